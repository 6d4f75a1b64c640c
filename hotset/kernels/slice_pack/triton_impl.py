"""slice_pack and slice_unpack in Triton: a program copies one piece of some rows of one unit.

A unit is one of the stores, that is, one layer. A piece is a slice of a row; slices longer than PIECE_BYTES are divided
into several pieces. The units have arbitrary addresses, so the kernel reads their addresses from a table. The table
also lists the pieces, after the addresses.
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

PIECE_BYTES = 512  # the bytes that a warp copies with one instruction
PROGRAM_BYTES = 16 << 10  # bytes in flight per program
WARPS = 4
MAX_ACCESS_BYTES = 16  # per thread and instruction
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
OPTIONS = {"enable_fp_fusion": False}  # no effect on integers, but Triton 3.9 warns if it is not set


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
    device = next((memory.device for memory in (packed, *stores) if memory.is_cuda), packed.device)
    addresses = tuple(store.data_ptr() for store in stores)
    starts = (packed.data_ptr(), packed.storage_offset(), *(number for span in slices.spans for number in span))
    width = gcd(MAX_ACCESS_BYTES, page_stride, row_stride, *addresses, *starts)  # the alignment of all accesses
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
    """Returns (byte in the stored row, byte in the packed row, number of bytes) of each piece: multiples of `width`."""
    pieces, column = [], 0
    for begin, nbytes in slices.spans:
        size = triton.cdiv(triton.cdiv(nbytes, triton.cdiv(nbytes, PIECE_BYTES)), width) * width
        pieces += [(begin + byte, column + byte, min(size, nbytes - byte)) for byte in range(0, nbytes, size)]
        column += nbytes
    return tuple(pieces)


@cache  # never freed, because a kernel on any stream may still read it
def _table(
    addresses: tuple[int, ...], pieces: tuple[tuple[int, int, int], ...], word: int, device: torch.device
) -> Tensor:
    """Uploads a list of the addresses of the units and then the pieces, in words. The upload is complete on return."""
    numbers = [*addresses, *(nbytes // word for piece in pieces for nbytes in piece)]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


@triton.jit(do_not_specialize=["first", "rows", "units", "pieces"])  # type: ignore[untyped-decorator]
def _copy_kernel(
    table: tl.tensor,  # [units] addresses, then [pieces, 3]: word in the stored row, word in the packed row, words
    pages: tl.tensor,  # the first one contains the first row
    packed: tl.tensor,  # in words, like all strides
    first: tl.tensor,  # first row within the first page
    rows: tl.tensor,
    units: tl.tensor,
    pieces: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    packed_stride: tl.tensor,
    page_rows: tl.constexpr,
    vector: tl.constexpr,  # words; every address and length is a multiple of it
    unpack: tl.constexpr,
    block_rows: tl.constexpr,
    block_words: tl.constexpr,
) -> None:
    unit = tl.program_id(1)
    piece = table + units + 3 * (tl.program_id(0) % pieces)  # neighbouring programs copy pieces of the same rows
    begin, column, words = tl.load(piece), tl.load(piece + 1), tl.multiple_of(tl.load(piece + 2), vector)
    row = tl.program_id(0) // pieces * block_rows + tl.arange(0, block_rows)
    valid = row < rows
    position = first + row
    page = tl.load(pages + position // page_rows, mask=valid, other=0)
    stored_at = tl.multiple_of(page * page_stride + (position % page_rows).to(tl.int64) * row_stride + begin, vector)
    packed_at = tl.multiple_of((unit.to(tl.int64) * rows + row) * packed_stride + column, vector)
    word = tl.arange(0, block_words)
    inside = valid[:, None] & (word < words)[None, :]
    address = tl.load(table + unit).to(tl.pointer_type(packed.dtype.element_ty))
    address = tl.multiple_of(address, vector * packed.dtype.element_ty.primitive_bitwidth // 8)
    stored = address + stored_at[:, None] + word[None, :]
    gathered = packed + packed_at[:, None] + word[None, :]
    if unpack:
        tl.store(stored, tl.load(gathered, mask=inside), mask=inside)
    else:
        tl.store(gathered, tl.load(stored, mask=inside), mask=inside)
