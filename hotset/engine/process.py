"""Runs the engine in a child process. HTTP never delays a step, and the server can report a crash.

The parent sends `AddRequests`, `AbortRequests`, `GetStats` and `StopEngine`. The child sends `EngineStarting` while it
loads the model, `EngineReady` or `EngineFailed`, then `OutputsReport` and `StatsReport`, and `EngineEnding` if a step
fails. Twice per second, and when the engine becomes idle, a report of its state is added to the outputs, so the parent
knows a recent state without waiting for a step. If the parent dies, the pipe closes and the child stops. If the child
dies, the parent fails its open requests. The child counts its progress in shared memory (see `progress.py`), so the
parent also notices a child that is stopped or hangs.

Importing this module does not import torch. A parent can therefore start the child first, and import its own modules
while the child loads the model.
"""

import contextlib
import gc
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from hotset.base.config import EngineConfig
from hotset.base.endings import SayWaiting, exit_code, wait_until_ended
from hotset.base.errors import EngineStopped, StartupError
from hotset.base.host_memory import return_free_memory
from hotset.base.listeners import check_listeners
from hotset.base.logs import log_to_stderr
from hotset.base.parent_death import resume_if_parent_dies
from hotset.base.processes import ProcessIdentity, descendants, name_as_ending
from hotset.base.status_line import ShowProgress, TaskProgress, ignore_progress
from hotset.engine.input_processor import Choice, ModelCard
from hotset.engine.outputs import EngineStats
from hotset.engine.progress import LOST_PARENT_SECONDS, STOP_SECONDS, Progress
from hotset.schedule.plan import TokenOutputs
from hotset.schedule.request import FinishReason
from hotset.schedule.snapshots import RequestSnapshot

if TYPE_CHECKING:
    from hotset.engine.core import Engine

LOGGER = logging.getLogger("hotset.engine")
AUDIT_AFTER_IDLE_S = 1.0
REPORT_SECONDS = 0.5  # interval between reports of the engine's state while there is work
SHOW_SECONDS = 0.1  # minimum time between two reports of the progress of one task
EXIT_SECONDS = 1.0  # time between the end of the child's pipe and its exit code
PEER_POLL_SECONDS = 0.02  # maximum interval between steps while all open requests wait for messages of peers
COPY_POLL_SECONDS = 0.0005  # the same while a message to a peer waits for copies to the host


@dataclass(frozen=True, slots=True)
class AddRequests:
    choices: Sequence[Choice]


@dataclass(frozen=True, slots=True)
class AbortRequests:
    request_ids: Sequence[str]
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class GetStats:
    number: int


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Commands the child to stop. Open requests get no further output. Open handoffs have `drain_seconds` to finish, or
    `progress.DRAIN_SECONDS` if that is longer; a second `StopEngine` cuts this time short."""

    drain_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WakeEngine:
    """Wakes the step loop. The child sends it to itself when its engine calls `wake` (see `build_engine`)."""


@dataclass(frozen=True, slots=True)
class EngineStarting:
    """Reports what the engine does before it is ready. The parent shows it, because only the parent can tidy up the
    terminal if the child is killed."""

    progress: TaskProgress


@dataclass(frozen=True, slots=True)
class EngineReady:
    card: ModelCard
    closing_seconds: float  # time that the engine can take to close, in addition to its drain


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """Reports that the engine cannot start. `trace` is the traceback of an unexpected exception, or None if the engine
    itself raised `error`."""

    error: StartupError
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class OutputsReport:
    """The outputs of a step, which may be empty, and a report of the engine's state if one is due."""

    outputs: TokenOutputs
    state: "StateReport | None" = None


@dataclass(frozen=True, slots=True)
class StateReport:
    """The state of the engine after a step."""

    stats: EngineStats
    requests: Sequence[RequestSnapshot]  # open ones, and those that have ended since the last report


@dataclass(frozen=True, slots=True)
class StatsReport:
    """Answers `GetStats`."""

    number: int
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class EngineEnding:
    """Reports that a step failed. The child closes the engine and exits with code 1."""

    reason: str


EngineCommand = AddRequests | AbortRequests | GetStats | StopEngine | WakeEngine
EngineReport = EngineStarting | EngineReady | EngineFailed | OutputsReport | StatsReport | EngineEnding


class EngineProcess:
    """The handle through which the parent controls the child process."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts the child, which loads the model. Does not wait for it."""
        context = multiprocessing.get_context("spawn")
        self.pipe, child_end = context.Pipe()
        self.progress = Progress(context)  # the child counts only after `wait_ready` has returned
        self._process = context.Process(target=_child, args=(config, child_end, self.progress), name="hotset-engine")
        self._process.start()
        child_end.close()
        self.stop_seconds = STOP_SECONDS  # time that the child can take to stop, in addition to its drain
        self._descendants: list[ProcessIdentity] = []  # the child's workers, and whatever else it has started

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def describe_end(self) -> str:
        """Describes how the child has died. Waits up to EXIT_SECONDS for its exit code, which is not known before the
        system has freed its memory."""
        return f"the engine process has died ({self._exit_code()})"

    def _exit_code(self) -> str:
        code = exit_code(self._process, EXIT_SECONDS)
        return "its memory is being freed" if code is None else f"exit code {code}"

    def wait_ready(self, show: ShowProgress = ignore_progress) -> ModelCard:
        """Waits until the engine is ready, and shows its progress with `show`.

        Raises StartupError if it cannot start or if the child dies.
        """
        try:
            while isinstance(report := self.pipe.recv(), EngineStarting):
                self._find_descendants()
                show(report.progress)
        except EOFError:
            raise StartupError(f"the engine process died while starting ({self._exit_code()})") from None
        self._find_descendants()
        if isinstance(report, EngineFailed):
            exit_code(self._process, STOP_SECONDS)
            if report.trace is not None:
                print(report.trace, file=sys.stderr)
            raise report.error
        assert isinstance(report, EngineReady)
        self.stop_seconds = STOP_SECONDS + report.closing_seconds
        return report.card

    def end(self, seconds: float | None = None) -> None:
        """Waits up to `seconds` for the child to exit, and kills it if it still runs. Then waits until it and all that
        it has started have ended and the system has freed their memory, which a next engine needs. Idempotent.

        The default of `seconds` is `stop_seconds`. For an orderly exit, the caller sends `StopEngine` first.
        """
        exit_code(self._process, self.stop_seconds if seconds is None else seconds)
        self.kill()
        if exit_code(self._process, self.stop_seconds) is None:
            LOGGER.error("the engine process %s has not ended and may hold memory", self.pid)
        for pid in wait_until_ended(self._descendants, self.stop_seconds, SayWaiting("the engine's workers")):
            LOGGER.error("process %s of the engine has not ended and may hold memory; it is killed", pid)
            with contextlib.suppress(OSError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        self._descendants = []

    def _find_descendants(self) -> None:
        """Remembers what the child has started. After its death, these processes would have another parent."""
        if self.pid is not None:
            self._descendants = descendants(self.pid) or self._descendants

    def kill(self) -> None:
        """Kills the child, even if it is stopped. Its workers exit when the pipe to it closes."""
        if self._process.is_alive():
            self._process.kill()


def _child(config: EngineConfig, pipe: Connection, progress: Progress) -> None:
    """Builds the engine, reports the result, and runs steps until it receives `StopEngine` or the parent has died."""
    # The parent handles signals. It drains its requests and sends `StopEngine`; if it dies, the pipe closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resume_if_parent_dies()
    log_to_stderr()  # a new process does not inherit the parent's logging
    inbox: queue.SimpleQueue[EngineCommand] = queue.SimpleQueue()
    try:
        engine = _build(config, pipe, lambda: inbox.put(WakeEngine()), progress.advance)
    except BrokenPipeError:
        return  # the parent has died
    if engine is None:
        return
    closing = threading.Event()
    threading.Thread(target=_read_commands, args=(pipe, inbox, engine.closing_seconds, closing), daemon=True).start()
    stop, failed = StopEngine(), False
    with progress.beating():
        try:
            stop = _run(engine, pipe, inbox, progress)
        except BrokenPipeError:
            pass  # the parent has died
        except Exception as error:
            failed = True
            _report_failure(pipe, error)
        finally:
            closing.set()
            engine.close(stop.drain_seconds, lambda: _stop_requested(inbox))
    if failed:
        sys.exit(1)


def _report_failure(pipe: Connection, error: Exception) -> None:
    if isinstance(error, EngineStopped):
        reason = str(error)
    else:
        reason = f"a step failed: {error!r}"
        LOGGER.error("a step failed", exc_info=error)
    with contextlib.suppress(OSError):
        pipe.send(EngineEnding(reason))


class _StartReporter:
    """Sends the progress of the start: every new task, and then at most one report every SHOW_SECONDS."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._title = ""
        self._sent_at = 0.0

    def show(self, progress: TaskProgress) -> None:
        now = time.monotonic()
        if progress.title != self._title or now >= self._sent_at + SHOW_SECONDS:
            self._title, self._sent_at = progress.title, now
            self._pipe.send(EngineStarting(progress))


def _build(
    config: EngineConfig, pipe: Connection, wake: Callable[[], None], advance: Callable[[], None]
) -> "Engine | None":
    """Builds the engine and reports the result. Returns None if the engine cannot be built."""
    try:
        from hotset.engine.build import build_engine

        engine = build_engine(config, show=_StartReporter(pipe).show, wake=wake, advance=advance)
        _check_listeners(config, engine)
    except StartupError as error:
        pipe.send(EngineFailed(error))
        return None
    except Exception as error:
        pipe.send(EngineFailed(StartupError(f"the engine failed to start: {error!r}"), traceback.format_exc()))
        return None
    gc.collect()
    gc.freeze()  # these objects stay, so collections need not scan them: on an H200 this saves pauses of 0.11 s
    pipe.send(EngineReady(engine.card, engine.closing_seconds))
    return engine


def _check_listeners(config: EngineConfig, engine: "Engine") -> None:
    """Closes the engine and raises StartupError if this process listens where it was not asked to."""
    control = engine.card.control_listens_on
    events = [address for endpoint in engine.card.kv_events for address in endpoint.addresses]
    try:
        check_listeners(
            "the engine",
            addresses=[*([] if control is None else [control]), *events, *engine.executor.addresses],
            interfaces=() if control is None else config.listening_interface.split(","),
        )
    except StartupError:
        engine.close()
        raise


def _read_commands(
    pipe: Connection, inbox: "queue.SimpleQueue[EngineCommand]", closing_seconds: float, closing: threading.Event
) -> None:
    """Reads the pipe in a separate thread, so that the parent does not block while a long step runs.

    If the parent has died, the main thread closes the engine after its step. If the step does not end soon, or if
    closing takes longer than `closing_seconds`, this thread ends the process. The main thread sets `closing` when it
    closes the engine.
    """
    while True:
        try:
            inbox.put(pipe.recv())
        except (EOFError, OSError):
            name_as_ending()
            # The second command cuts the drain of handoffs short: clients of this worker's peers wait for it.
            inbox.put(StopEngine())
            inbox.put(StopEngine())
            break
    if closing.wait(LOST_PARENT_SECONDS):
        time.sleep(closing_seconds)
    for worker in multiprocessing.active_children():
        worker.kill()  # a worker that is stopped would not notice the end of this process
    os._exit(1)


def _stop_requested(inbox: "queue.SimpleQueue[EngineCommand]") -> bool:
    """Returns True if the inbox contains a `StopEngine`. Removes all commands up to the first `StopEngine`, or all if
    there is none."""
    return any(isinstance(inbox.get(), StopEngine) for _ in range(inbox.qsize()))


def _run(
    engine: "Engine", pipe: Connection, inbox: "queue.SimpleQueue[EngineCommand]", progress: Progress
) -> StopEngine:
    """Runs steps until it receives `StopEngine`. Returns that command."""
    report_due_at = 0.0
    pipe.send(OutputsReport(TokenOutputs(), StateReport(engine.stats(), ())))
    while True:
        command = _next_command(engine, inbox, progress)
        while command is not None:
            if isinstance(command, StopEngine):
                return command
            _handle(engine, pipe, command)
            progress.advance()
            command = None if inbox.empty() else inbox.get()
        outputs = engine.step()
        progress.advance()
        progress.record_step(engine.steps, engine.open_requests)
        state, now = None, time.monotonic()
        if engine.idle or now >= report_due_at:
            state = StateReport(engine.stats(), engine.take_snapshots())
            report_due_at = 0.0 if engine.idle else now + REPORT_SECONDS
        if outputs or state is not None:
            pipe.send(OutputsReport(outputs, state))


def _next_command(
    engine: "Engine", inbox: "queue.SimpleQueue[EngineCommand]", progress: Progress
) -> EngineCommand | None:
    """Returns the next command, or None if there is none and the engine has work. If all open requests wait for peers,
    first waits up to PEER_POLL_SECONDS for a command. If the engine is idle, waits until a command comes. If none has
    come for AUDIT_AFTER_IDLE_S seconds, audits the engine, and returns memory to the system."""
    if not engine.idle:
        if not inbox.empty() or not engine.waiting_for_peers:
            return None if inbox.empty() else inbox.get()
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=COPY_POLL_SECONDS if engine.waiting_for_copies else PEER_POLL_SECONDS)
        return None
    try:
        return inbox.get(timeout=AUDIT_AFTER_IDLE_S)
    except queue.Empty:
        engine.audit()
        return_free_memory()
        with progress.waiting():
            return inbox.get()


def _handle(engine: "Engine", pipe: Connection, command: EngineCommand) -> None:
    match command:
        case AddRequests(choices):
            for choice in choices:
                engine.add(choice)
        case AbortRequests(request_ids, reason):
            for request_id in request_ids:
                engine.abort(request_id, reason)
        case GetStats(number):
            pipe.send(StatsReport(number, engine.stats()))
        case WakeEngine():
            pass  # sent by the handoff agent or when a worker has died; the next step handles it
