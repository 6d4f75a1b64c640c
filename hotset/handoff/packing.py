"""Moves the bytes of staging: from pages into a packed piece, and from there into pages. Memory is given by address."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotset.handoff.layout import plan_writes
from hotset.handoff.messages import MemoryRange, PackedPiece, PagedSpan
from hotset.handoff.staging import Block, blocks, sender_buffers
from hotset.kernels.slice_pack import RowSlices, slice_pack, slice_unpack
from hotset.transfer.api import Region


class StagingMemory:
    """Host memory for packed pieces: the ring of a decode worker, or the buffers of a prefill worker. The caller
    registers its region and keeps it until the transfer engine is closed."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        self.memory_range = MemoryRange(self._bytes.data_ptr(), nbytes)

    @property
    def region(self) -> Region:
        return Region(self.memory_range.address, self.memory_range.nbytes)

    @property
    def buffers(self) -> tuple[MemoryRange, ...]:
        return sender_buffers(self.memory_range)


def pack(piece: PackedPiece) -> None:
    """Copies a piece from the source's pages to `piece.address`, a buffer of this process."""
    for packed, block in _located_blocks(piece):
        stores = _unit_views(piece.source.shards[block.source].span, piece.row_pages)
        slices = RowSlices(tuple((source, nbytes) for source, _, nbytes in block.byte_ranges))
        slice_pack(stores, piece.row_pages, piece.first, piece.last, slices, packed)
    if (keys := piece.source.keys) is not None:
        _copy(plan_writes(keys, piece.key_pages, _packed_keys(piece, keys), (0,), piece.first, piece.last))


def unpack(piece: PackedPiece) -> None:
    """Copies a piece from `piece.address`, a lease of this process, to the target's pages, and nowhere else."""
    for packed, block in _located_blocks(piece):
        slices = RowSlices(tuple((target, nbytes) for _, target, nbytes in block.byte_ranges))
        for shard in block.targets:
            stores = _unit_views(piece.target.shards[shard].span, piece.row_pages)
            slice_unpack(packed, stores, piece.row_pages, piece.first, piece.last, slices)
    if (keys := piece.target.keys) is not None:
        _copy(plan_writes(_packed_keys(piece, keys), (0,), keys, piece.key_pages, piece.first, piece.last))


def _located_blocks(piece: PackedPiece) -> Iterator[tuple[Tensor, Block]]:
    """Yields every block with a view of its packed bytes."""
    address, rows = piece.address, (piece.last - piece.first) * len(piece.source.shards[0].span.bases)
    for block in blocks(piece.source, piece.target):
        nbytes = rows * block.row_bytes
        yield MemoryView(address, (nbytes,), (1,)).tensor, block
        address += nbytes


def _packed_keys(piece: PackedPiece, keys: PagedSpan) -> PagedSpan:
    """Describes the keys of the piece, which come last, as one page that holds the whole context."""
    rows = piece.last - piece.first
    layers = len(piece.source.shards[0].span.bases)
    start = piece.address + rows * layers * sum(block.row_bytes for block in blocks(piece.source, piece.target))
    group_bytes = rows * keys.row_bytes
    bases = tuple((start + group * group_bytes - piece.first * keys.row_bytes,) for group in range(len(keys.bases)))
    return PagedSpan(
        bases=bases,
        page_bytes=piece.last * keys.row_bytes,
        page_rows=piece.last,
        part_rows=piece.last,
        row_bytes=keys.row_bytes,
    )


def _copy(planned: np.ndarray) -> None:
    for source, target, nbytes in planned.tolist():
        ctypes.memmove(target, source, nbytes)


def _unit_views(span: PagedSpan, pages: Sequence[int]) -> list[Tensor]:
    """Returns each unit as slice_pack expects it: [pages, page rows, row bytes], up to the last of these pages."""
    shape = (max(pages) + 1, span.page_rows, span.row_bytes)
    strides = (span.page_bytes, span.row_bytes, 1)
    return [MemoryView(base, shape, strides).tensor for (base,) in span.bases]


@dataclass(frozen=True, slots=True)
class MemoryView:
    """Bytes of host memory at an address. Their owner must keep them for as long as the tensor is used."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def tensor(self) -> Tensor:
        return torch.from_numpy(np.asarray(_ArrayInterface(self)))


class _ArrayInterface:
    """Describes memory to numpy."""

    def __init__(self, memory: MemoryView) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (memory.address, False),
            "shape": memory.shape,
            "strides": memory.strides,
        }
