"""norm in Triton: one program per row, which it holds in registers between the sum and the product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

VALUES_PER_WARP = 512  # 16 per thread: two accesses of 16 bytes in bf16
MAX_WARPS = 16
OPTIONS = {"enable_fp_fusion": False}  # each product is rounded as torch rounds it


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    assert x.dim() in (2, 3) and x.stride(-1) == 1, f"rows of strides {x.stride()}"
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = x.shape[1] if x.dim() == 3 else 1
    strides = (x.stride(0), x.stride(1) if x.dim() == 3 else 0)
    _launch(x, x, weight, normed, normed, heads, strides, 0, eps, adds=False)
    return normed


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert x.dim() == 2 and delta.shape == x.shape, f"{tuple(delta.shape)} cannot be added to {tuple(x.shape)}"
    assert x.stride(1) == delta.stride(1) == 1, "the values of a row must be adjacent"
    total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, delta, weight, total, normed, 1, (x.stride(0), 0), delta.stride(0), eps, adds=True)
    return total, normed


def _launch(
    x: Tensor,
    delta: Tensor,
    weight: Tensor,
    total: Tensor,
    normed: Tensor,
    heads: int,
    strides: tuple[int, int],
    delta_stride: int,
    eps: float,
    adds: bool,
) -> None:
    width = x.shape[-1]
    assert weight.shape == (width,) and weight.is_contiguous(), f"a weight {tuple(weight.shape)} for rows of {width}"
    rows = x.numel() // width
    if rows == 0:
        return
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(rows,)](
        *(x, delta, weight, total, normed, heads, *strides, delta_stride, eps),
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
    heads: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    delta_stride: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    adds: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0)
    source = x + number // heads * row_stride + number % heads * head_stride
    value = tl.load(source + column, mask=inside, other=0)
    if adds:
        added = tl.load(delta + number * delta_stride + column, mask=inside, other=0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(total + number * width + column, value, mask=inside)
    wide = value.to(tl.float32)
    result = rms_scaled(wide, tl.sum(wide * wide, 0), gain, eps, width)
    tl.store(normed + number * width + column, result, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def rms_scaled(
    wide: tl.tensor, square_sum: tl.tensor, gain: tl.tensor, eps: tl.tensor, width: tl.constexpr
) -> tl.tensor:
    """A row in float32, given the sum of its squares, normed and rounded as the reference rounds: in `gain`'s dtype."""
    scaled = (wide * tl.rsqrt(square_sum * (1.0 / width) + eps)).to(gain.dtype)
    return (gain.to(tl.float32) * scaled.to(tl.float32)).to(gain.dtype)
