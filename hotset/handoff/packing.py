"""Copies the bytes of staged contexts: the sender packs pages into a piece, the receiver unpacks a piece into pages.

All memory is host memory of this process, given by address.
"""

import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hotset.handoff.layout import plan_writes
from hotset.handoff.messages import MemoryRange, PackedPiece, PagedSpan
from hotset.handoff.staging import Block, blocks, split_into_buffers
from hotset.kernels.slice_pack import RowSlices, slice_pack, slice_unpack
from hotset.transfer.api import Region


class StagingMemory:
    """Host memory for packed pieces. A decode worker uses it as its ring, a prefill worker divides it into buffers.
    The caller registers `region` and keeps this object until the transfer engine is closed."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        self.memory_range = MemoryRange(self._bytes.data_ptr(), nbytes)

    @property
    def region(self) -> Region:
        return Region(self.memory_range.address, self.memory_range.nbytes)

    @property
    def sender_buffers(self) -> tuple[MemoryRange, ...]:
        return split_into_buffers(self.memory_range)


def pack(piece: PackedPiece) -> None:
    """Copies a piece from the source's pages to `piece.address`, a buffer of this process."""
    for packed, block in _packed_blocks(piece):
        layers = _layer_tensors(piece.source.shards[block.source].span, piece.row_pages)
        slices = RowSlices(tuple((source, nbytes) for source, _, nbytes in block.byte_ranges))
        slice_pack(layers, piece.row_pages, piece.first, piece.last, slices, packed)
    if (keys := piece.source.keys) is not None:
        _copy(plan_writes(keys, piece.key_pages, _packed_keys(piece, keys), (0,), piece.first, piece.last))


def unpack(piece: PackedPiece) -> None:
    """Copies a piece from `piece.address`, a lease in this process's ring, to the target's pages."""
    for packed, block in _packed_blocks(piece):
        slices = RowSlices(tuple((target, nbytes) for _, target, nbytes in block.byte_ranges))
        for shard in block.targets:
            layers = _layer_tensors(piece.target.shards[shard].span, piece.row_pages)
            slice_unpack(packed, layers, piece.row_pages, piece.first, piece.last, slices)
    for keys in piece.target.all_keys:
        _copy(plan_writes(_packed_keys(piece, keys), (0,), keys, piece.key_pages, piece.first, piece.last))


def _packed_blocks(piece: PackedPiece) -> Iterator[tuple[Tensor, Block]]:
    """Yields every block of the piece, with a tensor over its packed bytes."""
    address, rows = piece.address, (piece.last - piece.first) * len(piece.source.shards[0].span.bases)
    for block in blocks(piece.source, piece.target):
        nbytes = rows * block.row_bytes
        yield _tensor_at(address, (nbytes,), (1,)), block
        address += nbytes


def _packed_keys(piece: PackedPiece, keys: PagedSpan) -> PagedSpan:
    """Describes the packed index keys, which follow the blocks, as a span with a single page, page 0.

    The page has `piece.last` rows, so that position p of the context is row p of the page. Only rows
    [piece.first, piece.last) exist: the bases lie `piece.first` rows before the packed keys.
    """
    rows = piece.last - piece.first
    layers = len(piece.source.shards[0].span.bases)
    start = piece.address + rows * layers * sum(block.row_bytes for block in blocks(piece.source, piece.target))
    group_bytes = rows * keys.row_bytes
    bases = tuple((start + group * group_bytes - piece.first * keys.row_bytes,) for group in range(len(keys.bases)))
    return PagedSpan(
        bases=bases,
        page_bytes=piece.last * keys.row_bytes,
        part_rows=piece.last,
        row_bytes=keys.row_bytes,
    )


def _copy(writes: np.ndarray) -> None:
    """Performs planned writes within this process."""
    for source, target, nbytes in writes.tolist():
        ctypes.memmove(target, source, nbytes)


def _layer_tensors(span: PagedSpan, pages: Sequence[int]) -> list[Tensor]:
    """Returns one tensor per layer in the shape that `slice_pack` expects: [pages, page rows, row bytes].

    Pages have one part. Each tensor begins with page 0 and ends with the page of the highest given number.
    """
    shape = (max(pages) + 1, span.part_rows, span.row_bytes)
    strides = (span.page_bytes, span.row_bytes, 1)
    addresses = [base for (base,) in span.bases]
    distances = {after - before for before, after in pairwise(addresses)}
    if len(distances) == 1 and min(distances) > 0:  # views of one tensor, which are copied together
        return [*_tensor_at(addresses[0], (len(addresses), *shape), (min(distances), *strides))]
    return [_tensor_at(address, shape, strides) for address in addresses]


def _tensor_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Returns a uint8 tensor over existing host memory. The memory must outlive the tensor, which does not own it."""
    return torch.from_numpy(np.asarray(_ArrayInterface(address, shape, strides)))


class _ArrayInterface:
    """Describes bytes at an address in the form that numpy accepts."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": shape,
            "strides": strides,
        }
