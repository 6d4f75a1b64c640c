"""A worker process: it holds a part of the model and of the KV memory, executes steps in order, and reports results.

It makes no decisions. If the pipe to the controller closes, or if the controller sends `AbortSteps`, it ends its step
and exits.
"""

import contextlib
import gc
import logging
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from hotset.base.engine_settings import CollectivesChoice
from hotset.base.errors import EngineStopped, StartupError
from hotset.base.listeners import LOOPBACK_INTERFACE, check_listeners
from hotset.base.logs import log_to_stderr
from hotset.base.numa import bind_threads, first_touch_cpus, store_nodes
from hotset.base.parent_death import resume_if_parent_dies
from hotset.base.processes import name_as_ending
from hotset.engine.build_runner import SharedStore, build_runner
from hotset.engine.decode_graphs import StepGraph
from hotset.engine.loading import ModelLoader, use_device
from hotset.engine.ports import Messages
from hotset.engine.progress import Progress
from hotset.engine.runner import Neighbours, SubmittedStep
from hotset.engine.sizing import WorkerMemory, free_bytes
from hotset.engine.workers import messages as msg
from hotset.engine.workers.distributed import Stage, World, make_world
from hotset.engine.workers.shared_memory import SharedMemory
from hotset.engine.workers.symmetric import AbortFlag
from hotset.models.collectives import SINGLE_RANK
from hotset.tiers.kv_memory import TrafficCopy

LOGGER = logging.getLogger("hotset.engine")
ABORTED, FAILED = 0, 1  # exit codes: after `AbortSteps` because of another worker, and after a reported failure
EXIT_SECONDS = 2.0  # time for the main thread to end its step after `AbortSteps`, or after the controller has died

JoinWorld = Callable[[msg.WorkerRank, torch.device, CollectivesChoice], World]


def main(pipe: Messages, progress: Progress) -> None:
    """Runs the worker process until it receives `StopWorker` or fails, or until the controller has died.

    `pipe` is the worker's end of the connection. If the controller is dead, its `send` raises BrokenPipeError.
    """
    # The controller handles signals. It stops its workers; if it dies, the pipe closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resume_if_parent_dies()
    log_to_stderr()
    if (exit_code := serve(pipe, progress, _join_world, _exit_soon)) is not None:
        os._exit(exit_code)  # the exit handlers of libraries may fail, or wait for other workers


def _exit_soon() -> None:
    """Gives the main thread time to end its GPU work, then ends the process, even in the middle of a step."""
    name_as_ending()
    time.sleep(EXIT_SECONDS)
    os._exit(ABORTED)


def _join_world(rank: msg.WorkerRank, device: torch.device, collectives: CollectivesChoice) -> World:
    world = make_world(rank, device, collectives)
    check_listeners(rank.name, interfaces=(LOOPBACK_INTERFACE,))
    return world


def serve(
    pipe: Messages,
    progress: Progress,
    join_world: JoinWorld,
    on_abort: Callable[[], None],
) -> int | None:
    """Executes commands until `StopWorker` or a failure, which it reports. Counts signs of life in `progress`.

    Returns None after `StopWorker`. Otherwise the process must end at once, with the returned exit code.

    `join_world` connects this worker to the others. `on_abort` is called from another thread after `AbortSteps`, or
    when the pipe has closed.
    """
    inbox = Inbox(pipe, on_abort)
    send_lock = threading.Lock()
    exit_code: int | None = None

    def send(report: msg.WorkerReport) -> None:
        with send_lock:
            pipe.send(report)

    def report_failure(error: Exception) -> None:
        nonlocal exit_code
        exit_code = FAILED
        if isinstance(error, BrokenPipeError):
            inbox.aborted = True
        if not inbox.aborted:  # otherwise the cause is elsewhere, and the controller knows it or is dead
            send(_failure(error))

    try:
        with progress.beating(), contextlib.ExitStack() as cleanup:
            try:
                _serve(inbox, send, progress, join_world, cleanup)
            except Exception as error:
                report_failure(error)  # before the clean-up, which waits for steps and releases pinned memory
    except Exception as error:
        report_failure(error)
    return ABORTED if inbox.aborted else exit_code


def _failure(error: Exception) -> msg.WorkerFailed:
    """Returns the report of an exception that is being handled."""
    if isinstance(error, StartupError):
        return msg.WorkerFailed(error)
    message = repr(error)
    if isinstance(error, torch.OutOfMemoryError):
        message = (
            f"the memory of its GPU is full ({str(error).partition('. ')[0]}); lower --gpu-memory-utilization, "
            "--device-kv-gib, --device-kv-tokens, --max-num-batched-tokens or --max-num-seqs"
        )
    return msg.WorkerFailed(StartupError(message), traceback.format_exc())


class Inbox:
    """The commands that the controller has sent. A thread reads them, even while a step blocks the main thread.

    The thread also reads after `StopWorker`, because `AbortSteps` may follow if an earlier step never ends.
    """

    def __init__(self, pipe: Messages, on_abort: Callable[[], None]) -> None:
        self.aborted = False  # the controller has sent `AbortSteps`, or is dead
        self._commands: queue.SimpleQueue[msg.WorkerCommand] = queue.SimpleQueue()
        self._flag: AbortFlag | None = None
        self._pipe, self._on_abort = pipe, on_abort
        threading.Thread(target=self._read, name="hotset-commands", daemon=True).start()

    def get(self) -> msg.WorkerCommand:
        """Waits for the next command, and returns it. Raises EngineStopped after `AbortSteps`, even if earlier commands
        are still in the inbox."""
        received = self._commands.get()
        if self.aborted:
            raise EngineStopped("the controller has aborted all steps")
        return received

    def set_on_abort(self, flag: AbortFlag) -> None:
        """Sets `flag` when `AbortSteps` comes, or now if it has come already."""
        self._flag = flag
        if self.aborted:
            flag.set()

    def _abort(self) -> None:
        self.aborted = True  # set before `_flag` is read; `set_on_abort` sets `_flag` before it reads `aborted`
        if self._flag is not None:
            self._flag.set()
        self._commands.put(msg.StopWorker())  # wakes the main thread

    def _read(self) -> None:
        while True:
            try:
                command: msg.WorkerCommand = self._pipe.recv()
            except Exception as error:
                if not isinstance(error, EOFError | OSError):  # these mean that the controller is dead
                    LOGGER.exception("cannot read a command; this worker ends")
                command = msg.AbortSteps()
            if isinstance(command, msg.AbortSteps):
                self._abort()
                self._on_abort()
                return
            self._commands.put(command)


def _serve(
    inbox: Inbox,
    send: Callable[[msg.WorkerReport], None],
    progress: Progress,
    join_world: JoinWorld,
    cleanup: contextlib.ExitStack,
) -> None:
    init = inbox.get()
    assert isinstance(init, msg.InitWorker), f"the first command must be InitWorker, not {init}"
    rank, device = init.rank, torch.device(init.rank.device)
    if device.type == "cuda":
        _run_near_gpu(rank, device.index)
    use_device(device)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // rank.workers))
    world = join_world(rank, device, init.config.collectives)
    inbox.set_on_abort(world.abort)
    loader = ModelLoader(init.config, device, rank.split, world.collectives, rank.ranks_on_gpu)
    # Measured once: after `DropMtp`, other workers may still hold the host memory that this one has released.
    host_free = free_bytes(torch.device("cpu"))
    while True:
        send(replace(loader.plan, node=rank.node, host_free=host_free))
        if isinstance(command := inbox.get(), msg.StopWorker):
            return
        assert isinstance(command, msg.LoadWeights), f"LoadWeights or StopWorker must follow, not {command}"
        stage = _load(loader, rank, world, send, progress.advance)
        dropping = _execute_commands(inbox, init, stage, world, send, progress, cleanup)
        if dropping is None:
            return
        cleanup.close()  # releases the KV memory
        loader.drop_mtp(dropping.config)
        init = replace(init, config=dropping.config)


def _run_near_gpu(rank: msg.WorkerRank, gpu: int) -> None:
    """Makes this process run on the CPUs near its GPU if memory gets to the NUMA node of the GPU only in this way."""
    if cpus := first_touch_cpus([gpu]):
        bind_threads(cpus)
        LOGGER.info("%s runs on the %d CPUs near GPU %d, because mbind is refused here", rank.name, len(cpus), gpu)


def _execute_commands(
    inbox: Inbox,
    init: msg.InitWorker,
    stage: Stage,
    world: World,
    send: Callable[[msg.WorkerReport], None],
    progress: Progress,
    cleanup: contextlib.ExitStack,
) -> msg.DropMtp | None:
    """Allocates the KV memory, and executes commands. Returns None after `StopWorker`, or the `DropMtp` command."""
    cache = inbox.get()
    if isinstance(cache, msg.CreateStore):
        shared = SharedMemory(cache.nbytes, nodes=store_nodes(cache.gpus))
        cleanup.callback(shared.close)  # not earlier, because other workers must map the memory first
        send(shared.name(init.rank.node))
        cache = inbox.get()
    if isinstance(cache, msg.StopWorker):
        return None
    assert isinstance(cache, msg.InitCache), f"InitCache or StopWorker must follow, not {cache}"
    worker = Worker(init, world, stage, cache, send)
    cleanup.callback(worker.close)
    send(msg.CacheReady())
    while not isinstance(command := _next_command(inbox, progress), msg.StopWorker | msg.DropMtp):
        worker.handle(command)
        progress.advance()
        if isinstance(command, msg.ExecuteStep):
            progress.record_step(command.number)
    return command if isinstance(command, msg.DropMtp) else None


def _next_command(inbox: Inbox, progress: Progress) -> msg.WorkerCommand:
    with progress.waiting():
        return inbox.get()


def _load(
    loader: ModelLoader,
    rank: msg.WorkerRank,
    world: World,
    send: Callable[[msg.WorkerReport], None],
    advance: Callable[[], None],
) -> Stage:
    split = rank.split
    decoder = loader.load(lambda done, total: send(msg.TaskProgress(done, total)))
    decoder.on_layer = advance
    previous_worker = None if rank.stage == 0 else rank.number - split.size
    next_worker = None if rank.stage == rank.stages - 1 else rank.number + split.size
    host_free = free_bytes(torch.device("cpu"))
    send(WorkerMemory(decoder.kv_shape, loader.free_for_kv(), node=rank.node, host_free=host_free))
    return Stage(decoder, world, previous_worker, next_worker)


@dataclass(frozen=True, slots=True)
class _Submission:
    """A submitted step, for the thread that reports it. The events were recorded when the step was submitted, so
    waiting for them does not wait for later steps."""

    number: int
    submitted: SubmittedStep | None  # None if the worker's replica had no plan
    executed: torch.cuda.Event | None  # occurs when the step has been computed; None on a CPU
    mirrored: torch.cuda.Event | None  # occurs when all its copies to the host are done; None if they are already
    traffic: TrafficCopy


class Worker:
    """Executes the commands of a worker whose weights are loaded and whose KV memory is allocated."""

    def __init__(
        self,
        init: msg.InitWorker,
        world: World,
        stage: Stage,
        cache: msg.InitCache,
        send: Callable[[msg.WorkerReport], None],
    ) -> None:
        rank, barrier = init.rank, world.collectives.barrier
        self._writer = cache.writer
        self._rank: msg.WorkerRank = rank
        self._services: list[msg.RunningService[object]] = []
        self._collectives, self._abort, self._stage, self._send = world.collectives, world.abort, stage, send
        neighbours = Neighbours(
            collectives=world.collectives if rank.split.tp_size > 1 else SINGLE_RANK,
            barrier=barrier if cache.writers > 1 else SINGLE_RANK.barrier,
            before_capture=lambda size: self._set_tokens([size] * rank.split.dp_size),
            wait_for_steps=rank.split.dp_size > 1 or rank.stages > 1,
        )
        with contextlib.ExitStack() as opened:
            store = None
            if cache.store is not None:
                shared = SharedMemory.open(cache.store, rank.node)
                opened.callback(shared.close)
                store = SharedStore(shared.bytes, cache.writer, cache.writers)
            self._runner = build_runner(
                init.config,
                stage,
                cache.budget,
                stage.device,
                stage.vocab,
                lambda done, total: send(msg.TaskProgress(done, total)),
                store=store,
                neighbours=neighbours,
                samples=self._reports_samples,
            )
        self._memory = self._runner.memory
        self._submitted: queue.SimpleQueue[_Submission | None] = queue.SimpleQueue()
        self._reporter = threading.Thread(target=self._report_steps, name="hotset-reports", daemon=True)
        self._reporter.start()

    def handle(self, command: msg.WorkerCommand) -> None:
        match command:
            case msg.ExecuteStep():
                self._execute(command)
            case msg.WarmUp():
                self._runner.warm_up(lambda done, total: self._send(msg.TaskProgress(done, total)))
                self._abort.check()
                gc.collect()
                gc.freeze()  # these objects stay, so collections need not scan them
                self._send(msg.WarmedUp(self._runner.has_graphs))
            case msg.StartService():
                self._start_service(command)
            case msg.RunAudit(tiered):
                self._send(msg.AuditReport(self._find_flaw(tiered)))
            case _:
                raise AssertionError(f"a running worker received {command}")

    def close(self) -> None:
        self._submitted.put(None)
        self._reporter.join()
        self._runner.close()

    def _start_service(self, command: msg.StartService) -> None:
        connection = command.connection if isinstance(command.connection, Connection) else command.connection.open()
        # The controller has mapped the host stores of its own node. On another node, the first writer describes one.
        described_elsewhere = self._rank.node == msg.THIS_MACHINE or self._writer > 0
        host = None if described_elsewhere else self._memory.host
        running = command.service.start(self._rank, self._memory.pool, host, connection)
        self._services.append(running)
        self._send(msg.ServiceStarted(running.description))

    def _execute(self, step: msg.ExecuteStep) -> None:
        self._runner.write_sampled(step.sampled)
        self._set_tokens(step.tokens_per_rank)
        submitted = None if step.plan is None else self._runner.submit(step.plan, step.graph)
        if any(step.tokens_per_rank) and (step.plan is None or not step.plan.seats):
            self._take_part_idle(step.graph)
        traffic = self._memory.copy_traffic()  # before `executed`, so that the reporter need not wait for it
        executed, mirrored = _recorded_event(self._stage.device), self._memory.mirrored_event()
        self._submitted.put(_Submission(step.number, submitted, executed, mirrored, traffic))

    def _set_tokens(self, tokens_per_rank: Sequence[int]) -> None:
        if self._rank.split.dp_size > 1:
            self._collectives.tokens_per_rank = tokens_per_rank

    def _take_part_idle(self, graph: StepGraph | None) -> None:
        """Computes this rank's experts in a step in which only other replicas have tokens."""
        if graph is None:
            self._stage.idle_moe_step()
        else:
            self._runner.replay_idle(graph)

    def _report_steps(self) -> None:
        """Waits for submitted steps and reports them. It runs in a separate thread, because on a GPU further steps are
        submitted meanwhile."""
        try:
            use_device(self._stage.device)
            while (step := self._submitted.get()) is not None:
                result = None if step.submitted is None else step.submitted.result()
                for event in (step.executed, step.mirrored):
                    if event is not None:
                        event.synchronize()
                self._abort.check()
                self._send(msg.StepDone(step.number, result if self._reports_samples else None, step.traffic.result()))
        except (BrokenPipeError, EngineStopped):
            return  # the controller is dead, or has aborted all steps
        except Exception as error:
            self._send(_failure(error))

    @property
    def _reports_samples(self) -> bool:
        """True on tensor parallel rank 0 of the last stage, which samples. The other ranks receive its tokens."""
        return self._rank.stage == self._rank.stages - 1 and self._rank.split.tp_rank == 0

    def _find_flaw(self, tiered: Mapping[int, int]) -> str | None:
        try:
            self._memory.audit(tiered)
        except AssertionError as error:
            return f"{self._rank.name}: {error}"
        return None


def _recorded_event(device: torch.device) -> torch.cuda.Event | None:
    """Returns an event that occurs when the work queued so far has been executed. Returns None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
