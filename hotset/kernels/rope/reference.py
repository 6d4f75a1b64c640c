"""The specification of rope."""

import torch
from torch import Tensor

from hotset.kernels.rope.rotation import Rotation


def rotate(x: Tensor, rotation: Rotation, interleaved: bool) -> Tensor:
    dim = rotation.dim
    turn = rotate_pairs if interleaved else rotate_halves
    if dim == x.shape[-1]:
        return turn(x, rotation)
    return torch.cat((turn(x[..., :dim], rotation), x[..., dim:]), dim=-1)


def rotate_halves(x: Tensor, rotation: Rotation) -> Tensor:
    """Pairs (i, i + dim/2). x: [rows, heads, dim]."""
    first, second = x.chunk(2, dim=-1)
    return _rotate(first, second, rotation)


def rotate_pairs(x: Tensor, rotation: Rotation) -> Tensor:
    """Pairs (2i, 2i + 1), written as two halves."""
    return _rotate(x[..., 0::2], x[..., 1::2], rotation)


def _rotate(first: Tensor, second: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation.cos, rotation.sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
