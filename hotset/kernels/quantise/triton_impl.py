"""quantise in Triton. A program quantises one group of several tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.base.units import ceil_div
from hotset.kernels.early_launch.triton_launch import EARLY_LAUNCH, wait_for_previous_launch
from hotset.kernels.fp8 import E4M3_MAX, MIN_SCALE, SCALE_BLOCK

# Tokens per program by number of tokens: few tokens need many small programs, because one GPU runs hundreds at a time.
TOKENS_PER_PROGRAM = {256: 8, 1 << 62: 32}
WARPS = 4
OPTIONS = {"enable_fp_fusion": False} | EARLY_LAUNCH  # every operation is rounded as written

_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_MIN_SCALE = tl.constexpr(MIN_SCALE)


def quantise(x: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    tokens, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = torch.empty(padded, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(ceil_div(width, SCALE_BLOCK), padded, dtype=torch.float32, device=x.device).t()
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
            block_tokens=block_tokens,
            num_warps=WARPS,
            **OPTIONS,
        )
    return codes, scales


@triton.jit(do_not_specialize=["tokens", "scale_stride"])  # type: ignore[untyped-decorator]
def _quantise_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    scale_stride: tl.tensor,
    block_tokens: tl.constexpr,
) -> None:
    wait_for_previous_launch()
    group = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * block_tokens + tl.arange(0, block_tokens)
    entry = group * _SCALE_BLOCK + tl.arange(0, _SCALE_BLOCK)
    inside = (token < tokens)[:, None] & (entry < width)[None, :]
    values = tl.load(x + token[:, None] * x_stride + entry[None, :], mask=inside, other=0).to(tl.float32)
    scale = group_scale(values)
    tl.store(codes + token[:, None] * width + entry[None, :], group_codes(values, scale), mask=inside)
    tl.store(scales + group.to(tl.int64) * scale_stride + token, scale, mask=token < tokens)


@triton.jit  # type: ignore[untyped-decorator]
def group_scale(values: tl.tensor) -> tl.tensor:
    """Returns the scales [tokens] of a group of float32 values [tokens, SCALE_BLOCK]."""
    return e4m3_scale(tl.max(tl.abs(values), 1))


@triton.jit  # type: ignore[untyped-decorator]
def e4m3_scale(largest: tl.tensor) -> tl.tensor:
    """Returns the scale of a block whose largest absolute value is `largest`.

    Divides instead of multiplying by the inverse, so that the result has the same bits as on a CPU.
    """
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
