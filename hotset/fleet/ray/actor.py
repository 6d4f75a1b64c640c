"""The Ray actor of a worker: it connects to the controller, and serves it like any other worker process."""

import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray
import torch

from hotset.base.address import normalized_host
from hotset.base.endings import wait_for_ending
from hotset.base.engine_settings import CollectivesChoice
from hotset.base.errors import StartupError
from hotset.base.listeners import check_listeners, interface_addresses, listeners
from hotset.base.logs import log_to_stderr
from hotset.base.processes import name_as_ending
from hotset.engine.progress import Progress
from hotset.engine.workers.distributed import RENDEZVOUS_SCHEME, World, make_world
from hotset.engine.workers.messages import WorkerRank
from hotset.engine.workers.worker import ABORTED, EXIT_SECONDS, serve
from hotset.fleet.ray.nodes import node_name
from hotset.fleet.ray.sockets import ControllerEndpoint, CurveKeys, WorkerSockets


@dataclass(frozen=True, slots=True)
class ActorFacts:
    """The facts that a worker's actor reports to the controller before it runs the worker."""

    pid: int
    node: str
    interface: str  # the interface with the address of the node
    gpus: Sequence[str]  # ids of the GPUs that Ray has assigned to the actor
    key: bytes  # the actor's public key
    rendezvous: str  # the address at which the actor listens for the rendezvous; empty if it does not listen


class WorkerActor:
    """The implementation of the Ray actor of one worker."""

    def __init__(self) -> None:
        self._keys = CurveKeys.create()
        self._listener: socket.socket | None = None

    def describe(self, hosts_rendezvous: bool) -> ActorFacts:
        """Returns the facts for the controller. If `hosts_rendezvous`, also listens for the other workers."""
        address = normalized_host(ray.util.get_node_ip_address())
        rendezvous = ""
        if hosts_rendezvous:
            self._listener = socket.create_server((address.strip("[]"), 0), family=_family(address))
            rendezvous = f"{RENDEZVOUS_SCHEME}{address}:{self._listener.getsockname()[1]}"
        context = ray.get_runtime_context()
        return ActorFacts(
            pid=os.getpid(),
            node=node_name(address, context.get_node_id()),
            interface=interface_of(address),
            gpus=tuple(context.get_accelerator_ids().get("GPU", ())),
            key=self._keys.public,
            rendezvous=rendezvous,
        )

    def run(self, number: int, controller: ControllerEndpoint, gpus: Sequence[str]) -> None:
        """Runs the worker until the controller stops it. `gpus` are the GPUs of all workers of this node."""
        if gpus:
            # Ray shows a worker only its own GPU. To exchange data directly, workers must see all GPUs of their node.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        log_to_stderr()
        sockets = WorkerSockets(controller, number, self._keys)
        wait_for_ending()
        progress = Progress(multiprocessing.get_context("spawn"), on_beat=sockets.beat)

        def exit_soon() -> None:
            name_as_ending()
            time.sleep(EXIT_SECONDS)
            sockets.close(ABORTED)
            os._exit(ABORTED)

        exit_code = serve(sockets, progress, self._join_world, exit_soon)
        sockets.close(exit_code or 0)
        if exit_code is not None:
            os._exit(exit_code)  # the exit handlers of libraries may fail, or wait for other workers
        ray.actor.exit_actor()

    def _join_world(self, rank: WorkerRank, device: torch.device, collectives: CollectivesChoice) -> World:
        of_ray = [listener.address for listener in listeners()]
        world = make_world(rank, device, collectives, self._listener)
        check_listeners(rank.name, addresses=of_ray, interfaces=(rank.interface,))
        return world


def interface_of(address: str) -> str:
    """Returns the network interface of this machine that has an address. Raises StartupError if there is none."""
    found = interface_addresses()
    for name, addresses in found.items():
        if address in addresses:
            return name
    listed = ", ".join(f"{name} ({', '.join(addresses) or 'no address'})" for name, addresses in found.items())
    raise StartupError(
        f"Ray knows this node as {address}, which is the address of none of its interfaces: {listed}; start Ray with "
        "--node-ip-address"
    )


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
