"""The controller's handle of one worker process: its state, and the methods to command it and to end it."""

import contextlib
import os
import select
import signal
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Protocol

from hotset.base.endings import POLL_SECONDS
from hotset.engine.ports import Messages
from hotset.engine.progress import Progress, StallTimer
from hotset.engine.start_plan import WorkerPlan
from hotset.engine.workers import messages as msg
from hotset.memory.device_pool import KvShape
from hotset.tiers.kv_memory import NO_TRAFFIC, Traffic

POST_SECONDS = 0.5  # time for another thread to finish the command that it is sending to the same worker


class WorkerProcess(Protocol):
    """The interface of a worker process to the controller. A child process of `multiprocessing` implements it."""

    @property
    def pid(self) -> int | None: ...

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process has ended."""

    @property
    def exitcode(self) -> int | None:
        """None if the process runs, or if its exit code is unknown."""

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...


class WorkerPipe(Messages, Protocol):
    """The controller's end of the connection to a worker."""

    def fileno(self) -> int:
        """A file descriptor that is readable if there is a report, and writable if `send` does not block."""

    def poll(self, timeout: float | None = 0.0) -> bool: ...


@dataclass(slots=True)
class WorkerHandle:
    """One worker process, and what it has reported."""

    rank: msg.WorkerRank
    process: WorkerProcess
    pipe: WorkerPipe
    progress: Progress
    silence: StallTimer = field(default_factory=StallTimer)
    hung: bool = False  # it has shown no sign of life for the step timeout
    killed: bool = False  # by the controller, because it did not end after `AbortSteps`
    plan: WorkerPlan | None = None  # None until the worker has planned what it loads
    loaded: bool = False  # whether its weights are loaded
    traffic: Traffic = NO_TRAFFIC  # as of the last step that it has reported
    failure: msg.WorkerFailed | None = None  # the failure that the controller has read
    _sending: threading.Lock = field(default_factory=threading.Lock)

    @property
    def planned(self) -> WorkerPlan:
        assert self.plan is not None, f"{self.rank.name} has not planned what it loads"
        return self.plan

    @property
    def shape(self) -> KvShape:
        return self.planned.weights.kv_shape

    def send(self, command: msg.WorkerCommand) -> None:
        """Sends a command. Raises OSError if the worker has died."""
        with self._sending:
            self.pipe.send(command)

    def post(self, command: msg.AbortSteps | msg.StopWorker) -> None:
        """Sends a command to a worker that may be dead, stopped or hung. Any thread may call this. It never blocks for
        long: if the pipe is full or in use, the command is not sent, and the worker must be killed."""
        if not self._sending.acquire(timeout=POST_SECONDS):
            return
        try:
            room = select.poll()
            with contextlib.suppress(OSError):
                room.register(self.pipe, select.POLLOUT)
                if room.poll(0):
                    self.pipe.send(command)
        finally:
            self._sending.release()

    @property
    def running(self) -> bool:
        """True unless the process has ended. Any thread may ask: this does not reap the process."""
        return not wait([self.process.sentinel], 0.0)

    @property
    def gone(self) -> bool:
        """True if the process has ended and the system has freed its memory, which can take minutes after its end is
        visible (`running`). Of a worker on another node, only its end is known."""
        return self.process.exitcode is not None or (self.rank.node != msg.THIS_MACHINE and not self.running)

    def wait_until_gone(self, seconds: float) -> None:
        """Waits at most `seconds`. `join` would wait without a limit after the end is visible."""
        deadline = time.monotonic() + seconds
        while not self.gone and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def resume(self) -> None:
        """Continues the process if it is stopped, so that it can end its GPU work and exit by itself. Does nothing for
        a worker on another node: `kill` ends it, also if it is stopped."""
        if self.rank.node == msg.THIS_MACHINE and self.process.pid is not None and self.running:
            with contextlib.suppress(ProcessLookupError):  # the process has ended meanwhile
                os.kill(self.process.pid, signal.SIGCONT)

    def abort(self) -> None:
        """Makes the worker end its step and exit, also if it is stopped or waits for others. Does not wait for it."""
        self.resume()
        self.post(msg.AbortSteps())

    def kill(self) -> None:
        self.killed = True
        self.process.kill()

    def reported_failure(self) -> msg.WorkerFailed | None:
        """Returns the failure that the worker has reported, also if the controller has not read it yet."""
        try:
            while self.failure is None and self.pipe.poll():
                report: msg.WorkerReport = self.pipe.recv()
                if isinstance(report, msg.WorkerFailed):
                    self.failure = report
        except (EOFError, OSError):  # nothing is left to read
            pass
        return self.failure
