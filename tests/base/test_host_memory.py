"""Free host memory respects the limits of control groups, in fake trees of /proc and /sys."""

import resource
from pathlib import Path

import pytest
from fake_files import write_files

from hotset.base.host_memory import HostMemory, host_memory, return_free_memory
from hotset.base.units import GIB, MIB

UNLIMITED = 9223372036854771712  # what cgroups v1 writes if there is no limit


MACHINE = {"proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {32 * GIB // 1024} kB\n"}


def v2(folder: str, **numbers: str | int) -> dict[str, str | int]:
    """Returns the files of a group: memory.max, memory.high, memory.current, and inactive_file of memory.stat."""
    group = f"sys/fs/cgroup/{folder}"
    stat = f"anon 5\ninactive_file {numbers.pop('inactive_file', 0)}\nactive_file 7\n"
    return {f"{group}/memory.{name}": number for name, number in numbers.items()} | {f"{group}/memory.stat": stat}


def v1(folder: str, limit: int, usage: int, cache: int = 0) -> dict[str, str | int]:
    group = f"sys/fs/cgroup/memory/{folder}"
    return {
        f"{group}/memory.limit_in_bytes": limit,
        f"{group}/memory.usage_in_bytes": usage,
        f"{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {cache}\n",
    }


IN_GROUP = {"proc/self/cgroup": "0::/a/b\n"}
V1_IN_GROUP = {"proc/self/cgroup": "9:cpuset:/x\n4:cpu,memory:/a/b\n0::/x\n"}
CASES: dict[str, tuple[dict[str, str | int], HostMemory]] = {
    "no control groups": ({}, HostMemory(64 * GIB, 32 * GIB, None)),
    "no limits": (IN_GROUP | v2("a/b", max="max", high="max", current=1), HostMemory(64 * GIB, 32 * GIB, None)),
    "limit minus usage": (
        IN_GROUP | v2("a/b", max=8 * GIB, high="max", current=2 * GIB),
        HostMemory(64 * GIB, 6 * GIB, 8 * GIB),
    ),
    "file caches count as free": (
        IN_GROUP | v2("a/b", max=8 * GIB, current=7 * GIB, inactive_file=5 * GIB),
        HostMemory(64 * GIB, 6 * GIB, 8 * GIB),
    ),
    "memory.high is a limit": (
        IN_GROUP | v2("a/b", max=8 * GIB, high=4 * GIB, current=GIB),
        HostMemory(64 * GIB, 3 * GIB, 4 * GIB),
    ),
    "a group above is fuller": (
        IN_GROUP | v2("a/b", max=8 * GIB, current=GIB) | v2("a", max=10 * GIB, current=9 * GIB),
        HostMemory(64 * GIB, GIB, 8 * GIB),
    ),
    "the topmost group of a container": (
        {"proc/self/cgroup": "0::/\n"} | v2("", max=8 * GIB, current=2 * GIB),
        HostMemory(64 * GIB, 6 * GIB, 8 * GIB),
    ),
    "a path that is seen from outside of the container": (
        {"proc/self/cgroup": "0::/../docker/123\n"} | v2("", max=8 * GIB, current=2 * GIB),
        HostMemory(64 * GIB, 6 * GIB, 8 * GIB),
    ),
    "usage above the limit": (IN_GROUP | v2("a/b", max=8 * GIB, current=9 * GIB), HostMemory(64 * GIB, 0, 8 * GIB)),
    "the machine has less left than the group": (
        IN_GROUP | v2("a/b", max=60 * GIB, current=GIB),
        HostMemory(64 * GIB, 32 * GIB, 60 * GIB),
    ),
    "v1": (
        V1_IN_GROUP | v1("a/b", 8 * GIB, 7 * GIB, cache=5 * GIB) | v1("", UNLIMITED, 50 * GIB),
        HostMemory(64 * GIB, 6 * GIB, 8 * GIB),
    ),
    "v1 in a group above": (
        V1_IN_GROUP | v1("a/b", UNLIMITED, GIB) | v1("a", 8 * GIB, 2 * GIB),
        HostMemory(64 * GIB, 6 * GIB, 8 * GIB),
    ),
    "both versions": (
        {"proc/self/cgroup": "4:memory:/a\n0::/b\n"}
        | v1("a", 8 * GIB, 2 * GIB)
        | v2("unified/b", max=5 * GIB, current=GIB),
        HostMemory(64 * GIB, 4 * GIB, 5 * GIB),
    ),
    "damaged files": (
        IN_GROUP | v2("a/b", max="x", current="y") | v2("a", max=8 * GIB),
        HostMemory(64 * GIB, 8 * GIB, 8 * GIB),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_free_memory_is_the_least_that_the_machine_and_each_control_group_leave(tmp_path: Path, case: str) -> None:
    files, expected = CASES[case]
    assert host_memory(write_files(tmp_path, MACHINE | files)) == expected


def test_without_proc_half_of_the_physical_memory_counts_as_free(tmp_path: Path) -> None:
    memory = host_memory(tmp_path)
    assert 0 < memory.free == memory.total // 2 and memory.limit is None


def test_the_memory_of_this_machine_can_be_measured() -> None:
    memory = host_memory()
    assert 0 < memory.free < memory.total


def test_freed_memory_below_memory_in_use_goes_back_to_the_system() -> None:
    """Blocks of 64 KiB come from the heap of the C library, which grows at its end only."""
    blocks = [b"x" * (64 << 10) for _ in range(3200)]
    resident = resident_bytes()
    del blocks[:-1]
    return_free_memory()
    assert resident_bytes() < resident - 150 * MIB and len(blocks) == 1


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
