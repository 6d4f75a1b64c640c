"""In these tests, engine processes and their workers are forks of one process that has imported torch."""

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def fast_process_starts() -> Iterator[None]:
    """Replaces the start method "spawn" by "forkserver". With "spawn", every process would import torch, which takes
    over two seconds of CPU time."""
    real = multiprocessing.get_context
    forkserver: Any = real("forkserver")
    forkserver.set_forkserver_preload(["torch", "hotset.engine.build"])

    def get_context(method: str | None = None) -> Any:
        return forkserver if method == "spawn" else real(method)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", get_context)
        yield
