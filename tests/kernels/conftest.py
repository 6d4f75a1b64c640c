"""Deselects the kernel tests that cannot run in this process.

Triton reads TRITON_INTERPRET when a kernel's module is imported, so a process either interprets its kernels or
compiles them. Tests marked `interpreted` run only if TRITON_INTERPRET is 1. Tests marked `not_interpreted` run only if
it is not.
"""

import os
from collections.abc import Iterator

import pytest
import torch

EXCLUDED_MARKER = "not_interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else "interpreted"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    excluded = [item for item in items if item.get_closest_marker(EXCLUDED_MARKER)]
    if excluded:
        config.hook.pytest_deselected(items=excluded)
        items[:] = [item for item in items if item not in excluded]


@pytest.fixture
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fills new tensors with NaN. On a GPU, those of the test's first 256 MiB."""
    if request.node.get_closest_marker("gpu"):
        torch.full((64 << 20,), float("nan"), device="cuda")  # freed at once, and used again by the next tensors
        yield
    else:
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)
