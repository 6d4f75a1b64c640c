"""Connects to a Ray cluster, chooses the nodes of workers, and checks which versions are installed there."""

import importlib.metadata
import logging
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hotset import __version__
from hotset.base.address import Address
from hotset.base.errors import ConfigError, StartupError

CONNECT_SECONDS = 5.0
WATCH_SECONDS, LOST_SECONDS = 1.0, 4.0  # interval between checks of the head, and silence after which it is lost
PLACEMENT_SECONDS = 10.0  # time for Ray to reserve resources that are free
# The beginning of every connection to a gRPC server: the preface of HTTP/2 and an empty SETTINGS frame (RFC 9113, 3.4).
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
NODE_ID = "ray.io/node-id"  # the label of every node with its id


def connect(address: str | None) -> bool:
    """Connects this process to a Ray cluster, by default to the cluster of this machine. Returns False if the process
    was already connected.

    Raises StartupError, with what to do, if the cluster cannot be reached or used.
    """
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    if address != "auto":
        _check_reachable(address)
    with _same_signal_handler():
        try:
            ray.init(address=address, logging_level=logging.WARNING, log_to_driver=True)
        except Exception as error:  # Ray raises ConnectionError, RuntimeError, ValueError and others
            reason = str(error).strip().partition("\n")[0]
            where = "" if address == "auto" else f" at {address}"
            raise StartupError(
                f"--executor ray cannot use the Ray cluster{where}: {reason}; this machine must be one of its nodes: "
                "run `ray start --head` here, or `ray start --address=HEAD:6379` to join another"
            ) from error
    return True


def _check_reachable(address: str) -> None:
    """Raises StartupError if nothing listens at the address. Ray itself would try for minutes."""
    parsed = Address.parse(address)
    if parsed is None:
        raise ConfigError(f"--ray-address must be the host and port of a Ray head, like 10.0.0.1:6379, got {address!r}")
    if (reason := unreachable(parsed, CONNECT_SECONDS)) is not None:
        raise StartupError(
            f"no Ray cluster can be reached at {address} ({reason}); start one with `ray start --head`, or correct "
            "--ray-address"
        )


def unreachable(address: Address, seconds: float) -> str | None:
    """Returns why no Ray head answers at an address within `seconds`, or None. A process that is stopped accepts
    connections, but does not answer."""
    try:
        with socket.create_connection((address.host.strip("[]"), address.port), seconds) as connection:
            connection.sendall(HTTP2_PREFACE)
            connection.recv(1)
    except ConnectionResetError:  # an answer, too: the head uses TLS
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None


class HeadWatch:
    """Watches the head of the cluster. Without this, Ray would end this process without a message, a minute after the
    head is lost."""

    def __init__(self) -> None:
        address = Address.parse(ray.get_runtime_context().gcs_address)
        assert address is not None, "Ray reports the address to which it is connected"
        self._address = address
        self._silent_since: float | None = None
        self._next_look = 0.0

    def problem(self) -> str | None:
        """Checks whether the head answers, at most once per WATCH_SECONDS. Returns what is wrong, or None."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + WATCH_SECONDS
        if (reason := unreachable(self._address, WATCH_SECONDS)) is None:
            self._silent_since = None
            return None
        self._silent_since = now if self._silent_since is None else self._silent_since
        if now < self._silent_since + LOST_SECONDS:
            return None
        return f"the head of the Ray cluster at {self._address} is lost ({reason})"


@contextmanager
def _same_signal_handler() -> Iterator[None]:
    """Restores the handler of SIGTERM, which Ray replaces, because the server decides when its engine ends."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster."""

    id: str
    address: str
    capacity: int  # number of workers for which it has a GPU, or a CPU if workers compute on CPUs

    @property
    def name(self) -> str:
        return node_name(self.address, self.id)


def node_name(address: str, node_id: str) -> str:
    """Returns the name of a node in messages. Several nodes can have one address, for example in tests."""
    return f"{address}/{node_id[:8]}"


def nodes(resource: str) -> list[Node]:
    """Returns the living nodes. The first one is the node of this process."""
    here = ray.get_runtime_context().get_node_id()
    found = [
        Node(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"].get(resource, 0)))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: node.id != here)


def possible_shares(workers: int, tp_size: int, capacities: Sequence[int]) -> list[int]:
    """Returns the possible numbers of workers per node, the largest first, which needs the fewest nodes.

    All nodes get the same number, and the first node is always among them. The ranks of a stage are on one node, or
    fill several.
    """
    shares = [
        size for size in range(workers, 0, -1) if workers % size == 0 and (size % tp_size == 0 or tp_size % size == 0)
    ]
    return [
        size
        for size in shares
        if capacities[0] >= size and sum(capacity >= size for capacity in capacities) >= workers // size
    ]


def reserve(workers: int, tp_size: int, resource: str) -> tuple[PlacementGroup, int]:
    """Reserves resources for all workers, and returns the placement group with the number of workers per bundle.

    Each bundle is on another node, the first one on the node of this process. Raises StartupError if the workers do not
    fit the nodes, or if others use their resources.
    """
    found = nodes(resource)
    shares = possible_shares(workers, tp_size, [node.capacity for node in found])
    listed = ", ".join(f"{node.name} has {node.capacity}" for node in found)
    if not shares:
        raise StartupError(
            f"{workers} workers do not fit the nodes of the Ray cluster: each worker takes one {resource}, all nodes "
            f"get the same number of workers, and the first node is this one; {listed}; change "
            "--tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size, or add nodes"
        )
    for share in shares:
        count = workers // share
        selector = [{NODE_ID: found[0].id}] + [{}] * (count - 1)
        group = placement_group([{resource: share}] * count, "STRICT_SPREAD", bundle_label_selector=selector)
        if group.wait(PLACEMENT_SECONDS):
            return group, share
        remove_placement_group(group)
    raise StartupError(
        f"others use the {resource}s that {workers} workers need ({listed} in total; `ray status` shows more); end "
        "what uses them, or add nodes"
    )


def in_bundle(group: PlacementGroup, bundle: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)


def check_versions(found: Mapping[str, str | None]) -> None:
    """Raises StartupError if the versions of Python, Hotset or torch on a node differ from this node, or if a package
    is missing there.

    `found` comes from `WorkerStub.versions`.
    """
    expected = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "Hotset": __version__,
        "torch": importlib.metadata.version("torch"),
        "pyzmq": importlib.metadata.version("pyzmq"),
    }
    for name, version in expected.items():
        if found[name] != version:
            has = "no " + name if found[name] is None else f"{name} {found[name]}"
            raise StartupError(
                f"node {found['node']} has {has}, but this node has {name} {version}; install the same versions on all "
                "nodes"
            )


def get(refs: Sequence[Any], seconds: float, task: str) -> list[Any]:
    """Returns the results of Ray calls. Raises StartupError, which names `task`, if one fails or takes too long."""
    try:
        return list(ray.get(list(refs), timeout=seconds))
    except RayError as error:
        cause = getattr(error, "cause", error)
        if isinstance(cause, StartupError):
            raise cause from None
        reason = str(cause).strip().partition("\n")[0] or repr(cause)
        raise StartupError(f"Ray could not {task}: {reason}") from error
