"""The executor with worker processes: sends them steps and collects their results."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import TypeVar

import torch

from hotset.base.address import Address
from hotset.base.config import EngineConfig
from hotset.base.endings import UNPINNED_BYTES_PER_SECOND
from hotset.base.errors import EngineStopped
from hotset.base.numa import store_nodes
from hotset.engine.decode_graphs import choose_graph
from hotset.engine.drafts.settings import DraftSettings
from hotset.engine.progress import STOP_SECONDS, stall_limit
from hotset.engine.runner import SampledToken
from hotset.engine.sizing import KvBudget, WorkerMemory, store_writer
from hotset.engine.start_plan import WorkerPlan
from hotset.engine.workers import messages as msg
from hotset.engine.workers.executor import HostShard, ServingWorker, Step, StepFuture
from hotset.engine.workers.group import ABORT_SECONDS, KILL_SECONDS, WorkerGroup
from hotset.engine.workers.handle import WorkerHandle
from hotset.engine.workers.launcher import Launcher
from hotset.engine.workers.shared_memory import SharedMemory, SharedName
from hotset.memory.host_store import HostStore, host_bytes
from hotset.models.split import Split
from hotset.schedule.handoffs import DeviceEvent
from hotset.schedule.plan import Plan, StepResult
from hotset.tiers.kv_memory import Traffic

LOGGER = logging.getLogger("hotset.engine")
T = TypeVar("T", bound=msg.WorkerReport)
START_SECONDS = 1800.0  # time limit between two reports of starting workers


@dataclass(slots=True)
class _SubmittedStep:
    """Implements `StepFuture` for a step that several workers execute, with the reports received for it so far."""

    executor: "MultiprocessExecutor"
    number: int
    step: Step
    of_replicas: list[StepResult | None]
    missing: set[int]  # numbers of the workers that have not reported

    def results(self) -> Sequence[StepResult | None]:
        self.executor.finish(self)
        return self.of_replicas


class _StepsFinished:
    """Implements `DeviceEvent`. It occurs when every worker has reported step `number`."""

    def __init__(self, executor: "MultiprocessExecutor", number: int) -> None:
        self._executor, self._number = executor, number

    def query(self) -> bool:
        return self._executor.steps_finished >= self._number


class MultiprocessExecutor:
    """Implements `Executor` with worker processes. If a worker dies, every wait ends with an error that names it."""

    def __init__(
        self,
        config: EngineConfig,
        splits: Sequence[Split],
        launcher: Launcher,
        kv_heads: int,
        wake: Callable[[], None] = lambda: None,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts all workers with `launcher`, and owns it. `load` then waits until they have loaded their weights.

        `kv_heads` is the number of KV heads of the whole model if rows consist of heads, else 1. `wake` is called from
        another thread when a worker process has ended or hangs; `check` raises from then on. `advance` is called
        repeatedly while this object waits for workers, because this object itself notices if they do not advance.
        """
        self._config, self._kv_heads, self._launcher = config, kv_heads, launcher
        self._stores: list[HostShard] = []  # the host stores on this machine
        self._shared: list[SharedMemory] = []  # the memory of these stores
        self._store_names: list[SharedName] = []  # the memory of all host stores
        self._in_flight: deque[_SubmittedStep] = deque()
        self._steps_submitted = 0
        self.steps_finished = 0  # steps that every worker has reported
        self._steps_before = 0  # steps finished before `drop_mtp`: the first step after them compiles kernels again
        self._sampled: list[SampledToken] = []  # tokens that the first stage has not received yet
        self._has_graphs = False  # all workers have captured the graphs of decode steps
        try:
            ranks = launcher.place(splits)
            self._on_gpu = torch.device(ranks[0].device).type == "cuda"
            self._group = WorkerGroup(config, ranks, launcher.start, wake, advance, self._oldest_step, launcher.problem)
        except BaseException:
            launcher.close()
            raise
        # Without this, a program that does not call `close` hangs at exit, because multiprocessing joins the workers.
        self._at_exit = Finalize(None, self.close, exitpriority=0)

    @property
    def workers(self) -> Sequence[WorkerHandle]:
        """The worker processes, in the order of their numbers. Empty after `close`."""
        return self._group.workers

    def plan(self) -> list[WorkerPlan]:
        """Waits until every worker has planned what it will load, and returns the plans. Nothing has been read yet."""
        plans = self._wait_for_all(WorkerPlan, "start-up")
        for worker, plan in zip(self.workers, plans, strict=True):
            worker.plan = plan
        self._stores, self._shared, self._store_names = [], [], []  # workers have released their earlier stores
        return plans

    @property
    def owns_store(self) -> list[bool]:
        """For each worker, whether it has a host store of its own. Call `plan` first."""
        return [self._writer(worker)[0] == 0 for worker in self.workers]

    def load(self, progress: Callable[[int, int], None]) -> list[WorkerMemory]:
        """Makes every worker load its weights, waits for them, and returns the memory that each has left for KV.

        `progress(done, total)` counts the bytes that all workers read.
        """
        self._send_to_all(msg.LoadWeights())
        total = sum(worker.planned.weights.read_bytes for worker in self.workers)
        memories = self._wait_for_all(WorkerMemory, "start-up", _Sum(total, progress))
        for worker in self.workers:
            worker.loaded = True
        return [replace(memory, owns_store=owned) for memory, owned in zip(memories, self.owns_store, strict=True)]

    def init_cache(self, budget: KvBudget, progress: Callable[[int, int], None]) -> None:
        """Makes every worker allocate its KV memory, and waits for them.

        `progress(done, total)` counts the bytes of host memory that the workers pin. It is not called on CPUs.
        """
        for worker in self.workers:
            self._init_worker_cache(worker, budget)
        page_rows = self._config.page_rows
        total = sum(host_bytes(worker.shape, budget.host_pages, page_rows) for worker in self.workers)
        self._wait_for_all(msg.CacheReady, "start-up", _Sum(total, progress))
        for shared in self._shared:
            shared.close()
        self._group.serving = True

    def drop_mtp(self, config: EngineConfig) -> None:
        """Makes every worker release its KV memory and the MTP layer, but no other weights. `plan`, `load` and
        `init_cache` must follow. `config` has no drafts."""
        self._drain()
        self._group.serving = False
        self._config, self._steps_before = config, self.steps_finished
        self._sampled = []
        self._send_to_all(msg.DropMtp(config))

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        def show(worker: WorkerHandle, reported: msg.TaskProgress) -> None:
            if worker.rank.number == 0:  # the others capture the same graphs at the same time
                progress(reported.done, reported.total)

        self._drain()
        self._send_to_all(msg.WarmUp())
        # All workers report the same, because they compute in the same dtype.
        self._has_graphs = all(warm.has_graphs for warm in self._wait_for_all(msg.WarmedUp, "warm-up", show))

    def check(self) -> None:
        self._group.check()

    def submit(self, step: Step) -> StepFuture:
        if any(plan is not None and plan.reads_host for plan in step) and self._shares_stores:
            self._drain()  # another rank may still write these pages in a step that it has not reported
        self._steps_submitted += 1
        missing = set(range(len(self.workers)))
        state = _SubmittedStep(self, self._steps_submitted, step, [None] * len(step), missing)
        graph = choose_graph(step, DraftSettings.of(self._config).max_verified) if self._has_graphs else None
        tokens_per_rank = [0 if plan is None else plan.num_tokens for plan in step]
        if graph is not None:
            tokens_per_rank = [graph.size] * len(step)
        sampled, self._sampled = self._sampled, []
        for worker in self.workers:
            rank = worker.rank
            is_first_stage = rank.stage == 0 and rank.stages > 1
            command = msg.ExecuteStep(
                number=state.number,
                plan=step[rank.replica],
                graph=graph,
                sampled=sampled if is_first_stage else (),
                tokens_per_rank=tokens_per_rank,
            )
            self._group.send(worker, command)
        self._in_flight.append(state)
        return state

    def finish(self, state: _SubmittedStep) -> None:
        """Waits until every worker has reported the step."""
        while state.missing:
            self._receive_step_report()

    def mirrored_event(self) -> DeviceEvent | None:
        submitted = self._steps_submitted
        return None if self.steps_finished == submitted else _StepsFinished(self, submitted)

    def hosts(self) -> Sequence[HostShard]:
        return self._stores

    @property
    def pool(self) -> None:
        """None, because the device pools belong to the workers."""

    @property
    def maps_all_hosts(self) -> bool:
        return len(self._stores) == len(self._store_names)

    def start_service(self, service: msg.WorkerService[msg.Description]) -> Sequence[ServingWorker[msg.Description]]:
        serving = []
        for worker in self.workers:
            rank = worker.rank

            def request(end: Connection | msg.ConnectionAddress, worker: WorkerHandle = worker) -> msg.ServiceStarted:
                # The worker imports the modules of the service, and may allocate and register memory.
                return self._request(worker, msg.StartService(service, end), msg.ServiceStarted, self._stall_limit(0))

            connection, started = self._launcher.connect(rank, request)
            described: msg.Description = started.description
            shape, first_layer = worker.shape, rank.split.first_layer
            serving.append(ServingWorker(rank.replica, first_layer, self._kv_heads, shape, described, connection))
        return serving

    def traffic(self) -> Traffic:
        """Returns the total traffic of all workers. Rows and lookups that several workers share are counted once."""
        reports = [(worker.rank, worker.traffic) for worker in self.workers]
        lookups: dict[int, int] = {}
        misses: dict[int, int] = {}
        rows_mirrored = 0
        for rank, traffic in reports:
            if rank.split.tp_rank == 0:
                first = rank.split.first_layer
                for total, counts in ((lookups, traffic.lookups), (misses, traffic.misses)):
                    for layer, count in counts.items():
                        total[first + layer] = total.get(first + layer, 0) + count
                rows_mirrored += traffic.rows_mirrored if rank.stage == 0 else 0
        return Traffic(rows_mirrored, lookups, misses, sum(traffic.bytes_swapped for _, traffic in reports))

    def audit(self, tiered: Sequence[Mapping[int, int]]) -> None:
        self._drain()
        for worker in self.workers:
            flaw = self._request(worker, msg.RunAudit(tiered[worker.rank.replica]), msg.AuditReport).flaw
            assert flaw is None, flaw

    @property
    def pinned_bytes(self) -> int:
        return sum(store.nbytes for store in self._store_names) if self._on_gpu else 0

    @property
    def addresses(self) -> Sequence[Address]:
        return self._launcher.addresses

    def close(self) -> None:
        self._at_exit.cancel()
        if self._in_flight:
            self._group.abort()  # a step never ends if one of its workers has died
        stop_seconds = ABORT_SECONDS if self._in_flight else STOP_SECONDS
        release_seconds = self.pinned_bytes / UNPINNED_BYTES_PER_SECOND
        self._group.close(stop_seconds + release_seconds, KILL_SECONDS + release_seconds)
        self._launcher.close()
        for shared in self._shared:
            shared.close()

    @property
    def _shares_stores(self) -> bool:
        return len(self._store_names) < len(self.workers)

    def _init_worker_cache(self, worker: WorkerHandle, budget: KvBudget) -> None:
        writer, writers = self._writer(worker)
        if budget.host_pages and writer == 0:
            # The ranks of a stage on one node have successive numbers.
            users = self.workers[worker.rank.number : worker.rank.number + writers]
            self._store_names.append(self._create_store(worker, users, budget))
        store = self._store_names[-1] if budget.host_pages else None
        self._group.send(worker, msg.InitCache(budget, store, writer, writers))

    def _create_store(self, worker: WorkerHandle, users: Sequence[WorkerHandle], budget: KvBudget) -> SharedName:
        """Creates the host store that `users` share, of which `worker` is the first. The controller creates and maps
        stores on its own machine, because handoffs use them."""
        rank, shape, page_rows = worker.rank, worker.shape, self._config.page_rows
        nbytes = host_bytes(shape, budget.host_pages, page_rows)
        gpus = [torch.device(user.rank.device).index for user in users] if self._on_gpu else []
        if rank.node != msg.THIS_MACHINE:
            return self._request(worker, msg.CreateStore(nbytes, gpus), SharedName)
        shared = SharedMemory(nbytes, nodes=store_nodes(gpus))
        store = HostStore(shape, budget.host_pages, page_rows, torch.device("cpu"), memory=shared.bytes)
        self._shared.append(shared)
        self._stores.append(HostShard(rank.replica, rank.split.first_layer, shape, self._kv_heads, store))
        return shared.name(msg.THIS_MACHINE)

    def _writer(self, worker: WorkerHandle) -> tuple[int, int]:
        """Returns the worker's index among the writers of its host store, and the number of these writers. The writers
        are the ranks of its stage on its node, because each node has its own copy of the rows that all ranks have."""
        if store_writer(worker.rank.split, worker.shape)[1] == 1:
            return 0, 1
        rank = worker.rank
        writers = [
            each.rank.number for each in self.workers if (each.rank.stage, each.rank.node) == (rank.stage, rank.node)
        ]
        return writers.index(rank.number), len(writers)

    def _drain(self) -> None:
        while self._in_flight:
            self._receive_step_report()

    def _receive_step_report(self) -> None:
        """Waits for the next report on a step in flight, and records it."""
        missing = {number for state in self._in_flight for number in state.missing}
        worker, report = self._group.receive(missing, self._stall_limit(), f"step {self._oldest_step()}")
        if not isinstance(report, msg.StepDone):
            raise _unexpected(worker, report)
        state = next(state for state in self._in_flight if state.number == report.number)
        state.missing.discard(worker.rank.number)
        worker.traffic = report.traffic
        if report.result is not None:
            state.of_replicas[worker.rank.replica] = report.result
        while self._in_flight and not self._in_flight[0].missing:
            self._complete(self._in_flight.popleft())

    def _complete(self, state: _SubmittedStep) -> None:
        """Handles a step that every worker has reported. In a pipeline, keeps its tokens for the first stage."""
        self.steps_finished = state.number
        if self.workers[0].rank.stages == 1:
            return
        for plan, result in zip(state.step, state.of_replicas, strict=True):
            if plan is not None and result is not None:
                self._sampled += _sampled_tokens(plan, result)

    def _send_to_all(self, command: msg.WorkerCommand) -> None:
        for worker in self.workers:
            self._group.send(worker, command)

    def _wait_for_all(
        self, report_type: type[T], task: str, progress: Callable[[WorkerHandle, msg.TaskProgress], None] | None = None
    ) -> list[T]:
        """Waits until every worker has sent a report of this type, and returns the reports in the order of workers.
        `progress` is called with every `TaskProgress` that arrives meanwhile."""
        reports: dict[int, T] = {}
        waiting = set(range(len(self.workers)))
        while waiting:
            worker, report = self._group.receive(waiting, START_SECONDS, task)
            if isinstance(report, report_type):
                reports[worker.rank.number] = report
                waiting.discard(worker.rank.number)
            elif isinstance(report, msg.TaskProgress) and progress is not None:
                progress(worker, report)
            else:
                raise _unexpected(worker, report)
        return [reports[number] for number in range(len(reports))]

    def _request(
        self, worker: WorkerHandle, command: msg.WorkerCommand, report_type: type[T], limit: float | None = None
    ) -> T:
        self._group.send(worker, command)
        limit = self._stall_limit() if limit is None else limit
        _, report = self._group.receive({worker.rank.number}, limit, type(command).__name__)
        if not isinstance(report, report_type):
            raise _unexpected(worker, report)
        return report

    def _oldest_step(self) -> int | None:
        return self._in_flight[0].number if self._in_flight else None

    def _stall_limit(self, steps: int | None = None) -> float:
        """Returns how long a worker may make no progress if `steps` steps have ended before."""
        steps = self.steps_finished - self._steps_before if steps is None else steps
        expected = max(worker.progress.expected_seconds for worker in self.workers)
        return stall_limit(self._config.step_timeout, steps, expected)


class _Sum:
    """Adds up the progress of all workers with a task."""

    def __init__(self, total: int, progress: Callable[[int, int], None]) -> None:
        self._total, self._progress = total, progress
        self._done: dict[int, int] = {}  # by number of the worker

    def __call__(self, worker: WorkerHandle, reported: msg.TaskProgress) -> None:
        self._done[worker.rank.number] = reported.done
        self._progress(sum(self._done.values()), self._total)


def _unexpected(worker: WorkerHandle, report: msg.WorkerReport) -> EngineStopped:
    return EngineStopped(f"{worker.rank.name} sent an unexpected report: {report!r}")


def _sampled_tokens(plan: Plan, result: StepResult) -> list[SampledToken]:
    """Returns the kept tokens with their seats and positions. The first stage needs them for the next step."""
    tokens, first = [], {segment: index for index, segment in reversed([*enumerate(plan.sampled)])}
    for index in plan.kept(result):
        segment = plan.sampled[index]
        not_drafted = plan.counts[segment] - len(plan.drafts.get(segment, ()))
        position = plan.starts[segment] + not_drafted + index - first[segment]
        tokens.append(SampledToken(plan.seats[segment], position, result.token_ids[index]))
    return tokens
