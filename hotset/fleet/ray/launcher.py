"""Starts workers as actors of a Ray cluster. Ray places, starts and kills them; plans and reports do not pass through
Ray."""

import atexit
import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from hotset.base.address import Address, normalized_host
from hotset.base.errors import StartupError
from hotset.base.listeners import listeners
from hotset.engine.ports import Messages
from hotset.engine.progress import Progress
from hotset.engine.workers.handle import WorkerPipe, WorkerProcess
from hotset.engine.workers.launcher import worker_rank
from hotset.engine.workers.messages import ConnectionAddress, WorkerRank
from hotset.engine.workers.placement import WorkerDevice
from hotset.fleet.ray import nodes
from hotset.fleet.ray.actor import ActorFacts
from hotset.fleet.ray.sockets import ControllerSockets, CurveKeys, RemoteWorker, SocketAddress
from hotset.models.split import Split

START_SECONDS = 300.0  # time for actors to start and to import torch
STARTING = "start the workers"
HELLO_SECONDS = 60.0  # time for a started actor to connect
KILL_SECONDS = 10.0  # Ray kills a stopped process after about 5 s
T = TypeVar("T")


def worker_stub() -> Any:
    """Returns the class of the actors. Because it is defined in a function, Ray sends it to other nodes as code. It can
    therefore report which versions are installed there before it imports Hotset."""

    class WorkerStub:
        def versions(self) -> dict[str, str | None]:
            import importlib
            import importlib.metadata
            import platform

            import ray

            def version_of(package: str) -> str | None:
                try:
                    return importlib.metadata.version(package)
                except importlib.metadata.PackageNotFoundError:
                    return None

            try:
                hotset = importlib.import_module("hotset").__version__
            except ImportError:
                hotset = None
            return {
                "node": f"{ray.util.get_node_ip_address()}/{ray.get_runtime_context().get_node_id()[:8]}",
                "Python": ".".join(platform.python_version_tuple()[:2]),
                "Hotset": hotset,
                "torch": version_of("torch"),
                "pyzmq": version_of("pyzmq"),
            }

        def describe(self, hosts_rendezvous: bool) -> Any:
            from hotset.fleet.ray.actor import WorkerActor

            self._actor = WorkerActor()
            return self._actor.describe(hosts_rendezvous)

        def run(self, number: int, controller: Any, gpus: Any) -> None:
            self._actor.run(number, controller, gpus)

    return WorkerStub


class RayLauncher:
    """Implements `Launcher` with actors of a Ray cluster."""

    def __init__(self, address: str | None, resource: str) -> None:
        """Each worker takes one `resource`, "GPU" or "CPU"."""
        self._address, self._resource = address, resource
        self._owns_connection = False
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._facts: list[ActorFacts] = []
        self._runs: list[Any] = []  # a reference per worker that is ready when its actor has ended
        self._sockets: ControllerSockets | None = None
        self._further: ControllerSockets | None = None  # for the connections of `connect`
        self._of_ray: list[Address] = []  # addresses at which this process listens for Ray
        self._head: nodes.HeadWatch | None = None
        self._problem: str | None = None

    def place(self, splits: Sequence[Split]) -> list[WorkerRank]:
        before = {listener.address for listener in listeners()}
        self._owns_connection = nodes.connect(self._address)
        self._of_ray = [listener.address for listener in listeners() if listener.address not in before]
        self._head = nodes.HeadWatch()
        self._group, share = nodes.reserve(len(splits), splits[0].tp_size, self._resource)
        self._sockets = ControllerSockets(normalized_host(ray.util.get_node_ip_address()))
        one = {"num_gpus": 1, "num_cpus": 0} if self._resource == "GPU" else {"num_cpus": 1}
        actor_class = ray.remote(worker_stub())
        for number in range(len(splits)):
            strategy = nodes.in_bundle(self._group, number // share)
            self._actors.append(actor_class.options(scheduling_strategy=strategy, **one).remote())
        for versions in nodes.get([actor.versions.remote() for actor in self._actors], START_SECONDS, STARTING):
            nodes.check_versions(versions)
        described = [actor.describe.remote(number == 0) for number, actor in enumerate(self._actors)]
        self._facts = nodes.get(described, START_SECONDS, STARTING)
        return [self._rank(number, splits) for number in range(len(splits))]

    def start(self, rank: WorkerRank, progress: Progress) -> tuple[WorkerPipe, WorkerProcess]:
        number, sockets = rank.number, self._sockets
        assert sockets is not None, "`place` has made them"
        actor, facts = self._actors[number], self._facts[number]
        worker = RemoteWorker(
            facts.pid,
            progress,
            send=lambda command: sockets.send(number, command),
            kill=lambda: None if self._problem else _kill(actor),
        )
        sockets.allow(number, facts.key, worker)
        gpus = [gpu for each in self._facts if each.node == facts.node for gpu in each.gpus]
        self._runs.append(actor.run.remote(number, sockets.endpoint, gpus))
        if not sockets.wait_connected(number, HELLO_SECONDS):
            worker.close()
            failed, _ = ray.wait(self._runs[-1:], timeout=0)
            if failed:
                nodes.get(failed, 0.0, f"run {rank.name}")
            raise StartupError(f"{rank.name} has not connected to the controller at {sockets.endpoint.commands}")
        return worker, worker

    def connect(self, rank: WorkerRank, request: Callable[[Connection | ConnectionAddress], T]) -> tuple[Messages, T]:
        assert self._sockets is not None, "`place` has made them"
        sockets = self._further = self._further or ControllerSockets(self._sockets.host)
        keys, number = CurveKeys.create(), rank.number
        progress = Progress(multiprocessing.get_context("spawn"))
        worker = RemoteWorker(0, progress, lambda message: sockets.send(number, message), kill=lambda: None)
        sockets.allow(number, keys.public, worker)
        answer = request(SocketAddress(sockets.endpoint, number, keys))
        if not sockets.wait_connected(number, HELLO_SECONDS):
            worker.close()
            raise StartupError(f"{rank.name} has not connected to the controller at {sockets.endpoint.commands}")
        return worker, answer

    @property
    def addresses(self) -> Sequence[Address]:
        opened = [sockets for sockets in (self._sockets, self._further) if sockets is not None]
        return [*self._of_ray, *(address for sockets in opened for address in sockets.addresses)]

    def problem(self) -> str | None:
        if self._problem is None and self._head is not None:
            self._problem = self._head.problem()
        return self._problem

    def close(self) -> None:
        for sockets in (self._sockets, self._further):
            if sockets is not None:
                sockets.close()
        if self._problem is not None:
            # Without its head, Ray answers no call, not even that of its exit handler. It ends its processes itself.
            if self._owns_connection:
                atexit.unregister(ray.shutdown)
            return
        if self._actors and ray.is_initialized():
            for actor in self._actors:
                _kill(actor)
            if self._runs:
                ray.wait(self._runs, num_returns=len(self._runs), timeout=KILL_SECONDS)
        self._actors, self._runs = [], []
        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)
        self._group = None
        if self._owns_connection:
            self._owns_connection = False
            ray.shutdown()

    def _rank(self, number: int, splits: Sequence[Split]) -> WorkerRank:
        facts = self._facts[number]
        device = "cpu"
        if self._resource == "GPU":
            device = f"cuda:{[each.pid for each in self._facts if each.node == facts.node].index(facts.pid)}"
        rank = worker_rank(number, splits, self._facts[0].rendezvous, WorkerDevice(device))
        return replace(rank, node=facts.node, interface=facts.interface)


def _kill(actor: Any) -> None:
    """Kills an actor. If its process is stopped, Ray ends it some seconds later."""
    with contextlib.suppress(RayError, ValueError):  # the actor is already dead, or the cluster is lost
        ray.kill(actor)
