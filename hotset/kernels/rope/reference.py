"""The specification of rope, and the type of its angles."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels.linear.reference import per_head_matmul


@dataclass(frozen=True, slots=True)
class Rotation:
    """The cosines and sines of one step's positions: [tokens, 1, dim / 2], to be broadcast over heads."""

    cos: Tensor
    sin: Tensor

    def __post_init__(self) -> None:
        if not (self.cos.stride() == self.sin.stride() and self.cos.stride(-1) == 1):
            raise InternalError(f"cos has strides {self.cos.stride()}, sin {self.sin.stride()}")

    @property
    def dim(self) -> int:
        """The number of values of a head that are rotated."""
        return 2 * self.cos.shape[-1]


def rotate(x: Tensor, rotation: Rotation, interleaved: bool) -> Tensor:  # [tokens, heads, dim]
    """Rotates the first `rotation.dim` values of every head and copies the remaining ones. x is not changed.

    The pairs are (i, i + rotation.dim / 2), or (2i, 2i + 1) if `interleaved`. Either way, the result has the first
    values of all pairs, then the second values. Queries and keys use the same order, so the order does not affect
    their dot products.
    """
    dim = rotation.dim
    rotate_all = rotate_pairs if interleaved else rotate_halves
    if dim == x.shape[-1]:
        return rotate_all(x, rotation)
    return torch.cat((rotate_all(x[..., :dim], rotation), x[..., dim:]), dim=-1)


def rotate_halves(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates the pairs (i, i + dim / 2) of x [tokens, heads, dim]."""
    first, second = x.chunk(2, dim=-1)
    return _rotate(first, second, rotation)


def rotate_pairs(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates the pairs (2i, 2i + 1) of x [tokens, heads, dim] and returns them as two halves."""
    return _rotate(x[..., 0::2], x[..., 1::2], rotation)


def _rotate(first: Tensor, second: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation.cos, rotation.sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rope_query(q: Tensor, key_up: Tensor, rotation: Rotation) -> Tensor:
    nope = key_up.shape[1]
    absorbed = per_head_matmul(q[..., :nope], key_up)
    return torch.cat((absorbed, rotate_pairs(q[..., nope:], rotation)), dim=-1)
