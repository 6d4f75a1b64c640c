"""Processes of ours that belong together: each a `hotset` command of its own, none of which outlives this one."""

import asyncio
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence

KILL_SECONDS = 5.0  # for a child that was told twice
LONGEST_LINE = 1 << 16
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a child gets when its parent dies


class Child:
    """A running `hotset` command. Its log lines come out on our stderr under its name."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._last_lines: deque[str] = deque(maxlen=20)
        self._readers = asyncio.gather(self._read_stdout(), self._read_stderr())

    @classmethod
    async def start(cls, name: str, arguments: Sequence[str], secrets: Mapping[str, str]) -> "Child":
        """`secrets` go into the environment: arguments can be read by everybody on the machine."""
        libc = ctypes.CDLL(None)
        parent = os.getpid()

        def die_with_parent() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it died in between
                os._exit(1)

        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "hotset", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **secrets},
            start_new_session=True,  # Ctrl-C is ours to pass on, in order
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
        """The line that says where it serves, once it does. Waits for ever where it never will: watch `ended` too."""
        return await asyncio.shield(self._ready)

    async def ended(self) -> str:
        """Waits for its end; returns what there is to say about it."""
        code = await self._process.wait()
        await asyncio.shield(self._readers)
        said = next((line for line in reversed(self._last_lines) if line.startswith("error: ")), None)
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return f"{self.name} ended ({how})" + (f": {said.removeprefix('error: ')}" if said else "")

    async def stop(self, seconds: float, hurry: asyncio.Event) -> None:
        """Tells it to drain and waits so long, or until `hurry` is set; then tells it again, and at last kills it."""
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
    """Lines of whatever length; of one that does not end, the last part."""
    rest = b""
    while piece := await stream.read(LONGEST_LINE):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
        rest = rest[-LONGEST_LINE:]
    if rest:
        yield rest.decode(errors="replace")
