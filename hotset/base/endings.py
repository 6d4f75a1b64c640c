"""Waits until processes have ended and the system has freed their memory."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from hotset.base.host_memory import host_memory
from hotset.base.processes import PROC, ProcessIdentity, ending_processes, has_ended
from hotset.base.status_line import ShowProgress, TaskProgress

LOGGER = logging.getLogger("hotset.processes")
POLL_SECONDS = 0.05
SAY_SECONDS = 10.0  # interval of log lines while processes are ending
QUIET_SECONDS = 1.0  # most processes that are ending have ended by then
ENDING_SECONDS = 10.0  # time for a process with little memory to end
UNPINNED_BYTES_PER_SECOND = 1e9  # rate at which even a slow machine releases pinned memory


class Child(Protocol):
    """A child process of `multiprocessing`."""

    @property
    def exitcode(self) -> int | None: ...


def exit_code(child: Child, seconds: float) -> int | None:
    """Waits until a child process has ended and its memory is free. Returns its exit code, or None after `seconds`.

    `join` would wait without a limit, because the pipe that it waits for closes before the system frees memory.
    """
    deadline = time.monotonic() + seconds
    while (code := child.exitcode) is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return code


def ending_seconds(root: Path = Path("/")) -> float:
    """Returns how long processes that use all the used memory of this machine may take to end."""
    memory = host_memory(root)
    return ENDING_SECONDS + (memory.total - memory.free) / UNPINNED_BYTES_PER_SECOND


def wait_until_ended(
    processes: Sequence[ProcessIdentity], seconds: float, waiting: Callable[[Sequence[int]], None]
) -> list[int]:
    """Waits until all processes have ended and their memory is free, at most `seconds`. Returns those that have not.

    `waiting` is called repeatedly with the processes that have not ended yet.
    """
    deadline = time.monotonic() + seconds
    while left := [process.pid for process in processes if not has_ended(process)]:
        if time.monotonic() >= deadline:
            break
        waiting(left)
        time.sleep(POLL_SECONDS)
    return left


class SayWaiting:
    """Logs a line every SAY_SECONDS while something waits for processes. The first calls log nothing."""

    def __init__(self, whose: str) -> None:
        self._whose, self._said_at = whose, time.monotonic()

    def __call__(self, names: Iterable[object]) -> None:
        if time.monotonic() >= self._said_at + SAY_SECONDS:
            self._said_at = time.monotonic()
            LOGGER.info("waiting until the memory of %s is free: %s", self._whose, ", ".join(map(str, names)))


def wait_for_ending(show: ShowProgress | None = None, proc: Path = PROC) -> None:
    """Waits until the processes of this user that are ending have freed their memory: those of an earlier engine may
    hold the memory that a new one needs. Gives up after `ending_seconds`, because a process may hang in the kernel.

    `show` shows what is waited for. Without it, the log says it.
    """
    began, seconds, say = time.monotonic(), ending_seconds(), SayWaiting("processes that are ending")
    while pids := ending_processes(proc):
        waited, names = time.monotonic() - began, ", ".join(map(str, pids))
        if waited > seconds:
            LOGGER.warning("still ending after %.0f s, and may hold memory: processes %s", waited, names)
            return
        if show is None:
            say(pids)
        elif waited > QUIET_SECONDS:
            show(TaskProgress("Waiting for the memory of an earlier engine", details=f"processes {names}"))
        time.sleep(POLL_SECONDS)
