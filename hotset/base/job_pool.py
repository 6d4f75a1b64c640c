"""Runs jobs in workers of a fork server, a few at a time."""

import queue
from collections.abc import Mapping
from typing import Any

from hotset.base.fork_server import ForkServer, Worker
from hotset.base.units import MIB

MAX_GROWTH_BYTES = 8 * MIB  # a worker whose memory has grown by more is replaced; forking a new one takes 3 ms
MAX_WORKERS = 4  # idle workers are kept; each needs about 3 MiB


class JobPool:
    """Owns up to MAX_WORKERS workers, forked when needed. Thread-safe: `run` waits until a worker is idle."""

    def __init__(self, memory_bytes: int) -> None:
        """Each job may use `memory_bytes` in addition to the memory of the prepared objects."""
        self.server = ForkServer()
        self._memory_bytes = memory_bytes
        # Idle workers, each with the number of preparations when it was forked. None: it is not forked yet.
        self._idle: queue.LifoQueue[tuple[Worker | None, int]] = queue.LifoQueue()
        for _ in range(MAX_WORKERS):
            self._idle.put((None, 0))
        self._num_preparations = 0  # a worker forked before the newest preparation lacks the prepared object

    def prepare(
        self, name: str, function: str, arguments: Mapping[str, Any], *, cpu_seconds: float, memory_bytes: int
    ) -> None:
        """Prepares an object for later jobs. See `ForkServer.prepare`."""
        self.server.prepare(name, function, arguments, cpu_seconds=cpu_seconds, memory_bytes=memory_bytes)
        self._num_preparations += 1

    def run(self, job: str, arguments: Mapping[str, Any], cpu_seconds: float, wall_seconds: float | None = None) -> Any:
        """Runs a job in a worker and returns its result. Raises like `Worker.run`."""
        worker, preparations = self._idle.get()
        try:
            self.server.check_open()
            if worker is not None and (not worker.alive or preparations < self._num_preparations):
                worker.end()
                worker = None
            if worker is None:
                preparations = self._num_preparations
                worker = self.server.fork(self._memory_bytes)
            return worker.run(job, arguments, cpu_seconds, wall_seconds)
        finally:
            if worker is not None and worker.grown_bytes > MAX_GROWTH_BYTES:
                worker.end()
            self._idle.put((worker, preparations))

    def close(self) -> None:
        """Kills the server and all workers. A job in progress fails. Idempotent."""
        self.server.close()
