"""The command line's side of an application: connects to Ray, checks the cluster, and calls the controller."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray
import ray.cloudpickle
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hotset.base.address import Address, ControlPort, is_loopback
from hotset.base.config import environment_defaults
from hotset.base.errors import ConfigError, StartupError
from hotset.base.listeners import LOOPBACK_INTERFACE, check_listeners, transfer_interface
from hotset.engine.model_checks import check_model
from hotset.fleet.cluster import probe
from hotset.fleet.cluster.controller import CONTROLLER, MAX_CALLS, Controller, namespace_of, state_key
from hotset.fleet.cluster.folders import make_folder
from hotset.fleet.cluster.placement import Node, check_fit
from hotset.fleet.cluster.spec import ENGINE_ROLES, ClusterSpec, EngineRole, Role
from hotset.fleet.ray.nodes import CONNECT_SECONDS, unreachable

ANSWER_SECONDS = 60.0  # for a node or the controller
POLL_SECONDS = 0.5
LOCAL_OBJECT_STORE_BYTES = 100 << 20  # Hotset stores nothing there; Ray's minimum is 75 MB

Status = dict[str, Any]


@contextmanager
def connected(address: str | None, name: str) -> Iterator[str]:
    """Connects to a running Ray cluster during the block, and yields the address of its head.

    `address` is the address of the head. Its default is RAY_ADDRESS, or else the cluster that runs on this machine.
    Raises ConfigError if there is no cluster.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    if address.startswith("ray://"):
        raise ConfigError(
            f"{address}: Ray Client is not supported; run this on a node of the cluster, or use its GCS address"
        )
    if address not in ("auto", "local"):  # Ray itself would try for a minute
        head = Address.parse(address)
        if head is None:
            raise ConfigError(f"the address of a Ray cluster looks like 10.0.0.1:6379, got {address!r}")
        if (reason := unreachable(head, CONNECT_SECONDS)) is not None:
            raise ConfigError(
                f"no Ray cluster answers at {address}: {reason}; start one with `ray start --head`, or use --local"
            )
    try:
        ray.init(address=address, namespace=namespace_of(name), log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"cannot connect to a Ray cluster at {address}: {reason}; start one with `ray start --head`, name its "
            "address with --address, or use --local"
        ) from None
    try:
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


@contextmanager
def local_cluster(name: str) -> Iterator[str]:
    """Starts a Ray cluster of one node on this machine, which ends with the block, and yields its address.

    The cluster listens on loopback only: `hotset.fleet.cluster.command` sets a variable for this before Ray is
    imported. The folder with its logs stays until the next local cluster starts.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        _temp_dir=str(make_folder()),
        namespace=namespace_of(name),
        include_dashboard=False,
        object_store_memory=LOCAL_OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _system_config={"worker_niceness": 0},  # Ray's default is 15: other programs would come first
    )
    try:
        check_listeners("the driver of Ray", interfaces=(LOOPBACK_INTERFACE,))
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


def log_folder() -> str:
    """Returns the folder with the logs of all processes on this node."""
    return f"{ray.get_runtime_context().get_temp_dir()}/session_latest/logs"


def cluster_nodes() -> list[Node]:
    """Returns the nodes that are alive."""
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]
    ]


def check_local(spec: ClusterSpec) -> None:
    """Raises ConfigError if the spec names an address or an interface that is not loopback, because --local allows
    only loopback."""
    host = spec.routers.host
    settings = [spec.engine_settings(role) for role in ENGINE_ROLES]
    interface = settings[0].get("transfer_interface")  # the same for all engines
    is_public = any(each.get("kv_events_public") for each in settings)
    for name, value, is_local in (
        ("routers.host", host, host is None or is_loopback(host)),
        ("flags.transfer-interface", interface, interface in (None, LOOPBACK_INTERFACE)),
        ("flags.kv-events-public", "true", not is_public),
    ):
        if not is_local:
            raise ConfigError(
                f"{name} is {value}, but --local listens on loopback only; leave it out, or start Ray with `ray start "
                "--head` and leave out --local"
            )


def check_cluster(spec: ClusterSpec) -> None:
    """Raises ConfigError if the application cannot run on the cluster: versions, room, the model on each node."""
    nodes = cluster_nodes()
    check_versions(nodes)
    check_fit(spec, spec.counts(), nodes)
    hosts = {role: [node for node in nodes if node.offers(spec.demand(role))] for role in ENGINE_ROLES}
    checks = {
        (role, node.label): _on_node(_check_engine, node, spec, role) for role in ENGINE_ROLES for node in hosts[role]
    }
    for (role, label), result in checks.items():
        reason = _result_of(result, label)
        if reason is not None:
            raise ConfigError(f"{role} engines cannot run on node {label}: {reason}")


def check_versions(nodes: Sequence[Node]) -> None:
    """Raises ConfigError if the version of Python or Hotset on a node differs from this process."""
    ray.cloudpickle.register_pickle_by_value(probe)
    try:
        results = {node.label: _on_node(probe.probe_node, node) for node in nodes}
    finally:
        ray.cloudpickle.unregister_pickle_by_value(probe)
    own = probe.probe_node()
    for label, result in results.items():
        found = _result_of(result, label)
        if found["hotset"] is None:
            raise ConfigError(
                f'node {label} has no Hotset; install it there: pip install "hotset[serve,transfer,cluster]"'
            )
        for package, name in (("python", "Python"), ("hotset", "Hotset")):
            if found[package] != own[package]:
                raise ConfigError(
                    f"node {label} has {name} {found[package]}, but this machine has {own[package]}; install the same "
                    "version on every node"
                )


def _on_node(function: Callable[..., Any], node: Node, *arguments: Any) -> Any:
    """Calls a function on a node. Returns the reference of its result."""
    on_node = NodeAffinitySchedulingStrategy(node.id, soft=False)
    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": on_node}
    return ray.remote(function).options(**options).remote(*arguments)


def _result_of(reference: Any, label: str) -> Any:
    try:
        return ray.get(reference, timeout=ANSWER_SECONDS)
    except ray.exceptions.GetTimeoutError:
        raise ConfigError(f"node {label} did not answer within {ANSWER_SECONDS:g} s; remove or restart it") from None
    except ray.exceptions.RayError as error:
        raise ConfigError(f"node {label} cannot run Hotset: {' '.join(str(error).split())[-300:]}") from None


def _check_engine(spec: ClusterSpec, role: EngineRole) -> str | None:
    """Runs on a node. Returns why an engine of the role cannot start there, or None."""
    address = Address(ray.util.get_node_ip_address(), 0)
    interface = spec.engine_settings(role).get("transfer_interface")
    try:
        check_model(spec.engine_config(role))
        transfer_interface(ControlPort(address, address), interface, secret="every application has one")
    except StartupError as error:
        return str(error)
    return None


def start_application(spec: ClusterSpec, api_key: str | None) -> None:
    """Starts the controller of an application, which starts everything else. Raises ConfigError if it runs already."""
    if _find_controller() is not None:
        raise ConfigError(
            f"the application {spec.name!r} is up already; `hotset cluster down --name {spec.name}` ends it, or give "
            "the spec another name"
        )
    for actor in ray.util.list_named_actors():  # supervisors that an application without a controller has left
        ray.kill(ray.get_actor(actor), no_restart=True)
    internal_kv._internal_kv_del(state_key(spec.name))
    environment = environment_defaults()
    handoff_secret = environment.get("handoff_secret") or secrets.token_hex(16)
    api_key = api_key or environment.get("api_key")
    variables = {"HOTSET_HANDOFF_SECRET": handoff_secret, **({"HOTSET_API_KEY": api_key} if api_key else {})}
    ray.remote(Controller).options(
        name=CONTROLLER, lifetime="detached", max_restarts=-1, num_cpus=0, max_concurrency=MAX_CALLS
    ).remote(spec, variables, probe.probe_node())


def _find_controller() -> Any:
    with suppress(ValueError):
        return ray.get_actor(CONTROLLER)
    return None


def call_controller(method: str, /, *arguments: Any, **keywords: Any) -> Any:
    """Calls a method of the controller. Raises ConfigError if no application runs, and StartupError if the controller
    does not answer."""
    controller = _find_controller()
    if controller is None:
        namespace = ray.get_runtime_context().namespace.removeprefix("hotset-")
        raise ConfigError(
            f"no application {namespace!r} runs on this cluster; start it with `hotset cluster up SPEC.yaml`, or name "
            "another one with --name"
        )
    try:
        return ray.get(getattr(controller, method).remote(*arguments, **keywords), timeout=ANSWER_SECONDS)
    except ray.exceptions.GetTimeoutError:
        raise StartupError(f"the controller did not answer within {ANSWER_SECONDS:g} s; try again") from None
    except ray.exceptions.RayError as error:
        raise StartupError(f"the controller was lost: {' '.join(str(error).split())[-300:]}; try again") from None


def is_complete(status: Status) -> bool:
    """Returns whether exactly the wanted processes are ready, and all engines have answered all routers."""
    members = status["members"]
    roles = [member["role"] for member in members]
    if any(member["phase"] != "ready" for member in members):
        return False
    engines = {member["url"] for member in members if member["role"] != "router"}
    all_routed = all(engines <= {*member["up"]} for member in members if member["role"] == "router")
    return all_routed and all(roles.count(role) == count for role, count in status["counts"].items())


def router_urls(status: Status) -> list[str]:
    """Returns the addresses at which clients reach the application."""
    return [member["url"] for member in status["members"] if member["role"] == "router" and member["phase"] == "ready"]


def check_scale(spec: ClusterSpec, counts: Mapping[Role, int]) -> None:
    """Raises ConfigError if the numbers of processes are not allowed by the target, or do not fit on the nodes."""
    for role, count in counts.items():
        target = None if role == "router" else spec.target_of(role)
        if target is not None and not target.min <= count <= target.max:
            raise ConfigError(f"target.{role} of the spec allows {target.min} to {target.max} engines, got {count}")
    nodes = cluster_nodes()
    check_versions(nodes)
    check_fit(spec, {**spec.counts(), **counts}, nodes)


def find_node(text: str) -> Node:
    """Returns the node whose address is `text`, or whose id begins with it. Raises ConfigError unless there is one."""
    nodes = cluster_nodes()
    found = [node for node in nodes if node.address == text or (len(text) >= 4 and node.id.startswith(text))]
    if len(found) == 1:
        return found[0]
    problem = f"{len(found)} nodes are" if found else "no node is"
    raise ConfigError(f"{problem} called {text!r}; the nodes are {', '.join(node.label for node in nodes)}")


def end_application(*, now: bool, report: Callable[[Status], None]) -> None:
    """Ends all processes and the controller. `report` is called with the status until they have ended."""
    call_controller("shut_down", now=now)
    while (status := call_controller("status"))["members"]:
        report(status)
        time.sleep(POLL_SECONDS)
    ray.kill(_find_controller(), no_restart=True)
    internal_kv._internal_kv_del(state_key(status["name"]))
