"""In these tests, engine processes and their workers are forks of one process that has imported torch."""

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hotset.engine import build
from hotset.engine.build import unmeasured_landing_policy
from hotset.fleet.handoff import stores
from hotset.fleet.transfer.api import MemoryKind


@pytest.fixture(scope="module", autouse=True)
def fast_process_starts() -> Iterator[None]:
    """Replaces the start method "spawn" by "forkserver". With "spawn", every process would import torch, which takes
    over two seconds of CPU time. It ends with each module, because tests in other folders need real starts.
    """
    real = multiprocessing.get_context
    forkserver: Any = real("forkserver")
    forkserver.set_forkserver_preload(["torch", "hotset.engine.build", "hotset.fleet.connections"])

    def get_context(method: str | None = None) -> Any:
        return forkserver if method == "spawn" else real(method)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", get_context)
        yield


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes engines treat their device pools, which are in memory of the CPU, as memory of a GPU in handoffs."""
    monkeypatch.setattr(stores, "memory_kind", lambda pool: MemoryKind.DEVICE)
    monkeypatch.setattr(
        build, "unmeasured_landing_policy", lambda config, _: unmeasured_landing_policy(config, torch.device("cuda"))
    )
