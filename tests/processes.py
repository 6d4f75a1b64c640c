"""Starts, finds and pauses other processes, waits for their end, and looks at what they hold.

A process or a thread can end while its files are being read. It is left out of the results then.
"""

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 60.0


def fork_server() -> Any:
    """Returns a multiprocessing context whose processes are forks of one process that has done the slow imports, and
    opens no engine. With "spawn", every process would import torch, which takes seconds of CPU time."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "nixl"])
    return context


def pause(pid: int) -> None:
    """Stops a process with SIGSTOP, and returns when all its threads have stopped.

    `os.kill` alone returns earlier: a thread of the process may then still answer a message.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while any(_state(task) not in ("T", None) for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} did not stop within {TIMEOUT_SECONDS:g} s"
        time.sleep(0.001)


def is_running(pid: int) -> bool:
    """Returns True unless the process has ended. A zombie has ended."""
    return state_of(pid) not in ("Z", None)


def state_of(pid: int) -> str | None:
    """Returns the state of a process as a letter (R: it computes), None if it has ended."""
    return _state(Path(f"/proc/{pid}"))


def wait_until_ended(pids: Iterable[int]) -> None:
    """Waits until all these processes have ended."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while running := {pid for pid in pids if is_running(pid)}:
        assert time.monotonic() < deadline, f"these processes still run: {running}"
        time.sleep(0.02)


def children_of(pid: int) -> set[int]:
    """Returns the running child processes of a process."""
    return {child for child, parent in _parents().items() if parent == pid}


def parent_of(pid: int) -> int:
    """Returns the parent of a running process."""
    return _parents()[pid]


def descendants_of(pid: int) -> set[int]:
    """Returns the running processes that `pid` and its descendants have started."""
    parents = _parents()
    descendants, newest = set[int](), {pid}
    while newest := {child for child, parent in parents.items() if parent in newest}:
        descendants |= newest
    return descendants


def command_line(pid: int) -> bytes:
    """Returns the arguments of a process, each with a null byte at its end. Returns nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_spawned(pid: int) -> bool:
    """Returns whether multiprocessing has spawned this process."""
    return b"spawn_main" in command_line(pid)


def resident_mib(pid: int) -> float:
    """Returns the resident memory of a process, 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Returns the files in /dev/shm that these processes have mapped. Other files there belong to other tests."""
    maps = "\n".join(_maps(pid) for pid in pids)
    paths = {Path("/dev/shm", name) for name in re.findall(r"/dev/shm/(\S+)$", maps, re.MULTILINE)}
    return {path for path in paths if path.exists()}


def _maps(pid: int) -> str:
    """Returns the mapped memory of a process. Returns nothing if the process has ended."""
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def _parents() -> dict[int, int]:
    """Returns the parent of every running process."""
    stats = {int(path.name): _stat(path) for path in Path("/proc").glob("[0-9]*")}
    return {pid: int(stat[1]) for pid, stat in stats.items() if stat and stat[0] != "Z"}


def _state(task: Path) -> str | None:
    """Returns the state of a process or thread, None if it has ended."""
    stat = _stat(task)
    return stat[0] if stat else None


def _stat(task: Path) -> list[str]:
    """Returns the fields of a `stat` file from the state on, none if the process or thread has ended.

    The fields follow the name in parentheses, which can itself contain spaces and parentheses.
    """
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
