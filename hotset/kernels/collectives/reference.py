"""The specification of the collectives. `parts` are the arguments of all ranks, in the order of the ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hotset.kernels.rows import accumulation_dtype


def all_reduce(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Adds in the order of the ranks, in the accumulation dtype, and rounds once. Every rank gets the same bits."""
    dtype = parts[0].dtype
    total = parts[0].to(accumulation_dtype(dtype), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def reduce_scatter(parts: Sequence[Tensor], tokens_per_rank: Sequence[int], rank: int) -> Tensor:
    first = sum(tokens_per_rank[:rank])
    return all_reduce([part[first : first + tokens_per_rank[rank]] for part in parts])


def all_gather_columns(parts: Sequence[Tensor] | Tensor) -> Tensor:
    return torch.cat(list(parts), dim=-1)


def all_gather_tokens(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts))


def broadcast(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].clone()
