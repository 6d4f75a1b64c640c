"""Signals to other processes whose effect tests can rely on."""

import os
import signal
import time
from pathlib import Path

SECONDS = 60.0


def pause(pid: int) -> None:
    """Stops a process with SIGSTOP and returns when all its threads have stopped.

    `os.kill` alone returns before that: a thread may still answer a message.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + SECONDS
    while any(_state(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    """Returns the state of a thread. It follows the name, which may contain spaces and parentheses."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
