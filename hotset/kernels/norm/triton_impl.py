"""norm in Triton. Each program keeps one vector in registers from the sum of squares to the product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels.early_launch.triton_launch import EARLY_LAUNCH, wait_for_previous_launch

VALUES_PER_WARP = 512  # 16 per thread: two accesses of 16 bytes in bf16
MAX_WARPS = 16
OPTIONS = {"enable_fp_fusion": False} | EARLY_LAUNCH  # each product is rounded as torch rounds it


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not (x.dim() == 2 and x.stride(1) == 1):
        raise InternalError(f"x has strides {x.stride()}; its values must be adjacent")
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, normed, normed, eps, adds=False)
    return normed


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not (x.dim() == 2 and delta.shape == x.shape):
        raise InternalError(f"{tuple(delta.shape)} cannot be added to {tuple(x.shape)}")
    if not x.stride(1) == delta.stride(1) == 1:
        raise InternalError("the values of a vector must be adjacent")
    total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, delta, weight, total, normed, eps, adds=True)
    return total, normed


def _launch(
    x: Tensor,
    delta: Tensor,
    weight: Tensor,
    total: Tensor,
    normed: Tensor,
    eps: float,
    adds: bool,
) -> None:
    """Launches the kernel. Without `adds`, it neither reads `delta` nor writes `total`."""
    tokens, width = x.shape
    if not (weight.shape == (width,) and weight.is_contiguous()):
        raise InternalError(f"a weight {tuple(weight.shape)} for a width of {width}")
    if tokens == 0:
        return
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(tokens,)](
        x=x,
        delta=delta,
        weight=weight,
        total=total,
        normed=normed,
        token_stride=x.stride(0),
        delta_stride=delta.stride(0),
        eps=eps,
        width=width,
        block=block,
        adds=adds,
        num_warps=min(MAX_WARPS, max(1, block // VALUES_PER_WARP)),
        **OPTIONS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_kernel(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    normed: tl.tensor,
    token_stride: tl.tensor,
    delta_stride: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    adds: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0)
    wait_for_previous_launch()
    value = tl.load(x + token * token_stride + column, mask=inside, other=0)
    if adds:
        added = tl.load(delta + token * delta_stride + column, mask=inside, other=0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(total + token * width + column, value, mask=inside)
    wide = value.to(tl.float32)
    result = rms_normed(wide, tl.sum(wide * wide, 0), gain, eps, width)
    tl.store(normed + token * width + column, result, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def rms_normed(
    wide: tl.tensor, square_sum: tl.tensor, gain: tl.tensor, eps: tl.tensor, width: tl.constexpr
) -> tl.tensor:
    """Normalises a float32 vector, given the sum of its squares, and rounds to `gain`'s dtype as the reference does."""
    scaled = (wide * tl.rsqrt(square_sum * (1.0 / width) + eps)).to(gain.dtype)
    return (gain.to(tl.float32) * scaled.to(tl.float32)).to(gain.dtype)
