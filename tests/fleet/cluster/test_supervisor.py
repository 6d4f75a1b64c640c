"""The command line with which a supervisor starts an engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_sysfs import fake_sysfs

from hotset.fleet.cluster.spec import parse_spec
from hotset.fleet.cluster.supervisor import Launch, Supervisor


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"transfer-interface": "eth0"}, "mlx5_1:1,eth0"),
        ({"transfer-interface": "mlx5_0:1"}, "mlx5_0:1"),
        ({"transfer-interface": "eth0", "transfer": "mooncake"}, "eth0"),  # Mooncake finds RDMA devices itself
        ({}, None),  # Ray knows the nodes by loopback addresses
    ],
)
def test_nixl_gets_the_active_rdma_ports_of_the_node_beside_the_interface_of_the_spec(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: dict[str, Any], expected: str | None
) -> None:
    slots = {"mlx5_0": "pci0000:15/0000:15:01.0", "mlx5_1": "pci0000:15/0000:15:02.0"}
    sysfs = fake_sysfs(tmp_path, {"mlx5_0": "1: DOWN", "mlx5_1": "4: ACTIVE"}, slots)
    context = SimpleNamespace(get_node_id=lambda: "ab", get_accelerator_ids=lambda: {"GPU": ["0"]})
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    spec = parse_spec({"model": "m", "flags": {"device": "cpu", **flags}})
    supervisor = Supervisor(Launch("a", "decode-1", "decode", spec, {}, {}, "controller", {}), sysfs)
    arguments, host = supervisor._arguments()
    given = arguments[arguments.index("--transfer-interface") + 1] if "--transfer-interface" in arguments else None
    assert (given, host) == (expected, "10.0.0.1")
