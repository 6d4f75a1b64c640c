"""The interface of a transfer engine, which copies spans of registered memory into a peer's registered memory.

Writes are one-sided: the transfer engine does not notify the peer. `handoff/` notifies it with messages over a separate
control channel.

After start-up (`register`, `describe`), only `connect` and `close` may block. Writes are submitted in lists. A list
ends in one of three states, at its deadline at the latest. After DONE and FAILED_QUIESCED the target memory can be used
again; after FAILED_UNKNOWN it must not be used.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hotset.base.errors import InternalError
from hotset.engine.ports import Throughput
from hotset.schedule.handoffs import DeviceEvent

Writes = NDArray[np.int64]  # [writes, 3]: local address, address in the peer's memory, number of bytes


class MemoryKind(Enum):
    HOST = "host"
    DEVICE = "device"


class WriteState(Enum):
    PENDING = "pending"
    DONE = "done"  # every byte is in the peer's memory and visible to the peer's threads
    FAILED_QUIESCED = "failed, quiesced"  # no further byte will be written
    FAILED_UNKNOWN = "failed, unknown"  # a byte may be written later: the target must not be used again


@dataclass(frozen=True, slots=True)
class Region:
    """A span of registered memory. Writes of this process can read it, and peers can write to it."""

    address: int
    nbytes: int
    memory: MemoryKind = MemoryKind.HOST
    device: int = 0  # number of the GPU, if `memory` is DEVICE


@dataclass(frozen=True, slots=True)
class WriteTicket:
    """Identifies one submitted list of writes. `handle` is private to the transfer engine."""

    nbytes: int
    handle: Any


class Meter:
    """Measures throughput. It may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._in_flight = 0
        self._since = 0.0
        self._seconds = 0.0
        self._nbytes = 0

    def begin(self) -> None:
        """Records that a list is in flight."""
        with self._lock:
            if not self._in_flight:
                self._since = self._clock()
            self._in_flight += 1

    def end(self, nbytes: int) -> None:
        """Records that a list is no longer in flight, and counts `nbytes` bytes (0 if the list has failed)."""
        with self._lock:
            if not self._in_flight:
                raise InternalError("more lists ended than began")
            self._in_flight -= 1
            self._nbytes += nbytes
            if not self._in_flight:
                self._seconds += self._clock() - self._since

    def read(self) -> Throughput:
        with self._lock:
            running = self._clock() - self._since if self._in_flight else 0.0
            return Throughput(self._nbytes, self._seconds + running)


class Transfer(Protocol):
    """One process's endpoint of a transfer engine. Its methods may be called from any thread."""

    name: str  # 'nixl', 'mooncake'

    def register(self, region: Region) -> None:
        """Registers memory. Call it before `describe`. Raises StartupError if the memory cannot be registered."""

    def describe(self) -> bytes:
        """Returns the data that a peer needs to connect and to write to this process."""

    def connect(self, name: str, description: bytes) -> None:
        """Connects to a peer and calls it `name`. Forgets an earlier peer of that name. `description` is the result of
        the peer's `describe`. Raises TransferError if the description is invalid, if the peer cannot be reached (which
        may take seconds to find out), or if the name was forgotten or connected again in the meantime."""

    def forget(self, name: str) -> None:
        """Forgets a peer. Lists to this peer that have not begun end as FAILED_QUIESCED; the other lists may still
        write. Ignores unknown names."""

    def submit(self, peer: str, writes: Writes, after: DeviceEvent | None = None) -> WriteTicket:
        """Submits a list of writes, which begins when `after` has happened. The caller may reuse the array at once, but
        the memory only after the list has ended. There is no order between lists, or between the writes of a list.
        This never blocks, and raises nothing for network failures: `poll` reports them. The list ends as
        FAILED_QUIESCED if the peer is unknown, or if a write is not inside registered memory on both sides."""

    def poll(self, ticket: WriteTicket) -> WriteState:
        """Returns the state of a list. A state other than PENDING is final."""

    def transport(self) -> str:
        """Returns a text like `UCX (intra-node cma/memory, tcp/lo; inter-node rc_mlx5/mlx5_0:1)`: the transports and
        devices of each kind of connection."""

    def throughput(self) -> Throughput: ...

    def close(self) -> bool:
        """Ends all pending lists as failed, and releases all resources, unless the engine hangs. Idempotent.

        Returns whether all resources are released. If so, nothing can be written to this process's memory through the
        endpoint any more, whatever peers have submitted."""
