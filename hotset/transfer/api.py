"""What a transfer engine does: writes spans of registered memory into a peer's registered memory, one-sided.

Nothing here notifies a peer: control messages go by ZeroMQ (`handoff/`), where one that is lost is said again.

Nothing here waits but `connect`. A list of writes ends in one of three ways, by a deadline at the latest, and only two
of them say that the target may be used again.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Writes = NDArray[np.int64]  # [n, 3]: address here, address in the peer's memory, bytes


class MemoryKind(Enum):
    HOST = "host"
    DEVICE = "device"


class WriteState(Enum):
    PENDING = "pending"
    DONE = "done"  # every byte is in the peer's memory, for the peer's threads to see
    FAILED_QUIESCED = "failed, quiesced"  # nothing of it will be written any more
    FAILED_UNKNOWN = "failed, unknown"  # something may be written later: the target must not be used again


@dataclass(frozen=True, slots=True)
class Region:
    """A span of memory that may be read from, or that peers may write to."""

    address: int
    nbytes: int
    memory: MemoryKind = MemoryKind.HOST
    device: int = 0  # number of the GPU, for device memory


class DeviceEvent(Protocol):
    """What a write waits for. `torch.cuda.DeviceEvent` is one."""

    def query(self) -> bool:
        """It has happened."""


@dataclass(frozen=True, slots=True)
class WriteTicket:
    """One submitted list of writes. `handle` is the engine's own."""

    number: int
    nbytes: int
    handle: Any = None


@dataclass(frozen=True, slots=True)
class Throughput:
    """What has arrived at peers so far, and the seconds in which any write was under way."""

    nbytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


class Transfer(Protocol):
    """One process's end. Calls may come from any thread."""

    name: str  # 'nixl', 'mooncake', 'loopback'

    def register(self, region: Region) -> None:
        """Before `describe`. StartupError if the memory cannot be registered: nothing would work without it."""

    def describe(self) -> bytes:
        """All that a peer needs to connect and to write here."""

    def connect(self, name: str, description: bytes) -> None:
        """`description`, as the peer gave it, becomes the peer `name`; one of that name before is forgotten.
        TransferError if it makes no sense, if the peer cannot be reached and the engine can tell (that may take
        seconds), or if the name was forgotten or connected anew meanwhile."""

    def forget(self, name: str) -> None:
        """No further writes to this peer: what has not begun fails as quiesced. Unknown: nothing happens."""

    def submit(self, peer: str, writes: Writes, after: DeviceEvent | None = None) -> WriteTicket:
        """Begins to write once `after` has happened. The array may be reused at once, the memory not before the end.
        Lists are written in any order, and so are the writes of one. Never waits, and never raises for what the network
        does: that is told by `poll`. FAILED_QUIESCED if the peer is unknown, or a write leaves registered memory."""

    def poll(self, ticket: WriteTicket) -> WriteState:
        """How it stands. What is not pending any more stays as it is."""

    def transport(self) -> str:
        """What the bytes travel over, in words, for people."""

    def throughput(self) -> Throughput:
        """All that has been written so far."""

    def close(self) -> None:
        """Gives everything back. Writes under way end as they may. Idempotent."""


class Meter:
    """Counts the bytes that arrived and the seconds in which anything was under way. Calls may come from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0
        self._seconds = 0.0
        self._nbytes = 0

    def begin(self) -> None:
        with self._lock:
            if not self._under_way:
                self._since = self._clock()
            self._under_way += 1

    def end(self, nbytes: int) -> None:
        """One that began has ended; `nbytes` of it arrived."""
        with self._lock:
            assert self._under_way, "more ended than began"
            self._under_way -= 1
            self._nbytes += nbytes
            if not self._under_way:
                self._seconds += self._clock() - self._since

    def read(self) -> Throughput:
        with self._lock:
            running = self._clock() - self._since if self._under_way else 0.0
            return Throughput(self._nbytes, self._seconds + running)
