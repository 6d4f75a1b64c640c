"""Memory that several processes of one node share. It has no name in the file system, so the system frees it when no
process uses it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hotset.base.errors import InternalError, StartupError
from hotset.base.units import show_bytes
from hotset.memory.mapping import map_descriptor, shared_descriptor


@dataclass(frozen=True, slots=True)
class SharedName:
    """Names memory that another process of the same node can map while its creator keeps the descriptor open."""

    node: str  # the node that has the memory
    path: str  # path of the creator's descriptor in /proc
    nbytes: int


class SharedMemory:
    """`nbytes` bytes of shared memory. Each process maps them at its own address. New memory is zero."""

    def __init__(self, nbytes: int, descriptor: int | None = None, nodes: Sequence[int] = ()) -> None:
        """Creates new memory or, given a `descriptor`, maps the memory of another process and owns the descriptor.

        New memory uses huge pages if the system has them. It is placed on the NUMA nodes `nodes`, if there are any.
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

    def name(self, node: str) -> SharedName:
        """Returns the name of the memory for other processes of `node`, the node of this process."""
        if self._descriptor < 0:
            raise InternalError("closed memory has no name")
        return SharedName(node, f"/proc/{os.getpid()}/fd/{self._descriptor}", self.nbytes)

    @classmethod
    def open(cls, name: SharedName, node: str) -> "SharedMemory":
        """Maps the memory of another process, from a process on `node`."""
        if name.node != node:
            raise InternalError(f"a process on node {node!r} cannot map the memory {name}")
        return cls(name.nbytes, os.open(name.path, os.O_RDWR))

    def close(self) -> None:
        """Closes the descriptor. Other processes can no longer map the memory, but mappings stay valid. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
