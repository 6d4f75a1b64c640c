"""`scripts/sabotage` runs for minutes, so here only: every patch still applies, and its tests still exist."""

import importlib.util
import os
import re
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "sabotage"
DEFECTS = set(range(1, 21))


def load_script() -> ModuleType:
    loader = SourceFileLoader("sabotage", str(SCRIPT))
    spec = importlib.util.spec_from_loader("sabotage", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sabotage"] = module  # dataclasses look their module up
    no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = no_bytecode
    return module


sabotage = load_script()
ALL = sabotage.load_patches()


def test_every_defect_has_a_patch() -> None:
    assert {patch.number for patch in ALL} == DEFECTS
    assert os.access(SCRIPT, os.X_OK)


@pytest.mark.parametrize("patch", ALL, ids=lambda patch: f"{patch.number} {patch.name}")
def test_a_patch_applies_changes_something_and_names_tests_that_exist(patch: Any) -> None:
    for file, text in patch.patched(ROOT).items():
        assert text != (ROOT / file).read_text()
        if file.endswith(".py"):
            compile(text, file, "exec")
    for test in patch.tests:
        file, name = test.split("::")
        function = name.partition("[")[0]  # of one case of it
        assert re.search(rf"^def {function}\(", (ROOT / file).read_text(), re.MULTILINE), f"{test} is gone"


def test_a_patch_that_no_longer_applies_is_named() -> None:
    change = sabotage.Change("hotset/x.py", "there", "gone")
    with pytest.raises(sabotage.DoesNotApply, match="found 2 times"):
        change.applied("there and there")


@pytest.mark.parametrize(
    ("status", "output", "caught"),
    [
        (1, "FAILED tests/a.py::test_b[c] - assert 1\n1 failed", True),
        (1, "FAILED tests/a.py::test_b[c d] - NameError: name 'x' is not defined\n1 failed", False),
        (1, "ERROR tests/a.py::test_b - fixture\n1 error", False),
        (2, "ERROR tests/a.py\n1 error during collection", False),
        (0, "3 passed", False),
        (None, "no end after 120 s", False),
        (5, "no tests ran", False),
    ],
)
def test_only_a_test_that_ran_and_failed_counts_as_caught(status: int | None, output: str, caught: bool) -> None:
    assert sabotage.judge(status, output)[0] is caught
