"""Byte layouts of rows, and rows found through page tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Run = tuple[int, int]  # device rows [first, first + count), consecutive in memory and in their request


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The bytes of one token in one layer (or of one index key): `width` values of one dtype, no padding."""

    width: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


def mla_row(kv_lora_rank: int, rope_dim: int, dtype: torch.dtype) -> RowLayout:
    """[latent: kv_lora_rank | rope key: rope_dim]: 1152 B in bf16 at rank 512 with 64 rope values."""
    return RowLayout(kv_lora_rank + rope_dim, dtype)


def gqa_row(kv_heads: int, head_dim: int, dtype: torch.dtype) -> RowLayout:
    """[K of every head | V of every head]."""
    return RowLayout(2 * kv_heads * head_dim, dtype)


def index_key_row(head_dim: int, dtype: torch.dtype) -> RowLayout:
    """[key: head_dim]."""
    return RowLayout(head_dim, dtype)


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The contexts of one step's segments in one layer, found through their pages."""

    rows: Tensor  # [device rows, width]: the whole pool of this layer
    runs: Sequence[Sequence[Run]]  # per segment, in order of position; pages that are neighbours are merged

    def gather(self, segment: int, length: int) -> Tensor:
        """Rows [0, length) of a segment's context as [length, width]; a view, not a copy, where they are one run."""
        parts = []
        for first, count in self.runs[segment]:
            parts.append(self.rows[first : first + min(count, length)])
            length -= count
            if length <= 0:
                break
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums and softmaxes are taken in float32, or in float64 for float64 values."""
    return torch.float64 if dtype == torch.float64 else torch.float32
