"""Copies the bytes of staged contexts: the sender packs pages into a piece, the receiver unpacks a piece into pages.

Memory is given by engine addresses. A process can copy only its own memory: `pack` and `unpack` copy the blocks of one
process, and `EngineCopies` makes all processes of an engine copy their blocks at the same time.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import torch

from hotset.base.paged_span import PagedSpan
from hotset.fleet.handoff.messages import MemoryRange, PackedPiece, Store
from hotset.fleet.handoff.staging import piece_layout
from hotset.fleet.transfer.api import MemoryKind, Region
from hotset.fleet.transfer.workers import PROCESS_MASK, WorkerConnection, process_and_address
from hotset.kernels.slice_pack import RowSlices, SlicedRows, copy_slices
from hotset.schedule.handoffs import ContextPages

CPU = torch.device("cpu")
# Held during a GPU copy. Python takes longer to begin such a copy than the GPU to perform it, so threads only compete.
GPU_COPY = threading.Lock()
COPY_SECONDS = 60.0  # limit for the copy of a worker process


class StagingMemory:
    """Memory for packed pieces, in one process and of one kind. A decode worker uses it as its ring, a prefill worker
    divides it into buffers. The caller registers `region` and keeps this object until the transfer engine is closed."""

    def __init__(self, nbytes: int, device: torch.device = CPU, memory: MemoryKind = MemoryKind.HOST) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.memory_range = MemoryRange(self._bytes.data_ptr(), nbytes)
        self.region = Region(self.memory_range.address, nbytes, memory, device.index or 0)

    def zero(self) -> None:
        self._bytes.zero_()

    def beside(self, store: Store) -> Store:
        """Returns the store with this staging memory. All its shards must be in the process of this memory."""
        return replace(store, staging=(self.memory_range,) * len(store.shards))


class EngineCopies:
    """Packs and unpacks pieces in all processes of an engine."""

    def __init__(self, device: torch.device, workers: Sequence[WorkerConnection]) -> None:
        """`device` is the device of this process's stores in device memory. `workers` are the other processes, in the
        order of their numbers, beginning with process 1."""
        self._device, self._workers = device, workers

    def pack(self, piece: PackedPiece) -> None:
        """Copies a piece from the source's pages to its staging memory. It is complete on return."""
        self._copy("pack", pack, piece, piece.source)

    def unpack(self, piece: PackedPiece) -> None:
        """Copies a piece from the target's staging memory to its pages. It is complete on return."""
        self._copy("unpack", unpack, piece, piece.target)

    def warm_up(self, store: Store) -> None:
        """Compiles the kernels for whole rows of this store. Packs one row and copies it back, so nothing changes. Call
        it while nothing else uses the store."""
        piece = PackedPiece(store, store, ContextPages((0,), (0,)), 0, 1, 0)
        self.pack(piece)
        self.unpack(piece)

    def _copy(self, name: str, copy: Callable[..., None], piece: PackedPiece, store: Store) -> None:
        processes = {_process(shard.span) for shard in store.shards} | {_process(keys) for keys in store.all_keys}
        in_workers = [self._workers[process - 1].call("copy", name, piece, process) for process in processes - {0}]
        if 0 in processes:
            copy(piece, 0, self._device)
        for future in in_workers:
            future.result(COPY_SECONDS)


def pack(piece: PackedPiece, process: int = 0, device: torch.device = CPU) -> None:
    """Packs the blocks whose source shards are in this process. `process` is its number."""
    with _copying(piece.source, device) as memory:
        for address, blocks, keys in _blocks_in(process, piece.source, piece.target, unpacked=False):
            packed = address + piece.offset
            copy_slices(blocks, piece.pages.rows, piece.first, piece.last, packed, memory, unpack=False)
            copy_slices(keys, piece.pages.keys, piece.first, piece.last, packed, memory, unpack=False)


def unpack(piece: PackedPiece, process: int = 0, device: torch.device = CPU) -> None:
    """Unpacks the blocks whose target shards are in this process. `process` is its number."""
    with _copying(piece.target, device) as memory:
        for address, blocks, keys in _blocks_in(process, piece.source, piece.target, unpacked=True):
            packed = address + piece.offset
            copy_slices(blocks, piece.pages.rows, piece.first, piece.last, packed, memory, unpack=True)
            copy_slices(keys, piece.pages.keys, piece.first, piece.last, packed, memory, unpack=True)


Blocks = tuple[SlicedRows, ...]


@lru_cache(maxsize=512)  # of a store with eight ranks, each is the first in turn
def _blocks_in(process: int, source: Store, target: Store, *, unpacked: bool) -> list[tuple[int, Blocks, Blocks]]:
    """Returns, for each staging memory of this process, its address and the blocks of rows and of index keys that are
    packed there or unpacked from there. All addresses are those of this process."""
    layout = piece_layout(source, target, 1)  # offsets in a piece of one row are those of one position
    store = target if unpacked else source
    rows: dict[int, list[SlicedRows]] = {}
    keys: dict[int, list[SlicedRows]] = {}
    for offset, _, block in layout.blocks:
        slices = RowSlices(tuple((end if unpacked else begin, length) for begin, end, length in block.byte_ranges))
        for shard in block.targets if unpacked else (block.source,):
            address = store.staging[shard].address & PROCESS_MASK
            if _process(span := store.shards[shard].span) == process:
                rows.setdefault(address, []).append(SlicedRows(_local(span), slices, offset))
    for span, staging in zip(store.all_keys if unpacked else store.all_keys[:1], store.staging, strict=False):
        if _process(span) == process:
            slices = RowSlices(((0, span.row_bytes),))
            keys.setdefault(staging.address & PROCESS_MASK, []).append(SlicedRows(_local(span), slices, layout.keys))
    return [(address, tuple(rows.get(address, ())), tuple(keys.get(address, ()))) for address in rows | keys]


def _local(span: PagedSpan) -> PagedSpan:
    """Returns the span with addresses of its own process."""
    return replace(span, bases=tuple(tuple(base & PROCESS_MASK for base in parts) for parts in span.bases))


@contextmanager
def _copying(store: Store, device: torch.device) -> Iterator[torch.device]:
    """Yields the device of the store. On a GPU, copies in the block run on a separate stream. Waits for them at the
    end."""
    if store.memory != MemoryKind.DEVICE.value or device.type != "cuda":
        yield CPU
        return
    with GPU_COPY, torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            yield device
        stream.synchronize()


def _process(span: PagedSpan) -> int:
    """Returns the number of the process whose memory this is. All layers of a staged store are in one process."""
    return process_and_address(span.bases[0][0])[0]
