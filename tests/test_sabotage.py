"""Checks that the patches of `scripts/sabotage` apply, and that the tests that they name exist."""

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
MOST_PATCHES = 200  # `make sabotage` runs tests for each of them


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


def problems(patch: Any) -> list[str]:
    """Returns why a patch cannot be tried: it does not apply, its code does not compile, or a test does not exist."""
    found = []
    try:
        for file, text in patch.patched(ROOT).items():
            if text == (ROOT / file).read_text():
                found.append(f"{file} does not change")
            if file.endswith(".py"):
                compile(text, file, "exec")
    except (sabotage.DoesNotApply, SyntaxError, FileNotFoundError) as problem:
        found.append(str(problem))
    for test in patch.tests:
        file, name = test.split("::")
        function = name.partition("[")[0]  # without the id of a parametrised case
        path = ROOT / file
        if not path.exists() or not re.search(rf"^(async )?def {function}\(", path.read_text(), re.MULTILINE):
            found.append(f"{test} does not exist")
    return found


def test_every_patch_applies_and_its_tests_exist() -> None:
    patches = sabotage.load_patches()
    assert [f"{patch.number}: {patch.name}: {problem}" for patch in patches for problem in problems(patch)] == []
    assert len({(patch.number, patch.name) for patch in patches}) == len(patches) <= MOST_PATCHES
    assert os.access(SCRIPT, os.X_OK)


def test_a_patch_that_no_longer_applies_is_reported() -> None:
    change = sabotage.Change("hotset/x.py", "old", "new")
    with pytest.raises(sabotage.DoesNotApply, match="found 2 times"):
        change.applied("old and old")


def test_a_defect_counts_as_caught_only_if_a_test_ran_and_failed() -> None:
    assert sabotage.judge(1, "FAILED tests/a.py::test_b[c] - assert 1\n1 failed")[0]
    for status, output in (
        (1, "FAILED tests/a.py::test_b[c d] - NameError: name 'x' is not defined\n1 failed"),
        (1, "ERROR tests/a.py::test_b - fixture\n1 error"),
        (2, "ERROR tests/a.py\n1 error during collection"),
        (0, "3 passed"),
        (None, "timed out after 120 s"),
        (5, "no tests ran"),
    ):
        assert not sabotage.judge(status, output)[0], output
