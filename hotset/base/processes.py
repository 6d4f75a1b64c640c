"""Identifies processes, and observes whether other processes of this machine have ended, are ending or are stopped.

A process that is killed has not ended at once: the system first frees its memory. Eight processes that had pinned
32 GiB of shared memory took 8.6 s, although their pipes closed at once (docs/internals/memory.md).
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
DEAD_STATES = ("Z", "X")  # states of a thread that runs no more code: zombie, dead
STOPPED_STATE = "T"  # state of a process that a signal has stopped
STATE, PARENT, SESSION, FLAGS, START_TIME = 0, 1, 3, 6, 19  # fields of a `stat` file, from the state on
PF_EXITING = 0x4  # flag of a thread that ends
SIGKILL_BIT = 1 << 8  # SIGKILL in a set of signals
ENDING_NAME = "hotset-ending"  # name of a process that ends because the process that started it has died


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identifies a process. Other processes of the same machine and pid namespace can observe whether it has ended."""

    boot_id: str  # random number that the kernel chose when the machine started
    pid_namespace: str
    pid: int
    start_time: int  # in clock ticks since the machine started; distinguishes it from later processes with this pid


def this_process() -> ProcessIdentity | None:
    """Returns the identity of this process, or None if the system does not provide one."""
    return identify(os.getpid())


def identify(pid: int) -> ProcessIdentity | None:
    """Returns the identity of a process of this pid namespace. None if it has ended, or if the system does not provide
    one."""
    try:
        if os.readlink(PROC / "self") != str(os.getpid()):
            return None  # /proc shows the processes of another namespace
        boot_id = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return ProcessIdentity(boot_id, os.readlink(PROC / "self/ns/pid"), pid, _start_time(pid))
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
        return bool(tasks) and all(_stat_fields(task)[STATE] in DEAD_STATES for task in tasks)
    except (OSError, ValueError, IndexError):
        return False  # the process ended during these reads, or they are not allowed: the next call decides


def find_stopped(pid: int) -> int | None:
    """Returns the id of a process that a signal has stopped: `pid` or one of its descendants. None if none is."""
    with suppress(OSError, IndexError):  # the process has ended
        if _stat_fields(PROC / str(pid))[STATE] == STOPPED_STATE:
            return pid
    return next((found for child in _children(pid) if (found := find_stopped(child)) is not None), None)


def descendants(pid: int) -> list[ProcessIdentity]:
    """Returns the processes that a process and its descendants have started, and that have not ended."""
    children = [identity for child in _children(pid) if (identity := identify(child)) is not None]
    return [*children, *(each for child in children for each in descendants(child.pid))]


def session_members(session: int) -> list[ProcessIdentity]:
    """Returns the processes of a session that have not ended. A process stays in its session when its parent dies."""
    members = []
    for pid, fields in _processes(PROC):
        if int(fields[SESSION]) == session and (identity := identify(pid)) is not None and not has_ended(identity):
            members.append(identity)
    return members


def ending_processes(proc: Path = PROC) -> list[int]:
    """Returns the processes of this user that are ending: those that the system has begun to end, and those with
    ENDING_NAME. They may hold memory for some time."""
    found = []
    for pid, _ in _processes(proc):
        folder = proc / str(pid)
        with suppress(OSError, IndexError, ValueError):  # the process has ended
            if folder.stat().st_uid == os.getuid() and pid != os.getpid() and _is_ending(folder):
                found.append(pid)
    return found


def name_as_ending() -> None:
    """Lets other processes see that this process has begun to end (`ending_processes`)."""
    with suppress(OSError):
        (PROC / "self/comm").write_text(ENDING_NAME)


def _is_ending(folder: Path) -> bool:
    tasks = [fields for task in (folder / "task").iterdir() if (fields := _stat_fields(task))]
    running = [fields for fields in tasks if fields[STATE] not in DEAD_STATES]
    if not running:
        return False  # it has ended, and only its exit code is left
    if (folder / "comm").read_text().strip() == ENDING_NAME:
        return True
    pending = (line.split() for line in (folder / "status").read_text().splitlines() if line[3:7] == "Pnd:")
    is_killed = any(int(signals, 16) & SIGKILL_BIT for _, signals in pending)  # also while it waits for a device
    return is_killed or all(int(fields[FLAGS]) & PF_EXITING for fields in running)


def _processes(proc: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the id of every process, and the fields of its `stat` file."""
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # the process has ended
                if fields := _stat_fields(folder):
                    yield int(folder.name), fields


def _children(pid: int) -> list[int]:
    """Returns the children of a process. Returns an empty list if the process has ended."""
    children = list[int]()
    with suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            with suppress(OSError):  # the thread has ended
                children += map(int, (task / "children").read_text().split())
    return children


def _start_time(pid: int) -> int:
    return int(_stat_fields(PROC / str(pid))[START_TIME])


def _stat_fields(folder: Path) -> list[str]:
    """Returns the fields of a `stat` file from the state on. The field before the state is the name in parentheses,
    which may itself contain spaces and parentheses."""
    return (folder / "stat").read_text().rpartition(")")[2].split()
