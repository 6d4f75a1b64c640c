"""What several tests of engines pretend."""

import pytest
import torch

from hotset.engine import build
from hotset.engine.build import unmeasured_landing_policy
from hotset.fleet.handoff import stores
from hotset.fleet.transfer.api import MemoryKind


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes engines treat their device pools, which are in memory of the CPU, as memory of a GPU in handoffs."""
    monkeypatch.setattr(stores, "memory_kind", lambda pool: MemoryKind.DEVICE)
    monkeypatch.setattr(
        build, "unmeasured_landing_policy", lambda config, _: unmeasured_landing_policy(config, torch.device("cuda"))
    )
