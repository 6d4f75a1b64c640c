"""Copies the bytes of staged contexts: the sender packs pages into a piece, the receiver unpacks a piece into pages.

Memory is given by engine addresses. A process can copy only its own memory: `pack` and `unpack` copy the blocks of one
process, and `EngineCopies` has all processes of an engine copy theirs at the same time.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hotset.handoff.layout import plan_writes
from hotset.handoff.messages import ContextPages, MemoryRange, PackedPiece, PagedSpan, Store
from hotset.handoff.staging import packed_span, piece_layout
from hotset.kernels import page_copy
from hotset.kernels.device_copies import to_device
from hotset.kernels.slice_pack import RowSlices, slice_pack, slice_unpack
from hotset.transfer.api import MemoryKind, Region, Writes
from hotset.transfer.workers import PROCESS_MASK, WorkerConnection, process_and_address

CPU = torch.device("cpu")
WORD_BYTES = 4
COPY_SECONDS = 60.0  # limit for the copy of a worker process


class StagingMemory:
    """Memory for packed pieces, in one process and of one kind. A decode worker uses it as its ring, a prefill worker
    divides it into buffers. The caller registers `region` and keeps this object until the transfer engine is closed."""

    def __init__(self, nbytes: int, device: torch.device = CPU, memory: MemoryKind = MemoryKind.HOST) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.memory_range = MemoryRange(self._bytes.data_ptr(), nbytes)
        self.region = Region(self.memory_range.address, nbytes, memory, device.index or 0)

    def beside(self, store: Store) -> Store:
        """Returns a store, all of whose shards are in this memory's process, with this staging memory."""
        return replace(store, staging=(self.memory_range,) * len(store.shards))


class EngineCopies:
    """Packs and unpacks pieces in all processes of an engine."""

    def __init__(self, device: torch.device, workers: Sequence[WorkerConnection]) -> None:
        """Stores of this process that are in device memory are on `device`. `workers` are the other processes, in the
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
    """Packs the blocks whose source shards are in this process, which has this number."""
    source, layout = piece.source, piece_layout(piece.source, piece.target, piece.last - piece.first)
    with _copying(source, device) as memory:
        for offset, nbytes, block in layout.blocks:
            span = source.shards[block.source].span
            if _process(span) == process:
                packed = _tensor_at(
                    source.staging[block.source].address + piece.offset + offset, (nbytes,), (1,), memory
                )
                slices = RowSlices(tuple((begin, length) for begin, _, length in block.byte_ranges))
                layers = _layer_tensors(span, piece.pages.rows, memory)
                slice_pack(layers, piece.pages.rows, piece.first, piece.last, slices, packed)
        if source.keys is not None and _process(source.keys) == process:
            start = source.staging[0].address + piece.offset + layout.keys
            packed_keys = packed_span(start, len(source.keys.bases), source.keys.row_bytes, piece.first, piece.last)
            _copy(plan_writes(source.keys, piece.pages.keys, packed_keys, (0,), piece.first, piece.last), memory)


def unpack(piece: PackedPiece, process: int = 0, device: torch.device = CPU) -> None:
    """Unpacks the blocks whose target shards are in this process, which has this number."""
    target, layout = piece.target, piece_layout(piece.source, piece.target, piece.last - piece.first)
    with _copying(target, device) as memory:
        for offset, nbytes, block in layout.blocks:
            slices = RowSlices(tuple((begin, length) for _, begin, length in block.byte_ranges))
            for shard in block.targets:
                span = target.shards[shard].span
                if _process(span) == process:
                    packed = _tensor_at(target.staging[shard].address + piece.offset + offset, (nbytes,), (1,), memory)
                    layers = _layer_tensors(span, piece.pages.rows, memory)
                    slice_unpack(packed, layers, piece.pages.rows, piece.first, piece.last, slices)
        for keys, staging in zip(target.all_keys, target.staging, strict=False):
            if _process(keys) == process:
                start = staging.address + piece.offset + layout.keys
                packed_keys = packed_span(start, len(keys.bases), keys.row_bytes, piece.first, piece.last)
                _copy(plan_writes(packed_keys, (0,), keys, piece.pages.keys, piece.first, piece.last), memory)


@contextmanager
def _copying(store: Store, device: torch.device) -> Iterator[torch.device]:
    """Yields the device on which the store is. On a GPU, copies run on a stream of their own, and end here."""
    if store.memory != MemoryKind.DEVICE.value or device.type != "cuda":
        yield CPU
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield device
    stream.synchronize()


def _process(span: PagedSpan) -> int:
    """Returns the number of the process whose memory this is. All layers of a store that is staged are in one."""
    return process_and_address(span.bases[0][0])[0]


def _copy(writes: Writes, device: torch.device) -> None:
    """Performs planned writes within this process."""
    local = writes & np.array([PROCESS_MASK, PROCESS_MASK, -1], np.int64)
    if device.type != "cuda":
        for source, target, nbytes in local.tolist():
            ctypes.memmove(target, source, nbytes)
        return
    # One kernel copies all runs, in words from the first address on each side.
    starts = local[:, :2].min(axis=0)
    runs = np.concatenate((local[:, :2] - starts, local[:, 2:]), axis=1)
    word = torch.int32 if not (runs % WORD_BYTES).any() else torch.uint8
    ends = (runs[:, :2] + runs[:, 2:]).max(axis=0)
    source, target = (
        _tensor_at(int(start), (int(end),), (1,), device).view(word)[None, :, None]
        for start, end in zip(starts, ends, strict=True)
    )
    page_copy.to_host(to_device(torch.from_numpy(runs // word.itemsize), device), source, target)


def _layer_tensors(span: PagedSpan, pages: Sequence[int], device: torch.device) -> list[Tensor]:
    """Returns one tensor per layer in the shape that `slice_pack` expects: [pages, page rows, row bytes].

    Pages have one part. Each tensor begins with page 0 and ends with the page of the highest given number.
    """
    shape = (max(pages) + 1, span.part_rows, span.row_bytes)
    strides = (span.page_bytes, span.row_bytes, 1)
    addresses = [base for (base,) in span.bases]
    distances = {after - before for before, after in pairwise(addresses)}
    if len(distances) == 1 and min(distances) > 0:  # views of one tensor, which are copied together
        return [*_tensor_at(addresses[0], (len(addresses), *shape), (min(distances), *strides), device)]
    return [_tensor_at(address, shape, strides, device) for address in addresses]


def _tensor_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns a uint8 tensor over existing memory, given by an engine address of this process. The memory must outlive
    the tensor, which does not own it."""
    array = {
        "version": 3,
        "typestr": "|u1",
        "data": (address & PROCESS_MASK, False),
        "shape": shape,
        "strides": strides,
    }
    if device.type == "cuda":
        return torch.as_tensor(_CudaArray(array), device=device)
    return torch.from_numpy(np.asarray(_HostArray(array)))


class _HostArray:
    """Bytes at an address, in the form that numpy accepts."""

    def __init__(self, array: dict[str, object]) -> None:
        self.__array_interface__ = array


class _CudaArray:
    """Bytes of a GPU at an address, in the form that torch accepts."""

    def __init__(self, array: dict[str, object]) -> None:
        self.__cuda_array_interface__ = array
