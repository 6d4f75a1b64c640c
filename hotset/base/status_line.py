"""Shows how far a long task is: one line that is redrawn on a terminal, and a line in the log every ten seconds
elsewhere."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from hotset.base.units import show_bytes

LOGGER = logging.getLogger("hotset.progress")

DRAW_SECONDS = 0.2
LOG_SECONDS = 10.0
PACE_SECONDS = 1.0  # a shorter time says little about the rate
BAR_WIDTH = 20
DEFAULT_COLUMNS = 80
ERASE_TO_END = "\x1b[K"


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """How far a task is: `done` of `total` bytes or items. `total` is None while it is not known."""

    title: str
    done: int = 0
    total: int | None = None
    in_bytes: bool = False
    details: str = ""  # shown after the amount

    @property
    def amount(self) -> str:
        """Text like "0.4 GiB of 1.2 GiB" or "3 of 12". If the total is not known, only the details."""
        details = f", {self.details}" if self.details else ""
        if not self.total:
            return self.details
        if self.in_bytes:
            return f"{show_bytes(self.done)} of {show_bytes(self.total)}{details}"
        return f"{self.done} of {self.total}{details}"


ShowProgress = Callable[[TaskProgress], None]


def ignore_progress(progress: TaskProgress) -> None:
    """Shows nothing."""


def show_counts(show: ShowProgress, title: str, *, in_bytes: bool = False) -> Callable[[int, int], None]:
    """Shows that a task has begun. Returns the function `(done, total)` that shows how far it is."""
    show(TaskProgress(title))
    return lambda done, total: show(TaskProgress(title, done, total, in_bytes))


class TaskTimer:
    """Passes the progress of tasks on, and measures how long each of them takes. One begins when another ends."""

    def __init__(self, show: ShowProgress, clock: Callable[[], float] = time.monotonic) -> None:
        self._show, self._clock = show, clock
        self._began = self._since = clock()
        self._title = "preparing"  # what comes before the first task
        self._seconds: dict[str, float] = {}

    def show(self, progress: TaskProgress) -> None:
        if progress.title != self._title:
            self._end_task()
            self._title = progress.title
        self._show(progress)

    def summary(self) -> str:
        """Returns text like "24.1 s: preparing 0.3, Loading m 9.0", with the seconds of all tasks so far."""
        self._end_task()
        tasks = ", ".join(f"{title} {seconds:.1f}" for title, seconds in self._seconds.items())
        return f"{self._since - self._began:.1f} s: {tasks}"

    def _end_task(self) -> None:
        now = self._clock()
        self._seconds[self._title] = self._seconds.get(self._title, 0.0) + now - self._since
        self._since = now


class StatusLine:
    """Shows the tasks that run in a `with` block, one after the other.

    On a terminal the line is erased at the end of the block, also after an error or Ctrl-C, so that the next message
    starts on an empty line. The cursor is never hidden and rests at the start of the line. If this process is killed,
    the terminal is therefore still usable, and messages of other processes overwrite the line.
    """

    def __init__(self, title: str, stream: TextIO | None = None, log_seconds: float | None = None) -> None:
        """`stream` is standard error by default, and `log_seconds` is LOG_SECONDS."""
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._interval = DRAW_SECONDS if self._is_terminal else log_seconds or LOG_SECONDS
        self._progress, self._since = TaskProgress(title), time.monotonic()
        self._done_before = 0  # of the current task, when it was first shown
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotset-status", daemon=True)

    def show(self, progress: TaskProgress) -> None:
        """Records how far the current task is. A new title begins a new task."""
        with self._lock:
            if progress.title != self._progress.title:
                self._since, self._done_before = time.monotonic(), progress.done
            self._progress = progress

    def print(self, text: str) -> None:
        """Prints a line of text above the status line."""
        with self._lock:
            self._write(f"{text}{ERASE_TO_END}\n" if self._is_terminal else f"{text}\n")

    def __enter__(self) -> "StatusLine":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._is_terminal:
            self._write(ERASE_TO_END)

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            with self._lock:
                if self._is_terminal:
                    self._write(f"{self._line()}{ERASE_TO_END}\r")
                else:
                    seconds = time.monotonic() - self._since
                    amount = f": {self._progress.amount}" if self._progress.amount else ""
                    LOGGER.info("%s%s%s, %.0f s", self._progress.title, amount, self._pace(seconds), seconds)

    def _line(self) -> str:
        """The text on a terminal, cut to the width of the terminal."""
        progress, seconds = self._progress, time.monotonic() - self._since
        parts = [progress.title]
        if progress.total:
            filled = min(BAR_WIDTH, BAR_WIDTH * progress.done // progress.total)
            full, empty = "━─" if (self._stream.encoding or "").lower().startswith("utf") else "#-"
            parts.append(full * filled + empty * (BAR_WIDTH - filled))
        if progress.amount:
            parts.append(f"{progress.amount}{self._pace(seconds)},")
        return " ".join([*parts, f"{seconds:.0f} s"])[: self._columns() - 1]

    def _pace(self, seconds: float) -> str:
        """Text like ", 3.1 GB/s, 9 s left" for a task that has counted bytes for some seconds, else nothing."""
        progress = self._progress
        done = progress.done - self._done_before
        if not progress.in_bytes or progress.total is None or done <= 0 or seconds < PACE_SECONDS:
            return ""
        rate = done / seconds
        return f", {rate / 1e9:.1f} GB/s, {(progress.total - progress.done) / rate:.0f} s left"

    def _columns(self) -> int:
        with suppress(OSError, ValueError):  # the stream is no file
            return os.get_terminal_size(self._stream.fileno()).columns or DEFAULT_COLUMNS
        return DEFAULT_COLUMNS

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone
            self._stream.write(text)
            self._stream.flush()
