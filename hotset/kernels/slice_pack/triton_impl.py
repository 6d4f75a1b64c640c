"""slice_pack and slice_unpack in Triton: a program moves one piece of some rows of one unit.

A piece is a slice, or an even part of one that is longer than PIECE_BYTES. Units lie wherever they do, so that the
kernel takes their addresses from a table; the pieces stand behind them.
"""

from collections.abc import Sequence
from functools import cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels.device_copies import to_device
from hotset.kernels.slice_pack.reference import RowSlices

PIECE_BYTES = 512  # a warp moves as much with one instruction
PROGRAM_BYTES = 16 << 10  # that a program has under way
WARPS = 4
WIDEST = 16  # bytes that a thread moves at a time
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
OPTIONS = {"enable_fp_fusion": False}  # nothing here is a float; Triton 3.9 warns where this is left open


def copy(
    stores: Sequence[Tensor],
    pages: Tensor | Sequence[int],
    first: int,
    last: int,
    slices: RowSlices,
    packed: Tensor,
    *,
    unpack: bool,
) -> None:
    rows, units = last - first, len(stores)
    if rows == 0 or slices.nbytes == 0:
        return
    page_rows, (page_stride, row_stride, _) = stores[0].shape[1], stores[0].stride()
    device = next((each.device for each in (packed, *stores) if each.is_cuda), packed.device)
    addresses = tuple(store.data_ptr() for store in stores)
    starts = (packed.data_ptr(), packed.storage_offset(), *(each for span in slices.spans for each in span))
    width = gcd(WIDEST, page_stride, row_stride, *addresses, *starts)  # to which everything is aligned
    word = min(width, max(WORDS))
    pieces = _pieces(slices, width)
    used = torch.as_tensor(pages, dtype=torch.int64)[first // page_rows : triton.cdiv(last, page_rows)].contiguous()
    block_words = triton.next_power_of_2(max(nbytes for _, _, nbytes in pieces) // word)
    block_rows = max(1, PROGRAM_BYTES // (block_words * word))
    _copy_kernel[(len(pieces) * triton.cdiv(rows, block_rows), units)](
        table=_table(addresses, pieces, word, device),
        pages=used if used.is_cuda else to_device(used, device),
        packed=packed.view(WORDS[word]),
        first=first % page_rows,
        rows=rows,
        units=units,
        pieces=len(pieces),
        page_stride=page_stride // word,
        row_stride=row_stride // word,
        packed_stride=slices.nbytes // word,
        page_rows=page_rows,
        vector=width // word,
        unpack=unpack,
        block_rows=block_rows,
        block_words=block_words,
        num_warps=WARPS,
        **OPTIONS,
    )


def _pieces(slices: RowSlices, width: int) -> tuple[tuple[int, int, int], ...]:
    """(byte of the stored row, byte of the packed row, bytes), in multiples of `width`."""
    pieces, column = [], 0
    for begin, nbytes in slices.spans:
        each = triton.cdiv(triton.cdiv(nbytes, triton.cdiv(nbytes, PIECE_BYTES)), width) * width
        pieces += [(begin + at, column + at, min(each, nbytes - at)) for at in range(0, nbytes, each)]
        column += nbytes
    return tuple(pieces)


@cache  # and never given up: a kernel may be reading it on any stream
def _table(
    addresses: tuple[int, ...], pieces: tuple[tuple[int, int, int], ...], word: int, device: torch.device
) -> Tensor:
    """Where each unit lies, and each piece in words; uploaded once, and there on return, for whatever stream."""
    numbers = [*addresses, *(nbytes // word for piece in pieces for nbytes in piece)]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


@triton.jit(do_not_specialize=["first", "rows", "units", "pieces"])  # type: ignore[untyped-decorator]
def _copy_kernel(
    table: tl.tensor,  # [units] addresses, [pieces, 3] words: in the stored row, in the packed row, and how many
    pages: tl.tensor,  # from that of the first row
    packed: tl.tensor,  # in words, as all that follows
    first: tl.tensor,  # row within the first page
    rows: tl.tensor,
    units: tl.tensor,
    pieces: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    packed_stride: tl.tensor,
    page_rows: tl.constexpr,
    vector: tl.constexpr,  # words to which every address and length is aligned
    unpack: tl.constexpr,
    block_rows: tl.constexpr,
    block_words: tl.constexpr,
) -> None:
    unit = tl.program_id(1)
    piece = table + units + 3 * (tl.program_id(0) % pieces)  # all pieces of a row at about the same time
    begin, column, words = tl.load(piece), tl.load(piece + 1), tl.multiple_of(tl.load(piece + 2), vector)
    row = tl.program_id(0) // pieces * block_rows + tl.arange(0, block_rows)
    there = row < rows
    position = first + row
    page = tl.load(pages + position // page_rows, mask=there, other=0)
    place = tl.multiple_of(page * page_stride + (position % page_rows).to(tl.int64) * row_stride + begin, vector)
    flat = tl.multiple_of((unit.to(tl.int64) * rows + row) * packed_stride + column, vector)
    word = tl.arange(0, block_words)
    inside = there[:, None] & (word < words)[None, :]
    address = tl.load(table + unit).to(tl.pointer_type(packed.dtype.element_ty))
    address = tl.multiple_of(address, vector * packed.dtype.element_ty.primitive_bitwidth // 8)
    stored = address + place[:, None] + word[None, :]
    gathered = packed + flat[:, None] + word[None, :]
    if unpack:
        tl.store(stored, tl.load(gathered, mask=inside), mask=inside)
    else:
        tl.store(gathered, tl.load(stored, mask=inside), mask=inside)
