"""Deselects the kernel tests that cannot run in this process.

Triton reads TRITON_INTERPRET when a kernel's module is imported, so a process either interprets its kernels or
compiles them. Tests marked `interpreted` run only if TRITON_INTERPRET is 1. Tests marked `not_interpreted` run only if
it is not.
"""

import os

import pytest

EXCLUDED_MARKER = "not_interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else "interpreted"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    excluded = [item for item in items if item.get_closest_marker(EXCLUDED_MARKER)]
    if excluded:
        config.hook.pytest_deselected(items=excluded)
        items[:] = [item for item in items if item not in excluded]
