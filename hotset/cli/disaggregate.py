"""`hotset serve MODEL --disaggregate 1P1D`: prefill workers, decode workers and a router, by one command."""

import asyncio
import json
import os
import re
import sys
import time
import urllib.request
from collections.abc import Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from hotset.base.config import EngineConfig, ServeConfig, flag_name
from hotset.base.errors import ConfigError, StartupError
from hotset.base.units import GIB
from hotset.cli.children import Child
from hotset.cli.shares import Free, Share, divide, measure, sized, weight_bytes
from hotset.cli.terminal import remark
from hotset.engine.timeouts import STOP_SECONDS, closing_seconds
from hotset.serve.listening import INTERRUPTED, STOP_SIGNALS, bound_socket, url_of

MOST_WORKERS = 64
HEALTH_SECONDS = 30.0  # for a router to find workers that are ready
END_SECONDS = 5.0  # for a worker, or the router, to end after what it waits for
LOOK_SECONDS = 0.1  # between looks at whether a child has ended
SECRET = ("api_key", "handoff_secret")
OF_ROUTER = ("cors_origin", "max_body_mib", "max_concurrency", "drain_seconds")
OF_WORKER = ("served_model_name", "max_body_mib", "max_queue", "max_concurrency", "drain_seconds")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Layout:
    """How many workers of each role."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """`"2P1D"`. ConfigError for anything else."""
        found = re.fullmatch(r"([0-9]{1,3})P([0-9]{1,3})D", text, re.IGNORECASE)
        layout = None if found is None else cls(int(found[1]), int(found[2]))
        if layout is None or not (layout.prefill and layout.decode and layout.workers <= MOST_WORKERS):
            raise ConfigError(
                f"--disaggregate takes numbers of prefill and decode workers like 1P1D or 2P1D, not {text!r}; "
                f"{MOST_WORKERS} in all are the limit"
            )
        return layout

    @property
    def workers(self) -> int:
        return self.prefill + self.decode

    @property
    def names(self) -> list[tuple[str, str]]:
        """Role and name of each worker."""
        numbered = [("prefill", n) for n in range(self.prefill)] + [("decode", n) for n in range(self.decode)]
        return [(role, f"{role} {number + 1}") for role, number in numbered]


def run(engine: EngineConfig, serve: ServeConfig, layout: Layout) -> int:
    """Serves until told to stop. Returns the exit code: 0 after a drain, 1 where a part did not start or died.

    `engine`: what all workers have in common, a secret among it; its own role does not matter."""
    try:
        _check(engine)
        # The port is held first, for the router: one that is taken should not cost the time that models take to load.
        with bound_socket(serve.host, serve.port) as holder:
            here = replace(serve, port=holder.getsockname()[1])
            free = Free(0) if engine.device == "cpu" and sized(engine) else measure(engine)
            shares = divide(engine, free, layout.workers, weight_bytes(engine.model))
            return asyncio.run(_Together(engine, here, layout, shares).run(url_of(holder)))
    except StartupError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _check(engine: EngineConfig) -> None:
    """Refuses what would be ignored or could not work, before anything is started."""
    for flag, address in (("--control", engine.control), ("--advertise", engine.advertise)):
        if address is not None and not address.endswith(":0"):
            raise ConfigError(f"--disaggregate gives each worker a control port of its own; use port 0 in {flag}")


class _Together:
    """The workers and their router as children of this process. One that ends on its own takes all the others along."""

    def __init__(self, engine: EngineConfig, serve: ServeConfig, layout: Layout, shares: Sequence[Share]) -> None:
        self._engine = engine
        self._serve = serve
        self._layout = layout
        self._shares = shares
        self._children: dict[str, list[Child]] = {"router": [], "decode": [], "prefill": []}  # in the order of stopping
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        given = {
            "HOTSET_API_KEY": serve.api_key,
            "HOTSET_HANDOFF_SECRET": engine.handoff_secret,
        }
        self._secrets = {name: value for name, value in given.items() if value is not None}

    async def run(self, url: str) -> int:
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        try:
            name = await self._unless_over(self._start(url))
            if name is None:
                return INTERRUPTED
            workers = f"{self._layout.prefill} prefill and {self._layout.decode} decode workers"
            print(f"Hotset serves {name} at {url} ({workers})", flush=True)
            await self._unless_over(asyncio.Event().wait())
            return 0
        finally:
            await self._end()

    def _on_signal(self) -> None:
        """The first signal drains; a second one, from someone who will not wait, stops at once."""
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def _start(self, url: str) -> str:
        """Starts everything and waits until the router finds every worker. Returns the model's name."""
        began = time.monotonic()
        for (role, name), share in zip(self._layout.names, self._shares, strict=True):
            arguments = worker_arguments(self._engine, self._serve, role, share)
            self._children[role].append(await Child.start(name, arguments, self._secrets))
        workers = [*self._children["prefill"], *self._children["decode"]]
        with _waiting_for(", ".join(child.name for child in workers)):
            lines = await asyncio.gather(*(self._ready(child, began) for child in workers))
        urls = [line.rpartition(" at ")[2].partition(" ")[0] for line in lines]
        arguments = router_arguments(self._serve, urls[: self._layout.prefill], urls[self._layout.prefill :])
        router = await Child.start("router", arguments, self._secrets)
        self._children["router"].append(router)
        with _waiting_for("router"):
            await self._ready(router, began)
            await self._healthy(url)
        return lines[0].removeprefix("Hotset serves ").partition(" at ")[0]

    async def _ready(self, child: Child, began: float) -> str:
        line = await child.ready()
        remark(f"{child.name} is ready after {time.monotonic() - began:.1f} s (process {child.pid})")
        return line

    async def _healthy(self, url: str) -> None:
        wanted = {"prefill": self._layout.prefill, "decode": self._layout.decode}
        deadline = time.monotonic() + HEALTH_SECONDS
        while True:
            found = await asyncio.to_thread(_health, url)
            if {role: found.get(role) for role in wanted} == wanted:
                return
            if time.monotonic() > deadline:
                raise StartupError(f"the router does not find all workers: {json.dumps(found)}")
            await asyncio.sleep(0.1)

    async def _unless_over(self, work: Coroutine[Any, Any, T]) -> T | None:
        """`work`'s result; None where a signal came first. StartupError where a child ended first."""
        working, told = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        over = asyncio.create_task(self._first_end())
        try:
            await asyncio.wait((working, told, over), return_when=asyncio.FIRST_COMPLETED)
            if told.done():
                return None
            if over.done():
                raise StartupError(f"{over.result()}; the others are stopped")
            return working.result()
        finally:
            for task in (working, told, over):
                task.cancel()
            await asyncio.gather(working, told, over, return_exceptions=True)

    async def _first_end(self) -> str:
        """Waits until a child has ended, also one that is started meanwhile; returns what there is to say about it."""
        while True:
            for child in (child for group in self._children.values() for child in group):
                if not child.running:
                    return await child.ended()
            await asyncio.sleep(LOOK_SECONDS)

    async def _end(self) -> None:
        """Router first, so that what it passes on may finish; then decode workers, which prefill workers feed."""
        if self._stop.is_set():
            remark(f"stopping in order: {', '.join(self._children)}; once more to stop at once")
        else:
            self._hurry.set()
        seconds = self._serve.drain_seconds + stop_seconds(self._engine, self._shares)
        for group in self._children.values():
            await asyncio.gather(*(child.stop(seconds, self._hurry) for child in group))


def stop_seconds(engine: EngineConfig, shares: Sequence[Share]) -> float:
    """What a worker may take to stop by itself, beyond its drain. It is not killed before: its memory goes in order."""
    given = [share.host_kv_gib or engine.host_kv_gib for share in shares]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # no store is larger
    host = max(machine if gib is None else int(gib * GIB) for gib in given)
    return closing_seconds(host, with_port=True) + STOP_SECONDS + END_SECONDS


def worker_arguments(engine: EngineConfig, serve: ServeConfig, role: str, share: Share) -> list[str]:
    """The command line of one worker, on a free port of this machine."""
    sized_engine = replace(
        engine,
        device=share.device or engine.device,
        device_kv_gib=share.device_kv_gib or engine.device_kv_gib,
        host_kv_gib=share.host_kv_gib or engine.host_kv_gib,
    )
    apart = [setting.name for setting in fields(EngineConfig) if setting.name not in ("model", "role", *SECRET)]
    own = ["serve", engine.model, "--role", role, "--host", "127.0.0.1", "--port", "0"]
    return [*own, *_flags(sized_engine, apart), *_flags(serve, OF_WORKER)]


def router_arguments(serve: ServeConfig, prefill: Sequence[str], decode: Sequence[str]) -> list[str]:
    """The command line of the router, where the clients will look for it."""
    own = ["router", "--prefill", *prefill, "--decode", *decode, "--host", serve.host, "--port", str(serve.port)]
    return [*own, *_flags(serve, OF_ROUTER)]


def _flags(config: EngineConfig | ServeConfig, names: Collection[str]) -> list[str]:
    """Flags for those of the fields that differ from their defaults."""
    changed = [s for s in fields(config) if s.name in names and getattr(config, s.name) != s.default]
    return [word for s in changed for word in (f"--{flag_name(s.name)}", str(getattr(config, s.name)))]


def _health(url: str) -> dict[str, Any]:
    """What the router says of its health; empty where it says nothing."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            found = json.load(answer)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def _waiting_for(what: str) -> Iterator[None]:
    """A sign of life on a terminal; a single line elsewhere."""
    if not sys.stderr.isatty():
        remark(f"waiting for {what}")
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"waiting for {what}"):
        yield
