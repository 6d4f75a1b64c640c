"""The memory topology of this machine, read from sysfs: NUMA nodes, the node and the link of each GPU, and huge pages.
Also how memory gets to the NUMA nodes of GPUs.

A NUMA node is a part of the memory, and the processors and devices that reach it fastest. Huge pages are units of
memory of 2 MiB, say, instead of 4 KiB: mapping and pinning them takes a fraction of the time.
"""

import contextlib
import ctypes
import errno
import os
import platform
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotset.base.devices import pci_address
from hotset.base.host_memory import first_numbers

NODES = "sys/devices/system/node"
TRANSPARENT_HUGE_PAGES = "sys/kernel/mm/transparent_hugepage"
PRIVATE_HUGE_PAGES_FILE = f"/{TRANSPARENT_HUGE_PAGES}/enabled"
SHARED_HUGE_PAGES_FILE = f"/{TRANSPARENT_HUGE_PAGES}/shmem_enabled"
# The C library has no wrapper for this call; libnuma, which has one, is missing on many machines.
MBIND_NUMBERS = {"x86_64": 237, "aarch64": 235}
MPOL_PREFERRED, MPOL_INTERLEAVE = 1, 3
MAX_NODES = 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.argtypes = (
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long),
    *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_uint),
)
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node that has memory. Sizes are in bytes."""

    number: int
    memory_bytes: int
    free_bytes: int
    cpus: str  # like "0-15,32-47"
    allowed: bool  # whether this process may use its memory


@dataclass(frozen=True, slots=True)
class HugePages:
    """The huge pages of this machine. A mode is the system's setting, like "madvise", or None if it has none."""

    private_mode: str | None  # for memory of one process
    shared_mode: str | None  # for memory that processes share
    page_bytes: int  # size of a reserved huge page; 0 if there are none
    free_reserved: int  # number of reserved huge pages that nobody uses

    @property
    def private(self) -> bool:
        """True if memory of one process gets huge pages when it asks for them."""
        return self.private_mode in ("always", "madvise")

    @property
    def shared(self) -> bool:
        """True if shared memory gets huge pages when it asks for them."""
        return self.shared_mode in ("always", "within_size", "advise", "force")


def numa_nodes(root: Path = Path("/")) -> tuple[NumaNode, ...]:
    """Returns the nodes with memory, in the order of their numbers. Empty if the kernel does not report nodes."""
    allowed = _allowed_nodes(root)
    nodes = []
    for folder in sorted((root / NODES).glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))):
        number = int(folder.name.removeprefix("node"))
        # Lines like "Node 0 MemTotal:  5860740 kB".
        words = (line.split() for line in _read(folder / "meminfo").splitlines())
        kib = {each[2]: int(each[3]) for each in words if len(each) > 3 and each[3].isdecimal()}
        total = kib.get("MemTotal:", 0) * 1024
        if total:
            free, cpus = kib.get("MemFree:", 0) * 1024, _read(folder / "cpulist")
            nodes.append(NumaNode(number, total, free, cpus, allowed is None or number in allowed))
    return tuple(nodes)


def gpu_node(gpu: int, root: Path = Path("/")) -> int | None:
    """Returns the NUMA node of a GPU, or None if the system does not know it."""
    address = pci_address(gpu)
    text = "" if address is None else _read(root / "sys/bus/pci/devices" / address / "numa_node")
    return int(text) if text.isdecimal() else None  # "-1" means unknown


def store_nodes(gpus: Collection[int], root: Path = Path("/")) -> tuple[int, ...]:
    """Returns the NUMA nodes for a host store that these GPUs use: their own nodes. Empty if the machine has only one
    node, if it does not report the node of a GPU, or if this process may not use the memory of one of these nodes."""
    if not gpus or len(nodes := numa_nodes(root)) < 2:
        return ()
    found = {gpu_node(gpu, root) for gpu in gpus}
    if found - {node.number for node in nodes if node.allowed}:
        return ()
    return tuple(sorted(node for node in found if node is not None))


def mbind(address: int, nbytes: int, nodes: Sequence[int]) -> int:
    """Places memory that has not been touched yet on NUMA nodes: on one node, or on another if that is full; on several
    nodes in turn. `address` is that of a page. Returns 0, or the number of an error."""
    number = MBIND_NUMBERS.get(platform.machine())
    if number is None:
        return errno.ENOSYS
    bits = (ctypes.c_ulong * (MAX_NODES // 64))()
    for node in nodes:
        bits[node // 64] |= 1 << node % 64
    mode = MPOL_PREFERRED if len(nodes) == 1 else MPOL_INTERLEAVE
    failed = _libc.syscall(number, address, nbytes, mode, ctypes.addressof(bits), MAX_NODES, 0)
    return ctypes.get_errno() if failed else 0


def mbind_refusal() -> str | None:
    """Returns why the system refuses `mbind` to this process, or None if it does not."""
    refused = mbind(0, 0, (0,))  # changes nothing, because it names no memory
    return os.strerror(refused) if refused else None


def first_touch_cpus(gpus: Collection[int], root: Path = Path("/")) -> frozenset[int]:
    """Returns the CPUs on which threads must touch new memory so that it gets to the NUMA nodes of these GPUs. Only
    CPUs on which this thread may run are returned. Empty if there is nothing to choose, or if `mbind` can place memory.
    """
    near = store_nodes(gpus, root)
    if not near or mbind_refusal() is None:
        return frozenset()
    allowed = os.sched_getaffinity(0)
    cpus = allowed & cpus_of_nodes(near, root)
    return frozenset() if cpus == allowed else frozenset(cpus)


def cpus_of_nodes(nodes: Collection[int], root: Path = Path("/")) -> set[int]:
    """Returns the CPUs of NUMA nodes."""
    return {cpu for node in numa_nodes(root) if node.number in nodes for cpu in _numbers(node.cpus)}


def bind_threads(cpus: Collection[int]) -> None:
    """Makes all threads of this process, and those that they start, run on these CPUs only."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(task.name), cpus)


def gpu_link_bytes_per_second(gpu: int, root: Path = Path("/")) -> float | None:
    """Returns the speed of a GPU's PCIe link in one direction, or None if the system does not know it."""
    address = pci_address(gpu)
    if address is None:
        return None
    folder = root / "sys/bus/pci/devices" / address
    speed, lanes = _read(folder / "max_link_speed").partition(" GT/s")[0], _read(folder / "max_link_width")
    try:
        transfers, width = float(speed) * 1e9, int(lanes)
    except ValueError:
        return None
    payload = 0.8 if transfers < 8e9 else 128 / 130  # 8b/10b encoding before the third generation
    return transfers * width * payload / 8 or None


def huge_pages(root: Path = Path("/")) -> HugePages:
    """Returns the huge-page settings of this machine."""
    entries = first_numbers(root / "proc/meminfo")
    return HugePages(
        private_mode=_selected(_read(root / TRANSPARENT_HUGE_PAGES / "enabled")),
        shared_mode=_selected(_read(root / TRANSPARENT_HUGE_PAGES / "shmem_enabled")),
        page_bytes=entries.get("Hugepagesize:", 0) * 1024,
        free_reserved=entries.get("HugePages_Free:", 0) - entries.get("HugePages_Rsvd:", 0),
    )


def _allowed_nodes(root: Path) -> set[int] | None:
    """Returns the nodes whose memory this process may use. None if the kernel does not report them."""
    for line in _read(root / "proc/self/status").splitlines():
        name, _, ranges = line.partition(":")
        if name == "Mems_allowed_list":
            return _numbers(ranges)
    return None


def _numbers(ranges: str) -> set[int]:
    """Returns the numbers in a list of the kernel, like "0-3,8"."""
    bounds = (part.strip().partition("-") for part in ranges.split(",") if part.strip())
    return {number for first, _, last in bounds for number in range(int(first), int(last or first) + 1)}


def _selected(text: str) -> str | None:
    """Returns the selected word of a setting like "always [madvise] never"."""
    return next((word.strip("[]") for word in text.split() if word.startswith("[")), None)


def _read(path: Path) -> str:
    """Returns the text of a file without surrounding spaces, or an empty text if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
