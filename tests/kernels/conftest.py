"""Deselects the kernel tests that belong to the other kind of process.

Triton reads TRITON_INTERPRET once per process. Tests marked `interpreted` run only in processes that set it, and tests
marked `not_interpreted` only in the others.
"""

import os

import pytest

EXCLUDED_MARKER = "not_interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else "interpreted"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    excluded = [item for item in items if item.get_closest_marker(EXCLUDED_MARKER)]
    if excluded:
        config.hook.pytest_deselected(items=excluded)
        items[:] = [item for item in items if item not in excluded]
