"""`hotset serve MODEL --disaggregate 1P1D`: starts prefill engines, decode engines and a router on this
machine."""

import asyncio
import json
import os
import shlex
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from http.client import HTTPException
from typing import Any, TypeVar

from hotset.base.config import EngineConfig
from hotset.base.errors import StartupError
from hotset.base.flags import EXIT_INTERRUPTED
from hotset.base.listeners import url_of
from hotset.base.logs import log_to_stderr, print_note
from hotset.base.serve_config import HttpSettings, ServeConfig
from hotset.base.settings import flag_words
from hotset.base.status_line import StatusLine
from hotset.base.units import GIB
from hotset.engine.progress import STOP_SECONDS, StallTimer, closing_seconds
from hotset.fleet.child_process import ChildProcess
from hotset.fleet.local.shares import RoleEngine, place_engines
from hotset.serve.http_server import STOP_SIGNALS

# Time limit of the router's health checks of workers. It is long because all processes share this machine, which can be
# busy, and because the death of a worker is noticed without the router.
WORKER_HEALTH_TIMEOUT_SECONDS = 10.0
ROUTER_HEALTH_TIMEOUT_SECONDS = 30.0  # time for the router to find all workers, which are ready before it starts
EXIT_SECONDS = 5.0  # time for a process to exit after its drain and the end of its engine
POLL_SECONDS = 0.1  # interval between checks whether a child has ended
HEALTH_POLL_SECONDS = 1.0  # interval between checks whether a child answers
HEALTH_TIMEOUT_SECONDS = 2.0  # time for an answer
SECRET_SETTINGS = ("api_key", "handoff_secret")
ROUTER_SETTINGS = {setting.name for setting in fields(HttpSettings)} - {"host", "port", "api_key"}
WORKER_SETTINGS = ("page", "otlp", "served_model_name", "max_body_mib", "max_queue", "max_concurrency", "drain_seconds")

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without the proxies of the environment

T = TypeVar("T")


def run(engines: Sequence[RoleEngine], serve: ServeConfig, reserved: socket.socket) -> int:
    """Serves until SIGTERM or SIGINT, and returns the exit code.

    The code is 0 after a drain, and 130 after a signal during start-up. Raises StartupError if a process did not start
    or died. `reserved` is a socket that is bound to the router's address, so that no other program takes the port while
    the models load.
    """
    log_to_stderr()
    bound = replace(serve, port=reserved.getsockname()[1])
    return asyncio.run(_Deployment(place_engines(engines), bound).run(url_of(reserved)))


class _Deployment:
    """The engines and their router, as child processes. If one of them ends or no longer answers, all are stopped."""

    def __init__(self, engines: Sequence[RoleEngine], serve: ServeConfig) -> None:
        self._engines, self._serve = engines, serve
        self._urls: dict[str, str] = {}  # by the name of the child
        self._children: dict[str, list[ChildProcess]] = {"router": [], "decode": [], "prefill": []}  # in stopping order
        self._stop = asyncio.Event()  # a signal was received
        self._stop_now = asyncio.Event()  # children must not finish their drain
        self._status: StatusLine | None = None  # while this object waits for children
        secrets = {"HOTSET_API_KEY": serve.api_key, "HOTSET_HANDOFF_SECRET": engines[0].config.handoff_secret}
        self._secrets = {name: value for name, value in secrets.items() if value is not None}

    async def run(self, url: str) -> int:
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        try:
            name = await self._unless_stopped(self._start(url))
            if name is None:
                return EXIT_INTERRUPTED
            prefill, decode = self._count("prefill"), self._count("decode")
            print(f"Hotset serves {name} at {url} ({prefill} prefill and {decode} decode workers)", flush=True)
            await self._unless_stopped(self._watch_answers())
            return 0
        finally:
            await self._end()

    def _count(self, role: str) -> int:
        return sum(engine.config.role == role for engine in self._engines)

    def _on_signal(self) -> None:
        """Starts a drain at the first signal, and stops at once at the second."""
        (self._stop_now if self._stop.is_set() else self._stop).set()

    async def _start(self, url: str) -> str:
        """Starts all processes and waits until the router has found every worker. Returns the model's name."""
        began = time.monotonic()
        for engine in self._engines:
            arguments = worker_arguments(engine.config, self._serve)
            self._print(f"{engine.name} starts: hotset {shlex.join(arguments)}")
            child = await ChildProcess.start(engine.name, arguments, self._secrets, self._print)
            self._children[engine.config.role].append(child)
        workers = [*self._children["prefill"], *self._children["decode"]]
        with self._waiting_for(", ".join(child.name for child in workers)):
            lines = await asyncio.gather(*(self._ready(child, began) for child in workers))
        urls = [line.rpartition(" at ")[2].partition(" ")[0] for line in lines]
        self._urls = dict(zip((child.name for child in workers), urls, strict=True)) | {"router": url}
        prefill = self._count("prefill")
        arguments = router_arguments(self._serve, urls[:prefill], urls[prefill:])
        router = await ChildProcess.start("router", arguments, self._secrets, self._print)
        self._children["router"].append(router)
        with self._waiting_for("router"):
            await self._ready(router, began)
            await self._wait_until_healthy(url)
        return lines[0].removeprefix("Hotset serves ").partition(" at ")[0]

    async def _ready(self, child: ChildProcess, began: float) -> str:
        line = await child.ready()
        self._print(f"{child.name} is ready after {time.monotonic() - began:.1f} s (process {child.pid})")
        return line

    @contextmanager
    def _waiting_for(self, what: str) -> Iterator[None]:
        with StatusLine(f"Waiting for {what}") as self._status:
            try:
                yield
            finally:
                self._status = None

    def _print(self, line: str) -> None:
        """Prints a line to stderr, above the status line if there is one."""
        if self._status is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._status.print(line)

    async def _wait_until_healthy(self, url: str) -> None:
        expected = {role: self._count(role) for role in ("prefill", "decode")}
        deadline = time.monotonic() + ROUTER_HEALTH_TIMEOUT_SECONDS
        while True:
            health = await asyncio.to_thread(_health, url) or {}
            if {role: health.get(role) for role in expected} == expected:
                return
            if time.monotonic() > deadline:
                seconds = ROUTER_HEALTH_TIMEOUT_SECONDS
                raise StartupError(f"the router did not find all workers within {seconds:g} s: {json.dumps(health)}")
            await asyncio.sleep(0.1)

    async def _watch_answers(self) -> None:
        """Raises StartupError if a child has not answered for `step_timeout`. Never returns."""
        limits = {engine.name: engine.config.step_timeout for engine in self._engines}
        limits["router"] = max(limits.values())
        await asyncio.gather(*(self._watch_child(name, url, limits[name]) for name, url in self._urls.items()))

    async def _watch_child(self, name: str, url: str, step_timeout: float) -> None:
        silence = StallTimer(max_poll_seconds=2 * (HEALTH_POLL_SECONDS + HEALTH_TIMEOUT_SECONDS))
        answers = 0
        while silence.seconds(answers) <= step_timeout:
            answers += await asyncio.to_thread(_health, url) is not None
            await asyncio.sleep(HEALTH_POLL_SECONDS)
        raise StartupError(f"{name} has not answered for {step_timeout:g} s (--step-timeout)")

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Returns the result of `work`, or None if a signal came first. Raises StartupError if a child ended first."""
        working, stopped = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        child_ended = asyncio.create_task(self._first_end())
        try:
            await asyncio.wait((working, stopped, child_ended), return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                return None
            if child_ended.done():
                raise StartupError(f"{child_ended.result()}; the other processes are stopped")
            return working.result()
        finally:
            for task in (working, stopped, child_ended):
                task.cancel()
            await asyncio.gather(working, stopped, child_ended, return_exceptions=True)

    async def _first_end(self) -> str:
        """Waits until a child has ended, and returns the result of its `ended`. Includes children started meanwhile."""
        while True:
            for child in (child for group in self._children.values() for child in group):
                if not child.running:
                    return await child.ended()
            await asyncio.sleep(POLL_SECONDS)

    async def _end(self) -> None:
        """Stops the router first, then the decode workers, then the prefill workers, so that requests can finish.

        If no signal was received, start-up or a child has failed. All children are then stopped without a drain.
        """
        if self._stop.is_set():
            print_note(f"stopping in order: {', '.join(self._children)}; press Ctrl-C again to stop at once")
        else:
            self._stop_now.set()
        seconds = self._serve.drain_seconds + stop_seconds([engine.config for engine in self._engines])
        for group in self._children.values():
            await asyncio.gather(*(child.stop(seconds, self._stop_now) for child in group))


def stop_seconds(configs: Sequence[EngineConfig]) -> float:
    """Returns the time limit for an engine to free its memory and exit after its drain."""
    # If the size of a host store is not given in GiB, the machine's memory is the upper bound.
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host_bytes = max(ram_bytes if c.host_kv_gib is None else int(c.host_kv_gib * GIB) for c in configs)
    return closing_seconds(host_bytes, with_endpoint=True) + STOP_SECONDS + EXIT_SECONDS


def worker_arguments(config: EngineConfig, serve: ServeConfig) -> list[str]:
    """Returns the command line of one engine, which listens on a free loopback port."""
    names = [setting.name for setting in fields(EngineConfig) if setting.name not in ("model", *SECRET_SETTINGS)]
    address = ["--host", "127.0.0.1", "--port", "0"]
    return ["serve", config.model, *address, *_flags(config, names), *_flags(serve, WORKER_SETTINGS)]


def router_arguments(serve: ServeConfig, prefill: Sequence[str], decode: Sequence[str]) -> list[str]:
    """Returns the command line of the router, which listens on the address that the user chose."""
    workers = ["--prefill", *prefill, "--decode", *decode]
    address = ["--host", serve.host, "--port", str(serve.port)]
    health = ["--health-timeout-seconds", f"{WORKER_HEALTH_TIMEOUT_SECONDS:g}"]
    return ["router", *workers, *address, *health, *_flags(serve, ROUTER_SETTINGS)]


def _flags(config: EngineConfig | ServeConfig, names: Collection[str]) -> list[str]:
    """Returns flags for the named fields whose values differ from their defaults."""
    changed = [s for s in fields(config) if s.name in names and getattr(config, s.name) != s.default]
    return [word for s in changed for word in flag_words(s.name, getattr(config, s.name))]


def _health(url: str) -> dict[str, Any] | None:
    """Returns the JSON answer of a server at /health. Returns an empty dict for any other answer, and None if the
    server does not answer."""
    try:
        with DIRECT.open(f"{url}/health", timeout=HEALTH_TIMEOUT_SECONDS) as response:
            health = json.load(response)
    except urllib.error.HTTPError as error:
        error.close()
        return {}
    except ValueError:  # no JSON, but an answer
        return {}
    except (OSError, HTTPException):
        return None
    return health if isinstance(health, dict) else {}
