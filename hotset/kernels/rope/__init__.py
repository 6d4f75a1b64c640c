"""rope: rotation of the first values of each head, by the angles of its row's position."""

from torch import Tensor

from hotset.kernels.fast_path import kernels_of, served_fast
from hotset.kernels.rope import reference
from hotset.kernels.rope.rotation import Rotation

__all__ = ["Rotation", "rotate"]


def rotate(
    x: Tensor,  # [rows, heads, dim]; heads may lie apart, the values of one are adjacent
    rotation: Rotation,  # of `rotation.dim` values, at most dim
    interleaved: bool,
) -> Tensor:  # as x
    """Turns the first `rotation.dim` values of every head; the others stay. x is not changed.

    Pairs are (i, i + half), or (2i, 2i + 1) if `interleaved`; these too are written as two halves, an order that
    queries and keys share, so that their products are the same.
    """
    assert rotation.dim <= x.shape[-1], f"{rotation.dim} angles' values of {x.shape[-1]}"
    if served_fast(x):
        out: Tensor = kernels_of("rope").rotate(x, rotation, interleaved)
        return out
    return reference.rotate(x, rotation, interleaved)
