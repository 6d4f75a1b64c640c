"""Child processes that each run one `hotset` command and end with this process."""

import asyncio
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence

KILL_SECONDS = 5.0  # between the second SIGTERM and SIGKILL
MAX_LINE_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1  # Linux's prctl option that sets the signal a child receives when its parent dies


class ChildProcess:
    """A running `hotset` command. Its log lines are printed to stderr with its name as a prefix."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._last_lines: deque[str] = deque(maxlen=20)
        self._readers = asyncio.gather(self._read_stdout(), self._read_stderr())

    @classmethod
    async def start(cls, name: str, arguments: Sequence[str], secrets: Mapping[str, str]) -> "ChildProcess":
        """Starts the command. `secrets` go into its environment, because any user can read a process's arguments."""
        libc = ctypes.CDLL(None)
        parent = os.getpid()

        def die_with_parent() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # the parent died before the call
                os._exit(1)

        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "hotset",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **secrets},
            start_new_session=True,  # Ctrl-C reaches only the parent, which stops its children in order
            preexec_fn=die_with_parent,
        )
        return cls(name, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def ready(self) -> str:
        """Waits for the line that announces its address and returns it.

        Never returns if the process ends first, so wait for `ended` as well.
        """
        return await asyncio.shield(self._ready)

    async def ended(self) -> str:
        """Waits for the end of the process and returns a description with its exit code and last error."""
        code = await self._process.wait()
        await asyncio.shield(self._readers)
        error = next((line for line in reversed(self._last_lines) if line.startswith("error: ")), None)
        cause = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return f"{self.name} ended ({cause})" + (f": {error.removeprefix('error: ')}" if error else "")

    async def stop(self, seconds: float, hurry: asyncio.Event) -> None:
        """Sends SIGTERM, which drains, and waits for the end.

        Sends a second SIGTERM after `seconds` or as soon as `hurry` is set, and SIGKILL after KILL_SECONDS more.
        """
        self._signal(signal.SIGTERM)
        waiting = asyncio.create_task(self._process.wait())
        hurried = asyncio.create_task(hurry.wait())
        try:
            await asyncio.wait((waiting, hurried), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                self._signal(signal.SIGTERM)
                await asyncio.wait((waiting,), timeout=KILL_SECONDS)
            if not waiting.done():
                self._signal(signal.SIGKILL)
            await waiting
        finally:
            hurried.cancel()
        await asyncio.shield(self._readers)

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
            print(f"[{self.name}] {line}", file=sys.stderr, flush=True)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yields the lines of a stream. A line longer than MAX_LINE_BYTES loses its beginning."""
    rest = b""
    while piece := await stream.read(MAX_LINE_BYTES):
        *complete, rest = (rest + piece).split(b"\n")
        for line in complete:
            yield line.decode(errors="replace")
        rest = rest[-MAX_LINE_BYTES:]
    if rest:
        yield rest.decode(errors="replace")
