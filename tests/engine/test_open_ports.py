"""Engine processes and their workers listen where they were asked to, and nowhere else."""

import multiprocessing
import os
import socket
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from harness import tiny_directory
from listening import Listening, listening
from processes import descendants_of

from hotset.base.config import EngineConfig
from hotset.base.listeners import listeners
from hotset.engine import build
from hotset.engine.build import build_engine
from hotset.engine.process import EngineFailed, EngineProcess, StopEngine, _build
from hotset.engine.workers.distributed import DistributedWorld
from hotset.engine.workers.messages import WorkerRank
from hotset.engine.workers.processes import MultiprocessExecutor
from hotset.models.split import Split

SETTINGS: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "device_kv_tokens": 256, "page_rows": 4}
SECRET = "a secret that both workers share"


def listeners_of_engine(config: EngineConfig) -> tuple[list[Listening], str | None]:
    """Starts an engine process. Returns the listening sockets of it and its workers, and its control address."""
    process = EngineProcess(config)
    try:
        card = process.wait_ready()
        assert process.pid is not None
        found = listening({process.pid} | descendants_of(process.pid))
        process.pipe.send(StopEngine())
    finally:
        process.end()
    return found, card.control


@pytest.mark.parametrize("split", ["tensor", "data"])
def test_defect_21_the_ranks_of_an_engine_listen_on_loopback_only(tmp_path: Path, split: str) -> None:
    model = tiny_directory(tmp_path, num_key_value_heads=2)
    config = EngineConfig(model, **SETTINGS, **{f"{split}_parallel_size": 2})
    with closing(build_engine(config)) as engine:
        assert isinstance(engine.executor, MultiprocessExecutor)
        pids = [worker.process.pid for worker in engine.executor.workers]
        found = listening(pid for pid in pids if pid is not None)
    assert {listener.host for listener in found} == {"127.0.0.1"}
    assert {listener.pid for listener in found} == set(pids), "each rank has a port for the other"


def test_defect_21_a_rank_uses_loopback_in_any_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters often set these variables for other programs."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "another0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "another0")
    before = set(listeners())
    rank = WorkerRank(
        number=0, workers=1, stage=0, stages=1, split=Split(), rendezvous=str(tmp_path / "rendezvous"), device="cpu"
    )
    DistributedWorld(rank, torch.device("cpu"))
    try:
        assert {listener.address.host for listener in set(listeners()) - before} == {"127.0.0.1"}
        assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("role", "transfer", "settings"),
    [
        ("decode", "nixl", {"control": "0.0.0.0:0", "advertise": "127.0.0.3:0", "transfer_interface": "lo"}),
        ("prefill", "mooncake", {"control": "127.0.0.2:0"}),
    ],
)
def test_defect_21_a_worker_listens_on_its_control_address_and_on_the_loopback_interface_only(
    tmp_path: Path, role: Literal["prefill", "decode"], transfer: Literal["nixl", "mooncake"], settings: dict[str, Any]
) -> None:
    pytest.importorskip(transfer)
    settings = {"role": role, "transfer": transfer, "handoff_secret": SECRET} | settings
    config = EngineConfig(tiny_directory(tmp_path, num_key_value_heads=2), **SETTINGS, **settings)
    found, control = listeners_of_engine(config)
    assert control is not None
    host, port = config.control.rpartition(":")[0], int(control.rpartition(":")[2])
    at_control = [listener for listener in found if (listener.host, listener.port) == (host, port)]
    others = [listener for listener in found if listener not in at_control]
    assert len(at_control) == 1 and others
    for listener in others:
        assert listener.host == "127.0.0.1" or listener.interface == "lo", listener


def test_defect_21_an_engine_with_an_unexpected_listener_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unexpected listener is a socket of the test process."""
    closed: list[bool] = []
    card = SimpleNamespace(control_listens_on=None, kv_events=())
    executor = SimpleNamespace(addresses=())
    engine = SimpleNamespace(card=card, executor=executor, closing_seconds=0.0, close=lambda: closed.append(True))
    monkeypatch.setattr(build, "build_engine", lambda config, **callbacks: engine)
    reports, child_end = multiprocessing.Pipe()
    with socket.create_server(("127.0.0.2", 0)):
        assert _build(EngineConfig(), child_end, lambda: None, lambda: None) is None
    report = reports.recv()
    assert isinstance(report, EngineFailed) and report.trace is None
    assert "the engine (process" in str(report.error) and "was asked to listen on no port" in str(report.error)
    assert closed == [True], "the engine was not closed, so it keeps its memory"
