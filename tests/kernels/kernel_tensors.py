"""Tensors that the tests of several kernels draw, compare and poison."""

import torch
from torch import Tensor

from hotset.kernels.rope import Rotation


def draw_exact(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draws multiples of 1/8 in [-1, 1]. Sums of their squares are exact in float32, in any order of summation."""
    return (torch.randint(-8, 9, shape) / 8).to(dtype)


def draw_rotation(tokens: int, dim: int, dtype: torch.dtype) -> Rotation:
    angles = torch.randn(tokens, 1, dim // 2) * 3
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def all_bytes(tensor: Tensor) -> Tensor:
    """Returns every byte of the memory that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def poison_free_memory() -> None:
    """Fills the memory that the allocator will return next with NaN, whose bits are out of range as an index."""
    freed = [torch.full((1 << 16,), float("nan"), device="cuda") for _ in range(64)]
    freed.append(torch.full((1 << 28,), float("nan"), device="cuda"))
    torch.cuda.synchronize()
