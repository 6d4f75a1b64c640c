"""Memory that several processes of one machine share. It has no path, so it is freed when no process uses it."""

import mmap
import os
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import torch
from torch import Tensor

from hotset.base.errors import StartupError
from hotset.base.units import show_bytes


class SharedMemory:
    """`nbytes` bytes of shared memory. Each process maps them at its own address. New memory is zero."""

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        """Creates new memory or, given a `descriptor`, maps the memory of another process and owns the descriptor."""
        self.nbytes = nbytes
        self._descriptor = os.memfd_create("hotset-kv") if descriptor is None else descriptor
        try:
            if descriptor is None:
                os.ftruncate(self._descriptor, nbytes)
            mapped = mmap.mmap(self._descriptor, nbytes)
        except OSError as error:
            os.close(self._descriptor)
            raise StartupError(
                f"{show_bytes(nbytes)} of shared host memory cannot be allocated ({error.strerror}); "
                "lower --host-kv-gib"
            ) from error
        self.bytes: Tensor = torch.frombuffer(mapped, dtype=torch.uint8)  # the tensor keeps the mapping alive

    def send(self, pipe: Connection, pid: int) -> None:
        """Shares the memory with process `pid` at the other end of the pipe. That process must call `receive`."""
        pipe.send(self.nbytes)
        send_handle(pipe, self._descriptor, pid)

    @classmethod
    def receive(cls, pipe: Connection) -> "SharedMemory":
        nbytes: int = pipe.recv()
        return cls(nbytes, recv_handle(pipe))

    def close(self) -> None:
        """Closes the descriptor. The memory can no longer be sent, but its mappings stay valid. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
