"""Checks whether the processes of an application fit on the nodes of a cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotset.base.errors import ConfigError
from hotset.base.units import show_bytes
from hotset.fleet.cluster.spec import ClusterSpec, Role

UNITS = {"CPU": "CPUs", "GPU": "GPUs", "memory": "memory"}


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster with all its resources, by Ray's names."""

    id: str
    address: str
    resources: Mapping[str, float]

    @property
    def label(self) -> str:
        """A short text that names the node."""
        return f"{self.address} ({self.id[:8]})"

    def offers(self, demand: Mapping[str, float]) -> bool:
        return all(self.resources.get(name, 0.0) >= amount for name, amount in demand.items())


def check_fit(spec: ClusterSpec, counts: Mapping[Role, int], nodes: Sequence[Node]) -> None:
    """Raises ConfigError if the processes do not fit on the nodes.

    Places the largest processes first, each on the first node with room. Ray may place them otherwise.
    """
    demands = {role: spec.demand(role) for role in counts}
    for role, demand in demands.items():
        if not any(node.offers(demand) for node in nodes):
            raise ConfigError(
                f"one {_noun(role)} needs {_show(demand)} on one node, but no node has that; {_show_nodes(nodes)}"
            )
    if spec.routers.port and counts["router"] > len(nodes):
        raise ConfigError(
            f"{counts['router']} routers listen at port {spec.routers.port} of different nodes, but there are only "
            f"{len(nodes)} nodes; lower routers.count, or set routers.port to 0"
        )
    room = [dict(node.resources) for node in nodes]
    processes = [role for role, count in counts.items() for _ in range(count)]
    processes.sort(key=lambda role: (demands[role].get("GPU", 0.0), demands[role].get("CPU", 0.0)), reverse=True)
    for role in processes:
        demand = demands[role]
        free = next((left for left in room if all(left.get(n, 0.0) >= amount for n, amount in demand.items())), None)
        if free is None:
            listed = ", ".join(f"{count} x {_noun(role)} ({_show(demands[role])})" for role, count in counts.items())
            raise ConfigError(
                f"the nodes do not have room for {listed}; {_show_nodes(nodes)}; use fewer or smaller engines, or add "
                "nodes"
            )
        for name, amount in demand.items():
            free[name] -= amount


def _noun(role: Role) -> str:
    return "router" if role == "router" else f"{role} engine"


def _show(resources: Mapping[str, float]) -> str:
    amounts = [
        show_bytes(int(amount)) if name == "memory" else f"{amount:g} {UNITS.get(name, name)}"
        for name, amount in resources.items()
    ]
    return ", ".join(amounts) or "nothing"


def _show_nodes(nodes: Sequence[Node]) -> str:
    shown = [
        f"{node.label} has {_show({name: node.resources.get(name, 0.0) for name in ('CPU', 'GPU')})}" for node in nodes
    ]
    return "; ".join(shown[:8]) + (f"; and {len(shown) - 8} more" if len(shown) > 8 else "")
