"""The host store: pages of host memory, `[layer][row]`, with space for the rows and index keys of every request."""

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from hotset.base.errors import StartupError
from hotset.base.numa import first_touch_cpus, store_nodes
from hotset.base.units import GIB, show_bytes
from hotset.memory.device_pool import KvShape
from hotset.memory.mapping import POPULATE_THREADS, populate, private_memory

LOGGER = logging.getLogger("hotset.memory")


def host_bytes(shape: KvShape, pages: int, page_rows: int) -> int:
    """Returns the size of a host store of `pages` pages."""
    return pages * page_rows * shape.token_bytes


class HostStore:
    """Owns `pages` pages of host memory. Fresh memory is not cleared.

    If `device` is a GPU, the memory is pinned, and new memory is on the GPU's NUMA node, in huge pages if the system
    has them.

    If several workers share one store, each of them can read every page, but each page has only one writer.
    """

    def __init__(
        self,
        shape: KvShape,
        pages: int,
        page_rows: int,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
        *,
        memory: Tensor | None = None,
        writer: int = 0,
        writers: int = 1,
    ) -> None:
        """`progress(done, total)` reports, in bytes, how much memory has been pinned.

        `memory` [host_bytes] uint8 is used instead of new memory. Page p is written by worker p % `writers`; this
        worker is number `writer`.
        """
        self.page_rows, self.writer, self.writers = page_rows, writer, writers
        count = pages * page_rows
        if memory is None:
            nbytes = host_bytes(shape, pages, page_rows)
            if device.type == "cuda":
                memory = private_memory(nbytes, store_nodes([_gpu(device)]))
            else:
                memory = torch.empty(nbytes, dtype=torch.uint8)
        row_bytes = shape.layers * count * shape.row.stride_bytes
        self.rows = memory[:row_bytes].view(shape.row.stored_dtype).view(shape.layers, count, shape.row.stored_width)
        self.keys: Tensor | None = None
        if shape.key is not None:
            stored = memory[row_bytes:].view(shape.key.stored_dtype)
            self.keys = stored.view(shape.groups, count, shape.key.stored_width)
        self._pinned: list[int] = []
        if device.type == "cuda":
            self._pin(_gpu(device), progress)

    @property
    def pinned_bytes(self) -> int:
        tensors = (self.rows, self.keys) if self._pinned else ()
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def _pin(self, gpu: int, progress: Callable[[int, int], None] | None) -> None:
        """Pins each layer separately, so that progress can be reported. A copy must therefore not span two layers.

        Threads allocate the memory of the next layers meanwhile, because this takes most of the time. Pinning itself
        is no faster in several threads.
        """
        layers = [layer for tensor in (self.rows, self.keys) if tensor is not None for layer in tensor]
        own = len(layers) * self.writer // self.writers  # workers that share the store begin with different layers
        layers = layers[own:] + layers[:own]
        total, done, began = sum(layer.nbytes for layer in layers), 0, time.monotonic()
        cpus = first_touch_cpus([gpu]) or os.sched_getaffinity(0)
        threads = ThreadPoolExecutor(
            min(POPULATE_THREADS, len(cpus)), "hotset-populate", initializer=os.sched_setaffinity, initargs=(0, cpus)
        )
        try:
            allocated = [populate(layer, threads) for layer in layers]
            for layer, parts in zip(layers, allocated, strict=True):
                for part in parts:
                    part.result()
                self._pin_layer(layer, total)
                done += layer.nbytes
                if progress is not None:
                    progress(done, total)
        except BaseException:
            self.close()
            raise
        finally:
            threads.shutdown(cancel_futures=True)
        seconds = time.monotonic() - began
        if total >= GIB:
            rate = total / seconds / 1e9
            LOGGER.info("%s of host memory allocated and pinned in %.1f s, %.1f GB/s", show_bytes(total), seconds, rate)

    def _pin_layer(self, layer: Tensor, total: int) -> None:
        failure = int(torch.cuda.cudart().cudaHostRegister(layer.data_ptr(), layer.nbytes, 0))
        if failure:
            raise StartupError(
                f"{show_bytes(total)} of host memory cannot be pinned (CUDA error {failure}); lower --host-kv-gib"
            )
        self._pinned.append(layer.data_ptr())

    def close(self) -> None:
        """Unpins the layers. The machine can hang if the operating system unpins them at exit. Idempotent."""
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop())


def _gpu(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
