"""quantise in Triton. A program quantises one group of several tokens, or normalises and quantises one whole token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.base.units import ceil_div
from hotset.kernels.fp8 import E4M3_MAX, MIN_SCALE, SCALE_BLOCK
from hotset.kernels.norm.triton_impl import MAX_WARPS, VALUES_PER_WARP, rms_normed

# Tokens per program by number of tokens: few tokens need many small programs, because one GPU runs hundreds at a time.
TOKENS_PER_PROGRAM = {256: 8, 1 << 62: 32}
WARPS = 4
OPTIONS = {"enable_fp_fusion": False}  # every operation is rounded as written

_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_MIN_SCALE = tl.constexpr(MIN_SCALE)


def quantise(x: Tensor, padded: int, lets_next_start: bool = False) -> tuple[Tensor, Tensor]:
    """`lets_next_start` lets the next kernel of the stream start early, if it is launched for that (`launch_pdl`)."""
    return _quantise(x, x.shape[1], padded, gated=False, lets_next_start=lets_next_start)


def swiglu_quantise(gate_up: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    return _quantise(gate_up, gate_up.shape[1] // 2, padded, gated=True, lets_next_start=False)


def _quantise(x: Tensor, width: int, padded: int, gated: bool, lets_next_start: bool) -> tuple[Tensor, Tensor]:
    tokens = x.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    codes, scales = _empty(padded, width, x.device)
    if tokens:
        block_tokens = next(count for most, count in TOKENS_PER_PROGRAM.items() if tokens <= most)
        _quantise_kernel[(scales.shape[1], triton.cdiv(tokens, block_tokens))](
            x=x,
            codes=codes,
            scales=scales,
            tokens=tokens,
            width=width,
            x_stride=x.stride(0),
            scale_stride=padded,
            gated=gated,
            lets_next_start=lets_next_start,
            block_tokens=block_tokens,
            num_warps=WARPS,
            **OPTIONS,
        )
    return codes, scales


def add_rms_norm_quantise(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, padded: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (tokens, width), groups = x.shape, ceil_div(x.shape[1], SCALE_BLOCK)
    assert delta.shape == x.shape, f"{tuple(delta.shape)} cannot be added to {tuple(x.shape)}"
    assert x.stride(1) == delta.stride(1) == 1, "the values of a token must be adjacent"
    assert weight.shape == (width,) and weight.is_contiguous(), f"a weight {tuple(weight.shape)} for a width of {width}"
    total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    codes, scales = _empty(padded, width, x.device)
    block_groups = triton.next_power_of_2(groups)
    if tokens:
        _norm_kernel[(tokens,)](
            x=x,
            delta=delta,
            weight=weight,
            total=total,
            normed=normed,
            codes=codes,
            scales=scales,
            x_stride=x.stride(0),
            delta_stride=delta.stride(0),
            scale_stride=padded,
            eps=eps,
            width=width,
            block_groups=block_groups,
            num_warps=min(MAX_WARPS, max(1, block_groups * SCALE_BLOCK // VALUES_PER_WARP)),
            **OPTIONS,
        )
    return total, normed, codes, scales


def _empty(padded: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    codes = torch.empty(padded, width, dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty(ceil_div(width, SCALE_BLOCK), padded, dtype=torch.float32, device=device).t()


@triton.jit(do_not_specialize=["tokens", "scale_stride"])  # type: ignore[untyped-decorator]
def _quantise_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    scale_stride: tl.tensor,
    gated: tl.constexpr,
    lets_next_start: tl.constexpr,
    block_tokens: tl.constexpr,
) -> None:
    if lets_next_start:
        tl.extra.cuda.gdc_launch_dependents()
    group = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * block_tokens + tl.arange(0, block_tokens)
    entry = group * _SCALE_BLOCK + tl.arange(0, _SCALE_BLOCK)
    inside = (token < tokens)[:, None] & (entry < width)[None, :]
    source = x + token[:, None] * x_stride + entry[None, :]
    values = tl.load(source, mask=inside, other=0).to(tl.float32)
    if gated:
        up = tl.load(source + width, mask=inside, other=0).to(tl.float32)
        values = (values * tl.sigmoid(values) * up).to(x.dtype.element_ty).to(tl.float32)
    scale = group_scale(values)
    tl.store(codes + token[:, None] * width + entry[None, :], group_codes(values, scale), mask=inside)
    tl.store(scales + group.to(tl.int64) * scale_stride + token, scale, mask=token < tokens)


@triton.jit(do_not_specialize=["scale_stride"])  # type: ignore[untyped-decorator]
def _norm_kernel(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    normed: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    x_stride: tl.tensor,
    delta_stride: tl.tensor,
    scale_stride: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    block_groups: tl.constexpr,
) -> None:
    """Holds one token as [groups, SCALE_BLOCK]: the norm sums over all groups, and each group has its own scale."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, block_groups)
    entry = group[:, None] * _SCALE_BLOCK + tl.arange(0, _SCALE_BLOCK)[None, :]
    inside = entry < width
    gain = tl.load(weight + entry, mask=inside, other=0)
    value = tl.load(x + token * x_stride + entry, mask=inside, other=0)
    added = tl.load(delta + token * delta_stride + entry, mask=inside, other=0)
    value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
    tl.store(total + token * width + entry, value, mask=inside)
    wide = value.to(tl.float32)
    result = rms_normed(wide, tl.sum(tl.sum(wide * wide, 1), 0), gain, eps, width)
    tl.store(normed + token * width + entry, result, mask=inside)
    values = result.to(tl.float32)
    scale = group_scale(values)
    tl.store(codes + token * width + entry, group_codes(values, scale), mask=inside)
    tl.store(scales + group.to(tl.int64) * scale_stride + token, scale, mask=group * _SCALE_BLOCK < width)


@triton.jit  # type: ignore[untyped-decorator]
def group_scale(values: tl.tensor) -> tl.tensor:
    """Returns the scales [tokens] of a group of float32 values [tokens, SCALE_BLOCK]."""
    largest = tl.max(tl.abs(values), 1)
    return tl.maximum(tl.div_rn(largest, tl.full(largest.shape, _E4M3_MAX, tl.float32)), _MIN_SCALE)


@triton.jit  # type: ignore[untyped-decorator]
def group_codes(values: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Returns the nearest e4m3 numbers to values / scale, with ties to even.

    The quotient must have the bits of a division, because it often is a tie. One division per group and three
    operations per value compute it: by Markstein's theorem, one correction of the product with the inverse suffices if
    the inverse is rounded correctly. The excess is subtracted, not added, so that the quotient of -0 is -0.
    """
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    wide_scale, wide_inverse = tl.broadcast(scale[:, None], values)[0], tl.broadcast(inverse[:, None], values)[0]
    quotient = values * wide_inverse
    excess = tl.fma(quotient, wide_scale, -values)
    return tl.fma(-excess, wide_inverse, quotient).to(tl.float8e4nv)
