"""Byte layouts of rows and index keys, and access to rows through pages."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hotset.base.errors import ConfigError, InternalError
from hotset.base.units import ceil_div
from hotset.kernels import EMPTY
from hotset.kernels.fp8 import SCALE_BLOCK, quantise

Run = tuple[int, int]  # (first, count): pages [first, first + count), consecutive in memory and in their request

ROW_ALIGN = 16  # bytes; rows start at multiples of this, so that copies can move 16 bytes at a time
KEY_ALIGN = 4  # bytes; index keys are small, and their scales are float32


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The memory layout of rows of `width` values. Consecutive rows are `stride_bytes` apart.

    A plain row holds the values in `dtype`. If the first `quantised` values are in fp8, a row is stored as bytes:
    [quantised values: e4m3 | one float32 scale per block of up to SCALE_BLOCK of them | the other values: bf16].
    """

    width: int
    dtype: torch.dtype  # of the values that the model writes and reads
    quantised: int = 0  # the number of leading values in fp8
    align: int = ROW_ALIGN

    def __post_init__(self) -> None:
        if not 0 <= self.quantised <= self.width:
            raise InternalError(f"{self.quantised} of {self.width} values cannot be in fp8")
        if self.stride_bytes % self.stored_dtype.itemsize != 0:
            raise InternalError(f"{self.dtype} does not divide a stride of {self.stride_bytes} bytes")

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
    def description(self) -> str:
        """The layout in words. Prefill and decode workers compare it, because their layouts must be equal."""
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
        """Converts values [..., width] to their stored form [..., stored width], padded with zeros."""
        if not self.quantised:
            padding = self.stored_width - self.width
            return F.pad(values, (0, padding)) if padding else values
        codes, scales = quantise(values[..., : self.quantised])
        parts = [codes, scales, values[..., self.quantised :].to(torch.bfloat16).contiguous()]
        stored = torch.cat([part.view(torch.uint8) for part in parts], dim=-1)
        return F.pad(stored, (0, self.stride_bytes - self.row_bytes))

    def decode(self, stored: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Converts the stored form [..., stored width] to values [..., width] in `dtype` (None: the layout's dtype)."""
        dtype = dtype or self.dtype
        if not self.quantised:
            return stored[..., : self.width].to(dtype)
        ends = (self.quantised, self.quantised + 4 * self.scales, self.row_bytes)
        codes = stored[..., : ends[0]].clone().view(torch.float8_e4m3fn).float()
        scales = stored[..., ends[0] : ends[1]].clone().view(torch.float32)
        scale_of_value = scales.repeat_interleave(SCALE_BLOCK, dim=-1)[..., : self.quantised]
        others = stored[..., ends[1] : ends[2]].clone().view(torch.bfloat16)
        return torch.cat(((codes * scale_of_value).to(dtype), others.to(dtype)), dim=-1)


def mla_row(kv_lora_rank: int, rope_dim: int, dtype: torch.dtype, fp8: bool = False) -> RowLayout:
    """Returns the layout [latent: kv_lora_rank | rope key: rope_dim].

    With rank 512 and 64 rope values, a row has 1152 bytes in bf16 and 656 bytes in fp8.
    """
    return RowLayout(kv_lora_rank + rope_dim, dtype, quantised=kv_lora_rank if fp8 else 0)


def gqa_row(kv_heads: int, head_dim: int, dtype: torch.dtype) -> RowLayout:
    """Returns the layout [K of every head | V of every head]."""
    return RowLayout(2 * kv_heads * head_dim, dtype)


def index_key_row(head_dim: int, dtype: torch.dtype, fp8: bool = False) -> RowLayout:
    """Returns the layout [key: head_dim]: 2 * head_dim bytes in bf16, head_dim + 4 in fp8 (for up to 128 values)."""
    align = max(KEY_ALIGN, 1 if fp8 else dtype.itemsize)
    return RowLayout(head_dim, dtype, quantised=head_dim if fp8 else 0, align=align)


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The contexts of one step's segments in one layer (or index group), accessed through their pages.

    A page has `parts` parts, each of which holds a block of `block_rows` consecutive rows. The parts of a context are
    numbered through all its pages. Block n is in part n * step + first_part: index groups whose keys share pages have
    the same `step` and different parts. The pages are listed twice: in `runs`, which the host reads, and in `table`,
    which the device reads. In a captured graph, `runs` is empty.
    """

    blocks: Tensor  # [parts, pages, block rows, stored width]: the whole pool of this layer or group
    runs: Sequence[Sequence[Run]]  # per segment, in the order of positions; adjacent pages are merged into one run
    layout: RowLayout
    table: Tensor  # [seats, pages] int64: the page in `blocks` of each page of a seat's context
    seat_of: Tensor  # [tokens] int64: the seat of each token; EMPTY: a padding token
    step: int = 1  # 1: every part belongs to this layer or group
    first_part: int = 0

    @property
    def capacity(self) -> int:
        """The number of rows that a context can have if `table` lists all its pages."""
        parts, _pages, block_rows, _width = self.blocks.shape
        return self.table.shape[1] * parts // self.step * block_rows

    def gather(self, segment: int, length: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns rows [0, length) of a segment's context as values [length, width].

        The result is a view, not a copy, if rows are plain and have the requested dtype, pages have one part, and all
        these pages are in one run.
        """
        if self.step != 1:
            return self.layout.decode(self._gather_blocks(segment, length)[:length], dtype)
        pieces = []
        pages_left = ceil_div(length, self.blocks.shape[0] * self.blocks.shape[2])
        for first, count in self.runs[segment]:
            taken = min(count, pages_left)
            pieces.append(self.blocks[:, first : first + taken].transpose(0, 1).flatten(0, 2))
            pages_left -= taken
            if pages_left == 0:
                break
        stored = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return self.layout.decode(stored[:length], dtype)

    def _gather_blocks(self, segment: int, length: int) -> Tensor:
        """Returns the blocks that hold rows [0, length) of a segment's context, one after another."""
        parts, _pages, block_rows, _width = self.blocks.shape
        pages = torch.tensor([page for first, count in self.runs[segment] for page in range(first, first + count)])
        part = torch.arange(ceil_div(length, block_rows)) * self.step + self.first_part
        return self.blocks[part % parts, pages[part // parts]].flatten(0, 1)

    def store(self, positions: Tensor, values: Tensor) -> None:
        """Writes `values` [tokens, width] at `positions` [tokens] of the tokens' contexts. Skips padding tokens."""
        real = self.seat_of != EMPTY
        self.blocks[self.locations(self.seat_of[real], positions[real])] = self.layout.encode(values)[real]

    def locations(self, seats: Tensor | int, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the indices (part, page, row) in `blocks` of the rows at `positions` in the contexts of `seats`."""
        parts, _pages, block_rows, _width = self.blocks.shape
        part = positions // block_rows * self.step + self.first_part
        return part % parts, self.table[seats, part // parts], positions % block_rows


def check_tiers_match(host_rows: Tensor, device_rows: Tensor) -> None:
    """Raises ConfigError if rows [..., width] cannot be copied between the two."""
    if host_rows.dtype != device_rows.dtype:
        raise ConfigError(f"host rows have dtype {host_rows.dtype}, but device rows have {device_rows.dtype}")
    if host_rows.shape[-1] != device_rows.shape[-1]:
        raise ConfigError(f"host rows have {host_rows.shape[-1]} values, but device rows have {device_rows.shape[-1]}")
    for name, rows in (("host", host_rows), ("device", device_rows)):
        if rows.stride(-1) != 1:
            raise InternalError(f"the values of a {name} row must be adjacent, but their stride is {rows.stride(-1)}")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums and softmaxes: float32, or float64 for float64 values."""
    return torch.float64 if dtype == torch.float64 else torch.float32
