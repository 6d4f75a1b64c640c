"""Runs the engine in a child process. HTTP never delays a step, and the server survives a crash of the engine.

The parent sends `AddRequests`, `AbortRequests`, `GetStats` and `StopEngine`. The child sends `EngineReady` or
`EngineFailed`, then `OutputsReport` and `StatsReport`. If the parent dies, the pipe closes and the child stops. If the
child dies, the parent fails its open requests.

Importing this module does not import torch. A parent can therefore start the child first, and import its own modules
while the child loads the model.
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
PEER_POLL_SECONDS = 0.02  # interval between steps while all open requests wait for peers


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
    `timeouts.DRAIN_SECONDS` if that is longer; a second `StopEngine` cuts this time short."""

    drain_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WakeEngine:
    """Wakes the step loop. The child sends it to itself when its engine calls `wake` (see `build_engine`)."""


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
    outputs: TokenOutputs


@dataclass(frozen=True, slots=True)
class StatsReport:
    number: int
    stats: EngineStats


EngineCommand = AddRequests | AbortRequests | GetStats | StopEngine | WakeEngine
EngineReport = EngineReady | EngineFailed | OutputsReport | StatsReport


class EngineProcess:
    """The handle through which the parent controls the child process."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts the child, which loads the model. Does not wait for it."""
        context = multiprocessing.get_context("spawn")
        self.pipe, child_end = context.Pipe()
        self._process = context.Process(target=_child, args=(config, child_end), name="hotset-engine")
        self._process.start()
        child_end.close()
        self.stop_seconds = STOP_SECONDS  # time that the child can take to stop, in addition to its drain

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def wait_ready(self) -> ModelCard:
        """Waits until the engine is ready. Raises StartupError if it cannot start or if the child dies."""
        try:
            report: EngineReport = self.pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise StartupError(f"the engine process died while starting (exit code {code})") from None
        if isinstance(report, EngineFailed):
            self._process.join(STOP_SECONDS)
            if report.trace is not None:
                print(report.trace, file=sys.stderr)
            raise report.error
        assert isinstance(report, EngineReady)
        self.stop_seconds = STOP_SECONDS + report.closing_seconds
        return report.card

    def end(self, seconds: float | None = None) -> None:
        """Waits up to `seconds` for the child to exit, and kills it if it still runs. Idempotent.

        The default of `seconds` is `stop_seconds`. For an orderly exit, the caller sends `StopEngine` first.
        """
        self._process.join(self.stop_seconds if seconds is None else seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _child(config: EngineConfig, pipe: Connection) -> None:
    """Builds the engine, reports the result, and runs steps until it receives `StopEngine` or the parent has died."""
    # The parent handles signals. It drains its requests and sends `StopEngine`; if it dies, the pipe closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log_to_stderr()  # a new process does not inherit the parent's logging
    inbox: queue.SimpleQueue[EngineCommand] = queue.SimpleQueue()
    try:
        engine = _build(config, pipe, lambda: inbox.put(WakeEngine()))
        if engine is not None:
            threading.Thread(target=_read_commands, args=(pipe, inbox), daemon=True).start()
            stop = StopEngine()
            try:
                stop = _run(engine, pipe, inbox)
            finally:
                engine.close(stop.drain_seconds, lambda: _stop_requested(inbox))
    except BrokenPipeError:
        return  # the parent has died


def _build(config: EngineConfig, pipe: Connection, wake: Callable[[], None]) -> "Engine | None":
    """Builds the engine and reports the result. Returns None if the engine cannot be built."""
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
    """Reads the pipe in a separate thread, so that the parent does not block while a long step runs."""
    while True:
        try:
            inbox.put(pipe.recv())
        except (EOFError, OSError):
            inbox.put(StopEngine())
            return


def _stop_requested(inbox: "queue.SimpleQueue[EngineCommand]") -> bool:
    """Returns True if the inbox contains a `StopEngine`. Removes all commands up to the first `StopEngine`, or all if
    there is none."""
    return any(isinstance(inbox.get(), StopEngine) for _ in range(inbox.qsize()))


def _run(engine: "Engine", pipe: Connection, inbox: "queue.SimpleQueue[EngineCommand]") -> StopEngine:
    """Runs steps until it receives `StopEngine`. Returns that command."""
    while True:
        command = _next_command(engine, inbox)
        while command is not None:
            if isinstance(command, StopEngine):
                return command
            _handle(engine, pipe, command)
            command = None if inbox.empty() else inbox.get()
        outputs = engine.step()
        if outputs:
            pipe.send(OutputsReport(outputs))


def _next_command(engine: "Engine", inbox: "queue.SimpleQueue[EngineCommand]") -> EngineCommand | None:
    """Returns the next command, or None if there is none and the engine has work. If all open requests wait for peers,
    first waits up to PEER_POLL_SECONDS for a command. If the engine is idle, waits until a command comes, and audits
    the engine if none has come for AUDIT_AFTER_IDLE_S seconds."""
    if not engine.idle:
        if not inbox.empty() or not engine.waiting_for_peers:
            return None if inbox.empty() else inbox.get()
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=PEER_POLL_SECONDS)
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
            pass  # `_run` calls `step` next, which handles the agent's event or reports the dead worker
