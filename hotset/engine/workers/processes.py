"""The controller's side of workers in processes of this machine: starts them, tells them steps, hears their reports."""

import contextlib
import multiprocessing
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from typing import TypeVar

import torch

from hotset.base.config import EngineConfig
from hotset.base.errors import EngineStopped, StartupError
from hotset.engine.sizing import KvBudget, WorkerMemory
from hotset.engine.timeouts import STOP_SECONDS, UNPINNED_PER_SECOND
from hotset.engine.workers.executor import HostShard, Step, StepFuture
from hotset.engine.workers.messages import (
    AuditReport,
    CacheReady,
    ExecuteStep,
    GetTraffic,
    InitCache,
    InitWorker,
    Loaded,
    LoadProgress,
    RunAudit,
    SampledToken,
    StepDone,
    StopWorker,
    TrafficReport,
    WorkerCommand,
    WorkerFailed,
    WorkerRank,
    WorkerReport,
)
from hotset.engine.workers.shared_memory import SharedMemory
from hotset.engine.workers.worker import main
from hotset.memory.device_pool import KvShape
from hotset.memory.host_store import HostStore, host_bytes
from hotset.models.split import Split
from hotset.schedule.plan import Plan, StepResult
from hotset.tiers.kv_memory import Traffic
from hotset.transfer.api import DeviceEvent

T = TypeVar("T", bound=WorkerReport)
START_SECONDS = 1800.0  # for a worker that loads and has nothing to tell
STEP_SECONDS = 600.0  # for the slowest step
BLAME_SECONDS = 1.0  # for a worker whose end made another one fail
HURRIED_SECONDS = 2.0  # for the same, while a step is under way


@dataclass(slots=True)
class _Worker:
    place: WorkerRank
    process: SpawnProcess
    pipe: Connection
    shape: KvShape | None = None
    free: int = 0
    loaded: tuple[int, int] = (0, 0)  # bytes of weights: done, in all


@dataclass(slots=True)
class _Begun:
    """A step, and what came of it so far."""

    number: int
    step: Step
    results: list[StepResult | None]
    missing: set[int] = field(default_factory=set)  # workers that have not reported


class _InFlight:
    def __init__(self, workers: "MultiprocessExecutor", begun: _Begun) -> None:
        self._workers, self._begun = workers, begun

    def results(self) -> Sequence[StepResult | None]:
        self._workers.finish(self._begun)
        return self._begun.results


class _Reported:
    """Happens when every worker has reported a step."""

    def __init__(self, workers: "MultiprocessExecutor", number: int) -> None:
        self._workers, self._number = workers, number

    def query(self) -> bool:
        return self._workers.finished >= self._number


class MultiprocessExecutor:
    """Implements `Executor`. Every wait ends when a worker dies, with its name."""

    def __init__(
        self,
        config: EngineConfig,
        splits: Sequence[Split],
        stages: int,
        kv_heads: int,
        device: torch.device,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts all of them; `load` waits until they have their weights. `kv_heads`: of the whole model, where rows
        are made of heads; else 1. `wake` is called, from another thread, when `check` has something to tell."""
        self._config, self._kv_heads, self._on_gpu = config, kv_heads, device.type == "cuda"
        self._workers: list[_Worker] = []
        self._stores: list[HostShard] = []
        self._shared: list[SharedMemory] = []
        self._begun: deque[_Begun] = deque()
        self._steps = 0
        self.finished = 0  # steps that every worker has reported
        self._told: list[SampledToken] = []  # sampled, and not yet told to the first stage
        self._dead: list[_Worker] = []
        self._wake = wake
        # A program that forgets to close would wait for its children at its end, and they for it.
        self._at_exit = Finalize(None, self.close, exitpriority=0)
        rendezvous = f"127.0.0.1:{_free_port()}"
        try:
            for number, split in enumerate(splits):
                where = f"cuda:{number}" if device.type == "cuda" else "cpu"
                place = WorkerRank(number, len(splits), number // split.size, stages, split, rendezvous, where)
                pipe, process = self._start(place)
                self._workers.append(_Worker(place, process, pipe))
                pipe.send(InitWorker(config, place))
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, args=(list(self._workers),), daemon=True).start()

    def _watch(self, workers: Sequence[_Worker]) -> None:
        """Until the first of them ends."""
        ends = {worker.process.sentinel: worker for worker in workers}
        ended = wait(list(ends))
        self._dead += [ends[each] for each in ended if isinstance(each, int)]
        self._wake()

    def _start(self, place: WorkerRank) -> tuple[Connection, SpawnProcess]:
        context = multiprocessing.get_context("spawn")
        pipe, far_end = context.Pipe()
        process = context.Process(target=main, args=(far_end,), name=f"hotset-worker-{place.number}")
        process.start()
        far_end.close()
        return pipe, process

    def load(self, progress: Callable[[int, int], None]) -> list[WorkerMemory]:
        """Waits until every worker has its weights. What each keeps."""
        waiting = set(range(len(self._workers)))
        while waiting:
            number, report = self._hear(waiting, START_SECONDS)
            worker = self._workers[number]
            match report:
                case LoadProgress(done, total):
                    worker.loaded = (done, total)
                    progress(*(sum(each.loaded[at] for each in self._workers) for at in (0, 1)))
                case Loaded(shape, free):
                    worker.shape, worker.free = shape, free
                    waiting.discard(number)
                case _:
                    raise self._misplaced(worker, report)
        return [WorkerMemory(self._shape(each), each.free, self._writer(each)[0] == 0) for each in self._workers]

    def init_cache(self, budget: KvBudget, progress: Callable[[int, int], None]) -> None:
        """Gives every worker its memory. `progress(done, total)`: workers that have it."""
        for worker in self._workers:
            self._init_cache_of(worker, budget)
        for done in range(len(self._workers)):
            number, report = self._hear(set(range(len(self._workers))), START_SECONDS)
            if not isinstance(report, CacheReady):
                raise self._misplaced(self._workers[number], report)
            progress(done + 1, len(self._workers))
        for shared in self._shared:
            shared.close()

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Workers compile as they go."""

    def check(self) -> None:
        if self._dead:
            raise self._died(self._dead[0])

    def submit(self, step: Step) -> StepFuture:
        if any(plan is not None and plan.reads_host for plan in step) and self._shares_stores:
            self._drain()  # what it reads may have been written by another rank: that one has said so by then
        self._steps += 1
        begun = _Begun(self._steps, step, [None] * len(step), set(range(len(self._workers))))
        rows = [0 if plan is None else plan.rows for plan in step]
        tokens, self._told = self._told, []
        for worker in self._workers:
            at_first = worker.place.stage == 0 and worker.place.stages > 1
            self._send(worker, ExecuteStep(self._steps, step[worker.place.replica], tokens if at_first else (), rows))
        self._begun.append(begun)
        return _InFlight(self, begun)

    def finish(self, begun: _Begun) -> None:
        """Waits until everybody has reported a step."""
        while begun.missing:
            self._take_in(STEP_SECONDS)

    def stored(self) -> DeviceEvent | None:
        return None if self.finished == self._steps else _Reported(self, self._steps)

    def hosts(self) -> Sequence[HostShard]:
        return self._stores

    @property
    def pool(self) -> None:
        """Each worker has its own."""

    def traffic(self) -> Traffic:
        """Rows are counted once for all workers that hold parts of them, bytes in all."""
        self._drain()
        counted = [(worker.place, self._asked(worker, GetTraffic(), TrafficReport).traffic) for worker in self._workers]
        lookups: dict[int, int] = {}
        misses: dict[int, int] = {}
        for place, traffic in counted:
            if place.split.tp_rank == 0:
                first = place.split.first_layer
                for total, part in ((lookups, traffic.lookups), (misses, traffic.misses)):
                    for layer, count in part.items():
                        total[first + layer] = total.get(first + layer, 0) + count
        whole = [place.split.tp_rank == 0 and place.stage == 0 for place, _ in counted]
        flushed = sum(traffic.rows_flushed for once, (_, traffic) in zip(whole, counted, strict=True) if once)
        return Traffic(flushed, lookups, misses, sum(traffic.bytes_swapped for _, traffic in counted))

    def audit(self, tiered: Sequence[Mapping[int, int]]) -> None:
        self._drain()
        for worker in self._workers:
            flaw = self._asked(worker, RunAudit(tiered[worker.place.replica]), AuditReport).flaw
            assert flaw is None, flaw

    @property
    def pinned_bytes(self) -> int:
        return sum(shared.nbytes for shared in self._shared) if self._on_gpu else 0

    def close(self) -> None:
        self._at_exit.cancel()
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.pipe.send(StopWorker())
        # One that waits for a worker that died does not hear: it is not waited for as long.
        patience = HURRIED_SECONDS if self._begun else STOP_SECONDS
        deadline = time.monotonic() + patience + self.pinned_bytes / UNPINNED_PER_SECOND
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()
        self._workers = []
        for shared in self._shared:
            shared.close()

    @property
    def _shares_stores(self) -> bool:
        return len(self._stores) < len(self._workers)

    def _init_cache_of(self, worker: _Worker, budget: KvBudget) -> None:
        place, shape, page_rows = worker.place, self._shape(worker), self._config.page_rows
        writer, writers = self._writer(worker)
        self._send(worker, InitCache(budget, writer, writers))
        if not budget.host_pages:
            return
        if writer == 0:
            shared = SharedMemory(host_bytes(shape, budget.host_pages, page_rows))
            store = HostStore(shape, budget.host_pages, page_rows, torch.device("cpu"), memory=shared.bytes)
            first = place.split.first_layer
            self._shared.append(shared)
            self._stores.append(HostShard(place.replica, first, shape, self._kv_heads, store))
        assert worker.process.pid is not None
        self._shared[-1].send(worker.pipe, worker.process.pid)

    def _writer(self, worker: _Worker) -> tuple[int, int]:
        """Number and count of those who write to its host store: ranks with the same rows share one."""
        split = worker.place.split
        same_rows = self._shape(worker).key is not None
        return (split.tp_rank, split.tp_size) if same_rows else (0, 1)

    def _drain(self) -> None:
        while self._begun:
            self._take_in(STEP_SECONDS)

    def _take_in(self, seconds: float) -> None:
        """One report of one worker on a step."""
        number, report = self._hear({number for begun in self._begun for number in begun.missing}, seconds)
        if not isinstance(report, StepDone):
            raise self._misplaced(self._workers[number], report)
        begun = next(each for each in self._begun if each.number == report.number)
        begun.missing.discard(number)
        if report.result is not None:
            begun.results[self._workers[number].place.replica] = report.result
        while self._begun and not self._begun[0].missing:
            self._collect_sampled(self._begun.popleft())

    def _collect_sampled(self, begun: _Begun) -> None:
        """Of a step that everybody has reported."""
        self.finished = begun.number
        if self._workers[0].place.stages == 1:
            return
        for plan, result in zip(begun.step, begun.results, strict=True):
            if plan is not None and result is not None:
                self._told += _sampled(plan, result)

    def _asked(self, worker: _Worker, question: WorkerCommand, answer: type[T]) -> T:
        self._send(worker, question)
        _, report = self._hear({worker.place.number}, STEP_SECONDS)
        if not isinstance(report, answer):
            raise self._misplaced(worker, report)
        return report

    def _send(self, worker: _Worker, command: WorkerCommand) -> None:
        try:
            worker.pipe.send(command)
        except OSError:
            raise self._died(worker) from None

    def _hear(self, numbers: set[int], seconds: float) -> tuple[int, WorkerReport]:
        """The next report of one of these workers. Of all others only the end is noticed."""
        pipes = {worker.pipe: worker for worker in self._workers if worker.place.number in numbers}
        ends = {worker.process.sentinel: worker for worker in self._workers}
        ready = wait([*pipes, *ends], seconds)
        if not ready:
            named = ", ".join(self._workers[number].place.name for number in sorted(numbers))
            raise EngineStopped(f"nothing was heard of {named} for {seconds:g} s")
        for each in ready:
            if isinstance(each, Connection) and (worker := pipes.get(each)) is not None:
                try:
                    report: WorkerReport = each.recv()
                except (EOFError, OSError):
                    raise self._died(worker) from None
                if isinstance(report, WorkerFailed):
                    raise self._failure(worker, report)
                return worker.place.number, report
        raise self._died(next(ends[each] for each in ready if isinstance(each, int)))

    def _died(self, worker: _Worker) -> EngineStopped:
        worker.process.join(BLAME_SECONDS)
        return EngineStopped(f"{worker.place.name} died (exit code {worker.process.exitcode})")

    def _failure(self, worker: _Worker, failed: WorkerFailed) -> StartupError | EngineStopped:
        """A worker fails where another one that it needs has died: then that is the one to name."""
        others = {each.process.sentinel: each for each in self._workers if each is not worker}
        for sentinel in wait(list(others), BLAME_SECONDS):
            if isinstance(sentinel, int) and others[sentinel].process.exitcode != 0:
                return self._died(others[sentinel])
        if failed.trace is not None:
            print(failed.trace, file=sys.stderr)
        if worker.shape is None:
            return failed.error
        return EngineStopped(f"{worker.place.name} failed: {failed.error}")

    def _misplaced(self, worker: _Worker, report: WorkerReport) -> EngineStopped:
        return EngineStopped(f"{worker.place.name} said {report!r}, which nobody asked for")

    def _shape(self, worker: _Worker) -> KvShape:
        assert worker.shape is not None, f"{worker.place.name} has not loaded"
        return worker.shape


def _sampled(plan: Plan, result: StepResult) -> list[SampledToken]:
    """What the first stage has to know before it computes the next row of these seats."""
    at = [(plan.seats[each], plan.starts[each] + plan.counts[each]) for each in plan.sampled]
    return [SampledToken(seat, position, token) for (seat, position), token in zip(at, result.token_ids, strict=True)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
