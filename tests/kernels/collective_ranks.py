"""Ranks for the tests of collectives: host threads that run the CUDA kernels on the CPU, over shared buffers."""

import ctypes
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar
from unittest import mock

import torch
from kernels import cuda_on_cpu
from torch import Tensor

from hotset.base.units import ceil_div
from hotset.kernels import cuda_source
from hotset.kernels.collectives import cuda_impl
from hotset.kernels.collectives.cuda_impl import COUNTERS, FLAG_BYTES, Staging
from hotset.kernels.cuda_source import LaunchShape

T = TypeVar("T")
DEADLINE_S = 45.0
POISON = 0xAB
THREADS = 32
_local = threading.local()


@cache
def _copy_of_library(rank: int, source: Path, macros: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Loads the library once more: the emulation keeps the state of a launch in static variables."""
    path = Path(cuda_on_cpu.library(source, macros)._name)
    return ctypes.CDLL(str(shutil.copy(path, path.with_name(f"rank-{rank}.so"))))


_compiling = threading.Lock()


@dataclass(frozen=True, slots=True)
class RankKernel:
    """A kernel that is launched for the rank of the calling thread."""

    source: Path
    name: str
    constants: dict[str, int]

    def launch(self, shape: LaunchShape, *arguments: Tensor | int) -> None:
        # All blocks of a launch form a cluster: the emulation runs only blocks of the same cluster at the same time.
        macros = tuple(sorted((self.constants | {"CLUSTER": shape.blocks}).items()))
        with _compiling:
            library = _copy_of_library(_local.rank, self.source, macros)
        cuda_on_cpu.EmulatedKernel(library, self.name, {}).launch(shape, *arguments)


@contextmanager
def emulated_kernels() -> Iterator[None]:
    def kernel(source: Path, name: str, **constants: int) -> RankKernel:
        return RankKernel(source, name, constants)

    with mock.patch.object(cuda_source, "kernel", kernel):
        yield


class Ranks:
    """The buffers of a group of ranks. They are poisoned, except for flags and counters, which begin at `sequence`."""

    def __init__(self, size: int, blocks: int = 2, slot_bytes: int = 0, sequence: int = 0) -> None:
        self.size = size
        self.abort = torch.zeros(1, dtype=torch.int32)
        self.slot_bytes, self.blocks = slot_bytes or 16 * size * ceil_div(160, 16 * size), blocks
        area = FLAG_BYTES + 2 * self.slot_bytes
        flags = [range(block * area, block * area + FLAG_BYTES) for block in range(blocks)]
        counters = [range(blocks * COUNTERS * FLAG_BYTES)]
        self.staging_memory = self._allocate(cuda_impl.staging_bytes(blocks, self.slot_bytes), flags, sequence)
        self.staging = self._views(self.staging_memory)
        inbox_bytes = cuda_impl.inbox_bytes(blocks, self.slot_bytes, size)
        self.inboxes = self._views(self._allocate(inbox_bytes, counters, sequence))

    def _allocate(self, nbytes: int, flags: list[range], sequence: int) -> list[Tensor]:
        buffers = []
        for _ in range(self.size):
            memory = torch.full((nbytes + 16,), POISON, dtype=torch.uint8)
            buffer = memory[-memory.data_ptr() % 16 :][:nbytes]
            for bytes_of_flags in flags:
                buffer[bytes_of_flags.start : bytes_of_flags.stop].view(torch.int32).fill_(sequence)
            buffers.append(buffer)
        return buffers

    def _views(self, buffers: list[Tensor]) -> list[Staging]:
        addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
        sizes = {"blocks": self.blocks, "slot_bytes": self.slot_bytes, "threads": THREADS, "bytes_per_block": 2}
        return [Staging(addresses, rank, self.abort, **sizes, memory=buffers) for rank in range(self.size)]

    def wait_for_flag(self, at: int, source: int) -> None:
        """Waits until rank `source` has published a round to rank `at`, in any block."""
        flags = self.staging_memory[at].view(torch.int32)[source :: (FLAG_BYTES + 2 * self.slot_bytes) // 4]
        deadline = time.monotonic() + DEADLINE_S
        while not flags.any():
            assert time.monotonic() < deadline, f"rank {source} has not published anything"
            time.sleep(0.001)

    def run(self, work: Callable[[int], T], ranks: list[int] | None = None) -> list[T]:
        """Runs `work(rank)` in a thread per rank, and returns the results. Raises the first error of any rank.

        Sets the abort flag and fails if they take more than DEADLINE_S.
        """
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            _local.rank = rank
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self.abort.fill_(1)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks or range(self.size)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + DEADLINE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            self.abort.fill_(1)
            raise TimeoutError(f"the ranks did not finish within {DEADLINE_S:g} s")
        if errors:
            raise errors[0]
        return [results[rank] for rank in sorted(results)]
