"""Identifies this process to peers, and observes whether other processes of this machine have ended or are stopped."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
DEAD_STATES = ("Z", "X")  # states of a thread that runs no more code: zombie, dead
STOPPED_STATE = "T"  # state of a process that a signal has stopped


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identifies a process. Other processes of the same machine and pid namespace can observe whether it has ended."""

    boot_id: str  # random number that the kernel chose when the machine started
    pid_namespace: str
    pid: int
    start_time: int  # in clock ticks since the machine started; distinguishes it from later processes with this pid


def this_process() -> ProcessIdentity | None:
    """Returns the identity of this process, or None if the system does not provide one."""
    try:
        if os.readlink(PROC / "self") != str(os.getpid()):
            return None  # /proc shows the processes of another namespace
        boot_id = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return ProcessIdentity(boot_id, os.readlink(PROC / "self/ns/pid"), os.getpid(), _start_time(os.getpid()))
    except (OSError, ValueError, IndexError):
        return None


def is_observable(process: ProcessIdentity | None, observer: ProcessIdentity | None) -> bool:
    """Returns whether `observer` can see `process`: both run on one machine and have the same pid namespace."""
    if process is None or observer is None:
        return False
    return (process.boot_id, process.pid_namespace) == (observer.boot_id, observer.pid_namespace)


def has_ended(process: ProcessIdentity) -> bool:
    """Returns whether an observable process has ended. Returns False if that cannot be determined.

    A zombie has ended only if all its threads have: the first thread of a process may end before the others do. A
    thread that is a zombie has left its last system call, has closed its files and uses no memory any more.
    """
    try:
        os.kill(process.pid, 0)  # unlike a missing entry in /proc, the answer does not depend on how /proc is mounted
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it exists, but belongs to another user
    try:
        if _start_time(process.pid) != process.start_time:
            return True
        tasks = list((PROC / str(process.pid) / "task").iterdir())
        return bool(tasks) and all(_stat_fields(task)[0] in DEAD_STATES for task in tasks)
    except (OSError, ValueError, IndexError):
        return False  # the process ended during these reads, or they are not allowed: the next call decides


def find_stopped(pid: int) -> int | None:
    """Returns the id of a process that a signal has stopped: `pid` or one of its descendants. None if none is."""
    with suppress(OSError, IndexError):  # the process has ended
        if _stat_fields(PROC / str(pid))[0] == STOPPED_STATE:
            return pid
    return next((found for child in _children(pid) if (found := find_stopped(child)) is not None), None)


def _children(pid: int) -> list[int]:
    """Returns the children of a process. Returns an empty list if the process has ended."""
    children = list[int]()
    with suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            with suppress(OSError):  # the thread has ended
                children += map(int, (task / "children").read_text().split())
    return children


def _start_time(pid: int) -> int:
    return int(_stat_fields(PROC / str(pid))[19])


def _stat_fields(folder: Path) -> list[str]:
    """Returns the fields of a `stat` file from the state on. The field before the state is the name in parentheses,
    which may itself contain spaces and parentheses."""
    return (folder / "stat").read_text().rpartition(")")[2].split()
