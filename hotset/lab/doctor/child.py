"""A process that calls functions for this one, and that can be killed with all processes that it has started.

Checks run in it because they can hang or crash in a driver, in NCCL or in a file system.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, TypeVar

from hotset.base.errors import HotsetError
from hotset.base.parent_death import kill_if_parent_dies

T = TypeVar("T")
END_SECONDS = 5.0  # time for the process to end, and for the system to remove it once it is killed
LINE_BYTES = 500  # of the last line of its output, in an error


class CallFailed(HotsetError):
    """The function raised an unexpected error, did not finish in time, or its process died."""


class ChildProcess:
    """Owns the process, which ends with the `with` block, or when a call does not finish. What it prints is kept back:
    libraries print anything."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        start = f"from {__name__} import answer_calls; answer_calls({theirs.fileno()}, {os.getpid()})"
        self._output = os.memfd_create("hotset-doctor-output")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # its processes can be killed together, and Ctrl-C reaches only this one
            )
        self._connection = Connection(ours.detach())

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, function: Callable[..., T], *arguments: Any, seconds: float) -> T:
        """Returns `function(*arguments)`. The function must be at the top level of a module.

        Raises the function's HotsetError, and CallFailed for any other failure. If the function takes longer than
        `seconds` or its process dies, the process has ended afterwards.
        """
        answer: Any  # the error or None, and the result
        try:
            self._connection.send((function, arguments))
            finished = self._connection.poll(seconds)
            answer = self._connection.recv() if finished else (CallFailed(f"did not finish within {seconds:g} s"), None)
        except (EOFError, OSError):
            finished, answer = False, (CallFailed(self._death()), None)
        if not finished:
            self._kill()
        error, result = answer
        if error is not None:
            raise error
        value: T = result
        return value

    def __enter__(self) -> "ChildProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        if kind is None:  # else a call may be in progress
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        self._kill()
        os.close(self._output)

    def _kill(self) -> None:
        """Kills the process and those that it has started. A process that waits in a driver may live on."""
        if self.alive:
            os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)

    def _death(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        code = self._process.returncode
        how = "ended unexpectedly" if code is None or code >= 0 else f"was killed by signal {-code}"
        output = os.pread(self._output, os.fstat(self._output).st_size, 0)
        lines = output.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"its process {how}{': ' if last else ''}{last[:LINE_BYTES]}"


def first_line(error: BaseException) -> str:
    """Returns the type and the first line of an error's message."""
    lines = str(error).strip().split("\n")
    return f"{type(error).__name__}: {lines[0][:LINE_BYTES]}" if lines[0] else type(error).__name__


def answer_calls(descriptor: int, parent: int) -> None:
    """Runs in the child: calls the functions that arrive, until the parent closes the connection or dies."""
    kill_if_parent_dies(parent)
    connection = Connection(descriptor)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((None, function(*arguments)))
        except HotsetError as error:
            connection.send((error, None))
        except Exception as error:
            connection.send((CallFailed(first_line(error)), None))
