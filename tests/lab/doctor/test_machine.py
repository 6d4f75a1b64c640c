"""Checks that need no GPU, on made-up machines, in both outcomes."""

import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fake_files import write_files
from lab.doctor.subjects import subject

from hotset.base.units import GIB
from hotset.lab.doctor import machine
from hotset.lab.doctor.machine import EXTRAS, check_host, check_packages, check_ports, check_versions

ROOT = Path(__file__).resolve().parents[3]
MEMORY = f"MemTotal: {512 * GIB // 1024} kB\nMemAvailable: {400 * GIB // 1024} kB\n"
PAGES = "sys/kernel/mm/transparent_hugepage"


def install(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    monkeypatch.setattr(machine, "_version", lambda name: None if name in missing else "1.0")


def test_extras_are_those_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {
        extra: {requirement.split(">")[0].split("[")[0] for requirement in requirements}
        for extra, requirements in declared.items()
        if extra != "dev"
    }
    assert {extra: set(names) for extra, names in EXTRAS.items()} == names


@pytest.mark.parametrize(
    ("missing", "settings", "gpus", "levels"),
    [
        ((), {}, (), {}),
        (("fastapi",), {}, (), {"serve": "broken"}),
        (("triton",), {}, (), {"cuda": "skipped"}),
        (("triton",), {}, (0,), {"cuda": "broken"}),
        (("nixl", "ray"), {}, (), {"transfer": "skipped", "cluster": "skipped"}),
        (("nixl",), {"role": "decode"}, (), {"transfer": "broken"}),
        (("mooncake-transfer-engine-non-cuda",), {"role": "decode"}, (), {}),  # the one for CUDA is there
        (("ray",), {"executor": "ray", "tensor_parallel_size": 2}, (), {"cluster": "broken"}),
    ],
)
def test_a_missing_package_is_broken_only_if_this_configuration_needs_it(
    missing: tuple[str, ...],
    settings: dict[str, Any],
    gpus: tuple[int, ...],
    levels: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, *missing)
    found = check_packages(subject(settings=settings, gpus=gpus))
    by_extra = dict(zip(EXTRAS, found, strict=True))
    assert {extra: finding.level for extra, finding in by_extra.items()} == dict.fromkeys(EXTRAS, "good") | levels
    for extra in levels:
        assert by_extra[extra].mend == f'pip install "hotset[{extra}]"'
        assert by_extra[extra].what.startswith(f"{extra}: without ")


def test_versions_are_broken_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = check_versions(subject())
    assert found.level == "good" and "torch 2." in found.what
    install(monkeypatch, "torch")
    (found,) = check_versions(subject())
    assert (found.level, found.mend) == ("broken", "pip install torch")


@pytest.mark.parametrize(("shared_mode", "level"), [("always [advise] never", "good"), ("advise [never]", "slow")])
def test_the_host_is_checked_for_private_and_for_shared_memory(
    shared_mode: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_files(
        tmp_path,
        {"proc/meminfo": MEMORY, f"{PAGES}/enabled": "[madvise]", f"{PAGES}/shmem_enabled": shared_mode},
    )
    found = {finding.what: finding.level for finding in check_host(subject(gpus=(0,), root=root))}
    assert [found[what] for what in found if "host memory is in huge pages" in what][:1] == ["good"]
    assert [found[what] for what in found if what.startswith(("shared", "200.0 GiB of shared"))] == [level]
    assert [found[what] for what in found if "400.0 GiB of host memory are free" in what] == ["good"]
    assert not any("lock" in what for what in found), "there is no RDMA device"


def test_a_store_that_does_not_fit_is_broken(tmp_path: Path) -> None:
    root = write_files(tmp_path, {"proc/meminfo": MEMORY})
    found = check_host(subject(settings={"host_kv_gib": 401.0}, gpus=(0,), root=root))
    assert found[0].level == "broken" and "--host-kv-gib" in found[0].mend
    found = check_host(subject(settings={"host_kv_gib": 400.0}, gpus=(0,), root=root))
    assert found[0].level == "good"


def test_locked_memory_is_checked_if_a_port_of_an_rdma_device_is_active(tmp_path: Path) -> None:
    limits = "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         65536     65536      bytes\n"
    files: dict[str, object] = {"proc/meminfo": MEMORY, "proc/self/limits": limits}
    files |= {"sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE", "proc/self/status": "CapEff:\t0\n"}
    root = write_files(tmp_path, files)
    found = check_host(subject(settings={"role": "decode"}, gpus=(0,), root=root))
    assert [finding.level for finding in found if "lock" in finding.what] == ["broken"]
    found = check_host(subject(gpus=(0,), root=root))
    assert [finding.level for finding in found if "for handoffs, RDMA devices must lock" in finding.what] == ["slow"]
    write_files(tmp_path, {"proc/self/status": f"CapEff:\t{1 << 14:x}\n"})
    found = check_host(subject(gpus=(0,), root=tmp_path))
    assert [finding.level for finding in found if "lock" in finding.what] == ["good"]


def test_without_a_gpu_the_host_needs_neither_huge_pages_nor_nodes(tmp_path: Path) -> None:
    found = check_host(subject(root=write_files(tmp_path, {"proc/meminfo": MEMORY})))
    assert [finding.level for finding in found] == ["good", "good"]


def test_ports_that_others_use_are_broken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = {"role": "decode", "control": f"127.0.0.1:{port}", "kv_events": f"tcp://127.0.0.1:{port + 1}"}
        if port == 65535:
            del settings["kv_events"]
        found = check_ports(subject(settings=settings, serve={"port": port}))
    assert [finding.level for finding in found[:2]] == ["broken", "broken"]
    assert found[0].what == f"cannot listen on 127.0.0.1 port {port}: Address already in use"
    assert (found[0].mend, found[1].mend) == ("choose another --host or --port", "choose another --control")


def test_ports_that_are_free_are_good() -> None:
    found = check_ports(subject(settings={"role": "decode", "kv_events": "tcp://127.0.0.1:0"}))
    assert [finding.level for finding in found] == ["good"] * 3
