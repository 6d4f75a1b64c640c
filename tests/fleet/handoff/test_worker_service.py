"""Worker processes open endpoints in threads of their own. Each must make the worker's GPU its current one."""

import threading
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loopback import Hub, Loopback

from hotset.engine import loading
from hotset.engine.workers.messages import THIS_MACHINE
from hotset.fleet.handoff.worker_service import TransferService
from hotset.fleet.transfer import engines
from hotset.fleet.transfer.engines import TransferSettings
from hotset.fleet.transfer.workers import RemoteTransfer, WorkerConnection


def test_a_worker_opens_its_endpoint_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer engine is created on the GPU of the pool, not on GPU 0, which a new thread would use."""
    used, opened_on = threading.local(), list[torch.device | None]()

    def backend(settings: TransferSettings) -> Any:
        opened_on.append(getattr(used, "device", None))
        return Loopback(Hub())

    monkeypatch.setattr(loading, "use_device", lambda device: setattr(used, "device", device))
    monkeypatch.setitem(engines.BACKENDS, "nixl", backend)
    monkeypatch.setattr(engines, "Lanes", lambda opened, *settings: opened)
    ours, theirs = Pipe()
    service = TransferService(TransferSettings("nixl"), TransferSettings.open, with_pool=False, staging_bytes=0)
    pool: Any = SimpleNamespace(device=torch.device("cuda:3"))
    rank: Any = SimpleNamespace(name="worker 3", node=THIS_MACHINE)
    service.start(rank, pool, None, theirs)
    connection = WorkerConnection(ours)
    assert RemoteTransfer(connection, 1.0).close()
    connection.close()
    assert opened_on == [torch.device("cuda:3")]
