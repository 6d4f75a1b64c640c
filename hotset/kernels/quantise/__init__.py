"""quantise: activations in fp8, with one scale per token and group of SCALE_BLOCK values."""

from torch import Tensor

from hotset.base.units import ceil_div
from hotset.kernels.fast_path import has_fast_path, kernels_of
from hotset.kernels.quantise import reference


def quantise(
    x: Tensor,  # [tokens, width]; tokens may have any stride
    align_tokens: int = 1,
) -> tuple[Tensor, Tensor]:  # codes [padded, width] e4m3, scales [padded, groups] float32 with stride(0) == 1
    """Returns codes and scales with the bits of `fp8.quantise`. On a GPU, the call can be captured in a graph.

    Tokens are padded to a multiple of `align_tokens`; the padding is not written. The scales of one group are adjacent:
    this is the order that torch's scaled matrix products require.
    """
    assert x.dim() == 2, f"x has shape {tuple(x.shape)}; it must have one row per token"
    padded = ceil_div(x.shape[0], align_tokens) * align_tokens
    op = kernels_of("quantise") if has_fast_path(x) else reference
    codes, scales = op.quantise(x, padded)
    return codes, scales
