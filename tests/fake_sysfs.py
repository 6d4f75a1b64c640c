"""A directory like /sys of a machine with RDMA devices and GPUs."""

from collections.abc import Mapping
from pathlib import Path


def fake_sysfs(root: Path, ports: Mapping[str, str], slots: Mapping[str, str], numa: Mapping[str, int] = {}) -> Path:
    """Creates the directory. `ports` are the states of the first ports of RDMA devices. `slots` are the paths of
    devices and GPUs (`gpu0`, …) below /sys/devices, and `numa` the NUMA nodes of those that are not at node 0."""
    for name, slot in slots.items():
        device = root / "devices" / slot
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{numa.get(name, 0)}\n")
        (device / "vendor").write_text("0x10de\n" if name.startswith("gpu") else "0x15b3\n")
        (device / "class").write_text("0x030200\n" if name.startswith("gpu") else "0x020700\n")
        link = root / "bus/pci/devices" / device.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
    for name, state in ports.items():
        port = root / "class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (root / "class/infiniband" / name / "device").symlink_to(root / "devices" / slots[name])
    return root
