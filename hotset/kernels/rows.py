"""Byte layouts of rows and index keys, and rows found through pages."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hotset.base.units import ceil_div
from hotset.kernels import EMPTY

Run = tuple[int, int]  # pages [first, first + count), consecutive in memory and in their request

ROW_ALIGN = 16  # rows begin at multiples of this, so that copies may move 16 bytes at a time
KEY_ALIGN = 4  # index keys are many and small, and their scale is one float32
SCALE_BLOCK = 128  # values that share one scale
E4M3_LARGEST = 448.0
SMALLEST_SCALE = 1e-30  # of a block of zeros


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How `width` values lie in memory, row after row, `stride_bytes` apart.

    Plain: the values in `dtype`. With the first `quantised` of them in fp8, a row is bytes:
    [quantised: e4m3 | one float32 scale per started 128 of them | the other values: bf16].
    """

    width: int
    dtype: torch.dtype  # of the values that the model writes and reads
    quantised: int = 0
    align: int = ROW_ALIGN

    def __post_init__(self) -> None:
        assert 0 <= self.quantised <= self.width, f"{self.quantised} of {self.width} values quantised"
        assert self.stride_bytes % self.stored_dtype.itemsize == 0, f"{self.dtype} does not divide a stride"

    @property
    def scales(self) -> int:
        return ceil_div(self.quantised, SCALE_BLOCK)

    @property
    def row_bytes(self) -> int:
        if not self.quantised:
            return self.width * self.dtype.itemsize
        return self.quantised + 4 * self.scales + 2 * (self.width - self.quantised)

    @property
    def stride_bytes(self) -> int:
        return ceil_div(self.row_bytes, self.align) * self.align

    @property
    def described(self) -> str:
        """In words, for people and for comparing."""
        kind = str(self.dtype).removeprefix("torch.")
        fp8 = f", {self.quantised} of them in fp8" if self.quantised else ""
        return f"{self.width} values in {kind}{fp8}, {self.stride_bytes} bytes"

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.uint8 if self.quantised else self.dtype

    @property
    def stored_width(self) -> int:
        return self.stride_bytes // self.stored_dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        """[..., width] values -> [..., stored width] as they lie in memory; padding is zero."""
        if not self.quantised:
            spare = self.stored_width - self.width
            return F.pad(values, (0, spare)) if spare else values
        latent = values[..., : self.quantised].float()
        blocks = F.pad(latent, (0, self.scales * SCALE_BLOCK - self.quantised)).unflatten(-1, (self.scales, -1))
        scales = (blocks.abs().amax(-1) / E4M3_LARGEST).clamp_min(SMALLEST_SCALE)
        codes = (blocks / scales[..., None]).flatten(-2)[..., : self.quantised].to(torch.float8_e4m3fn)
        parts = [codes, scales, values[..., self.quantised :].to(torch.bfloat16).contiguous()]
        stored = torch.cat([part.view(torch.uint8) for part in parts], dim=-1)
        return F.pad(stored, (0, self.stride_bytes - self.row_bytes))

    def decode(self, stored: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., stored width] -> [..., width] values in `dtype` (None: the layout's own)."""
        dtype = dtype or self.dtype
        if not self.quantised:
            return stored[..., : self.width].to(dtype)
        ends = (self.quantised, self.quantised + 4 * self.scales, self.row_bytes)
        codes = stored[..., : ends[0]].clone().view(torch.float8_e4m3fn).float()
        scales = stored[..., ends[0] : ends[1]].clone().view(torch.float32)
        each = scales.repeat_interleave(SCALE_BLOCK, dim=-1)[..., : self.quantised]
        others = stored[..., ends[1] : ends[2]].clone().view(torch.bfloat16)
        return torch.cat(((codes * each).to(dtype), others.to(dtype)), dim=-1)


def mla_row(kv_lora_rank: int, rope_dim: int, dtype: torch.dtype, fp8: bool = False) -> RowLayout:
    """[latent: kv_lora_rank | rope key: rope_dim]. At rank 512 with 64 rope values: 1152 B in bf16, 656 B in fp8."""
    return RowLayout(kv_lora_rank + rope_dim, dtype, quantised=kv_lora_rank if fp8 else 0)


def gqa_row(kv_heads: int, head_dim: int, dtype: torch.dtype) -> RowLayout:
    """[K of every head | V of every head]."""
    return RowLayout(2 * kv_heads * head_dim, dtype)


def index_key_row(head_dim: int, dtype: torch.dtype, fp8: bool = False) -> RowLayout:
    """[key: head_dim]: 2 * head_dim B in bf16, head_dim + 4 B in fp8 (up to 128 values)."""
    align = max(KEY_ALIGN, 1 if fp8 else dtype.itemsize)
    return RowLayout(head_dim, dtype, quantised=head_dim if fp8 else 0, align=align)


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The contexts of one step's segments in one layer (or index group), found through their pages.

    A page holds, in each of its `parts`, `block_rows` consecutive rows. The host knows the pages as `runs`, the device
    as `table`: a captured graph goes by the table alone, and its runs are empty.
    """

    blocks: Tensor  # [parts, pages, block rows, stored width]: the whole pool of this layer or group
    runs: Sequence[Sequence[Run]]  # per segment, in order of position; pages that are neighbours are merged
    layout: RowLayout
    table: Tensor  # [seats, pages] int64: the page of each page of a seat's context
    seat_of: Tensor  # [query rows] int64: the seat of each query row; EMPTY: a padded one, of no request

    def gather(self, segment: int, length: int, dtype: torch.dtype | None = None) -> Tensor:
        """Rows [0, length) of a segment's context as [length, width] values; no copy where they are one run."""
        parts = []
        left = ceil_div(length, self.blocks.shape[0] * self.blocks.shape[2])
        for first, count in self.runs[segment]:
            taken = min(count, left)
            parts.append(self.blocks[:, first : first + taken].transpose(0, 1).flatten(0, 2))
            left -= taken
            if left == 0:
                break
        stored = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.layout.decode(stored[:length], dtype)

    def store(self, positions: Tensor, values: Tensor) -> None:
        """Writes `values` [query rows, width] at the positions [query rows] of each query row's own context."""
        there = self.seat_of != EMPTY
        self.blocks[self.places(self.seat_of[there], positions[there])] = self.layout.encode(values)[there]

    def places(self, seats: Tensor | int, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(part, page, row) in `blocks` of the positions of contexts on `seats`."""
        parts, _pages, block_rows, _width = self.blocks.shape
        within = positions % (parts * block_rows)
        return within // block_rows, self.table[seats, positions // (parts * block_rows)], within % block_rows


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums and softmaxes are taken in float32, or in float64 for float64 values."""
    return torch.float64 if dtype == torch.float64 else torch.float32
