"""quantise: activations in fp8, with one scale per token and group of SCALE_BLOCK values."""

from dataclasses import dataclass

from torch import Tensor

from hotset.base.errors import InternalError
from hotset.base.units import ceil_div
from hotset.kernels.fast_path import has_fast_path, kernels_of
from hotset.kernels.quantise import reference

TOKEN_ALIGN = 4  # tokens are padded to a multiple of this, as torch's scaled products require


@dataclass(frozen=True, slots=True)
class QuantisedTokens:
    """The codes and scales that `fp8.quantise` returns. The padding after those of the last token is not written."""

    codes: Tensor  # [padded, width] float8_e4m3fn
    scales: Tensor  # [padded, groups] float32; those of one group are adjacent, as torch's scaled products require


def quantise(
    x: Tensor,  # [tokens, width]; tokens may have any stride
) -> QuantisedTokens:
    """Returns x in fp8. On a GPU, this call can be captured in a graph."""
    if x.dim() != 2:
        raise InternalError(f"x has shape {tuple(x.shape)}; it must have one row per token")
    op = kernels_of("quantise") if has_fast_path(x) else reference
    return QuantisedTokens(*op.quantise(x, padded_tokens(x.shape[0])))


def padded_tokens(tokens: int) -> int:
    return ceil_div(tokens, TOKEN_ALIGN) * TOKEN_ALIGN
