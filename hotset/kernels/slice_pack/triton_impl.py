"""copy_slices in Triton: a program copies one piece of some rows of one unit.

A unit is one layer of one block. A piece is a slice of a row; slices longer than PIECE_BYTES are divided into several
pieces. The units have arbitrary addresses, so the kernel reads from a table where each unit is, where it is packed, and
which pieces it has. Blocks of the same geometry share a launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.base.paged_span import PagedSpan
from hotset.base.units import ceil_div
from hotset.kernels.device_copies import list_to_device
from hotset.kernels.slice_pack.reference import RowSlices, SlicedRows

PIECE_BYTES = 512  # the bytes that a warp copies with one instruction
PROGRAM_BYTES = 16 << 10  # bytes in flight per program
WARPS = 4
MAX_ACCESS_BYTES = 16  # per thread and instruction
WORDS = {4: tl.int32, 2: tl.int16, 1: tl.int8}
OPTIONS = {"enable_fp_fusion": False}  # no effect on integers, but Triton 3.9 warns if it is not set

Piece = tuple[int, int, int]  # byte in the stored row, byte in the packed row, number of bytes


def copy(
    blocks: Sequence[SlicedRows],
    pages: Tensor | Sequence[int],
    first: int,
    last: int,
    packed: int,
    device: torch.device,
    *,
    unpack: bool,
) -> None:
    if first == last:
        return
    for launch in _launches(tuple(blocks)):
        span, num_parts = launch.span, len(launch.span.bases[0])
        table = _table(launch, gcd(launch.alignment, packed), device)
        start = first // span.part_rows * span.step  # the first part that is read, among all parts of the context
        if isinstance(pages, Tensor):
            on_device = pages
        else:  # pages before the first one that is read are not uploaded
            skipped, start = divmod(start, num_parts)
            on_device = list_to_device(pages[skipped : span.pages_for(last)], torch.int64, device)
        _copy_kernel[(table.num_pieces * triton.cdiv(last - first, table.block_rows), table.num_units)](
            table=table.numbers,
            pages=on_device,
            packed=packed,
            first=first % span.part_rows,
            rows=last - first,
            start=start,
            pieces=table.num_pieces,
            page_stride=span.page_bytes,
            row_stride=span.row_bytes,
            part_rows=span.part_rows,
            parts=num_parts,
            step=span.step,
            word=WORDS[table.word],
            word_bytes=table.word,
            vector=table.width // table.word,
            unpack=unpack,
            block_rows=table.block_rows,
            block_words=table.block_words,
            num_warps=WARPS,
            **OPTIONS,
        )


@dataclass(frozen=True, eq=False)  # its identity is the key of `_table`
class _Launch:
    """Blocks whose spans differ only in their addresses."""

    blocks: tuple[SlicedRows, ...]
    alignment: int  # of all accesses, in bytes, if the packed piece has this alignment too

    @property
    def span(self) -> PagedSpan:
        return self.blocks[0].span


@cache
def _launches(blocks: tuple[SlicedRows, ...]) -> list[_Launch]:
    alike: dict[tuple[int, ...], list[SlicedRows]] = {}
    for block in blocks:
        span = block.span
        if block.slices.spans:
            geometry = span.page_bytes, span.part_rows, span.row_bytes, span.step, len(span.bases[0])
            alike.setdefault(geometry, []).append(block)
    return [_Launch(tuple(group), _alignment(group)) for group in alike.values()]


def _alignment(blocks: Sequence[SlicedRows]) -> int:
    numbers = [MAX_ACCESS_BYTES]
    for block in blocks:
        numbers += [block.span.page_bytes, block.span.row_bytes, block.before]
        numbers += [number for bases_or_slice in (*block.span.bases, *block.slices.spans) for number in bases_or_slice]
    return gcd(*numbers)


@dataclass(frozen=True)
class _Table:
    """The units of a launch: [units][its bases; first part, packed bytes before, packed bytes of a row; pieces]."""

    numbers: Tensor  # int64
    num_units: int
    num_pieces: int  # of each unit; units with fewer pieces are padded with empty ones
    width: int  # bytes of an access
    word: int  # bytes of a word, of which an access has one or more
    block_rows: int
    block_words: int


@cache  # never freed, because a kernel on any stream may still read it
def _table(launch: _Launch, width: int, device: torch.device) -> _Table:
    """Uploads the table. The upload is complete on return."""
    pieces = [_pieces(block.slices, width) for block in launch.blocks]
    num_pieces, word = max(len(listed) for listed in pieces), min(width, max(WORDS))
    units = []
    for block, listed in zip(launch.blocks, pieces, strict=True):
        padded = [*listed, *[(0, 0, 0)] * (num_pieces - len(listed))]
        nbytes = block.slices.nbytes
        for layer, bases in enumerate(block.span.bases):
            place = [block.span.first_part(layer), block.before + layer * nbytes, nbytes]
            units.append([*bases, *place, *(number for piece in padded for number in piece)])
    longest = max(nbytes for listed in pieces for _, _, nbytes in listed)
    block_words = triton.next_power_of_2(longest // word)
    block_rows = max(1, PROGRAM_BYTES // (block_words * word))
    numbers = torch.tensor(units, dtype=torch.int64, device=device)
    return _Table(numbers, len(units), num_pieces, width, word, block_rows, block_words)


def _pieces(slices: RowSlices, width: int) -> list[Piece]:
    """Divides the slices into pieces, whose numbers are multiples of `width`."""
    pieces, column = [], 0
    for begin, nbytes in slices.spans:
        size = ceil_div(ceil_div(nbytes, ceil_div(nbytes, PIECE_BYTES)), width) * width
        pieces += [(begin + byte, column + byte, min(size, nbytes - byte)) for byte in range(0, nbytes, size)]
        column += nbytes
    return pieces


@triton.jit(do_not_specialize=["packed", "first", "rows", "start", "pieces"])  # type: ignore[untyped-decorator]
def _copy_kernel(
    table: tl.tensor,  # see _Table; all its numbers, and all strides, are in bytes
    pages: tl.tensor,
    packed: tl.tensor,  # address of the packed piece
    first: tl.tensor,  # first row within its part
    rows: tl.tensor,
    start: tl.tensor,  # the part of the first row in the first unit, counted from the first of `pages`
    pieces: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    part_rows: tl.constexpr,
    parts: tl.constexpr,
    step: tl.constexpr,
    word: tl.constexpr,
    word_bytes: tl.constexpr,
    vector: tl.constexpr,  # words; every address and length is a multiple of it
    unpack: tl.constexpr,
    block_rows: tl.constexpr,
    block_words: tl.constexpr,
) -> None:
    unit = table + tl.program_id(1) * (parts + 3 + 3 * pieces)
    place = unit + parts
    first_part, before, packed_stride = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    piece = place + 3 + 3 * (tl.program_id(0) % pieces)  # neighbouring programs copy pieces of the same rows
    begin, column, nbytes = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    row = tl.program_id(0) // pieces * block_rows + tl.arange(0, block_rows)
    valid = row < rows
    position = first + row
    part = start + position // part_rows * step + first_part
    page = tl.load(pages + part // parts, mask=valid, other=0)
    base = tl.load(unit + part % parts, mask=valid, other=0) if parts > 1 else tl.load(unit)
    stored_at = base + page * page_stride + (position % part_rows).to(tl.int64) * row_stride + begin
    packed_at = packed.to(tl.int64) + before * rows + row * packed_stride + column
    stored_row = tl.multiple_of(stored_at.to(tl.pointer_type(word)), vector * word_bytes)
    packed_row = tl.multiple_of(packed_at.to(tl.pointer_type(word)), vector * word_bytes)
    number = tl.arange(0, block_words)
    words = tl.multiple_of((nbytes // word_bytes).to(tl.int32), vector)
    inside = valid[:, None] & (number < words)[None, :]
    stored, gathered = stored_row[:, None] + number[None, :], packed_row[:, None] + number[None, :]
    if unpack:
        tl.store(stored, tl.load(gathered, mask=inside), mask=inside)
    else:
        tl.store(gathered, tl.load(stored, mask=inside), mask=inside)
