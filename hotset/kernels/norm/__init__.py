"""norm: RMS norm, alone or after the addition of a residual.

If the values are narrower than the accumulation dtype, the scaled vector is rounded to the dtype of the values, then
multiplied by the weight and rounded again.
"""

from torch import Tensor

from hotset.kernels.fast_path import has_fast_path, kernels_of
from hotset.kernels.norm import reference

MAX_FAST_WIDTH = 32_768  # the fast path holds a whole vector in registers; wider ones use the reference


def rms_norm(
    x: Tensor,  # [tokens, width]; tokens may have any stride, their values must be adjacent
    weight: Tensor,  # [width]
    eps: float,
) -> Tensor:  # like x, contiguous in the fast path
    """Returns x / sqrt(mean(x ** 2) + eps) * weight, with the mean in the accumulation dtype."""
    if _has_fast_path(x):
        out: Tensor = kernels_of("norm").rms_norm(x, weight, eps)
        return out
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(
    x: Tensor,  # [tokens, width]
    delta: Tensor,  # [tokens, width]
    weight: Tensor,  # [width]
    eps: float,
) -> tuple[Tensor, Tensor]:  # x + delta, and its norm
    """Adds `delta` to the residual x and normalises the sum, on the fast path in one pass. Changes neither input."""
    if _has_fast_path(x) and delta.dtype == x.dtype:
        out: tuple[Tensor, Tensor] = kernels_of("norm").add_rms_norm(x, delta, weight, eps)
        return out
    return reference.add_rms_norm(x, delta, weight, eps)


def _has_fast_path(x: Tensor) -> bool:
    return has_fast_path(x) and x.shape[-1] <= MAX_FAST_WIDTH
