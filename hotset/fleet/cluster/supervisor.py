"""A supervisor: the Ray actor that runs one engine or router as a child process on its node.

It starts the process once, watches its answers, and reports its state. If the process ends, the controller starts
another supervisor, perhaps on another node. If the supervisor dies, the operating system sends SIGTERM to the process,
which finishes its requests and ends.
"""

import asyncio
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import ray
from ray.experimental import internal_kv

from hotset.base.address import WILDCARD_HOSTS
from hotset.base.endings import ending_seconds
from hotset.base.errors import ConfigError, HeadLost, StartupError
from hotset.base.processes import find_stopped
from hotset.base.rdma import SYSFS, with_active_ports
from hotset.base.settings import flag_words
from hotset.engine.progress import StallTimer
from hotset.fleet.child_process import ChildProcess
from hotset.fleet.cluster.folders import make_folder
from hotset.fleet.cluster.probe import probe_node
from hotset.fleet.cluster.reconcile import Report
from hotset.fleet.cluster.scaling import Load
from hotset.fleet.cluster.spec import ClusterSpec, Restart, Role

POLL_SECONDS = 0.5  # interval between two looks at the process
ANSWER_SECONDS = 2.0  # time for one answer of the process
QUIET_SHARE = 0.75  # share of silent_seconds after which a silent controller is asked; it has the rest to answer
HEAD_POLL_SECONDS = 2.0
KILL_SECONDS = 30.0  # time for a process to exit after its drain, beside that to free its memory
WORKERS_FILE = "workers.json"
READY_LINE = re.compile(r" at (http://\S+)")


def silence_key(application: str, epoch: str) -> bytes:
    """Returns the key that a supervisor writes to the storage of the head when it finds that a controller hangs."""
    return f"hotset-{application}/silent/{epoch}".encode()


@dataclass(frozen=True, slots=True)
class Launch:
    """The process that a supervisor runs. `secrets` are environment variables of the process."""

    application: str
    name: str
    role: Role
    spec: ClusterSpec
    secrets: Mapping[str, str]
    workers: Mapping[str, Sequence[str]]  # the workers that a router has at its start
    controller: str  # the name of the controller, in the namespace of the supervisor
    versions: Mapping[str, str | None]  # of Hotset and Python where the application was started


class Supervisor:
    """The actor. Its methods run on one event loop."""

    def __init__(self, launch: Launch, sysfs: Path = SYSFS) -> None:
        """The RDMA devices of the node are below `sysfs`."""
        self._launch, self._sysfs = launch, sysfs
        self._policy: Restart = launch.spec.restart
        self._node = ray.get_runtime_context().get_node_id()
        self._is_started = False
        self._child: ChildProcess | None = None
        self._url: str | None = None
        self._advertised_url: str | None = None
        self._ended: str | None = None
        self._is_gone = True  # no process of the command holds memory
        self._load = Load()
        self._routed: tuple[str, ...] = ()
        self._up: tuple[str, ...] = ()
        self._stop_now = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._epoch = ""  # of the controller that last requested a report
        self._num_reports = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._folder: Path | None = None  # of a router's workers

    async def start(self) -> None:
        """Starts the process, unless it was started before. `report` returns a failure."""
        if self._is_started:
            return
        self._is_started = True
        try:
            await self._check_versions()
            if self._launch.role == "router":
                self._folder = make_folder()
                self._write_workers(self._launch.workers)
            arguments, self._host = self._arguments()
            self._print(f"starts: hotset {' '.join(arguments)}")
            self._is_gone = False
            self._child = await ChildProcess.start(
                self._launch.name,
                arguments,
                self._launch.secrets,
                lambda line: print(line, file=sys.stderr, flush=True),
            )
        except (StartupError, OSError) as error:
            self._is_gone = True
            self._ended = f"{self._launch.name} could not start: {error}"
            return
        watches = (self._watch_process(), self._watch_answers(), self._watch_controller(), self._watch_head())
        self._tasks = [asyncio.create_task(watch) for watch in watches]

    async def report(self, epoch: str) -> Report:
        """Returns the state of the process. `epoch` names the running controller."""
        self._epoch = epoch
        self._num_reports += 1
        return Report(
            node=self._node,
            pid=None if self._child is None else self._child.pid,
            url=self._advertised_url,
            ready=self._url is not None and self._ended is None,
            ended=self._ended,
            holds_memory=not self._is_gone,
            load=self._load,
            routed=self._routed,
            up=self._up,
        )

    async def set_workers(self, workers: Mapping[str, Sequence[str]]) -> None:
        """Replaces the workers of a router, which reads them from its file."""
        self._write_workers(workers)

    async def stop(self, *, now: bool) -> None:
        """Lets the process finish its requests and end. If `now`, it does not finish them."""
        if now:
            self._stop_now.set()
        if self._child is not None and self._stopping is None:
            seconds = self._launch.spec.drain_seconds + KILL_SECONDS + ending_seconds()
            self._stopping = asyncio.create_task(self._child.stop(seconds, self._stop_now))

    async def _check_versions(self) -> None:
        """Raises ConfigError on a node that joined the cluster with other versions."""
        found = await asyncio.to_thread(probe_node)
        if found != self._launch.versions:
            wanted = self._launch.versions
            raise ConfigError(
                f"its node has Hotset {found['hotset']} and Python {found['python']}, but the application was started "
                f"with Hotset {wanted['hotset']} and Python {wanted['python']}; install the same on every node"
            )

    def _arguments(self) -> tuple[list[str], str]:
        """Returns the command line of the process, and the host at which others reach it."""
        spec, role = self._launch.spec, self._launch.role
        host = ray.util.get_node_ip_address()
        if role == "router":
            settings = {"host": host, **spec.router_settings(), "workers_file": f"{self._folder}/{WORKERS_FILE}"}
            return ["router", *_flags(settings)], host if settings["host"] in WILDCARD_HOSTS else settings["host"]
        settings = {**spec.engine_settings(role), "host": host, "port": 0, "control": f"{host}:0"}
        interface = settings.get("transfer_interface")
        if interface is not None and settings.get("transfer", "nixl") == "nixl":
            gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", ())
            settings["transfer_interface"] = with_active_ports(interface, gpus, self._sysfs)
        return ["serve", spec.model, *_flags(settings)], host

    def _write_workers(self, workers: Mapping[str, Sequence[str]]) -> None:
        if self._folder is not None and self._ended is None:
            new = self._folder / "new.json"
            new.write_text(json.dumps({role: list(urls) for role, urls in workers.items()}))
            new.rename(self._folder / WORKERS_FILE)

    async def _watch_process(self) -> None:
        """Waits until the process is ready, and then until it has ended."""
        assert self._child is not None
        ending = asyncio.create_task(self._child.ended())
        ready = asyncio.create_task(self._child.ready())
        seconds = self._policy.start_seconds
        await asyncio.wait((ending, ready), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            found = READY_LINE.search(ready.result())
            assert found is not None, f"unexpected ready line {ready.result()!r}"
            self._url = found[1]
            self._advertised_url = f"http://{self._host}:{self._url.rpartition(':')[2]}"
        elif not ending.done():
            self._end(f"{self._launch.name} was not ready after {seconds:g} s (restart.start-seconds)")
        reason = await ending
        self._ended = self._ended or reason
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        await self._child.gone()
        self._is_gone = True

    def _end(self, reason: str) -> None:
        """Kills the process, which has failed for this reason."""
        self._ended = self._ended or reason
        self._print(f"error: {reason}")
        if self._child is not None:
            self._child.kill()

    async def _watch_answers(self) -> None:
        """Fetches the load of an engine, or the workers of a router. Kills a ready process if it no longer answers, or
        if the process or one of its descendants is stopped."""
        assert self._child is not None
        max_poll_seconds = 2 * (POLL_SECONDS + ANSWER_SECONDS)
        silence, stop = StallTimer(max_poll_seconds=max_poll_seconds), StallTimer(max_poll_seconds=max_poll_seconds)
        answers, runs = 0, 0  # the number of polls that the process answered, and of polls without a stopped process
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        key = self._launch.secrets.get("HOTSET_API_KEY")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            while self._ended is None:
                await asyncio.sleep(POLL_SECONDS)
                if self._url is None or self._stopping is not None:
                    continue
                stopped = find_stopped(self._child.pid)
                runs += stopped is None
                answers += await self._fetch(session)
                if stop.seconds(runs) > self._policy.silent_seconds and self._stopping is None:
                    self._end(f"process {stopped} of {self._launch.name} is stopped")
                if silence.seconds(answers) > self._policy.silent_seconds and self._stopping is None:
                    seconds = self._policy.silent_seconds
                    self._end(f"{self._launch.name} has not answered for {seconds:g} s (restart.silent-seconds)")

    async def _fetch(self, session: aiohttp.ClientSession) -> bool:
        """Asks the process for its state. Returns False if it does not answer; an error is an answer, too."""
        path = "/workers" if self._launch.role == "router" else "/handoff"
        try:
            async with session.get(f"{self._url}{path}") as response:
                body: Any = await response.json()
                if response.status != 200:
                    return True
        except aiohttp.ContentTypeError:
            return True
        except (aiohttp.ClientError, OSError, ValueError):
            return False
        if self._launch.role == "router":
            self._routed = tuple(worker["url"] for worker in body["workers"])
            self._up = tuple(worker["url"] for worker in body["workers"] if worker["up"])
        else:
            self._load = _load_of(body)
        return True

    async def _watch_controller(self) -> None:
        """Asks the controller for a sign of life if it no longer requests reports.

        If the controller does not answer, restarts it. If it does not know this process, it has replaced the process,
        for example because Ray lost the node for a while. The process then ends.
        """
        silence = StallTimer(max_poll_seconds=2 * POLL_SECONDS)
        quiet_seconds = QUIET_SHARE * self._policy.silent_seconds
        while self._ended is None and self._stopping is None:
            await asyncio.sleep(POLL_SECONDS)
            if silence.seconds(self._num_reports) <= quiet_seconds or not self._epoch:
                continue
            try:
                controller = await asyncio.to_thread(ray.get_actor, self._launch.controller)
                async with asyncio.timeout(self._policy.silent_seconds - quiet_seconds):
                    is_known = await controller.knows.remote(self._launch.name)
            except TimeoutError:
                await self._restart_controller()
            except (ray.exceptions.RayError, ValueError, RuntimeError) as error:
                self._print(f"the controller cannot be reached: {error}")  # Ray restarts it
            else:
                if not is_known:
                    self._print("the controller has replaced this process, which finishes its requests and ends")
                    await self.stop(now=False)
                    await asyncio.gather(*([] if self._stopping is None else [self._stopping]))
                    os._exit(0)
            self._num_reports += 1  # restarts the measurement of silence

    async def _restart_controller(self) -> None:
        """Makes Ray restart the controller. If several supervisors call this, only one has an effect."""
        key = silence_key(self._launch.application, self._epoch)
        try:
            was_killed = await asyncio.to_thread(internal_kv._internal_kv_put, key, b"", overwrite=False)
            if not was_killed:
                self._print("the controller does not answer; Ray restarts it")
                controller = await asyncio.to_thread(ray.get_actor, self._launch.controller)
                await asyncio.to_thread(ray.kill, controller, no_restart=False)
        except (ray.exceptions.RayError, ValueError, RuntimeError) as error:
            self._print(f"the controller does not answer, and cannot be restarted: {error}")

    async def _watch_head(self) -> None:
        """Ends the process if the Ray head is lost, because nothing would restart, remove or route to it any more."""
        seconds = self._policy.head_seconds
        answered_at = time.monotonic()
        while self._ended is None:
            await asyncio.sleep(HEAD_POLL_SECONDS)
            try:
                async with asyncio.timeout(seconds):
                    await asyncio.to_thread(internal_kv._internal_kv_exists, b"hotset")
                answered_at = time.monotonic()
            except (TimeoutError, RuntimeError, ray.exceptions.RayError):
                if time.monotonic() - answered_at < seconds:
                    continue
                address = ray.get_runtime_context().gcs_address
                error = HeadLost(
                    f"the Ray head at {address} has not answered for {seconds:g} s; {self._launch.name} finishes its "
                    "requests and ends"
                )
                self._print(f"error: {error.code}: {error}")
                await self.stop(now=False)
                return

    def _print(self, line: str) -> None:
        print(f"[{self._launch.name}] {line}", file=sys.stderr, flush=True)


def _flags(settings: Mapping[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in flag_words(name, value)]


def _load_of(state: Mapping[str, Any]) -> Load:
    """Returns the load of an engine from the state that it reports at /handoff."""
    return Load(
        running=state["running"],
        waiting_requests=state["waiting"],
        waiting_tokens=state["waiting_tokens"],
        kv_usage=state["kv_usage"],
        tier_pressure=state["tier_pressure"],
    )
