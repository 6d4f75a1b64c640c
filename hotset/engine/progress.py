"""Signs of life: a process counts its progress in shared memory, and the process that started it notices when the
counters stand still. Also the time limits of hung engines and of stopping an engine. The CLI uses this module too, so
it must not import torch.

There are two signs. A *beat* comes from a thread of its own every BEAT_SECONDS, so a process without beats is stopped.
The main loop *advances* with every command, step and layer, so a process with beats that does not advance hangs. The
usual time of a layer depends on model and machine. The process therefore also reports the longest time between two
advances in its last RECENT_STEPS steps.
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from typing import Any

from hotset.base.endings import UNPINNED_BYTES_PER_SECOND

BEAT_SECONDS = 0.5
POLL_SECONDS = 0.25  # interval between two looks at the counters
MAX_POLL_SECONDS = 1.0  # a watcher that was itself paused for longer counts only this much of the pause
RECENT_STEPS = 100
FIRST_STEP_SECONDS = 600.0  # additional time for the first step, which compiles kernels
STALL_MARGIN_SECONDS = 5.0  # time between the limits for a process without beats and for one that does not advance
STOP_SECONDS = 10.0  # time for a child process to finish its step and exit before it is killed
LOST_PARENT_SECONDS = 5.0  # time for an engine process to finish its step after its parent has died
DRAIN_SECONDS = 5.0  # minimum time for open handoffs to finish
ENDPOINT_SECONDS = 20.0  # time for the handoff endpoint to close after its drain
BEATS, ADVANCES, WAITING, STEPS, STEP_NS, OPEN_REQUESTS, EXPECTED_NS = range(7)


class Progress:
    """Counters in shared memory. One process writes them; the process that started it reads them without waiting."""

    def __init__(self, context: BaseContext, on_beat: Callable[[Sequence[int]], None] | None = None) -> None:
        """The object must be an argument of a process that `context` starts. A process on another node has an object of
        its own, and sends its counters with every beat: `on_beat` is called with them."""
        self._counters: Any = context.RawArray(ctypes.c_int64, 7)
        self._on_beat = on_beat
        self._advanced_ns = 0
        self._longest_ns = 0  # the longest time between two advances since the newest step
        self._longest_of_steps: deque[int] = deque(maxlen=RECENT_STEPS)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Counts beats from another thread during the block."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_SECONDS):
                self._counters[BEATS] += 1
                if self._on_beat is not None:
                    self._on_beat(list(self._counters))

        self._advanced_ns, self._longest_ns = time.monotonic_ns(), 0  # steps during start-up do not count
        thread = threading.Thread(target=beat, name="hotset-beats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks the main loop as waiting for commands during the block. It need not advance meanwhile."""
        self._counters[WAITING] = 1
        try:
            yield
        finally:
            self._advanced_ns = time.monotonic_ns()
            self._counters[WAITING] = 0

    def advance(self) -> None:
        """Counts a command, a layer, or another small part of the main loop's work."""
        now = time.monotonic_ns()
        self._longest_ns = max(self._longest_ns, now - self._advanced_ns)
        self._advanced_ns = now
        self._counters[ADVANCES] += 1

    def record_step(self, steps: int, open_requests: int = 0) -> None:
        """Records the number of steps since start, and how many requests are open after the newest one."""
        self._counters[OPEN_REQUESTS] = open_requests
        if steps != self._counters[STEPS]:
            self._longest_of_steps.append(self._longest_ns)
            self._longest_ns = 0
            self._counters[EXPECTED_NS] = max(self._longest_of_steps)
            self._counters[STEP_NS] = time.monotonic_ns()
            self._counters[STEPS] = steps

    def set_counters(self, counters: Sequence[int]) -> None:
        """Sets the counters to those that a process on another node has sent. The first message of such a process has
        no counters."""
        self._counters[: len(counters)] = counters

    @property
    def beats(self) -> int:
        return int(self._counters[BEATS])

    @property
    def advances(self) -> int:
        return int(self._counters[ADVANCES])

    @property
    def activity(self) -> int:
        """A number that changes as long as the main loop advances, or waits for commands in a process that runs."""
        return self.beats if self._counters[WAITING] else self.advances

    @property
    def steps(self) -> int:
        return int(self._counters[STEPS])

    @property
    def open_requests(self) -> int:
        return int(self._counters[OPEN_REQUESTS])

    @property
    def expected_seconds(self) -> float:
        """The longest time between two advances in the last RECENT_STEPS steps."""
        return float(self._counters[EXPECTED_NS]) / 1e9

    @property
    def seconds_since_step(self) -> float | None:
        """The time since the newest step ended, or None if there was none. Processes of one machine share the clock."""
        return (time.monotonic_ns() - self._counters[STEP_NS]) / 1e9 if self.steps else None


class StallTimer:
    """Measures how long a counter has not changed.

    It counts the time between its own looks, up to `max_poll_seconds` each. A pause of the watcher itself therefore
    does not count: if the whole machine or process group was suspended, the watched process could not advance either.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_poll_seconds: float = MAX_POLL_SECONDS) -> None:
        self._clock, self._max_poll_seconds = clock, max_poll_seconds
        self._counter: int | None = None
        self._looked_at = 0.0
        self._seconds = 0.0

    def seconds(self, counter: int) -> float:
        """Looks at the counter, and returns how long it has had this value."""
        now = self._clock()
        if counter != self._counter:
            self._counter, self._seconds = counter, 0.0
        else:
            self._seconds += min(now - self._looked_at, self._max_poll_seconds)
        self._looked_at = now
        return self._seconds


def stall_limit(step_timeout: float, steps: int, expected_seconds: float) -> float:
    """Returns how long a step may go on without finishing a layer.

    `steps` is the number of steps that have ended. In the newest of them, a layer took up to `expected_seconds`. The
    limit for beats is shorter. A stopped worker is therefore reported before the workers that wait for it.
    """
    return step_timeout + STALL_MARGIN_SECONDS + expected_seconds + (0.0 if steps else FIRST_STEP_SECONDS)


class EngineWatch:
    """Notices that an engine process is stopped or hangs."""

    def __init__(self, progress: Progress, step_timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds_without_progress = 0.0
        self._progress = progress
        self._step_timeout = step_timeout
        self._silence, self._stall = StallTimer(clock), StallTimer(clock)

    def problem(self) -> str | None:
        """Looks at the counters. Returns what is wrong, or None. The caller repeats it every POLL_SECONDS."""
        silent = self._silence.seconds(self._progress.beats)
        stalled = self._stall.seconds(self._progress.activity)
        self.seconds_without_progress = max(silent, stalled)
        steps = self._progress.steps
        limit = stall_limit(self._step_timeout, steps, self._progress.expected_seconds)
        if silent > self._step_timeout:
            return f"the engine process has shown no sign of life for {self._step_timeout:g} s (--step-timeout)"
        if stalled > limit:
            return f"step {steps + 1} of the engine has made no progress for {limit:.0f} s (--step-timeout)"
        return None


def closing_seconds(pinned_bytes: int, with_endpoint: bool) -> float:
    """Returns the time that closing an engine can take on a slow machine, in addition to the requested drain."""
    return (DRAIN_SECONDS + ENDPOINT_SECONDS if with_endpoint else 0.0) + pinned_bytes / UNPINNED_BYTES_PER_SECOND
