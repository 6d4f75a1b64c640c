"""Memory of host stores: its NUMA policy and its huge pages as this machine's kernel reports them, and made-up machines
with several nodes."""

import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_files import write_files
from memory.fake_cudart import FakeCudart, allocated_bytes
from torch import Tensor

from hotset.base import numa
from hotset.base.errors import StartupError
from hotset.base.numa import HugePages, huge_pages, store_nodes
from hotset.base.units import MIB
from hotset.kernels.rows import RowLayout, index_key_row
from hotset.memory import mapping
from hotset.memory.device_pool import KvShape
from hotset.memory.host_store import HostStore
from hotset.memory.mapping import map_descriptor, populate, private_memory, set_nodes, shared_descriptor

NBYTES = 8 * MIB + 12345


def huge_bytes(memory: Tensor) -> int:
    """Returns the bytes in huge pages of the mapping to which `memory` belongs."""
    for block in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
        first, last = (int(bound, 16) for bound in block.partition(" ")[0].split("-"))
        if first <= memory.data_ptr() < last:
            return 1024 * int(re.findall(r"(?m)^AnonHugePages:\s+(\d+) kB", block)[0])
    raise AssertionError("the memory is not mapped")


def policy_of(memory: Tensor) -> str:
    """Returns the NUMA policy that the kernel reports for the mapping to which `memory` belongs."""
    mappings = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    policies = {int(address, 16): policy for address, policy, *_ in mappings}
    return policies[max(address for address in policies if address <= memory.data_ptr())]


def populated(memory: Tensor) -> None:
    with ThreadPoolExecutor(2) as threads:
        for part in populate(memory, threads):
            part.result()


def kinds() -> list[tuple[str, Any]]:
    def shared(nbytes: int, nodes: tuple[int, ...] = ()) -> Tensor:
        descriptor = shared_descriptor(nbytes)
        try:
            return map_descriptor(descriptor, nbytes, nodes)
        finally:
            os.close(descriptor)

    return [("private", private_memory), ("shared", shared)]


KINDS = pytest.mark.parametrize("allocate", [function for _, function in kinds()], ids=[name for name, _ in kinds()])


@KINDS
def test_memory_is_allocated_completely_before_it_is_used(allocate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "POPULATED_BYTES", 3 * MIB)
    memory = allocate(NBYTES)
    address = memory.data_ptr()
    assert memory.nbytes == NBYTES and allocated_bytes(address, NBYTES) == 0, "fresh memory takes no room"
    populated(memory)
    assert allocated_bytes(address, NBYTES) >= NBYTES
    assert not memory.any() and memory.fill_(7).sum() == 7 * NBYTES


@pytest.mark.skipif(not huge_pages().private, reason="the machine has no huge pages")
def test_private_memory_is_in_huge_pages() -> None:
    memory = private_memory(16 * MIB)
    populated(memory)
    assert huge_bytes(memory) >= 8 * MIB, "only the ends may be in small pages"


def test_a_part_of_memory_is_allocated_without_its_neighbours() -> None:
    memory = private_memory(64 * MIB)
    populated(memory[MIB + 5 : 3 * MIB])
    assert allocated_bytes(memory.data_ptr() + MIB + 5, 2 * MIB - 5) >= 2 * MIB - 5
    assert allocated_bytes(memory.data_ptr() + 16 * MIB, 48 * MIB) == 0


def test_shared_memory_is_the_same_in_two_mappings() -> None:
    descriptor = shared_descriptor(NBYTES)
    one, other = (map_descriptor(descriptor, NBYTES) for _ in range(2))
    os.close(descriptor)
    one[NBYTES - 1], other[0] = 5, 6
    assert one.data_ptr() != other.data_ptr()
    assert (int(other[NBYTES - 1]), int(one[0])) == (5, 6)


def reports_policies() -> bool:
    return Path("/proc/self/numa_maps").exists() and set_nodes(private_memory(NBYTES), (0,))


@pytest.mark.skipif(not reports_policies(), reason="the kernel or the container has no NUMA policies")
@KINDS
def test_memory_of_one_node_prefers_it_and_memory_of_several_is_interleaved(allocate: Any) -> None:
    assert policy_of(allocate(NBYTES)) == "default"
    assert policy_of(allocate(NBYTES, (0,))).startswith("prefer")
    memory = allocate(NBYTES, (0, 0))  # on a machine with one node, only the mode can be seen
    assert policy_of(memory) == "interleave:0"
    populated(memory)


def test_a_refused_node_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = private_memory(NBYTES)
    with caplog.at_level(logging.INFO, "hotset.memory"):
        assert not set_nodes(memory, (900, 901))  # no machine has so many nodes
        monkeypatch.setattr(numa, "MBIND_NUMBERS", {})
        assert not set_nodes(memory, (0,))
    assert [record.message for record in caplog.records] == [
        "host memory is not placed on NUMA nodes [900, 901]: Invalid argument",
        "host memory is not placed on NUMA nodes [0]: Function not implemented",
    ]
    populated(memory)


def test_memory_that_cannot_be_allocated_is_a_start_up_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match=r"cannot be allocated \(Cannot allocate memory\); lower --host-kv-gib"):
        private_memory(1 << 60)
    memory = private_memory(NBYTES)
    with ThreadPoolExecutor(1) as threads:
        unmapped = PAGESIZE  # nothing is mapped at the lowest addresses
        monkeypatch.setattr(mapping, "_whole_pages", lambda _: (unmapped, PAGESIZE))
        with pytest.raises(StartupError, match=r"of host memory cannot be allocated \(.*\); lower --host-kv-gib"):
            populate(memory, threads)[0].result()


def test_reserved_huge_pages_are_used_only_if_they_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has none, so the kernel refuses them although the fake report promises enough."""
    for free in (1, 1 << 20):
        monkeypatch.setattr(mapping, "huge_pages", lambda free=free: HugePages("never", "never", 2 * MIB, free))
        for _, allocate in kinds():
            memory = allocate(NBYTES)
            populated(memory)
            assert memory.fill_(1).sum() == NBYTES


@pytest.mark.parametrize(
    ("gpus", "allowed", "nodes"),
    [
        ([0], "0-1", (0,)),
        ([2], "0-1", (1,)),
        ([2, 3], "0-1", (1,)),
        ([0, 1, 2, 3], "0-1", (0, 1)),
        ([], "0-1", ()),
        ([2], "0", ()),
        ([0, 2], "0", ()),
        ([4], "0-1", ()),
    ],
)
def test_a_store_is_on_the_nodes_of_the_gpus_that_use_it(
    tmp_path: Path, gpus: list[int], allowed: str, nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs 0 and 1 are on node 0, GPUs 2 and 3 on node 1, and the node of GPU 4 is unknown."""
    files = {"proc/self/status": f"Mems_allowed_list:\t{allowed}\n"}
    for node in (0, 1):
        files[f"sys/devices/system/node/node{node}/meminfo"] = f"Node {node} MemTotal: 1024 kB\n"
    for gpu, node_text in enumerate(("0", "0", "1", "1", "-1")):
        files[f"sys/bus/pci/devices/0000:0{gpu}:00.0/numa_node"] = node_text
    write_files(tmp_path, files)
    monkeypatch.setattr(numa, "pci_address", lambda gpu: f"0000:0{gpu}:00.0")
    assert store_nodes(gpus, tmp_path) == nodes
    (tmp_path / "sys/devices/system/node/node1/meminfo").unlink()
    assert store_nodes(gpus, tmp_path) == (), "with one node there is nothing to choose"


def store_on(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[HostStore, list[Any]]:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(mapping, "POPULATED_BYTES", MIB)
    shape = KvShape(4, RowLayout(512, torch.bfloat16), (0, 1), index_key_row(128, torch.bfloat16, fp8=True), 8)
    reported: list[Any] = []
    return HostStore(shape, 40, 64, torch.device("cuda", 0), lambda *each: reported.append(each), **settings), reported


@pytest.mark.parametrize("writer", [0, 1, 2])
def test_every_layer_is_pinned_once_after_its_pages_are_allocated(writer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = FakeCudart()
    store, reported = store_on(cudart, monkeypatch, writer=writer, writers=3)
    assert store.keys is not None
    layers = [*store.rows, *store.keys]
    assert cudart.pinned == {layer.data_ptr(): layer.nbytes for layer in layers}
    assert next(iter(cudart.pinned)) == layers[2 * writer].data_ptr(), "workers begin with different layers"
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert reported[-1] == (store.pinned_bytes,) * 2 == (sum(layer.nbytes for layer in layers),) * 2
    store.close()
    assert not cudart.pinned


def test_a_store_that_cannot_be_pinned_leaves_nothing_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = FakeCudart(fails_at=3)
    with pytest.raises(StartupError, match=r"cannot be pinned \(CUDA error 2\)"):
        store_on(cudart, monkeypatch)
    assert not cudart.pinned
