"""An asyncio client for an engine that runs in another process."""

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hotset.base.config import EngineConfig
from hotset.base.errors import EngineStopped, HandoffLost, NoRoomLeft, RequestError
from hotset.base.request_options import DEFAULT_OPTIONS, RequestOptions
from hotset.base.sampling import SamplingParams
from hotset.base.status_line import ShowProgress, ignore_progress
from hotset.base.structure import structure_failed
from hotset.engine.frontend import Frontend, load_frontend
from hotset.engine.input_processor import InputProcessor, ModelCard
from hotset.engine.output_processor import OutputProcessor
from hotset.engine.outputs import Delta, EngineStats
from hotset.engine.process import (
    AbortRequests,
    AddRequests,
    EngineCommand,
    EngineEnding,
    EngineProcess,
    EngineReport,
    GetStats,
    OutputsReport,
    StateReport,
    StatsReport,
    StopEngine,
)
from hotset.engine.progress import POLL_SECONDS, EngineWatch, Progress

LOGGER = logging.getLogger("hotset.engine")
T = TypeVar("T")
Inbox = asyncio.Queue[Delta | EngineStopped]


@dataclass(frozen=True, slots=True)
class ReceivedStats:
    """Statistics of the engine, and the time at which they arrived."""

    stats: EngineStats
    received_at: float  # by time.monotonic

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.received_at


class EngineClient:
    """Sends requests to the engine process and returns its output. All coroutines must run on the same event loop.

    A thread watches the signs of life of the process. If the process is stopped or hangs for `step_timeout`, the thread
    kills it, and all requests fail with the reason.
    """

    def __init__(self, config: EngineConfig, front: Frontend, process: EngineProcess, card: ModelCard) -> None:
        """Wraps an engine process that is ready. Callers use `start`, which waits until it is."""
        self.model = front.card(card)
        self.tokenizer = front.tokenizer
        self.defaults = front.defaults
        self._process = process
        self._pipe = process.pipe
        self._input_processor = InputProcessor(self.model, config.seed)
        self._outputs = OutputProcessor(front.tokenizer)
        self.structure_checks = front.structure_checks(card.vocab)
        self._inboxes: dict[str, Inbox] = {}
        self._unstarted: set[str] = set()  # choices that have no token yet
        self._stats: dict[int, asyncio.Future[EngineStats]] = {}
        self._numbers = itertools.count()
        self.newest_stats: ReceivedStats | None = None
        # Called on the event loop: observers with each report of the engine's state, `on_closing` when `close` begins.
        self.state_observers: list[Callable[[StateReport], None]] = []
        self.on_closing: Callable[[], None] = lambda: None
        self._stopping = False
        self._failure: str | None = None
        self._watch = EngineWatch(process.progress, config.step_timeout)
        self._closing = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: queue.SimpleQueue[EngineCommand] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="hotset-commands", daemon=True).start()
        threading.Thread(target=self._watch_process, name="hotset-watch", daemon=True).start()

    @classmethod
    def start(
        cls, config: EngineConfig, process: EngineProcess | None = None, show: ShowProgress = ignore_progress
    ) -> "EngineClient":
        """Waits until the engine process (`process`, or a new one) is ready. `show` shows its progress.

        Raises StartupError if the engine cannot start. In this case the process has ended.
        """
        process = process or EngineProcess(config)
        try:
            return cls(config, load_frontend(config), process, process.wait_ready(show))
        except BaseException:
            process.end(0.0)
            raise

    @property
    def failure(self) -> str | None:
        """The reason why the engine no longer works, or None while it works."""
        if self._failure is None and not self._process.alive:
            return self._process.describe_end()
        return self._failure

    @property
    def alive(self) -> bool:
        return self.failure is None

    def check(self) -> None:
        """Raises EngineStopped with the reason if the engine no longer works."""
        if (failure := self.failure) is not None:
            raise EngineStopped(failure)

    @property
    def progress(self) -> Progress:
        return self._process.progress

    @property
    def seconds_without_progress(self) -> float:
        """The time for which the engine has shown no sign of life or has not advanced in a step. Small while idle."""
        return self._watch.seconds_without_progress

    @property
    def waiting(self) -> int:
        """The number of accepted choices that have no token yet."""
        return len(self._unstarted)

    @property
    def role(self) -> str:
        return self.model.role

    @property
    def control(self) -> str | None:
        """The address at which peers reach the engine's handoff agent, or None with role 'both'."""
        return self.model.control

    async def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> AsyncGenerator[Delta, None]:
        """Yields the deltas of all `n` choices as they arrive; each choice ends with a finish_reason.

        The caller has checked the structure of the answer (`structure_checks`).

        Raises RequestError before the first delta if the request is invalid, HandoffLost if the KV of the prompt does
        not arrive, NoRoomLeft if pages in quarantine leave too little memory for the request, and EngineStopped if the
        engine is already draining, or stops or dies before the request has ended. Closing the iterator aborts the
        request and frees its pages.
        """
        self.listen()
        if self._stopping:
            raise EngineStopped("the engine is stopping")
        self.check()
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids", param="stop")
        choices = self._input_processor.accept(request_id, prompt, params, options)
        inbox: Inbox = asyncio.Queue()
        ids = [choice.request_id for choice in choices]
        self._inboxes.update(dict.fromkeys(ids, inbox))
        self._unstarted.update(ids)
        self._outputs.add(choices)
        self._outbox.put(AddRequests(choices))
        num_open = len(choices)
        try:
            while num_open:
                delta = await inbox.get()
                if isinstance(delta, EngineStopped):
                    raise delta
                if delta.finish_reason == "lost":
                    peer = "" if options.prefill_at is None else f"the prefill worker at {options.prefill_at} failed: "
                    raise HandoffLost(f"{peer}{delta.error}")
                if delta.finish_reason == "no_room":
                    raise NoRoomLeft(delta.error)
                if delta.finish_reason == "structure":
                    raise structure_failed(delta.error)
                num_open -= delta.finish_reason is not None
                yield delta
        finally:
            self._abandon(ids)

    async def stats(self) -> EngineStats:
        """Returns the engine's statistics after its current step, which can take long.

        Raises EngineStopped if the engine stops, dies or hangs.
        """
        self.listen()
        self.check()
        number = next(self._numbers)
        answer: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats[number] = answer
        self._outbox.put(GetStats(number))
        try:
            return await answer
        finally:
            self._stats.pop(number, None)

    async def close(self, drain_seconds: float) -> None:
        """Accepts no more requests, waits for open requests, then for open handoffs, and stops the process.

        Both waits together take at most `drain_seconds`, but handoffs get at least `progress.DRAIN_SECONDS`. A second
        call cuts the wait for handoffs short.
        """
        self._stopping = True
        self.on_closing()
        deadline = asyncio.get_running_loop().time() + drain_seconds
        while self._inboxes and self.alive and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self._closing.set()
        self._fail(EngineStopped("the server is shutting down"))
        remaining = max(0.0, deadline - asyncio.get_running_loop().time())
        self._outbox.put(StopEngine(remaining))
        await asyncio.to_thread(self._process.end, remaining + self._process.stop_seconds)
        if self.tokenizer is not None:
            self.tokenizer.close()
        self._outbox.put(StopEngine())  # sending to the dead process fails, which ends the thread of `_write`

    def _abandon(self, request_ids: Sequence[str]) -> None:
        """Removes choices from this client, and aborts those that have not ended."""
        for request_id in request_ids:
            self._inboxes.pop(request_id, None)
        self._unstarted.difference_update(request_ids)
        still_open = self._outputs.forget(request_ids)
        if still_open:
            self._outbox.put(AbortRequests(still_open, "abort"))

    def listen(self) -> None:
        """Starts, on the first call, the thread that reads reports and passes them to the running event loop.

        `generate` and `stats` call it. If neither is called soon, the caller must call it: the engine reports its state
        repeatedly, and blocks when the pipe is full.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            threading.Thread(target=self._read, args=(self._loop,), name="hotset-reports", daemon=True).start()

    def _watch_process(self) -> None:
        """Kills the process if it is stopped or hangs. The end of the pipe then fails its requests."""
        while not self._closing.wait(POLL_SECONDS) and self.alive:
            if (problem := self._watch.problem()) is not None:
                LOGGER.error("%s; it is killed", problem)
                self._failure = problem
                self._process.kill()

    def _write(self) -> None:
        """Sends commands from a separate thread, because a long prompt can fill the pipe and block the event loop."""
        while True:
            command = self._outbox.get()
            try:
                self._pipe.send(command)
            except OSError:
                return

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                report: EngineReport = self._pipe.recv()
            except (EOFError, OSError):
                self._failure = self._failure or self._process.describe_end()
                self._call(loop, self._fail, EngineStopped(self._failure))
                return
            if isinstance(report, EngineEnding):
                self._failure = report.reason
                self._call(loop, self._fail, EngineStopped(report.reason))
            else:
                self._call(loop, self._handle, report)

    @staticmethod
    def _call(loop: asyncio.AbstractEventLoop, callback: Callable[[T], None], argument: T) -> None:
        """Schedules `callback(argument)` on the loop. Does nothing if the loop is closed."""
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(callback, argument)

    def _handle(self, report: EngineReport) -> None:
        match report:
            case OutputsReport(outputs, state):
                if state is not None:
                    self._record_stats(state.stats)
                    for observe in self.state_observers:
                        observe(state)
                deltas, stopped = self._outputs.process(outputs)
                if stopped:
                    self._outbox.put(AbortRequests(stopped, "stop"))
                self._unstarted.difference_update(outputs.request_ids)
                for request_id, delta in deltas:
                    self._inboxes[request_id].put_nowait(delta)
            case StatsReport(number, stats):
                self._record_stats(stats)
                answer = self._stats.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(stats)

    def _record_stats(self, stats: EngineStats) -> None:
        self.newest_stats = ReceivedStats(stats, time.monotonic())

    def _fail(self, error: EngineStopped) -> None:
        """Ends every open request and every pending call of `stats` with `error`."""
        for inbox in set(self._inboxes.values()):
            inbox.put_nowait(error)
        for answer in self._stats.values():
            if not answer.done():
                answer.set_exception(error)
