"""Checks that invariants that protect data raise InternalError, even in `python -O`, which removes asserts.

Run as a script, this file violates the invariants in VIOLATIONS and prints what each raised. It uses only modules that
start without torch, which takes seconds to import.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from hotset.base.errors import InternalError
from hotset.base.paged_span import PagedSpan
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.fleet.handoff.codec import Codec
from hotset.fleet.handoff.layout import plan_writes
from hotset.memory.geometry import Geometry
from hotset.memory.pages import PageAllocator
from hotset.schedule.plan import StepResult
from hotset.schedule.request import Request
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.ledger import Ledger
from hotset.tiers.residence import Holding, Residence

ROOT = Path(__file__).resolve().parents[1]
CHECK_SECONDS = 120.0


def release_a_free_page() -> None:
    pages = PageAllocator(4)
    pages.release([2])


def quarantine_without_a_landing() -> None:
    make_ledger().quarantine(Holding(), "r 1")


def park_without_a_host_store() -> None:
    make_ledger().park(Holding(), 2)


def share_pages_of_a_landing() -> None:
    make_ledger().publish(Holding(residence=Residence.LANDING), [], [])


def count_a_key_page_as_whole_too_early() -> None:
    Geometry(2, 1, 32, keys_per_block=4, blocks_per_page=3)


def commit_out_of_order() -> None:
    scheduler = make_scheduler()
    scheduler.plan()
    second = scheduler.plan()
    scheduler.commit(StepResult(second.number if second is not None else -1, [8]))


def add_a_request_twice() -> None:
    make_scheduler().add(make_request())


def write_rows_beyond_the_pages() -> None:
    span = PagedSpan(((1 << 20,),), 16 * 8, 16, 8)
    plan_writes(span, [0], span, [0], 0, 17)


def encode_with_an_empty_secret() -> None:
    Codec(b"")


VIOLATIONS: dict[Callable[[], None], str] = {
    release_a_free_page: "page 2 was released while it was free",
    quarantine_without_a_landing: "a request that is absent has no writer",
    park_without_a_host_store: "there is no host store to park in",
    share_pages_of_a_landing: "another process may still write to its pages",
    count_a_key_page_as_whole_too_early: "max_blocks_of_group is smaller than blocks_per_page / key_groups",
    commit_out_of_order: "plan 1 committed before 0",
    add_a_request_twice: "there is already a request r",
    write_rows_beyond_the_pages: "17 rows, 16 in a part, need 2 pages, not 1",
    encode_with_an_empty_secret: "the secret is empty",
}


def make_ledger() -> Ledger:
    return Ledger(Geometry(2, 1, 32), PageAllocator(8), None)


def make_request() -> Request:
    return Request("r", PromptSpec((8, 9, 10), SamplingParams(seed=0)), 8)


def make_scheduler() -> Scheduler:
    scheduler = Scheduler(make_ledger(), 4, 64)
    scheduler.add(make_request())
    return scheduler


def print_violations() -> None:
    for violate in VIOLATIONS:
        try:
            violate()
        except InternalError as error:
            print(f"{violate.__name__}: {error}")
        except Exception as error:
            print(f"{violate.__name__}: not an InternalError, but {error!r}")
        else:
            print(f"{violate.__name__}: no error")


def test_violations_of_guarded_invariants_raise_without_asserts() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-O", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CHECK_SECONDS, check=True)
    expected = [f"{violate.__name__}: {message}" for violate, message in VIOLATIONS.items()]
    assert done.stdout.splitlines() == ["__debug__ is False", *expected]


def test_an_assert_only_narrows_a_type_or_is_in_an_audit() -> None:
    others = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in sorted((ROOT / "hotset").rglob("*.py"))
        if "assert " in (source := file.read_text())
        for line in guarding_asserts(ast.parse(source))
    ]
    assert not others, (
        f"`python -O` removes these checks: raise InternalError instead, or move them to an audit: {others}"
    )


def test_only_asserts_that_guard_an_invariant_are_found() -> None:
    source = """
assert x is not None and isinstance(y, int) and z != "abort"
assert x is not None and x > 0
def audit(self):
    assert x > 0
class A:
    def audit_host():
        for x in y: assert x > 0
    def other(): assert not x
"""
    assert list(guarding_asserts(ast.parse(source))) == [3, 9]


def guarding_asserts(node: ast.AST) -> Iterator[int]:
    """Yields the lines of asserts that check more than a type, except in functions whose names begin with `audit`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and child.name.startswith("audit"):
            continue
        if isinstance(child, ast.Assert) and not narrows_type(child.test):
            yield child.lineno
        yield from guarding_asserts(child)


def narrows_type(test: ast.expr) -> bool:
    """Returns True for `isinstance`, for `is` and `!=` with a constant, and for these joined with `and` or negated."""
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            return all(narrows_type(value) for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call(func=ast.Name(id="isinstance"))):
            return True
        case ast.Call(func=ast.Name(id="isinstance")):
            return True
        case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.NotEq()], comparators=[ast.Constant()]):
            return True
    return False


if __name__ == "__main__":
    print(f"__debug__ is {__debug__}")
    print_violations()
