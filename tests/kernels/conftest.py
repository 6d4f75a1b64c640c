"""Kernel tests run in two kinds of process: ordinary ones, and ones where Triton interprets its kernels on the CPU."""

import os

import pytest

OTHER = "not_interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else "interpreted"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what belongs to the other kind of process."""
    left_out = [item for item in items if item.get_closest_marker(OTHER)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
