"""Pauses other processes, and looks at what they hold."""

import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

TIMEOUT_SECONDS = 60.0


def pause(pid: int) -> None:
    """Stops a process with SIGSTOP and returns when all its threads have stopped.

    `os.kill` returns earlier, when a thread of the process can still answer a message.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while any(_state(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} did not stop within {TIMEOUT_SECONDS:g} s"
        time.sleep(0.001)


def is_running(pid: int) -> bool:
    """Returns True unless the process has ended. A zombie has ended."""
    try:
        return _state(Path(f"/proc/{pid}")) != "Z"
    except OSError:
        return False


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Returns the files in /dev/shm that the processes have mapped. Tests in parallel have others."""
    maps = "\n".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids if is_running(pid))
    paths = {Path("/dev/shm", name) for name in re.findall(r"/dev/shm/(\S+)$", maps, re.MULTILINE)}
    return {path for path in paths if path.exists()}


def _state(task: Path) -> str:
    """Returns the state of a thread. In the file, the state follows the thread's name in parentheses, and the name can
    itself contain spaces and parentheses."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
