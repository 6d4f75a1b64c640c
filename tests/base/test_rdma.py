"""Which RDMA ports move KV, and in which order."""

from pathlib import Path

import pytest
from fake_sysfs import fake_sysfs

from hotset.base.rdma import active_ports, rdma_devices, with_active_ports

SLOTS = {
    "gpu0": "pci0000:15/0000:15:01.0/0000:17:00.0",
    "gpu1": "pci0000:97/0000:97:01.0/0000:98:00.0",
    "mlx5_0": "pci0000:97/0000:97:05.0/0000:9a:00.0",  # at the root complex of GPU 1
    "mlx5_1": "pci0000:15/0000:15:01.0/0000:16:00.0",  # behind the switch of GPU 0
    "mlx5_2": "pci0000:26/0000:26:01.0/0000:27:00.0",  # at the processor of GPU 0
    "mlx5_3": "pci0000:15/0000:15:01.0/0000:18:00.0",
}
STATES = {"mlx5_0": "4: ACTIVE", "mlx5_1": "4: ACTIVE", "mlx5_2": "4: ACTIVE", "mlx5_3": "1: DOWN"}


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    return fake_sysfs(tmp_path, STATES, SLOTS, {"gpu1": 1, "mlx5_0": 1})


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (("0",), ["mlx5_1:1", "mlx5_2:1", "mlx5_0:1"]),
        (("1",), ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1"]),
        ((), ["mlx5_1:1", "mlx5_0:1", "mlx5_2:1"]),
        (("GPU-with-a-name",), ["mlx5_1:1", "mlx5_0:1", "mlx5_2:1"]),
    ],
)
def test_active_ports_come_in_the_order_of_their_distance_to_the_gpus(
    sysfs: Path, gpus: tuple[str, ...], expected: list[str]
) -> None:
    assert active_ports(gpus, sysfs) == expected


def test_ports_of_a_machine_without_gpus_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    root = fake_sysfs(tmp_path, STATES, {name: slot for name, slot in SLOTS.items() if not name.startswith("gpu")})
    assert active_ports(("0",), root) == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1"]


@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        ("eth0", "mlx5_1:1,mlx5_2:1,mlx5_0:1,eth0"),
        ("mlx5_2:1,eth0", "mlx5_2:1,eth0"),  # chosen by hand
        ("lo", "lo"),
    ],
)
def test_an_ip_interface_alone_gets_the_active_ports(sysfs: Path, interface: str, expected: str) -> None:
    assert with_active_ports(interface, ("0",), sysfs) == expected


def test_a_machine_without_rdma_uses_the_interface_alone(tmp_path: Path) -> None:
    assert with_active_ports("eth0", (), tmp_path) == "eth0"
    assert rdma_devices(tmp_path) == [] and active_ports((), tmp_path) == []
