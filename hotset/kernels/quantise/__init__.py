"""quantise: `fp8.quantise` on a GPU, for activations: one scale per token and group of SCALE_BLOCK values."""

from dataclasses import dataclass

from torch import Tensor

from hotset.base.units import ceil_div
from hotset.kernels.fast_path import kernels_of

TOKEN_ALIGN = 4  # tokens are padded to a multiple of this, as torch's scaled products require


@dataclass(frozen=True, slots=True)
class QuantisedTokens:
    """The codes and scales that `fp8.quantise` returns. The padding after the last token is not written."""

    codes: Tensor  # [padded, width] float8_e4m3fn
    scales: Tensor  # [padded, groups] float32; those of one group are adjacent, as torch's scaled products require


def quantise(
    x: Tensor,  # [tokens, width]; tokens may have any stride
) -> QuantisedTokens:
    """Returns x in fp8. The products of the reference call `fp8.quantise` instead. A graph can capture this call."""
    padded = ceil_div(x.shape[0], TOKEN_ALIGN) * TOKEN_ALIGN
    return QuantisedTokens(*kernels_of("quantise").quantise(x, padded))
