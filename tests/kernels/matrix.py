"""Products of test parameters, of which `make test` runs a part and `make test-all` every case."""

import itertools
import random
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def slow_if(cases: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """Returns the cases, for `pytest.mark.parametrize`; those that are among `slow` are marked so."""
    return [pytest.param(case, marks=pytest.mark.slow) if case in slow else case for case in cases]


def matrix(*axes: Sequence[Any]) -> list[Any]:
    """Returns every combination of one value per axis, for `pytest.mark.parametrize`.

    Not slow are so many of them that every two values of different axes meet in one. A value that is a tuple stands
    for several parameters.
    """
    places = [range(len(axis)) for axis in axes]
    cases = list(itertools.product(*places))
    order = random.Random(0).sample(cases, len(cases))
    met: set[tuple[tuple[int, int], ...]] = set()
    quick = set()
    # A case that adds many new pairs first: fewer cases are needed.
    for wanted in range(len(axes) * (len(axes) - 1) // 2, 0, -1):
        for case in order:
            pairs = set(itertools.combinations(enumerate(case), 2))
            if case not in quick and len(pairs - met) >= wanted:
                quick.add(case)
                met |= pairs
    marks = {case: () if case in quick else (pytest.mark.slow,) for case in cases}
    return [pytest.param(*_values(axes, case), marks=marks[case]) for case in cases]


def _values(axes: Sequence[Sequence[Any]], case: Sequence[int]) -> list[Any]:
    values = [axis[place] for axis, place in zip(axes, case, strict=True)]
    return [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
