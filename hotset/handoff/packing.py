"""Moves the bytes of staging: from pages into a packed piece, and from there into pages. Memory is named by address."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotset.handoff.layout import writes
from hotset.handoff.messages import MemoryRange, PackedPiece, PagedSpan
from hotset.handoff.staging import Block, blocks, sender_buffers
from hotset.kernels.slice_pack import Slices, slice_pack, slice_unpack
from hotset.transfer.api import Region


class StagingMemory:
    """Host memory through which packed pieces go: at a decode worker a ring, at a prefill worker buffers. Whoever makes
    it registers its region, and keeps it until the transfer engine is closed."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        self.space = MemoryRange(self._bytes.data_ptr(), nbytes)

    @property
    def region(self) -> Region:
        return Region(self.space.address, self.space.nbytes)

    @property
    def buffers(self) -> tuple[MemoryRange, ...]:
        return sender_buffers(self.space)


def pack(piece: PackedPiece) -> None:
    """Out of the source's pages. The address is that of a buffer here."""
    for at, block in _placed(piece):
        stores = _units(piece.source.shards[block.source].span, piece.row_pages)
        slices = Slices(tuple((here, nbytes) for here, _, nbytes in block.pieces))
        slice_pack(stores, piece.row_pages, piece.first, piece.last, slices, at)
    if (keys := piece.source.keys) is not None:
        _move(writes(keys, piece.key_pages, _packed_keys(piece, keys), (0,), piece.first, piece.last))


def unpack(piece: PackedPiece) -> None:
    """Into the target's pages, and nowhere else. The address is that of a lease here."""
    for at, block in _placed(piece):
        slices = Slices(tuple((there, nbytes) for _, there, nbytes in block.pieces))
        for target in block.targets:
            stores = _units(piece.target.shards[target].span, piece.row_pages)
            slice_unpack(at, stores, piece.row_pages, piece.first, piece.last, slices)
    if (keys := piece.target.keys) is not None:
        _move(writes(_packed_keys(piece, keys), (0,), keys, piece.key_pages, piece.first, piece.last))


def _placed(piece: PackedPiece) -> Iterator[tuple[Tensor, Block]]:
    """Every block, and where it lies."""
    address, rows = piece.address, (piece.last - piece.first) * len(piece.source.shards[0].span.bases)
    for block in blocks(piece.source, piece.target):
        nbytes = rows * block.row_bytes
        yield MemoryAt(address, (nbytes,), (1,)).tensor, block
        address += nbytes


def _packed_keys(piece: PackedPiece, keys: PagedSpan) -> PagedSpan:
    """The keys of the piece, which come last, as if all of the context were there on one page."""
    rows = piece.last - piece.first
    layers = len(piece.source.shards[0].span.bases)
    start = piece.address + rows * layers * sum(block.row_bytes for block in blocks(piece.source, piece.target))
    group_bytes = rows * keys.row_bytes
    bases = tuple((start + group * group_bytes - piece.first * keys.row_bytes,) for group in range(len(keys.bases)))
    return PagedSpan(bases, piece.last * keys.row_bytes, piece.last, piece.last, keys.row_bytes)


def _move(planned: np.ndarray) -> None:
    for here, there, nbytes in planned.tolist():
        ctypes.memmove(there, here, nbytes)


def _units(span: PagedSpan, pages: Sequence[int]) -> list[Tensor]:
    """Each unit as slice_pack wants it: [pages, page rows, row bytes], as far as these pages reach."""
    shape = (max(pages) + 1, span.page_rows, span.row_bytes)
    strides = (span.page_bytes, span.row_bytes, 1)
    return [MemoryAt(base, shape, strides).tensor for (base,) in span.bases]


@dataclass(frozen=True, slots=True)
class MemoryAt:
    """Bytes of host memory that somebody else owns, and keeps for as long as the tensor is used."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def tensor(self) -> Tensor:
        return torch.from_numpy(np.asarray(_Interface(self)))


class _Interface:
    """How numpy is told of memory."""

    def __init__(self, memory: MemoryAt) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (memory.address, False),
            "shape": memory.shape,
            "strides": memory.strides,
        }
