"""Runs jobs in workers of a fork server, a few at a time."""

import queue
from collections.abc import Mapping
from typing import Any

from hotset.base.fork_server import ForkServer, Worker
from hotset.base.units import MIB

GROWN_BYTES = 8 * MIB  # a worker whose memory has grown by more ends after its job: a new one is there in 3 ms
MAX_WORKERS = 4  # idle ones are kept; a worker that waits needs some 3 MiB


class JobPool:
    """Up to MAX_WORKERS workers, which are forked when they are needed. Thread-safe: a thread waits for a free one."""

    def __init__(self, memory_bytes: int) -> None:
        """Each job may use `memory_bytes` in addition to the memory of the prepared objects."""
        self.server = ForkServer()
        self._memory_bytes = memory_bytes
        # Workers that no thread uses. None stands for a worker that is not forked yet.
        self._idle: queue.LifoQueue[tuple[int, Worker] | None] = queue.LifoQueue()
        for _ in range(MAX_WORKERS):
            self._idle.put(None)
        self._num_preparations = 0  # a worker forked before the newest preparation lacks that object

    def prepare(
        self, name: str, function: str, arguments: Mapping[str, Any], *, cpu_seconds: float, memory_bytes: int
    ) -> None:
        """Prepares an object for later jobs. See `ForkServer.prepare`."""
        self.server.prepare(name, function, arguments, cpu_seconds=cpu_seconds, memory_bytes=memory_bytes)
        self._num_preparations += 1

    def run(self, job: str, arguments: Mapping[str, Any], cpu_seconds: float, wall_seconds: float | None = None) -> Any:
        """Runs a job in a worker and returns its result. Raises like `Worker.run`."""
        idle = self._idle.get()
        try:
            self.server.check_open()
            if idle is not None and (not idle[1].alive or idle[0] < self._num_preparations):
                idle[1].end()
                idle = None
            if idle is None:
                idle = self._num_preparations, self.server.fork(self._memory_bytes)
            return idle[1].run(job, arguments, cpu_seconds, wall_seconds)
        finally:
            if idle is not None and idle[1].grown_bytes > GROWN_BYTES:
                idle[1].end()
            self._idle.put(idle)

    def close(self) -> None:
        """Kills the server and all workers. A job in progress fails. Idempotent."""
        self.server.close()
