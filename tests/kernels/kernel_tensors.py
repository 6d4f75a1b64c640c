"""Tensors that the tests of several kernels draw, compare and poison."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hotset.base.units import ceil_div
from hotset.kernels import EMPTY
from hotset.kernels.rope import Rotation
from hotset.kernels.rows import PagedRows, RowLayout
from hotset.memory.pages import extend_runs


def draw_exact(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draws multiples of 1/8 in [-1, 1]. Sums of their squares are exact in float32, in any order of summation."""
    return (torch.randint(-8, 9, shape) / 8).to(dtype)


def draw_rotation(tokens: int, dim: int, dtype: torch.dtype) -> Rotation:
    angles = torch.randn(tokens, 1, dim // 2) * 3
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def on_device(value: Any, device: str) -> Any:
    """Returns a tensor on a device, or a copy of a dataclass whose tensors are there. Other values are unchanged."""
    if isinstance(value, Tensor):
        return value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: on_device(getattr(value, field.name), device) for field in fields(value)})
    return value


def all_bytes(tensor: Tensor) -> Tensor:
    """Returns every byte of the memory that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def paged_rows(contexts: Sequence[Tensor], counts: Sequence[int], page_rows: int, layout: RowLayout) -> PagedRows:
    """Stores contexts [length, width] on scattered pages of a pool that is NaN elsewhere.

    Segment i has seat i and `counts[i]` queries.
    """
    page_counts = [ceil_div(len(context), page_rows) for context in contexts]
    order = torch.randperm(sum(page_counts) + 2).tolist()
    memory = torch.full((1, len(order), page_rows, layout.stride_bytes), 0xFF, dtype=torch.uint8)
    blocks = memory.view(layout.stored_dtype)
    table = torch.full((len(contexts), max(page_counts)), EMPTY)
    runs: list[list[tuple[int, int]]] = [[] for _ in contexts]
    for seat, (context, count) in enumerate(zip(contexts, page_counts, strict=True)):
        pages, positions = [order.pop() for _ in range(count)], torch.arange(len(context))
        table[seat, :count] = torch.tensor(pages)
        blocks[0, table[seat, positions // page_rows], positions % page_rows] = layout.encode(context)
        extend_runs(runs[seat], pages)
    return PagedRows(blocks, runs, layout, table, torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)))


def poison_free_memory() -> None:
    """Fills the memory that the allocator will return next with NaN, whose bits are out of range as an index."""
    freed = [torch.full((1 << 16,), float("nan"), device="cuda") for _ in range(64)]
    freed.append(torch.full((1 << 28,), float("nan"), device="cuda"))
    torch.cuda.synchronize()
