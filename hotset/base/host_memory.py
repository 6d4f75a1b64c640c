"""Host memory and CPUs that this process can use: what the machine has, within the limits of its control groups.

Containers and service managers put a process into a control group (cgroup). Its memory is limited there and in every
group above. A process that exceeds a limit is killed, although the machine may have memory left.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hotset.base.units import show_bytes

CGROUPS = "sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Sizes in bytes. File caches that the kernel can drop count as free."""

    total: int  # of the machine
    free: int  # what this process could allocate now
    limit: int | None  # the lowest limit of its control groups; None if none is below `total`

    @property
    def limit_note(self) -> str:
        """The limit in words, to be appended to a message. Empty if there is none."""
        return "" if self.limit is None else f" (a control group limits this process to {show_bytes(self.limit)})"


@dataclass(frozen=True, slots=True)
class _GroupFiles:
    """The files of one version of cgroups, in the folder of a group."""

    limits: tuple[str, ...]
    usage: str
    dropped_first: str  # entry of memory.stat: file caches that the kernel drops before it enforces a limit


_V1 = _GroupFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _GroupFiles(("memory.max", "memory.high"), "memory.current", "inactive_file")


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Measures the memory of this machine, whose folders `proc` and `sys` are in `root`.

    If the free memory of the machine is unknown, it is taken to be half of the physical memory.
    """
    total, free = _machine_memory(root / "proc/meminfo")
    lowest = None
    for folder, version in _groups(root, "memory"):
        files = _V2 if version == 2 else _V1
        limits = [limit for name in files.limits if (limit := _number(folder / name)) is not None]
        limit = min(limits, default=total)
        if limit >= total:  # cgroups v1 writes a huge number instead of "max"
            continue
        lowest = limit if lowest is None else min(lowest, limit)
        used = (_number(folder / files.usage) or 0) - first_numbers(folder / "memory.stat").get(files.dropped_first, 0)
        free = min(free, limit - max(0, used))
    return HostMemory(total, max(0, free), lowest)


def cgroup_cpus(root: Path = Path("/")) -> float | None:
    """Returns how many CPUs the control groups of this process let it use at a time. None if they set no limit."""
    limits = []
    for folder, version in _groups(root, "cpu"):
        if version == 2:
            quota, _, period = "".join(_lines(folder / "cpu.max")[:1]).partition(" ")
        else:
            quota, period = (str(_number(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal():  # no limit is "max" or "-1"
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def return_free_memory() -> None:
    """Returns to the system the memory that this process has freed, except what lies below memory that is in use. Takes
    milliseconds."""
    with contextlib.suppress(AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _machine_memory(meminfo: Path) -> tuple[int, int]:
    """Returns the total and the available memory of the machine."""
    kib = first_numbers(meminfo)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total = kib["MemTotal:"] * 1024 if "MemTotal:" in kib else physical
    return total, kib["MemAvailable:"] * 1024 if "MemAvailable:" in kib else total // 2


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yields the folders of this process's groups up to the topmost one, and their version of cgroups.

    In a container, /proc can show the path of a group as seen from outside. Its folder is missing then, and the topmost
    folder is the one of the container.
    """
    mounts = root / CGROUPS
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            tops, version = [mounts / controller], 1
        elif number == "0":
            tops, version = [mounts, mounts / "unified"], 2  # "unified": where v1 is in use too
        else:
            continue
        for folder in tops:
            yield folder, version
            for part in PurePosixPath(path).parts:
                if part not in ("/", ".."):
                    folder = folder / part
                    yield folder, version


def _lines(path: Path) -> list[str]:
    """Returns the lines of a file, or none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _number(path: Path) -> int | None:
    """Returns the number in a file, or None if the file has none, like "max" for no limit."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdecimal() else None


def first_numbers(path: Path) -> dict[str, int]:
    """Returns the first number after each word that begins a line."""
    fields = (line.split() for line in _lines(path))
    return {words[0]: int(words[1]) for words in fields if len(words) > 1 and words[1].isdecimal()}
