"""quantise: activations in fp8, with one scale per token and group of SCALE_BLOCK values.

`swiglu_quantise` and `add_rms_norm_quantise` compute the activations, too, so that they are not read again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.base.units import ceil_div
from hotset.kernels.fast_path import has_fast_path, kernels_of
from hotset.kernels.norm import MAX_FAST_WIDTH
from hotset.kernels.quantise import reference

TOKEN_ALIGN = 4  # tokens are padded to a multiple of this, as torch's scaled products require


@dataclass(frozen=True, slots=True)
class QuantisedTokens:
    """The codes and scales that `fp8.quantise` returns for `tokens` tokens. The padding after them is not written."""

    codes: Tensor  # [padded, width] float8_e4m3fn
    scales: Tensor  # [padded, groups] float32; those of one group are adjacent, as torch's scaled products require
    tokens: int
    dtype: torch.dtype  # of the values

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens, self.codes.shape[1]

    @property
    def device(self) -> torch.device:
        return self.codes.device


def quantise(
    x: Tensor,  # [tokens, width]; tokens may have any stride
) -> QuantisedTokens:
    """Returns x in fp8. On a GPU, this call and those below can be captured in a graph."""
    assert x.dim() == 2, f"x has shape {tuple(x.shape)}; it must have one row per token"
    op = kernels_of("quantise") if has_fast_path(x) else reference
    codes, scales = op.quantise(x, padded_tokens(x.shape[0]))
    return QuantisedTokens(codes, scales, x.shape[0], x.dtype)


def swiglu_quantise(
    gate_up: Tensor,  # [tokens, 2 * width]: gate | up
) -> QuantisedTokens:  # [tokens, width]
    """Returns silu(gate) * up, rounded to the dtype of its factors, in fp8."""
    assert gate_up.shape[1] % 2 == 0, f"{gate_up.shape[1]} values per token cannot be divided into gate and up"
    op = kernels_of("quantise") if has_fast_path(gate_up) else reference
    codes, scales = op.swiglu_quantise(gate_up, padded_tokens(gate_up.shape[0]))
    return QuantisedTokens(codes, scales, gate_up.shape[0], gate_up.dtype)


def add_rms_norm_quantise(
    x: Tensor,  # [tokens, width]
    delta: Tensor,  # [tokens, width]
    weight: Tensor,  # [width]
    eps: float,
) -> tuple[Tensor, Tensor, QuantisedTokens]:  # x + delta, its norm, and the norm in fp8
    """Adds `delta` to the residual x, normalises the sum and quantises the norm, on the fast path in one pass."""
    fast = has_fast_path(x) and delta.dtype == x.dtype and x.shape[1] <= MAX_FAST_WIDTH
    op = kernels_of("quantise") if fast else reference
    total, normed, codes, scales = op.add_rms_norm_quantise(x, delta, weight, eps, padded_tokens(x.shape[0]))
    return total, normed, QuantisedTokens(codes, scales, x.shape[0], x.dtype)


def padded_tokens(tokens: int) -> int:
    return ceil_div(tokens, TOKEN_ALIGN) * TOKEN_ALIGN
