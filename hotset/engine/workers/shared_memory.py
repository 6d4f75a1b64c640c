"""Memory that several processes of one machine map. It has no name, so whoever dies leaves nothing behind."""

import mmap
import os
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import torch
from torch import Tensor

from hotset.base.errors import StartupError
from hotset.base.units import show_bytes


class SharedMemory:
    """`nbytes` of memory, at some address of each process that has it. Fresh memory is zero."""

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        """`descriptor`: of memory that another process made; owned from now on."""
        self.nbytes = nbytes
        self._descriptor = os.memfd_create("hotset-kv") if descriptor is None else descriptor
        try:
            if descriptor is None:
                os.ftruncate(self._descriptor, nbytes)
            mapped = mmap.mmap(self._descriptor, nbytes)
        except OSError as error:
            os.close(self._descriptor)
            raise StartupError(
                f"{show_bytes(nbytes)} of shared host memory cannot be had ({error.strerror}); lower --host-kv-gib"
            ) from error
        self.bytes: Tensor = torch.frombuffer(mapped, dtype=torch.uint8)  # keeps the mapping alive

    def send(self, pipe: Connection, pid: int) -> None:
        """To the process `pid` at the other end, which receives it by `received`."""
        pipe.send(self.nbytes)
        send_handle(pipe, self._descriptor, pid)

    @classmethod
    def received(cls, pipe: Connection) -> "SharedMemory":
        nbytes: int = pipe.recv()
        return cls(nbytes, recv_handle(pipe))

    def close(self) -> None:
        """No further process can be given it; what is mapped stays as long as it is used. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
