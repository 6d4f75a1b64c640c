"""The RDMA devices of this machine, as the kernel shows them below /sys.

A port is named as UCX names it: `mlx5_0:1` is port 1 of the device mlx5_0.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

SYSFS = Path("/sys")
NVIDIA, DISPLAY_CONTROLLERS = "0x10de", "0x03"  # PCI vendor, and the class whose members GPUs are


def rdma_devices(sysfs: Path = SYSFS) -> list[str]:
    """Returns the names of the RDMA devices, without ports."""
    folder = sysfs / "class/infiniband"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def active_ports(gpus: Collection[str] = (), sysfs: Path = SYSFS) -> list[str]:
    """Returns the ports that are in use, those closest to the GPUs first.

    `gpus` are the numbers of GPUs in the order of their PCI addresses, which is that of NVML and Ray; without them, all
    GPUs count. The distance is that between PCI slots: devices behind the same switch are closer than others.
    """
    near = _gpu_slots(gpus, sysfs)
    found = []
    for device in rdma_devices(sysfs):
        slot = (sysfs / "class/infiniband" / device / "device").resolve()
        for port in sorted((sysfs / "class/infiniband" / device / "ports").glob("*")):
            if _read(port / "state").endswith("ACTIVE"):  # like "4: ACTIVE"
                found.append((min((_distance(slot, gpu) for gpu in near), default=(0, 0)), f"{device}:{port.name}"))
    return [name for _, name in sorted(found)]


def with_active_ports(interface: str, gpus: Collection[str] = (), sysfs: Path = SYSFS) -> str:
    """Returns the devices on which NIXL should move KV: the active RDMA ports and `interface`, which remains for TCP.

    If `interface` is a loopback interface, or names an RDMA device, the choice is made already.
    """
    names, known = interface.split(","), rdma_devices(sysfs)
    if "lo" in names or any(name.partition(":")[0] in known for name in names):
        return interface
    return ",".join([*active_ports(gpus, sysfs), interface])


def _gpu_slots(gpus: Collection[str], sysfs: Path) -> Sequence[Path]:
    folder = sysfs / "bus/pci/devices"
    slots = [
        path.resolve()
        for path in sorted(folder.iterdir() if folder.is_dir() else ())
        if _read(path / "vendor") == NVIDIA and _read(path / "class").startswith(DISPLAY_CONTROLLERS)
    ]
    return [slot for number, slot in enumerate(slots) if str(number) in gpus] or slots


def _distance(one: Path, other: Path) -> tuple[bool, int]:
    """Returns whether two PCI devices are at different processors, and the number of steps from one to the other."""
    shared = len([None for a, b in zip(one.parts, other.parts, strict=False) if a == b])
    return _read(one / "numa_node") != _read(other / "numa_node"), len(one.parts) + len(other.parts) - 2 * shared


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
