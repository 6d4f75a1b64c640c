"""NUMA nodes, the nodes of GPUs and huge pages, read from fake trees of /proc and /sys."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from fake_files import write_files

from hotset.base import numa
from hotset.base.numa import (
    HugePages,
    NumaNode,
    first_touch_cpus,
    gpu_link_bytes_per_second,
    gpu_node,
    huge_pages,
    numa_nodes,
)
from hotset.base.units import GIB, MIB

TWO_SOCKETS = {
    "proc/self/status": "Name:\tpython\nMems_allowed:\t3\nMems_allowed_list:\t0-1\n",
    "sys/devices/system/node/online": "0-2",
    "sys/devices/system/node/node0/meminfo": f"Node 0 MemTotal: {64 * GIB // 1024} kB\nNode 0 MemFree: 1024 kB\n",
    "sys/devices/system/node/node0/cpulist": "0-15,32-47\n",
    "sys/devices/system/node/node1/meminfo": f"Node 1 MemTotal: {32 * GIB // 1024} kB\nNode 1 MemFree: 2048 kB\n",
    "sys/devices/system/node/node1/cpulist": "16-31,48-63\n",
    "sys/devices/system/node/node10/meminfo": "Node 10 MemTotal: 0 kB\n",  # processors without memory
}


def test_nodes_with_memory_are_listed_in_order(tmp_path: Path) -> None:
    assert numa_nodes(write_files(tmp_path, TWO_SOCKETS)) == (
        NumaNode(0, 64 * GIB, MIB, "0-15,32-47", True),
        NumaNode(1, 32 * GIB, 2 * MIB, "16-31,48-63", True),
    )


@pytest.mark.parametrize(
    ("status", "allowed"),
    [("Mems_allowed_list:\t1\n", [False, True]), ("Mems_allowed_list:\t0,2-5\n", [True, False]), ("", [True, True])],
)
def test_nodes_that_a_control_group_excludes_are_not_allowed(tmp_path: Path, status: str, allowed: list[bool]) -> None:
    root = write_files(tmp_path, TWO_SOCKETS | {"proc/self/status": status})
    assert [node.allowed for node in numa_nodes(root)] == allowed


def test_a_machine_that_reports_nothing_has_no_nodes_and_no_huge_pages(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path) == ()
    assert huge_pages(tmp_path) == HugePages(None, None, 0, 0)


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), (None, None)])
def test_a_gpus_node_is_that_of_its_pci_device(
    tmp_path: Path, text: str | None, node: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "pci_address", {0: "0000:3b:00.0", 1: "0000:af:00.0"}.get)
    files = {"sys/bus/pci/devices/0000:3b:00.0/numa_node": "0\n"}
    if text is not None:
        files["sys/bus/pci/devices/0000:af:00.0/numa_node"] = text
    assert (gpu_node(0, write_files(tmp_path, files)), gpu_node(1, tmp_path), gpu_node(2, tmp_path)) == (0, node, None)


@pytest.mark.parametrize(
    ("private_mode", "shared_mode", "private", "shared"),
    [("always", "advise", True, True), ("madvise", "never", True, False), ("never", "deny", False, False)],
)
def test_allowed_huge_pages_are_found(
    tmp_path: Path, private_mode: str, shared_mode: str, private: bool, shared: bool
) -> None:
    def setting(choices: str, selected: str) -> str:
        return " ".join(f"[{word}]" if word == selected else word for word in choices.split())

    folder = "sys/kernel/mm/transparent_hugepage"
    files = {
        f"{folder}/enabled": setting("always madvise never", private_mode),
        f"{folder}/shmem_enabled": setting("always within_size advise never deny force", shared_mode),
        "proc/meminfo": "MemTotal: 9 kB\nHugePages_Total: 8\nHugePages_Free: 7\nHugePages_Rsvd: 3\n"
        "Hugepagesize: 2048 kB\n",
    }
    pages = huge_pages(write_files(tmp_path, files))
    assert pages == HugePages(private_mode, shared_mode, 2 * MIB, 4)
    assert (pages.private, pages.shared) == (private, shared)


@pytest.mark.parametrize(
    ("speed", "width", "gigabytes"),
    [
        ("32.0 GT/s PCIe", "16", 63.0),
        ("5.0 GT/s PCIe", "8", 4.0),
        ("Unknown", "16", None),
        ("8.0 GT/s PCIe", "0", None),
    ],
)
def test_the_speed_of_a_gpus_link_follows_from_its_generation_and_width(
    tmp_path: Path, speed: str, width: str, gigabytes: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "pci_address", {0: "0000:3b:00.0"}.get)
    folder = "sys/bus/pci/devices/0000:3b:00.0"
    root = write_files(tmp_path, {f"{folder}/max_link_speed": f"{speed}\n", f"{folder}/max_link_width": f"{width}\n"})
    found = gpu_link_bytes_per_second(0, root)
    assert found == (None if gigabytes is None else pytest.approx(gigabytes * 1e9, rel=0.001))
    assert gpu_link_bytes_per_second(1, root) is None


@pytest.mark.parametrize(
    ("gpus", "allowed", "cpus"),
    [
        ([0], range(64), {*range(16), *range(32, 48)}),
        ([1], range(64), {*range(16, 32), *range(48, 64)}),
        ([1], (3, 17, 20), {17, 20}),  # what the user has allowed is never extended
        ([0, 1], range(64), set()),  # all CPUs are near
        ([0], range(8), set()),  # it runs nowhere else
        ([0], (16, 17), set()),  # no CPU near the GPU is allowed
        ([2], range(64), set()),  # its node is unknown
    ],
)
def test_threads_near_the_gpus_touch_memory_first_where_mbind_is_refused(
    tmp_path: Path, gpus: list[int], allowed: Iterable[int], cpus: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = {f"sys/bus/pci/devices/0000:0{gpu}:00.0/numa_node": str(gpu) for gpu in (0, 1)}
    root = write_files(tmp_path, TWO_SOCKETS | addresses)
    monkeypatch.setattr(numa, "pci_address", lambda gpu: f"0000:0{gpu}:00.0")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed))
    monkeypatch.setattr(numa, "mbind", lambda *_: errno.EPERM)
    assert first_touch_cpus(gpus, root) == cpus
    monkeypatch.setattr(numa, "mbind", lambda *_: 0)
    assert first_touch_cpus(gpus, root) == set(), "the kernel places memory"


def test_this_machine_has_nothing_to_choose_or_real_cpus() -> None:
    assert first_touch_cpus([0]) <= os.sched_getaffinity(0)


BIND = """
import os, threading
from pathlib import Path
from hotset.base.numa import bind_threads
ready, go, found = threading.Event(), threading.Event(), []
def run():
    ready.set()
    go.wait()
    found.append(os.sched_getaffinity(0))
earlier = threading.Thread(target=run)
earlier.start()
ready.wait()
cpu = min(os.sched_getaffinity(0))
bind_threads({cpu})
go.set()
earlier.join()
later = threading.Thread(target=run)
later.start()
later.join()
assert found == [{cpu}] * 2 and os.sched_getaffinity(0) == {cpu}, found
"""


def test_all_threads_of_a_process_are_bound_and_those_that_they_start() -> None:
    subprocess.run([sys.executable, "-c", BIND], check=True, timeout=60)
