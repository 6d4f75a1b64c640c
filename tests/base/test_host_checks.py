"""What is found before an engine takes memory, in fake trees of /proc and /sys, in both outcomes of each check."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_files import write_files

from hotset.base import numa
from hotset.base.host_checks import (
    HostNeeds,
    check_cpus,
    check_free_memory,
    check_host,
    check_huge_pages,
    check_locked_memory,
    check_numa,
    check_shared_folder,
)
from hotset.base.units import GIB, MIB

THP = "sys/kernel/mm/transparent_hugepage"
ONE = HostNeeds(store_bytes=512 * GIB, pinned_bytes=512 * GIB, gpus=(0,))
EIGHT = HostNeeds(store_bytes=512 * GIB, pinned_bytes=512 * GIB, workers=8, gpus=tuple(range(8)))
TWO_NODES = {
    "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 1024 kB\n",
    "sys/devices/system/node/node0/cpulist": "0-3\n",
    "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 1024 kB\n",
    "sys/devices/system/node/node1/cpulist": "4-7\n",
    "sys/bus/pci/devices/0000:00:00.0/numa_node": "0\n",
    "sys/bus/pci/devices/0000:01:00.0/numa_node": "1\n",
}


@pytest.fixture
def gpus_on_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """GPU 0 and CPUs 0 to 3 are on node 0, GPU 1 and CPUs 4 to 7 on node 1."""
    monkeypatch.setattr(numa, "pci_address", lambda gpu: f"0000:0{gpu}:00.0")
    return write_files(tmp_path, TWO_NODES)


def refuse_mbind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `mbind` fail as Docker's default seccomp profile does."""
    monkeypatch.setattr(numa, "mbind", lambda *_: errno.EPERM)


@pytest.mark.parametrize(
    ("needs", "enabled", "shmem_enabled", "level", "mend"),
    [
        (ONE, "always [madvise] never", "[never] advise", "good", ""),
        (EIGHT, "[always] madvise never", "[advise] never", "good", ""),
        (EIGHT, "always madvise [never]", "[within_size] never", "good", ""),
        (ONE, "always madvise [never]", "[advise] never", "slow", f"as root: echo madvise > /{THP}/enabled"),
        (EIGHT, "[always] madvise", "advise [never]", "slow", f"as root: echo advise > /{THP}/shmem_enabled"),
        (EIGHT, "[always] madvise", "advise [deny]", "slow", f"as root: echo advise > /{THP}/shmem_enabled"),
    ],
)
def test_a_large_store_in_small_pages_is_slow_and_the_command_that_allows_huge_ones_is_named(
    tmp_path: Path, needs: HostNeeds, enabled: str, shmem_enabled: str, level: str, mend: str
) -> None:
    root = write_files(tmp_path, {f"{THP}/enabled": enabled, f"{THP}/shmem_enabled": shmem_enabled})
    finding = check_huge_pages(needs, root)
    assert (finding.level, finding.mend) == (level, mend)
    if level == "slow":
        assert "134217728 pages to pin" in finding.what, "512 GiB in pages of 4 KiB"
        assert ("by each of 8 workers" in finding.what) == (needs is EIGHT)


def test_huge_pages_that_are_reserved_suffice_if_there_are_enough(tmp_path: Path) -> None:
    needs = HostNeeds(store_bytes=100 * GIB, pinned_bytes=100 * GIB, workers=2, gpus=(0, 1))
    for free, level in ((51200, "good"), (51199, "slow")):
        root = write_files(tmp_path, {"proc/meminfo": f"HugePages_Free: {free}\nHugepagesize: 2048 kB\n"})
        assert check_huge_pages(needs, root).level == level
    # A kernel without transparent huge pages in shared memory can only reserve some.
    assert check_huge_pages(needs, root).mend == "as root: sysctl vm.nr_hugepages=51200"


def test_a_small_store_in_small_pages_is_good_but_the_command_is_named(tmp_path: Path) -> None:
    root = write_files(tmp_path, {f"{THP}/shmem_enabled": "advise [never]"})
    finding = check_huge_pages(HostNeeds(99 * GIB, 99 * GIB, 2, (0, 1)), root)
    assert finding.level == "good" and finding.mend == f"as root: echo advise > /{THP}/shmem_enabled"


@pytest.mark.parametrize(
    ("limit", "capabilities", "level"),
    [
        ("8388608", "00000000a80425fb", "broken"),
        ("unlimited", "00000000a80425fb", "good"),
        (str(512 * GIB), "00000000a80425fb", "good"),
        ("8388608", "00000000a80465fb", "good"),  # with CAP_IPC_LOCK
    ],
)
def test_the_limit_on_locked_memory_must_allow_rdma_devices_to_use_the_stores(
    tmp_path: Path, limit: str, capabilities: str, level: str
) -> None:
    files = {
        "proc/self/limits": f"Limit  Soft Limit  Hard Limit  Units\nMax locked memory  {limit}  unlimited  bytes\n",
        "proc/self/status": f"Name: python\nCapEff:\t{capabilities}\n",
    }
    finding = check_locked_memory(ONE, write_files(tmp_path, files))
    assert finding.level == level and ("memlock" in finding.mend) == (level == "broken")


def test_a_machine_that_does_not_report_the_limit_on_locked_memory_is_not_refused(tmp_path: Path) -> None:
    assert check_locked_memory(ONE, tmp_path).level == "good"


@pytest.mark.parametrize(("free", "level"), [(64 * MIB, "slow"), (GIB, "good")])
def test_a_small_shared_folder_is_reported(
    tmp_path: Path, free: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def statvfs(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(f_bavail=free // 4096, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert check_shared_folder(tmp_path).level == level
    assert asked == [tmp_path / "dev/shm"]


def test_without_a_shared_folder_nothing_is_free(tmp_path: Path) -> None:
    assert check_shared_folder(tmp_path).level == "slow"


def test_memory_that_a_control_group_limits_is_refused_with_the_limit(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {32 * GIB // 1024} kB\n",
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/memory.max": 8 * GIB,
        "sys/fs/cgroup/a/memory.current": GIB,
    }
    root = write_files(tmp_path, files)
    assert check_free_memory(HostNeeds(7 * GIB), root).level == "good"
    finding = check_free_memory(HostNeeds(7 * GIB + 1), root)
    assert finding.level == "broken" and "docker run --memory" in finding.mend
    assert finding.what.endswith("but 7.0 GiB are free (a control group limits this process to 8.0 GiB)")


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": 50000,
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": 100000,
            },
            0.5,
        ),
        ({"proc/self/cgroup": "4:cpu:/a\n", "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": -1}, None),
        ({}, None),
    ],
)
def test_fewer_cpus_than_workers_are_reported(
    tmp_path: Path, files: dict[str, object], cpus: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    finding = check_cpus(EIGHT, write_files(tmp_path, files))
    assert (finding.level, finding.what.partition(" CPUs")[0]) == (
        ("good", "9") if cpus is None else ("slow", f"only {cpus:g}")
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert check_cpus(EIGHT, tmp_path).level == "slow", "one of nine processes has no CPU"


@pytest.mark.parametrize(
    ("refused", "cpus", "level", "mended"),
    [
        (False, range(8), "good", False),
        (True, range(8), "good", True),  # threads near the GPUs touch memory first
        (True, range(4), "good", True),  # also if the process may not run elsewhere
        (True, (8, 9), "slow", True),
    ],
)
def test_memory_that_cannot_be_placed_is_reported(
    gpus_on_two_nodes: Path,
    refused: bool,
    cpus: range | tuple[int, ...],
    level: str,
    mended: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus))
    if refused:
        refuse_mbind(monkeypatch)
    else:
        monkeypatch.setattr(numa, "mbind", lambda *_: 0)
    finding = check_numa((0,), gpus_on_two_nodes)
    assert finding.level == level and ("--cap-add SYS_NICE" in finding.mend) == mended


def test_a_gpu_whose_node_is_unknown_is_reported_unless_there_is_only_one_node(gpus_on_two_nodes: Path) -> None:
    assert check_numa((2,), gpus_on_two_nodes).level == "slow"
    (gpus_on_two_nodes / "sys/devices/system/node/node1/meminfo").unlink()
    assert check_numa((2,), gpus_on_two_nodes).level == "good"


def test_only_what_an_engine_needs_is_checked(tmp_path: Path) -> None:
    """An empty tree has neither huge pages nor a /dev/shm."""
    assert [finding.level for finding in check_host(HostNeeds(512 * GIB), tmp_path)] == ["good"], "on a CPU"
    assert [finding.level for finding in check_host(ONE, tmp_path)] == ["good", "slow", "good"]
    checked = check_host(EIGHT, tmp_path)
    assert len(checked) == 4 and "/dev/shm" in checked[-1].what


def test_the_checks_of_this_machine_can_be_made() -> None:
    for finding in check_host(HostNeeds(GIB, GIB, 2, (0, 1), registers_rdma=True)):
        assert finding.what and (finding.level == "good" or finding.mend)
