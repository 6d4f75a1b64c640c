"""A Ray cluster of several simulated nodes on this machine, and an application on it."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import plain_http
import ray
from ray.cluster_utils import Cluster

from hotset.base.errors import StartupError
from hotset.base.listeners import interface_addresses
from hotset.fleet.cluster import application
from hotset.fleet.cluster.spec import ClusterSpec, parse_spec

WAIT_SECONDS = 180.0
OBJECT_STORE_BYTES = 100 << 20
RAY_CONFIG = {
    "worker_niceness": 0,  # Ray's default is 15, with which processes starve on a busy machine
    # Ray's defaults notice a node that is stopped after half a minute.
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 4,
}
# Ray announces a change of a default that does not concern us.
RAY_WARNINGS = ("ignore:Tip. In future versions of Ray:FutureWarning",)
NODE_ADDRESS = ray.util.get_node_ip_address()  # of all simulated nodes
INTERFACE = next(name for name, hosts in interface_addresses().items() if NODE_ADDRESS in hosts)
SIZES = {"device": "cpu", "device-kv-tokens": 1024, "host-kv-tokens": 2048, "transfer-interface": INTERFACE}


def wait_for(condition: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> Any:
    """Waits until the condition is true, and returns its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.1)
    return value


@dataclass
class SimulatedCluster:
    """A running Ray cluster to which this process is connected."""

    cluster: Cluster
    nodes: list[Any] = field(default_factory=list)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add_node(self, cpus: float = 4, **options: Any) -> Any:
        node = self.cluster.add_node(num_cpus=cpus, object_store_memory=OBJECT_STORE_BYTES, **options)
        self.nodes.append(node)
        return node

    def up(self, spec: ClusterSpec, api_key: str | None = None) -> None:
        application.check_cluster(spec)
        application.start_application(spec, api_key)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = application.call_controller("status")
        return found

    def members(self, role: str | None = None, phase: str | None = None) -> list[dict[str, Any]]:
        found = self.status()["members"]
        return [m for m in found if role in (None, m["role"]) and phase in (None, m["phase"])]

    def wait_until_complete(self, seconds: float = WAIT_SECONDS) -> dict[str, Any]:
        """Waits until exactly the wanted processes are ready, and the router sends requests to all engines."""

        def status_if_complete() -> dict[str, Any] | None:
            with suppress(StartupError):  # the controller hangs, or is being restarted
                found = self.status()
                return found if application.is_complete(found) else None
            return None

        try:
            found: dict[str, Any] = wait_for(status_if_complete, "a complete application", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.status()}") from None
        counts = {role: count for role, count in found["counts"].items() if role != "router"}
        for url in application.router_urls(found):
            wait_for(lambda url=url: has_workers(url, counts), f"{url} with {counts}")
        return found

    @property
    def url(self) -> str:
        (url,) = application.router_urls(self.status())
        return url

    def down(self, *, now: bool = True) -> None:
        application.end_application(now=now, report=lambda found: None)


def has_workers(url: str, counts: dict[str, int]) -> bool:
    """Returns whether a router has exactly `counts` live workers of each role."""
    try:
        answer = plain_http.get(f"{url}/health", timeout=10)
    except OSError:
        return False
    return answer.status_code == 200 and {role: answer.json().get(role) for role in counts} == counts


def complete(url: str, prompt: list[int], **fields: Any) -> Any:
    """Returns the answer to a completion request."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return plain_http.post(f"{url}/v1/completions", json={**body, **fields}, timeout=120)


def spec_of(model: str, **fields: Any) -> ClusterSpec:
    """Returns the spec of a small application on CPUs."""
    small = {"resources": {"cpus": 0.5}}
    value = {
        "model": model,
        "flags": SIZES,
        "prefill": small,
        "decode": small,
        "routers": {"port": 0, "resources": {"cpus": 0}},
        "drain-seconds": 60.0,
    }
    for name, change in fields.items():
        name = name.replace("_", "-")
        value[name] = {**value[name], **change} if isinstance(value.get(name), dict) else change
    return parse_spec(value)


@contextmanager
def simulated_cluster(name: str = "hotset", *, cpus: float = 4, nodes: int = 0) -> Iterator[SimulatedCluster]:
    """Starts a head and `nodes` further nodes, and connects this process. Everything ends with the block."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": cpus,
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "_system_config": RAY_CONFIG,
        },
    )
    simulated = SimulatedCluster(cluster)
    try:
        for _ in range(nodes):
            simulated.add_node(cpus)
        with application.connected(simulated.address, name):
            yield simulated
    finally:
        ray.shutdown()
        cluster.shutdown()
