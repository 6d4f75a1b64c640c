"""Which GPUs are checked, and how measurements of GPUs are judged. Functions of torch are replaced."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_files import write_files
from lab.doctor.subjects import subject

from hotset.base import numa
from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError, MissingDependency
from hotset.base.units import GIB
from hotset.lab.doctor import gpus
from hotset.lab.doctor.gpus import (
    CopyRates,
    PcieLink,
    check_gpus,
    check_peer_access,
    check_pinning,
    find_gpus,
    judge_copies,
    judge_free_memory,
    judge_peer_access,
    judge_pinning,
    pcie_link,
)

H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=140 * GIB)
A100 = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, total_memory=80 * GIB)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes torch report four usable GPUs."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: H200)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (139 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 28, 9)))
    return monkeypatch


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, (0, 1, 2, 3)),
        ({"device": "cuda"}, (0, 1, 2, 3)),
        ({"device": "cuda:2"}, (2,)),
        ({"gpus": "3,1"}, (3, 1)),
        ({"tensor_parallel_size": 2}, (0, 1)),
        ({"tensor_parallel_size": 2, "gpus": "2,3"}, (2, 3)),
        ({"data_parallel_size": 4, "ranks_per_gpu": 2}, (0, 1)),
        ({"tensor_parallel_size": 8, "executor": "ray"}, (0, 1, 2, 3)),
    ],
)
def test_the_gpus_of_the_engine_are_checked_or_else_all(
    machine: pytest.MonkeyPatch, settings: dict[str, Any], found: tuple[int, ...]
) -> None:
    assert find_gpus(EngineConfig(**settings)) == found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpus": "0,9"}, "GPU 9 does not exist: this machine has 4"),
        ({"device": "cuda:4"}, "GPU 4 does not exist"),
        ({"tensor_parallel_size": 8}, "8 workers .* need 8 GPUs, but this machine has 4"),
    ],
)
def test_gpus_that_do_not_exist_are_refused(
    machine: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find_gpus(EngineConfig(**settings))


def test_a_gpu_that_nobody_asked_for_and_that_cannot_be_used_is_broken(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    machine.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    assert find_gpus(EngineConfig()) == ()
    with pytest.raises(ConfigError, match=r"Tesla T4 has compute capability 7\.5"):
        find_gpus(EngineConfig(device="cuda"))
    (found,) = check_gpus(subject())
    assert found.level == "broken" and "compute capability 7.5" in found.what


def test_equal_gpus_are_good_and_others_slow(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
    root = write_files(tmp_path, {"proc/driver/nvidia/version": version})
    driver, kinds = check_gpus(subject(gpus=(0, 1), root=root))
    assert driver.level == kinds.level == "good"
    assert "driver 580.95.05" in driver.what and "CUDA 13.0, NCCL 2.28.9" in driver.what
    assert kinds.what == "GPU 0,1: NVIDIA H200, compute capability 9.0, 140.0 GiB"
    machine.setattr(torch.cuda, "get_device_properties", lambda index: (H200, A100)[index])
    _, kinds = check_gpus(subject(gpus=(0, 1), root=root))
    assert kinds.level == "slow" and "GPU 1: NVIDIA A100" in kinds.what


def test_memory_that_other_programs_hold_is_slow(machine: pytest.MonkeyPatch) -> None:
    assert judge_free_memory(0, free=139 * GIB, total=140 * GIB, utilization=0.92) == []
    (found,) = judge_free_memory(3, free=100 * GIB, total=140 * GIB, utilization=0.92)
    assert found.level == "slow" and found.what.startswith("GPU 3: only 100.0 GiB of 140.0 GiB are free")
    machine.setattr(torch.cuda, "mem_get_info", lambda index: (index * GIB, 140 * GIB))
    assert [finding.level for finding in check_gpus(subject(gpus=(1, 2)))] == ["good", "good", "slow", "slow"]


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (MissingDependency("page_copy on a GPU needs cuda-core"), "on GPU 1: page_copy on a GPU needs cuda-core"),
        (RuntimeError("gcc: not found\nmore lines"), "on GPU 1: RuntimeError: gcc: not found"),
        (None, "on GPU 1: a kernel computed a wrong result"),
    ],
)
def test_a_kernel_that_does_not_compile_or_is_wrong_is_broken(
    error: Exception | None, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(gpu: int) -> bool:
        if gpu == 1 and error is not None:
            raise error
        return gpu != 1

    monkeypatch.setattr(torch.cuda, "device", lambda gpu: torch.no_grad())
    assert gpus._try_kernel("Triton", run, (0, 2), "mend").level == "good"
    found = gpus._try_kernel("Triton", run, (0, 1), "mend")
    assert found.level == "broken" and found.what == f"Triton {what}"


LINK = PcieLink("32.0 GT/s PCIe", 16, 16, 63e9)


@pytest.mark.parametrize(
    ("rates", "level", "words"),
    [
        (CopyRates(0, 55e9, 52e9, 55e9, LINK), "good", "16 of 16 lanes of 32.0 GT/s (63.0 GB/s)"),
        (CopyRates(0, 55e9, 27e9, 55e9, LINK), "slow", "GPU 0: 55.0 GB/s from the host, 27.0 GB/s to it, over PCIe"),
        (CopyRates(0, 55e9, 52e9, 55e9, replace(LINK, lanes=8)), "slow", "8 of 16 lanes"),
        (CopyRates(1, 55e9, 52e9, 27e9, LINK), "slow", "27.0 GB/s while all GPUs copy"),
        (CopyRates(1, 20e9, 20e9, 20e9, None), "good", "20.0 GB/s to it"),
    ],
)
def test_copies_are_compared_with_the_link_and_with_those_of_all_gpus(rates: CopyRates, level: str, words: str) -> None:
    found = judge_copies(rates)
    assert found.level == level and words in found.what and bool(found.mend) == (level == "slow")


def test_the_pcie_link_is_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpus, numa):
        monkeypatch.setattr(module, "pci_address", {0: "0000:3b:00.0", 1: "0000:af:00.0"}.get)
    files = {"max_link_speed": "32.0 GT/s PCIe\n", "max_link_width": "16\n", "current_link_width": "8\n"}
    write_files(tmp_path, {f"sys/bus/pci/devices/0000:3b:00.0/{name}": text for name, text in files.items()})
    found = pcie_link(0, tmp_path)
    assert found == PcieLink("32.0 GT/s PCIe", 8, 16, pytest.approx(63.0e9, rel=0.001))
    assert pcie_link(1, tmp_path) is pcie_link(2, tmp_path) is None


def test_pinning_is_slow_if_the_planned_store_takes_minutes() -> None:
    assert judge_pinning(4e9, planned=1000 * 10**9, shared=False).level == "good"
    found = judge_pinning(4e9, planned=1500 * 10**9, shared=True)
    assert found.level == "slow" and "takes 6.2 min, in every worker" in found.what


def test_pinning_is_skipped_without_a_host_store_and_without_memory(tmp_path: Path) -> None:
    (found,) = check_pinning(subject(settings={"tiers": "off"}, gpus=(0,)))
    assert found.level == "skipped"
    root = write_files(tmp_path, {"proc/meminfo": "MemTotal: 4000000 kB\nMemAvailable: 1000000 kB\n"})
    (found,) = check_pinning(subject(gpus=(0,), root=root))
    assert found.level == "skipped" and "976.6 MiB" in found.what


def test_pairs_without_peer_access_are_named() -> None:
    assert [finding.level for finding in check_peer_access(subject(gpus=(0,)))] == ["skipped"]
    good = judge_peer_access((0, 1, 2), [], [380e9, 390e9, 385e9])
    assert (good.level, good.what) == (
        "good",
        "each of 3 GPUs can address all others; copies from each to the next: 380 to 390 GB/s",
    )
    slow = judge_peer_access((0, 1, 2), [(0, 2), (2, 0), (2, 1)], [380e9, 9e9, 9e9])
    assert slow.level == "slow" and slow.what.startswith("GPU 0 not 2; GPU 2 not 0,1; copies")
