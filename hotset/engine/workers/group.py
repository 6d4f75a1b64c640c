"""The worker processes of an engine: sends them commands, receives their reports, and ends all if one dies or hangs."""

import logging
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import wait

from hotset.base.config import EngineConfig
from hotset.base.endings import POLL_SECONDS as GONE_POLL_SECONDS
from hotset.base.endings import SayWaiting
from hotset.base.errors import EngineStopped, StartupError
from hotset.engine.progress import POLL_SECONDS, Progress, StallTimer
from hotset.engine.workers import messages as msg
from hotset.engine.workers.handle import WorkerHandle, WorkerPipe, WorkerProcess

LOGGER = logging.getLogger("hotset.engine")
CAUSE_SECONDS = 1.0  # time to wait for the exit code of a dead worker, or for a dead worker that made another one fail
ABORT_SECONDS = 3.0  # time for workers to end by themselves after `AbortSteps`; then they are killed
KILL_SECONDS = 10.0  # time for the system to end a killed process that has pinned no memory
StartProcess = Callable[[msg.WorkerRank, Progress], tuple[WorkerPipe, WorkerProcess]]


class WorkerGroup:
    """All worker processes. If one dies or hangs, the others are aborted and end, and every later call of `send`,
    `receive` and `check` raises an error that names the cause."""

    def __init__(
        self,
        config: EngineConfig,
        ranks: Iterable[msg.WorkerRank],
        start: StartProcess,
        wake: Callable[[], None],
        advance: Callable[[], None],
        oldest_step: Callable[[], int | None],
        problem: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Starts all workers. `wake` is called from another thread when one has died or hangs. `advance` is called
        repeatedly while `receive` waits. `oldest_step` returns the number of the oldest step in flight. `problem` is
        called repeatedly; if it returns a reason, the workers are ended as if one had died."""
        self.workers: list[WorkerHandle] = []
        self.serving = False  # workers have started and are not being closed, so they must show signs of life
        self._step_timeout, self._wake, self._advance = config.step_timeout, wake, advance
        self._oldest_step, self._find_problem = oldest_step, problem
        self._problem: str | None = None
        self._lost: list[WorkerHandle] = []  # the workers that died or hung first; the others end because of them
        self._closing = threading.Event()
        try:
            for rank in ranks:
                progress = Progress(multiprocessing.get_context("spawn"))
                pipe, process = start(rank, progress)
                self.workers.append(WorkerHandle(rank, process, pipe, progress))
                self.send(self.workers[-1], msg.InitWorker(config, rank))
        except BaseException:
            self.close(0.0)
            raise
        threading.Thread(target=self._watch, args=(list(self.workers),), name="hotset-watch", daemon=True).start()

    def check(self) -> None:
        """Raises EngineStopped if a worker has died or hangs."""
        if self._problem is not None:
            raise EngineStopped(self._problem)
        if self._lost:
            raise self._error(self._lost[0])

    def send(self, worker: WorkerHandle, command: msg.WorkerCommand) -> None:
        try:
            worker.send(command)
        except OSError:
            raise self._failed(worker) from None

    def receive(self, numbers: set[int], timeout: float, task: str) -> tuple[WorkerHandle, msg.WorkerReport]:
        """Waits for the next report of one of the workers `numbers`, and returns the worker with the report.

        Raises EngineStopped if any worker dies or hangs meanwhile, or if none of these workers reports or advances for
        `timeout` seconds; the message names `task`. If the report is `WorkerFailed`, raises its error, or the error of
        the worker that caused the failure. In all these cases all workers are aborted, because they may wait for the
        failed worker.
        """
        by_pipe = {worker.pipe.fileno(): worker for worker in self.workers if worker.rank.number in numbers}
        by_sentinel = {worker.process.sentinel: worker for worker in self.workers}
        stall = StallTimer()
        while not (ready := wait([*by_pipe, *by_sentinel], POLL_SECONDS)):
            self.check()
            self._advance()
            if stall.seconds(sum(worker.progress.advances for worker in by_pipe.values())) > timeout:
                names = ", ".join(worker.rank.name for worker in by_pipe.values())
                self.abort()
                raise EngineStopped(f"{names} made no progress in {task} for {timeout:.0f} s")
        self.check()  # a hung worker that was resumed may have sent a report
        for source in ready:
            if isinstance(source, int) and (worker := by_pipe.get(source)) is not None:
                try:
                    report: msg.WorkerReport = worker.pipe.recv()
                except (EOFError, OSError):
                    raise self._failed(worker) from None
                if isinstance(report, msg.WorkerFailed):
                    worker.failure = report
                    raise self._failed(worker)
                return worker, report
        raise self._failed(next(by_sentinel[source] for source in ready if isinstance(source, int)))

    def abort(self) -> None:
        """Makes all workers end their steps and exit, also if they are stopped or wait for others. Does not wait."""
        for worker in self.workers:
            worker.abort()

    def close(self, seconds: float, release_seconds: float = KILL_SECONDS) -> None:
        """Stops all workers. Kills those that have not ended after `seconds`. Idempotent.

        Workers that are still busy ABORT_SECONDS earlier are aborted first, because a killed worker cannot end its GPU
        work in order. Returns when the system has freed the memory of all of them, or after `release_seconds` more.
        """
        self.serving = False
        self._closing.set()
        for worker in self.workers:
            worker.resume()
            worker.post(msg.StopWorker())
        for worker in _still_running(self.workers, max(0.0, seconds - ABORT_SECONDS)):
            worker.abort()
        for worker in _still_running(self.workers, min(seconds, ABORT_SECONDS)):
            worker.kill()
        for worker in self._wait_until_gone(release_seconds):
            LOGGER.error("%s (process %s) has not ended and may hold memory", worker.rank.name, worker.process.pid)
        for worker in self.workers:
            worker.pipe.close()
        self.workers = []

    def _wait_until_gone(self, seconds: float) -> list[WorkerHandle]:
        """Waits until the system has freed the memory of all workers, and returns those that still have some after
        `seconds`. A replacement of this engine needs the memory."""
        deadline, say = time.monotonic() + seconds, SayWaiting("workers")
        while (left := [worker for worker in self.workers if not worker.gone]) and time.monotonic() < deadline:
            say(worker.rank.name for worker in left)
            time.sleep(GONE_POLL_SECONDS)
        return left

    def _watch(self, workers: Sequence[WorkerHandle]) -> None:
        """Waits until a worker has died or hangs. Then ends all others too, because they wait for it in their steps."""
        by_sentinel = {worker.process.sentinel: worker for worker in workers}
        while not self._lost and self._problem is None:
            ended = wait(list(by_sentinel), POLL_SECONDS)
            if self._closing.is_set():
                return
            self._lost = [by_sentinel[sentinel] for sentinel in ended if isinstance(sentinel, int)]
            self._problem = None if self._lost else self._find_problem()
            for worker in workers if self.serving and not self._lost else ():
                if worker.silence.seconds(worker.progress.beats) > self._step_timeout:
                    worker.hung = True
                    self._lost.append(worker)
        self._wake()
        for worker in workers:
            worker.abort()
        # A lost worker may be stopped, or cut off from this node, and still run.
        for worker in [*_still_running(workers, ABORT_SECONDS), *self._lost]:
            worker.kill()

    def _failed(self, worker: WorkerHandle) -> StartupError | EngineStopped:
        """Aborts all workers after `worker` was found to have failed or ended, and returns the error to raise."""
        error = self._error(worker)  # before the abort, which would hide which worker died by itself
        self.abort()
        return error

    def _error(self, worker: WorkerHandle) -> StartupError | EngineStopped:
        """Returns the error to raise after `worker` was found to have failed or ended. It names the worker that is the
        likely cause: one that hangs, or one that has died without a report."""
        if self._problem is not None:
            return EngineStopped(self._problem)
        if hung := next((each for each in self._lost if each.hung), None):
            step = self._oldest_step()
            during = "" if step is None else f", in step {step}"
            return EngineStopped(
                f"{hung.rank.name} has shown no sign of life for {self._step_timeout:g} s (--step-timeout){during}"
            )
        worker = self._lost[0] if self._lost else worker
        if worker.failure is None:
            worker.wait_until_gone(CAUSE_SECONDS)
        if (failed := worker.reported_failure()) is None:
            return _death(worker)
        by_sentinel = {other.process.sentinel: other for other in self.workers if other is not worker}
        for sentinel in wait(list(by_sentinel), CAUSE_SECONDS):
            if isinstance(sentinel, int):
                other = by_sentinel[sentinel]
                other.wait_until_gone(CAUSE_SECONDS)  # its end is visible before its exit code
                if other.process.exitcode != 0 and not other.killed and other.reported_failure() is None:
                    return _death(other)
        if failed.trace is not None:
            print(failed.trace, file=sys.stderr)
        if not worker.loaded:
            return (
                failed.error
                if worker.rank.node == msg.THIS_MACHINE
                else StartupError(f"{worker.rank.name}: {failed.error}")
            )
        return EngineStopped(f"{worker.rank.name} failed: {failed.error}")


def _death(worker: WorkerHandle) -> EngineStopped:
    code = worker.process.exitcode
    how = "it was killed or stopped, or its node is lost" if code is None else f"exit code {code}"
    return EngineStopped(f"{worker.rank.name} died ({how})")


def _still_running(workers: Iterable[WorkerHandle], seconds: float) -> list[WorkerHandle]:
    """Waits until all workers have ended, at most `seconds`. Returns those that have not."""
    running = {worker.process.sentinel: worker for worker in workers}
    deadline = time.monotonic() + seconds
    while running and (ended := wait(list(running), max(0.0, deadline - time.monotonic()))):
        for sentinel in ended:
            if isinstance(sentinel, int):
                del running[sentinel]
    return list(running.values())
