"""norm: RMS norm of rows, alone or after a residual was added.

For values narrower than the accumulation dtype the order of roundings is: the scaled row is rounded to the values'
dtype, then multiplied by the weight and rounded again.
"""

from torch import Tensor

from hotset.kernels.fast_path import kernels_of, served_fast
from hotset.kernels.norm import reference

MAX_FAST_WIDTH = 32_768  # one program holds a whole row in registers


def rms_norm(
    x: Tensor,  # [rows, width] or [rows, heads, width]; rows may lie apart, the values of one are adjacent
    weight: Tensor,  # [width]
    eps: float,
) -> Tensor:  # as x, contiguous where Triton makes it
    """x / rms(x) * weight; the mean square is taken in the accumulation dtype."""
    if _fast(x):
        out: Tensor = kernels_of("norm").rms_norm(x, weight, eps)
        return out
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(
    x: Tensor,  # [rows, width]
    delta: Tensor,  # [rows, width]
    weight: Tensor,  # [width]
    eps: float,
) -> tuple[Tensor, Tensor]:  # x + delta, and its norm
    """The residual and what the next part of the layer reads of it, in one pass. Neither input is changed."""
    if _fast(x) and delta.dtype == x.dtype:
        out: tuple[Tensor, Tensor] = kernels_of("norm").add_rms_norm(x, delta, weight, eps)
        return out
    return reference.add_rms_norm(x, delta, weight, eps)


def _fast(x: Tensor) -> bool:
    return served_fast(x) and x.shape[-1] <= MAX_FAST_WIDTH
