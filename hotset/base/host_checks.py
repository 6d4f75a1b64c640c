"""Checks of this machine before an engine takes its memory: huge pages, limits of the process and its container, NUMA.

A check looks and changes nothing. Engines log what it finds before they read weights; `hotset doctor` prints it.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotset.base.host_memory import cgroup_cpus, host_memory
from hotset.base.numa import (
    PRIVATE_HUGE_PAGES_FILE,
    SHARED_HUGE_PAGES_FILE,
    cpus_of_nodes,
    huge_pages,
    mbind_refusal,
    numa_nodes,
    store_nodes,
)
from hotset.base.units import GIB, KIB, MIB, ceil_div, show_bytes

Level = Literal["good", "skipped", "slow", "broken"]  # the better ones first
HUGE_PAGES_WANTED_BYTES = 100 * GIB  # smaller stores start in seconds also without huge pages
SMALL_PAGE_BYTES = 4 * KIB
NCCL_SHARED_BYTES = 1 * GIB  # what NVIDIA's guide to NCCL advises for /dev/shm of a container
CAP_IPC_LOCK = 14  # Linux's number of the capability to lock any amount of memory
IPC_LOCK = "docker run --ulimit memlock=-1 (or --cap-add IPC_LOCK), LimitMEMLOCK=infinity in a systemd unit"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found: all is good, the engine will be slower than it could be, or it cannot work. A check that
    does not apply, or that needs something else first, is skipped.

    `mend` says in one line what to do about it. It is empty if there is nothing to do.
    """

    level: Level
    what: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class HostNeeds:
    """What an engine needs of this machine, apart from GPU memory."""

    store_bytes: int  # of all its host stores together
    pinned_bytes: int = 0  # the part of the host stores that each worker pins; 0 on a CPU
    workers: int = 1
    gpus: tuple[int, ...] = ()
    registers_rdma: bool = False  # its transfer engine registers the host stores with RDMA devices

    @property
    def shared(self) -> bool:
        """The host stores of several workers are in memory that processes share."""
        return self.workers > 1


def check_host(needs: HostNeeds, root: Path = Path("/")) -> list[Finding]:
    """Returns what the checks find on this machine, whose folders `proc`, `sys` and `dev` are in `root`.

    Free memory is not among them: engines size their memory by what is free, and refuse what does not fit.
    """
    findings = [check_cpus(needs, root)]
    if needs.gpus:
        findings += [check_huge_pages(needs, root), check_numa(needs.gpus, root)]
        if needs.workers > 1:
            findings.append(check_shared_folder(root))
    if needs.registers_rdma:
        findings.append(check_locked_memory(needs, root))
    return findings


def check_huge_pages(needs: HostNeeds, root: Path = Path("/")) -> Finding:
    """Checks whether large host stores will be in huge pages. With small ones, the driver pins 512 times as many."""
    nbytes, pages = needs.store_bytes, huge_pages(root)
    kind, file = ("shared ", SHARED_HUGE_PAGES_FILE) if needs.shared else ("", PRIVATE_HUGE_PAGES_FILE)
    mode = pages.shared_mode if needs.shared else pages.private_mode
    if pages.shared if needs.shared else pages.private:
        return Finding("good", f"{kind}host memory is in huge pages ({file} is {mode})")
    if pages.free_reserved * pages.page_bytes >= nbytes > 0:
        return Finding("good", f"{kind}host memory is in reserved huge pages")
    reserve = f"sysctl vm.nr_hugepages={ceil_div(nbytes, pages.page_bytes or 2 * MIB)}"
    mend = f"as root: echo {'advise' if needs.shared else 'madvise'} > {file}" if mode else f"as root: {reserve}"
    if nbytes < HUGE_PAGES_WANTED_BYTES:
        return Finding("good", f"{show_bytes(nbytes)} of {kind}host memory would start faster in huge pages", mend)
    of_workers = f" by each of {needs.workers} workers" if needs.workers > 1 else ""
    count = ceil_div(needs.pinned_bytes, SMALL_PAGE_BYTES)
    return Finding(
        "slow",
        f"{show_bytes(nbytes)} of {kind}host memory will be in pages of 4 KiB ({file} is {mode or 'missing'}): {count} "
        f"pages to pin{of_workers}, so start and end take 2 to 7 times as long as with pages of 2 MiB",
        mend,
    )


def check_free_memory(needs: HostNeeds, root: Path = Path("/")) -> Finding:
    """Checks whether the machine and the control groups of this process leave enough memory for the host stores."""
    memory = host_memory(root)
    if needs.store_bytes <= memory.free:
        return Finding("good", f"{show_bytes(memory.free)} of host memory are free{memory.limit_note}")
    mend = "lower --host-kv-gib"
    if memory.limit is not None:
        mend += ", or raise the limit (docker run --memory, resources.limits.memory, MemoryMax of a systemd unit)"
    what = (
        f"the host stores need {show_bytes(needs.store_bytes)} of host memory, but {show_bytes(memory.free)} are free"
    )
    return Finding("broken", what + memory.limit_note, mend)


def check_cpus(needs: HostNeeds, root: Path = Path("/")) -> Finding:
    """Checks whether each worker, and the process that controls them, has a CPU."""
    cpus: float = len(os.sched_getaffinity(0))
    limit, wanted = cgroup_cpus(root), needs.workers + (needs.workers > 1)
    if limit is not None and limit < cpus:
        cpus = limit
    if cpus >= wanted or not needs.gpus:
        return Finding("good", f"{cpus:g} CPUs may be used")
    return Finding(
        "slow",
        f"only {cpus:g} CPUs may be used by {needs.workers} workers and their controller, which wait for each other",
        f"allow at least {wanted} (docker run --cpus and --cpuset-cpus, resources.limits.cpu, taskset)",
    )


def check_locked_memory(needs: HostNeeds, root: Path = Path("/")) -> Finding:
    """Checks the limit on locked memory, which counts what is registered with RDMA devices. What is pinned for a GPU
    (`cudaHostRegister`) does not count."""
    limit = _locked_memory_limit(root)
    if limit is None or limit >= needs.store_bytes:
        return Finding("good", "the limit on locked memory allows RDMA devices to use the host stores")
    return Finding(
        "broken",
        f"RDMA devices must lock {show_bytes(needs.store_bytes)} of host memory, but the limit is {show_bytes(limit)}",
        f"raise it: {IPC_LOCK}",
    )


def check_shared_folder(root: Path = Path("/")) -> Finding:
    """Checks the size of /dev/shm, through which NCCL connects GPUs without peer access. Host stores are not there."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        free = 0
    else:
        free = found.f_bavail * found.f_frsize
    if free >= NCCL_SHARED_BYTES:
        return Finding("good", f"{show_bytes(free)} are free in /dev/shm")
    return Finding(
        "slow",
        f"only {show_bytes(free)} are free in /dev/shm; NCCL fails if it needs more to connect the GPUs",
        "docker run --shm-size=1g (or --ipc=host), an emptyDir with medium: Memory at /dev/shm in Kubernetes",
    )


def check_numa(gpus: Collection[int], root: Path = Path("/")) -> Finding:
    """Checks whether host memory can be placed on the NUMA nodes of these GPUs."""
    if len(numa_nodes(root)) < 2:
        return Finding("good", "all memory is equally near to all GPUs (one NUMA node)")
    nodes = store_nodes(gpus, root)
    if not nodes:
        return Finding(
            "slow",
            "host memory is not placed on the NUMA nodes of the GPUs, because these are unknown or not allowed",
            "allow all nodes (docker run --cpuset-mems), or see hotset info for the nodes of the GPUs",
        )
    numbers = ", ".join(map(str, nodes))
    if (refusal := mbind_refusal()) is None:
        return Finding("good", f"host memory is placed on the NUMA nodes of the GPUs ({numbers})")
    mend = "docker run --cap-add SYS_NICE, capabilities.add: [SYS_NICE] in Kubernetes"
    if cpus_of_nodes(nodes, root) & os.sched_getaffinity(0):
        return Finding(
            "good", f"mbind is refused ({refusal}), so CPUs of NUMA nodes {numbers} touch memory first", mend
        )
    what = f"host memory gets to any NUMA node: mbind is refused ({refusal}), and the CPUs of nodes {numbers} are not"
    return Finding("slow", f"{what} allowed for this process", mend)


def _locked_memory_limit(root: Path) -> int | None:
    """Returns how many bytes this process may lock. None if there is no limit, or if it is unknown."""
    capabilities = _field(root / "proc/self/status", "CapEff:")
    if capabilities and int(capabilities[0], 16) >> CAP_IPC_LOCK & 1:
        return None
    soft = _field(root / "proc/self/limits", "Max locked memory")
    return int(soft[0]) if soft and soft[0].isdecimal() else None


def _field(path: Path, name: str) -> list[str]:
    """Returns the words after `name` in the line that begins with it, or none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    return next((line.removeprefix(name).split() for line in lines if line.startswith(name)), [])
