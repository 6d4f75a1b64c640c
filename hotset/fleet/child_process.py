"""Child processes that each run one `hotset` command and receive SIGTERM when this process dies."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from hotset.base.endings import SayWaiting, ending_seconds
from hotset.base.parent_death import PARENT_VARIABLE, resume_if_parent_dies
from hotset.base.processes import session_members

KILL_SECONDS = 5.0  # time between the second SIGTERM and SIGKILL, and after SIGKILL
POLL_SECONDS = 0.1  # interval between two looks at what is left of a command
MAX_LINE_BYTES = 1 << 16


class ChildProcess:
    """A running `hotset` command. `print_line` prints the lines of its stderr, each with `name` as a prefix."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, print_line: Callable[[str], None]) -> None:
        self.name = name
        self._print_line = print_line
        self._process = process
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._last_lines: deque[str] = deque(maxlen=20)
        self._readers = asyncio.gather(self._read_stdout(), self._read_stderr())

    @classmethod
    async def start(
        cls, name: str, arguments: Sequence[str], secrets: Mapping[str, str], print_line: Callable[[str], None]
    ) -> "ChildProcess":
        """Starts the command. `secrets` are environment variables, because any user can read a process's arguments."""
        parent = os.getpid()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "hotset",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **secrets, PARENT_VARIABLE: str(parent)},
            start_new_session=True,  # Ctrl-C reaches only the parent, which stops its children in order
            preexec_fn=lambda: resume_if_parent_dies(parent),  # the command then terminates itself
        )
        return cls(name, process, print_line)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def ready(self) -> str:
        """Waits for the first line on stdout, which a server or router prints when it is ready, and returns it.

        Never returns if the process ends without printing one, so wait for `ended` as well.
        """
        return await asyncio.shield(self._ready)

    async def ended(self) -> str:
        """Waits until the process has ended. Returns its name, exit code or signal, and last error line, if any."""
        code = await self._process.wait()
        await asyncio.shield(self._readers)
        error = next((line for line in reversed(self._last_lines) if line.startswith("error: ")), None)
        cause = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return f"{self.name} ended ({cause})" + (f": {error.removeprefix('error: ')}" if error else "")

    async def gone(self) -> None:
        """Waits until the process has ended, and with it all that it has started, and the system has freed their
        memory. If the process was killed, its engine and its workers still end by themselves.

        Kills what has not ended after `ending_seconds`, and gives up KILL_SECONDS later.
        """
        await self._process.wait()
        say = SayWaiting(self.name)
        for seconds in (ending_seconds(), KILL_SECONDS):
            deadline = time.monotonic() + seconds
            while left := [member.pid for member in await asyncio.to_thread(session_members, self.pid)]:
                if time.monotonic() >= deadline:
                    break
                say(left)
                await asyncio.sleep(POLL_SECONDS)
            else:
                return
            self._print_line(f"[{self.name}] error: processes {left} have not ended, may hold memory, and are killed")
            for pid in left:
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    os.kill(pid, signal.SIGKILL)

    async def stop(self, drain_seconds: float, stop_now: asyncio.Event) -> None:
        """Sends SIGTERM, which makes the command drain its requests, and waits until the process has ended (`gone`).

        Sends a second SIGTERM, which ends the drain, after `drain_seconds` or as soon as `stop_now` is set. Sends
        SIGKILL if the process still runs KILL_SECONDS later.
        """
        self._signal(signal.SIGTERM)
        ending = asyncio.create_task(self._process.wait())
        hurried = asyncio.create_task(stop_now.wait())
        try:
            await asyncio.wait((ending, hurried), timeout=drain_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                self._signal(signal.SIGTERM)
                await asyncio.wait((ending,), timeout=KILL_SECONDS)
            if not ending.done():
                self._signal(signal.SIGKILL)
            await ending
        finally:
            hurried.cancel()
        await self.gone()
        await asyncio.shield(self._readers)

    def kill(self) -> None:
        """Sends SIGKILL, without a drain."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            self._process.send_signal(number)

    async def _read_stdout(self) -> None:
        assert self._process.stdout is not None
        async for line in _lines(self._process.stdout):
            if not self._ready.done():
                self._ready.set_result(line)

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        async for line in _lines(self._process.stderr):
            self._last_lines.append(line)
            self._print_line(f"[{self.name}] {line}")


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yields the lines of a stream. A line longer than MAX_LINE_BYTES may lose its beginning."""
    incomplete = b""
    while piece := await stream.read(MAX_LINE_BYTES):
        *complete, incomplete = (incomplete + piece).split(b"\n")
        for line in complete:
            yield line.decode(errors="replace")
        incomplete = incomplete[-MAX_LINE_BYTES:]
    if incomplete:
        yield incomplete.decode(errors="replace")
