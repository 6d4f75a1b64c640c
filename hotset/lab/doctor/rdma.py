"""RDMA devices: their active ports, how near they are to the GPUs, and whether they can reach GPU memory."""

from dataclasses import dataclass
from pathlib import Path

from hotset.base.devices import pci_address
from hotset.base.host_checks import Finding
from hotset.base.rdma import active_ports, rdma_devices
from hotset.lab.doctor.findings import Subject

DEVICES = "sys/class/infiniband"


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """An active port of an RDMA device."""

    name: str  # like mlx5_0:1, as --transfer-interface takes it
    rate: str  # like "400 Gb/sec (4X NDR)"
    link: str  # InfiniBand or Ethernet
    device: Path  # the device's folder among the PCI devices


def describe_ports(root: Path) -> list[RdmaPort]:
    """Returns the active ports of all RDMA devices of the machine whose folder `sys` is in `root`."""
    found = []
    for name in active_ports(sysfs=root / "sys"):
        device, _, number = name.partition(":")
        folder = root / DEVICES / device
        rate, link = (_read(folder / "ports" / number / entry) for entry in ("rate", "link_layer"))
        found.append(RdmaPort(name, rate, link, (folder / "device").resolve()))
    return found


def distance(one: Path, other: Path) -> str:
    """Returns in words how far two devices are from each other. Both are folders among the PCI devices.

    The path of such a folder names every bridge up to the processor, like pci0000:15/0000:15:01.0/0000:16:00.0. Devices
    that share a bridge are behind the same switch.
    """
    ours, theirs = ([part for part in path.parts if part.count(":") == 2] for path in (one, other))
    if ours and theirs and ours[0] == theirs[0]:
        return "same PCIe switch"
    nodes = [_read(path / "numa_node") for path in (one, other)]
    if not all(node.isdecimal() for node in nodes):  # "-1" means unknown
        return "unknown distance"
    return "same NUMA node" if nodes[0] == nodes[1] else "other NUMA node"


def check_rdma(subject: Subject) -> list[Finding]:
    """Reports the active ports with their nearest GPUs, and GPUs without a near port."""
    ports, devices = describe_ports(subject.root), rdma_devices(subject.root / "sys")
    if not devices:
        return [Finding("skipped", "no RDMA device; handoffs to other machines would use TCP")]
    if not ports:
        mend = "see ibstat and the cables; in a container: --device /dev/infiniband, --network host"
        return [Finding("slow", f"no port of {', '.join(devices)} is active, so handoffs would use TCP", mend)]
    gpus = {gpu: _gpu_folder(gpu, subject.root) for gpu in subject.gpus}
    found = [Finding("good", _describe(port, gpus)) for port in ports]
    for gpu, folder in gpus.items():
        if folder is not None and all(distance(port.device, folder) == "other NUMA node" for port in ports):
            mend = "use a port at the GPU's node, if the machine has one"
            found.append(Finding("slow", f"every active port is at another NUMA node than GPU {gpu}", mend))
    if not (subject.root / "dev/infiniband").is_dir():
        mend = "in a container: --device /dev/infiniband --cap-add IPC_LOCK"
        found.append(Finding("broken", "the devices are there, but /dev/infiniband is not", mend))
    return found + ([_gpu_direct(subject.root)] if gpus else [])


def _describe(port: RdmaPort, gpus: dict[int, Path | None]) -> str:
    by_distance: dict[str, list[str]] = {}
    for gpu, folder in gpus.items():
        where = "unknown distance" if folder is None else distance(port.device, folder)
        by_distance.setdefault(where, []).append(str(gpu))
    near = (f"; {where}: GPU {','.join(numbers)}" for where, numbers in by_distance.items())
    return f"{port.name}: {port.link}, {port.rate}{''.join(near)}"


def _gpu_folder(gpu: int, root: Path) -> Path | None:
    address = pci_address(gpu)
    folder = root / "sys/bus/pci/devices" / (address or "")
    return folder.resolve() if address is not None and folder.exists() else None


def _gpu_direct(root: Path) -> Finding:
    """Looks for one of the two ways in which RDMA reaches GPU memory: a module of the driver, or dma-buf, which the
    driver with open kernel modules has."""
    if (root / "sys/module/nvidia_peermem").is_dir():
        return Finding("good", "GPUDirect: the module nvidia_peermem is loaded")
    if "Open Kernel Module" in _read(root / "proc/driver/nvidia/version"):
        return Finding("good", "GPUDirect: the driver's open kernel modules have dma-buf")
    mend = "as root: modprobe nvidia_peermem, or install the driver with open kernel modules"
    return Finding("slow", "no GPUDirect: RDMA reaches GPU memory through host memory only", mend)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
