"""Memory that several processes of one machine share. It has no path, so it is freed when no process uses it."""

import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

from torch import Tensor

from hotset.base.errors import StartupError
from hotset.base.units import show_bytes
from hotset.memory.mapping import map_descriptor, shared_descriptor


class SharedMemory:
    """`nbytes` bytes of shared memory. Each process maps them at its own address. New memory is zero."""

    def __init__(self, nbytes: int, descriptor: int | None = None, nodes: Sequence[int] = ()) -> None:
        """Creates new memory or, given a `descriptor`, maps the memory of another process and owns the descriptor.

        New memory is in huge pages if the system has them, and on the NUMA nodes `nodes`, if there are any.
        """
        self.nbytes = nbytes
        self._descriptor = -1 if descriptor is None else descriptor
        try:
            if descriptor is None:
                self._descriptor = shared_descriptor(nbytes)
            self.bytes: Tensor = map_descriptor(self._descriptor, nbytes, nodes)
        except OSError as error:
            self.close()
            raise StartupError(
                f"{show_bytes(nbytes)} of shared host memory cannot be allocated ({error.strerror}); "
                "lower --host-kv-gib"
            ) from error

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
