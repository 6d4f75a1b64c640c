"""The engine in a process of its own, so that HTTP never stalls a step and a crash takes nobody else along.

The parent sends `AddRequests`, `AbortRequests`, `GetStats` and `StopEngine`. The child sends `EngineReady` or
`EngineFailed`, then `CommittedReport` and `StatsReport`.
The end of the pipe is a message too: a child whose parent died stops, a parent whose child died fails its requests.

This module is light: only the child imports torch, so a parent may start it first and import its own parts meanwhile.
"""

import contextlib
import multiprocessing
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from hotset.base.config import EngineConfig
from hotset.base.errors import StartupError
from hotset.base.logs import log_to_stderr
from hotset.engine.input_processor import Choice, ModelCard
from hotset.engine.outputs import EngineStats
from hotset.engine.timeouts import STOP_SECONDS
from hotset.schedule.plan import TokenOutputs
from hotset.schedule.request import FinishReason

if TYPE_CHECKING:
    from hotset.engine.core import Engine

AUDIT_AFTER_IDLE_S = 1.0
PEER_SECONDS = 0.02  # between looks at what peers may have done, where nothing else is to be done


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
    """Stop now; requests that are still open get no further answer. What peers wait for may be finished for so long,
    or until this is said again."""

    drain_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WakeEngine:
    """Of the child to itself: a peer has answered."""


@dataclass(frozen=True, slots=True)
class EngineReady:
    card: ModelCard
    closing_seconds: float  # that the engine may take to close, beyond its drain


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine did not start. `error` is meant for people; `trace` is set where it is a bug of ours."""

    error: StartupError
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class CommittedReport:
    committed: TokenOutputs


@dataclass(frozen=True, slots=True)
class StatsReport:
    number: int
    stats: EngineStats


EngineCommand = AddRequests | AbortRequests | GetStats | StopEngine | WakeEngine
EngineReport = EngineReady | EngineFailed | CommittedReport | StatsReport


class EngineProcess:
    """The parent's handle on the child."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts the child and returns at once; it loads the model by itself."""
        context = multiprocessing.get_context("spawn")
        self.pipe, far_end = context.Pipe()
        self._process = context.Process(target=_child, args=(config, far_end), name="hotset-engine")
        self._process.start()
        far_end.close()
        self.stop_seconds = STOP_SECONDS  # that a child may take to stop, beyond its drain

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def wait_ready(self) -> ModelCard:
        """Waits until the model is loaded. StartupError if it cannot be, or if the child dies meanwhile."""
        try:
            first: EngineReport = self.pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise StartupError(f"the engine process died while starting (exit code {code})") from None
        if isinstance(first, EngineFailed):
            self._process.join(STOP_SECONDS)
            if first.trace is not None:
                print(first.trace, file=sys.stderr)
            raise first.error
        assert isinstance(first, EngineReady)
        self.stop_seconds = STOP_SECONDS + first.closing_seconds
        return first.card

    def end(self, seconds: float | None = None) -> None:
        """Waits so long for a child that was told to stop, or `stop_seconds`, then kills it. Idempotent."""
        self._process.join(self.stop_seconds if seconds is None else seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _child(config: EngineConfig, pipe: Connection) -> None:
    """The child's main: builds the engine, reports, and steps until told to stop or until the parent is gone."""
    # Signals are the parent's to handle: it drains its clients first and then says Stop, or dies and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log_to_stderr()  # a fresh process: nothing of the parent's log came along
    inbox: queue.SimpleQueue[EngineCommand] = queue.SimpleQueue()
    try:
        engine = _built(config, pipe, lambda: inbox.put(WakeEngine()))
        if engine is not None:
            threading.Thread(target=_read_commands, args=(pipe, inbox), daemon=True).start()
            told = StopEngine()
            try:
                told = _run(engine, pipe, inbox)
            finally:
                engine.close(told.drain_seconds, lambda: _stop_requested(inbox))
    except BrokenPipeError:
        return  # the parent is gone


def _built(config: EngineConfig, pipe: Connection, wake: Callable[[], None]) -> "Engine | None":
    """The engine, reported as ready; None if it could not be built, which is reported as well."""
    try:
        from hotset.engine.build import build_engine

        engine = build_engine(config, wake=wake)
    except StartupError as error:
        pipe.send(EngineFailed(error))
        return None
    except Exception as error:
        pipe.send(EngineFailed(StartupError(f"the engine failed to start: {error!r}"), traceback.format_exc()))
        return None
    pipe.send(EngineReady(engine.card, engine.closing_seconds))
    return engine


def _read_commands(pipe: Connection, inbox: "queue.SimpleQueue[EngineCommand]") -> None:
    """Drains the pipe at once, so that the parent never blocks while a long step runs."""
    while True:
        try:
            inbox.put(pipe.recv())
        except (EOFError, OSError):
            inbox.put(StopEngine())
            return


def _stop_requested(inbox: "queue.SimpleQueue[EngineCommand]") -> bool:
    """Whatever else is asked is not answered any more."""
    return any(isinstance(inbox.get(), StopEngine) for _ in range(inbox.qsize()))


def _run(engine: "Engine", pipe: Connection, inbox: "queue.SimpleQueue[EngineCommand]") -> StopEngine:
    """Until told to stop."""
    while True:
        command = _next_command(engine, inbox)
        while command is not None:
            if isinstance(command, StopEngine):
                return command
            _handle(engine, pipe, command)
            command = None if inbox.empty() else inbox.get()
        news = engine.step()
        if news:
            pipe.send(CommittedReport(news))


def _next_command(engine: "Engine", inbox: "queue.SimpleQueue[EngineCommand]") -> EngineCommand | None:
    """The next command; None if there is none and the engine has work. An idle engine waits, after an audit."""
    if not engine.idle:
        if not inbox.empty() or not engine.waiting_for_peers:
            return None if inbox.empty() else inbox.get()
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=PEER_SECONDS)
        return None
    try:
        return inbox.get(timeout=AUDIT_AFTER_IDLE_S)
    except queue.Empty:
        engine.audit()
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
            pass  # what woke us is taken in by the step that follows
