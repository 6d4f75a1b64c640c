"""Renders chat templates in child processes, which are killed if they take too long.

Templates come with models and are programs. One that never ends, or that fills the memory, must not stop the server.
A child imports neither torch nor the engine, and it gets no secrets: its environment contains only ENVIRONMENT. It
reads one line of JSON per rendering and answers with one line (`chat_template.main`). If this process dies, the child
reads the end of its input and exits.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from hotset.base.errors import CheckpointError, EngineStopped, RequestError
from hotset.base.units import MIB

PROCESSES = 2  # renderings at the same time
START_SECONDS = 60.0  # time limit for a child to import its modules, and to compile the template
RENDER_SECONDS = 5.0  # of CPU time
WAIT_FACTOR = 12  # how many times its CPU time a rendering may take on a busy machine
MAX_RENDERED_CHARACTERS = 8 << 20
MAX_CHILD_BYTES = 512 * MIB  # address space of a child
MAX_REPLY_BYTES = 6 * MAX_RENDERED_CHARACTERS + (1 << 16)  # JSON needs up to 6 bytes for a character
ENVIRONMENT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "TZ")


class TemplateRenderer:
    """Renders one chat template in up to PROCESSES child processes, which `close` ends.

    The first child starts at once, the others when they are needed. A child that was killed is replaced.
    """

    def __init__(
        self, template: str, special_tokens: Mapping[str, str], source: str, seconds: float = RENDER_SECONDS
    ) -> None:
        """Raises `CheckpointError`, whose message names `source`, if the template does not compile within its limits.

        `seconds` is the limit for the CPU time of each rendering.
        """
        self._program = json_line({"template": template, "special_tokens": dict(special_tokens)})
        self._source = source
        self._seconds = seconds
        self._closed = threading.Event()
        self._processes: weakref.WeakSet[_TemplateProcess] = weakref.WeakSet()
        # Children that no thread uses. None stands for a child that is not started yet.
        self._idle: queue.LifoQueue[_TemplateProcess | None] = queue.LifoQueue()
        for process in (*[None] * (PROCESSES - 1), self._start()):
            self._idle.put(process)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """Returns the prompt. Waits while all children are rendering. `variables` are those of the template other than
        `messages` and the special tokens.

        Raises `RequestError` if the template refuses the messages, fails on them, or exceeds its limits.
        """
        try:
            request = json_line({"messages": [dict(message) for message in messages], "variables": variables or {}})
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages must consist of JSON values: {error}", param="messages") from error
        process = self._idle.get()
        try:
            if process is None or not process.alive:
                process = self._start()
            return str(process.exchange(request, WAIT_FACTOR * self._seconds)["text"])
        except _Refusal as refusal:
            raise RequestError(f"the chat template refuses these messages: {refusal}", param="messages") from refusal
        except (_Failure, CheckpointError) as failure:
            what = f"the chat template {failure} on these messages" if isinstance(failure, _Failure) else str(failure)
            message = f"{what}; send a prompt instead, or repair the template"
            raise RequestError(message, param="messages", code="chat_template_failed") from failure
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """Kills all children. A rendering in progress fails. Idempotent."""
        self._closed.set()
        for process in list(self._processes):
            process.kill()

    def _start(self) -> "_TemplateProcess":
        if self._closed.is_set():
            raise EngineStopped("chat templates are no longer rendered: the model was closed")
        process = _TemplateProcess(self._program, self._source, self._seconds)
        self._processes.add(process)
        if self._closed.is_set():  # meanwhile
            process.kill()
        return process


class _Refusal(Exception):
    """The template raised an exception. The message is its reason."""


class _Failure(Exception):
    """The template exceeded a limit or ended its process. The message continues "the chat template"."""


class _TemplateProcess:
    """One child process. Only one thread at a time uses it, except for `kill`."""

    def __init__(self, program: bytes, source: str, seconds: float) -> None:
        """Starts the child and compiles the template. Raises `CheckpointError` if that fails."""
        self._cpu_seconds = seconds
        start = f"from hotset.models.chat_template import main; main({seconds!r})"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                start_new_session=True,  # Ctrl-C is for the parent
            )
        except OSError as error:
            raise CheckpointError(f"{source}: the chat template cannot be run in a process: {error}") from error
        # Also runs when this object is garbage collected, and when the interpreter exits.
        self.kill = weakref.finalize(self, _kill, self._process)
        try:
            self.exchange(b"", START_SECONDS)
            self.exchange(program, START_SECONDS)
        except (_Refusal, _Failure) as error:
            self.kill()
            what = "is broken:" if isinstance(error, _Refusal) else "cannot be compiled: it"
            raise CheckpointError(f"{source}: the chat template {what} {error}") from error

    @property
    def alive(self) -> bool:
        return self.kill.alive and self._process.poll() is None

    def exchange(self, request: bytes, seconds: float) -> dict[str, Any]:
        """Sends a line and returns the answer. If none comes within `seconds`, kills the child and raises _Failure."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        deadline = time.monotonic() + seconds
        watchdog = threading.Timer(seconds, self._process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            stdin.write(request)
            stdin.flush()
            line = stdout.readline(MAX_REPLY_BYTES)
        except (OSError, ValueError):  # the child has ended, or `kill` has closed the pipes
            line = b""
        finally:
            watchdog.cancel()
        if not line.endswith(b"\n"):
            self.kill()
            late = time.monotonic() >= deadline
            raise _Failure(f"did not answer within {seconds:g} s" if late else self._end())
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise _Failure(answer["failed"])
        if "refused" in answer:
            raise _Refusal(answer["refused"])
        return answer

    def _end(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGPROF:
            return f"did not finish within {self._cpu_seconds:g} s of CPU time"
        return f"ended its process ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # the pipe may still hold bytes for the child
            pipe.close()


def json_line(value: object) -> bytes:
    """Returns `value` as one line of JSON. UTF-8 has no lone surrogates; backslashreplace writes them as JSON does."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
