"""A worker process: holds its part of the model and of memory, carries out steps in order, and reports.

It decides nothing. When the pipe to its controller ends it ends too, whatever it is doing.
"""

import logging
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

import torch

from hotset.base.errors import StartupError
from hotset.base.logs import log_to_stderr
from hotset.engine.loading import load_decoder
from hotset.engine.runner import Runner, SubmittedStep
from hotset.engine.sizing import free_bytes
from hotset.engine.workers.distributed import DistributedWorld, Stage, World
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
    StepDone,
    StopWorker,
    TrafficReport,
    WorkerCommand,
    WorkerFailed,
    WorkerRank,
    WorkerReport,
)
from hotset.engine.workers.shared_memory import SharedMemory
from hotset.memory.device_pool import DevicePool
from hotset.memory.host_store import HostStore
from hotset.models.collectives import SINGLE_RANK, Collectives
from hotset.schedule.plan import StepResult
from hotset.tiers.kv_memory import KvMemory

LOGGER = logging.getLogger("hotset.engine")
Inbox = queue.SimpleQueue[tuple[WorkerCommand, SharedMemory | None]]


def main(pipe: Connection) -> None:
    """Of the process: until told to stop."""
    # Signals are the controller's to handle: it tells its workers to stop, or dies and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log_to_stderr()
    serve(pipe, DistributedWorld, lambda: os._exit(1))


def serve(pipe: Connection, join: Callable[[WorkerRank, torch.device], World], at_end: Callable[[], None]) -> None:
    """Until told to stop. `join` meets the other workers. `at_end`: the controller is gone."""
    inbox: Inbox = queue.SimpleQueue()
    turn = threading.Lock()

    def send(report: WorkerReport) -> None:
        with turn:
            pipe.send(report)

    threading.Thread(target=_read, args=(pipe, inbox, at_end), daemon=True).start()
    try:
        _serve(inbox, send, join)
    except BrokenPipeError:
        return
    except StartupError as error:
        send(WorkerFailed(error))
    except Exception as error:
        send(WorkerFailed(StartupError(repr(error)), traceback.format_exc()))


def _read(pipe: Connection, inbox: Inbox, at_end: Callable[[], None]) -> None:
    """Hears the controller at any time, so that its end is noticed even while another worker is waited for in vain."""
    while True:
        try:
            command: WorkerCommand = pipe.recv()
            memory = (
                SharedMemory.received(pipe) if isinstance(command, InitCache) and command.budget.host_pages else None
            )
        except (EOFError, OSError):
            at_end()
            return
        inbox.put((command, memory))
        if isinstance(command, StopWorker):
            return


def _serve(
    inbox: Inbox, send: Callable[[WorkerReport], None], join: Callable[[WorkerRank, torch.device], World]
) -> None:
    begin, _ = inbox.get()
    assert isinstance(begin, InitWorker), f"a worker begins with {begin}"
    place, device = begin.place, torch.device(begin.place.device)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.workers))
    world = join(place, device)
    stage = _load(begin, device, world, send)
    settle, memory = inbox.get()
    if isinstance(settle, StopWorker):
        return
    assert isinstance(settle, InitCache), f"a worker that has loaded is told {settle}"
    worker = Worker(begin, world.collectives, stage, settle, memory, send)
    try:
        send(CacheReady())
        while worker.handle(inbox.get()[0]):
            pass
    finally:
        worker.close()


def _load(begin: InitWorker, device: torch.device, world: World, send: Callable[[WorkerReport], None]) -> Stage:
    place, split = begin.place, begin.place.split
    decoder = load_decoder(
        begin.config, device, lambda done, total: send(LoadProgress(done, total)), split, world.collectives
    )
    before = None if place.stage == 0 else place.number - split.size
    after = None if place.stage == place.stages - 1 else place.number + split.size
    send(Loaded(decoder.kv_shape, free_bytes(device)))
    return Stage(decoder, world, before, after)


class Worker:
    """A worker whose memory is settled."""

    def __init__(
        self,
        begin: InitWorker,
        collectives: Collectives,
        stage: Stage,
        settle: InitCache,
        memory: SharedMemory | None,
        send: Callable[[WorkerReport], None],
    ) -> None:
        config, budget, shape = begin.config, settle.budget, stage.kv_shape
        self._place: WorkerRank = begin.place
        self._collectives, self._stage, self._send = collectives, stage, send
        pool = DevicePool(shape, budget.geometry, budget.device_pages, stage.device)
        host = None
        if memory is not None:
            sizes = (budget.host_pages, config.page_rows, stage.device)
            host = HostStore(shape, *sizes, memory=memory.bytes, writer=settle.writer, writers=settle.writers)
            memory.close()
        self._memory = KvMemory(pool, host, config.max_num_seqs, budget.max_model_len)
        barrier = collectives.barrier if settle.writers > 1 else SINGLE_RANK.barrier
        self._runner = Runner(
            stage, self._memory, config.max_num_seqs, budget.max_model_len, stage.vocab, barrier=barrier
        )
        self._tickets: queue.SimpleQueue[tuple[int, SubmittedStep | None] | None] = queue.SimpleQueue()
        self._reporter = threading.Thread(target=self._report, name="hotset-reports", daemon=True)
        self._reporter.start()

    def handle(self, command: WorkerCommand) -> bool:
        """False: it was told to stop."""
        match command:
            case ExecuteStep():
                self._carry(command)
            case GetTraffic():
                self._send(TrafficReport(self._memory.traffic()))
            case RunAudit(tiered):
                self._send(AuditReport(self._flaw(tiered)))
            case StopWorker():
                return False
            case _:
                raise AssertionError(f"a worker at work is told {command}")
        return True

    def close(self) -> None:
        self._tickets.put(None)
        self._reporter.join()
        self._memory.close()

    def _carry(self, carry: ExecuteStep) -> None:
        self._runner.write_sampled(carry.tokens)
        if self._place.split.dp_size > 1:
            self._collectives.tokens_per_rank = carry.rows
        ticket = None if carry.plan is None else self._runner.submit(carry.plan)
        if sum(carry.rows) and not carry.rows[self._place.replica]:
            self._stage.idle_moe_step()
        self._tickets.put((carry.number, ticket))

    def _report(self) -> None:
        """Beside the steps: on a GPU the next is submitted before this one has ended."""
        try:
            while (waiting := self._tickets.get()) is not None:
                number, ticket = waiting
                result = None if ticket is None else ticket.result()
                if (stored := self._memory.mirrored_event()) is not None:
                    stored.synchronize()
                self._send(StepDone(number, self._told(result)))
        except BrokenPipeError:
            return
        except Exception as error:
            self._send(WorkerFailed(StartupError(repr(error)), traceback.format_exc()))

    def _told(self, result: StepResult | None) -> StepResult | None:
        """Every rank of the last stage samples the same: the first of them tells."""
        last = self._place.stage == self._place.stages - 1
        return result if last and self._place.split.tp_rank == 0 else None

    def _flaw(self, tiered: Mapping[int, int]) -> str | None:
        try:
            self._memory.audit(tiered)
        except AssertionError as error:
            return f"{self._place.name}: {error}"
        return None
