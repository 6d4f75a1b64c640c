"""RDMA devices in made-up trees of /sys, with paths of PCI devices as on a machine with two processors."""

from pathlib import Path

import pytest
from fake_files import write_files
from lab.doctor.subjects import subject

from hotset.lab.doctor import rdma
from hotset.lab.doctor.rdma import check_rdma

SLOTS = {  # of GPUs 0 to 2 and of two network cards: the first is behind the same switch as GPU 0
    "0000:18:00.0": "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0",
    "0000:3b:00.0": "pci0000:37/0000:37:01.0/0000:3b:00.0",
    "0000:9a:00.0": "pci0000:97/0000:97:01.0/0000:98:00.0/0000:9a:00.0",
    "0000:19:00.0": "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0",
    "0000:b1:00.0": "pci0000:b0/0000:b0:01.0/0000:b1:00.0",
}
NODES = {"0000:18:00.0": 0, "0000:3b:00.0": 0, "0000:9a:00.0": 1, "0000:19:00.0": 0, "0000:b1:00.0": 1}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the root of a machine with three GPUs and two network cards, of which only the first has a cable."""
    for address, slot in SLOTS.items():
        write_files(tmp_path, {f"sys/devices/{slot}/numa_node": NODES[address]})
        link = tmp_path / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(tmp_path / "sys/devices" / slot)
    for device, address, state in (("mlx5_0", "0000:19:00.0", "4: ACTIVE"), ("mlx5_1", "0000:b1:00.0", "1: DOWN")):
        folder = f"sys/class/infiniband/{device}"
        port = {"state": state, "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
        write_files(tmp_path, {f"{folder}/ports/1/{name}": text for name, text in port.items()})
        (tmp_path / folder / "device").symlink_to(tmp_path / "sys/devices" / SLOTS[address])
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    write_files(tmp_path, {"sys/module/nvidia_peermem/refcnt": 0})
    monkeypatch.setattr(rdma, "pci_address", dict(enumerate(SLOTS)).get)
    return tmp_path


def test_active_ports_are_listed_with_their_distance_to_each_gpu(machine: Path) -> None:
    port, direct = check_rdma(subject(gpus=(0, 1), root=machine))
    assert (port.level, direct.level) == ("good", "good")
    assert port.what == "mlx5_0:1: InfiniBand, 400 Gb/sec (4X NDR); same PCIe switch: GPU 0; same NUMA node: GPU 1"
    assert "nvidia_peermem" in direct.what


def test_a_gpu_without_a_port_at_its_processor_is_slow(machine: Path) -> None:
    port, far, _ = check_rdma(subject(gpus=(0, 2), root=machine))
    assert "same PCIe switch: GPU 0; other NUMA node: GPU 2" in port.what
    assert far.level == "slow" and "GPU 2" in far.what


def test_a_gpu_or_node_that_the_system_does_not_show_is_at_an_unknown_distance(machine: Path) -> None:
    write_files(machine, {f"sys/devices/{SLOTS['0000:3b:00.0']}/numa_node": -1})
    port, _ = check_rdma(subject(gpus=(1, 7), root=machine))
    assert "unknown distance: GPU 1,7" in port.what


def test_no_device_is_skipped_and_no_active_port_is_slow(machine: Path, tmp_path: Path) -> None:
    (found,) = check_rdma(subject(root=tmp_path / "empty"))
    assert found.level == "skipped"
    write_files(machine, {"sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN"})
    (found,) = check_rdma(subject(root=machine))
    assert found.level == "slow" and "mlx5_0, mlx5_1" in found.what


def test_devices_that_a_container_hides_are_broken(machine: Path) -> None:
    (machine / "dev/infiniband").rmdir()
    _, found = check_rdma(subject(root=machine))
    assert found.level == "broken" and "--device /dev/infiniband" in found.mend


def test_gpu_memory_is_reached_by_the_module_or_by_dma_buf(machine: Path) -> None:
    (machine / "sys/module/nvidia_peermem/refcnt").unlink()
    (machine / "sys/module/nvidia_peermem").rmdir()
    *_, found = check_rdma(subject(gpus=(0,), root=machine))
    assert found.level == "slow" and "modprobe nvidia_peermem" in found.mend
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
    write_files(machine, {"proc/driver/nvidia/version": version})
    *_, found = check_rdma(subject(gpus=(0,), root=machine))
    assert found.level == "good" and "dma-buf" in found.what
