"""Structures are compiled as a trial before their requests are admitted, in a process with limits."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from structures import of_schema, small_tokenizer

from hotset.base.errors import RequestError
from hotset.base.job_pool import JobPool
from hotset.base.structure import Structure
from hotset.base.units import MIB
from hotset.grammar import check
from hotset.grammar.check import StructureChecks

VOCAB = 64
TIMEOUT_SECONDS = 10.0


@pytest.fixture(scope="module")
def jobs() -> Iterator[JobPool]:
    with closing(JobPool(256 * MIB)) as jobs:
        yield jobs


@pytest.fixture
def checks(jobs: JobPool) -> StructureChecks:
    return StructureChecks(jobs, small_tokenizer().to_str, VOCAB)


def test_only_the_last_demanded_structures_are_known(checks: StructureChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MAX_PASSED", 2)
    first, second, third = (Structure("regex", pattern) for pattern in "abc")
    for structure in (first, second, first, third):  # the second was demanded longest ago
        checks.check(structure)
    assert [checks.has_passed(structure) for structure in (first, second, third)] == [True, False, True]


def test_while_tables_are_built_nobody_waits_to_see_what_has_passed(jobs: JobPool) -> None:
    """The event loop calls `has_passed`."""
    began, may_end = threading.Event(), threading.Event()

    def slow_tokenizer() -> str:
        began.set()
        may_end.wait(TIMEOUT_SECONDS)
        return small_tokenizer().to_str()

    checks, structure = StructureChecks(jobs, slow_tokenizer, VOCAB), Structure("regex", "a")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(checks.check, structure)
        assert began.wait(TIMEOUT_SECONDS)
        assert not threads.submit(checks.has_passed, structure).result(TIMEOUT_SECONDS / 2)
        may_end.set()
        first.result(TIMEOUT_SECONDS)
    assert checks.has_passed(structure)


def test_a_structure_that_is_refused_is_not_known_afterwards(checks: StructureChecks) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="cannot be compiled"):
            checks.check(Structure("regex", "("))
    assert not checks.has_passed(Structure("regex", "("))


def test_a_slow_structure_is_refused_alone(checks: StructureChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = Structure("regex", "a"), of_schema({"allOf": [{"pattern": f"a{{{n},}}b"} for n in range(100)]})
    with monkeypatch.context() as patch:
        patch.setattr(check, "CHECK_SECONDS", 0.05)  # it takes minutes
        with pytest.raises(RequestError, match="compiling the json schema did not") as refused:
            checks.check(long)
    assert refused.value.code == "invalid_structure"
    checks.check(short)
    assert (checks.has_passed(long), checks.has_passed(short)) == (False, True)
