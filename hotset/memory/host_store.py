"""The host store: the home of every row and index key, `[layer][row]`, in pages."""

from collections.abc import Callable

import torch
from torch import Tensor

from hotset.base.errors import StartupError
from hotset.base.units import show_bytes
from hotset.memory.device_pool import KvShape


def host_bytes(shape: KvShape, pages: int, page_rows: int) -> int:
    """Of a store of so many pages."""
    return pages * page_rows * shape.token_bytes


class HostStore:
    """`pages` pages of host memory, pinned for `device` where that is a GPU. Fresh memory is not cleared.

    Several workers may share one: then all of them read every page, and each writes those that are its own.
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
        """`progress(done, total)` is told, in bytes, how much memory is ready. `memory`: [host_bytes] uint8 in which to
        keep it. Page p is written by writer p % `writers`, of which this is number `writer`."""
        self.page_rows, self.writer, self.writers = page_rows, writer, writers
        count = pages * page_rows
        if memory is None:
            memory = torch.empty(host_bytes(shape, pages, page_rows), dtype=torch.uint8)
        of_rows = shape.layers * count * shape.row.stride_bytes
        self.rows = memory[:of_rows].view(shape.row.stored_dtype).view(shape.layers, count, shape.row.stored_width)
        self.keys: Tensor | None = None
        if shape.key is not None:
            stored = memory[of_rows:].view(shape.key.stored_dtype)
            self.keys = stored.view(shape.groups, count, shape.key.stored_width)
        self._pinned: list[int] = []
        if device.type == "cuda":
            self._pin(progress)

    def writes(self, page: int) -> bool:
        """Whether this worker writes that page."""
        return page % self.writers == self.writer

    def _pin(self, progress: Callable[[int, int], None] | None) -> None:
        """Layer by layer, so that progress can be shown: a copy must not span what was pinned in two pieces."""
        layers = [layer for tensor in (self.rows, self.keys) if tensor is not None for layer in tensor]
        total, done = sum(layer.nbytes for layer in layers), 0
        for layer in layers:
            failure = int(torch.cuda.cudart().cudaHostRegister(layer.data_ptr(), layer.nbytes, 0))
            if failure:
                self.close()
                raise StartupError(
                    f"{show_bytes(total)} of host memory cannot be pinned (CUDA error {failure}); "
                    "lower --host-kv-gib or raise the limit on locked memory"
                )
            self._pinned.append(layer.data_ptr())
            done += layer.nbytes
            if progress is not None:
                progress(done, total)

    def close(self) -> None:
        """Unpins piece by piece, in order: an exit that leaves it to the kernel can hang a machine. Idempotent."""
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop())
