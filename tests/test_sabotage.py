"""Checks that every patch of `scripts/sabotage` applies and that the tests it names exist. The script, which runs these
tests, takes minutes."""

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
DEFECTS = {*range(1, 49), *range(50, 59), 61, 62, 63, 66, 67, 71, 72, 73, 74, *range(79, 96)}


def load_script() -> ModuleType:
    loader = SourceFileLoader("sabotage", str(SCRIPT))
    spec = importlib.util.spec_from_loader("sabotage", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sabotage"] = module  # `dataclass` looks up the module of its class in sys.modules
    no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = no_bytecode
    return module


sabotage = load_script()
PATCHES = sabotage.load_patches()


def test_every_defect_has_a_patch() -> None:
    assert {patch.number for patch in PATCHES} == DEFECTS
    assert os.access(SCRIPT, os.X_OK)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.number} {patch.name}")
def test_each_patch_applies_and_changes_its_files_and_its_tests_exist(patch: Any) -> None:
    for file, text in patch.patched(ROOT).items():
        assert text != (ROOT / file).read_text()
        if file.endswith(".py"):
            compile(text, file, "exec")
    for test in patch.tests:
        file, name = test.split("::")
        function = name.partition("[")[0]  # without the id of a parametrised case
        assert re.search(rf"^def {function}\(", (ROOT / file).read_text(), re.MULTILINE), f"{test} does not exist"


def test_a_patch_that_no_longer_applies_is_reported() -> None:
    change = sabotage.Change("hotset/x.py", "old", "new")
    with pytest.raises(sabotage.DoesNotApply, match="found 2 times"):
        change.applied("old and old")


@pytest.mark.parametrize(
    ("status", "output", "caught"),
    [
        (1, "FAILED tests/a.py::test_b[c] - assert 1\n1 failed", True),
        (1, "FAILED tests/a.py::test_b[c d] - NameError: name 'x' is not defined\n1 failed", False),
        (1, "ERROR tests/a.py::test_b - fixture\n1 error", False),
        (2, "ERROR tests/a.py\n1 error during collection", False),
        (0, "3 passed", False),
        (None, "timed out after 120 s", False),
        (5, "no tests ran", False),
    ],
)
def test_a_defect_counts_as_caught_only_if_a_test_ran_and_failed(status: int | None, output: str, caught: bool) -> None:
    assert sabotage.judge(status, output)[0] is caught
