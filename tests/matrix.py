"""Builds lists of parameters. `make test` runs a part of each list, and `make test-all` the whole list."""

import itertools
import math
import random
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def slow_if(cases: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """Returns `cases` for `pytest.mark.parametrize`. Those in `slow` get the marker `slow`.

    A case that is a tuple supplies several parameters.
    """
    return [pytest.param(*_parameters(case), marks=pytest.mark.slow) if case in slow else case for case in cases]


def matrix(*axes: Sequence[Any], together: int = 2) -> list[Any]:
    """Returns every combination of one value per axis, for `pytest.mark.parametrize`.

    A small subset stays unmarked. It contains every combination of values of any two axes at least once, or of any
    `together` axes. All other combinations are marked `slow`. A value that is a tuple supplies several parameters.
    """
    combinations = list(itertools.product(*(range(len(axis)) for axis in axes)))  # as indices into the axes
    shuffled = random.Random(0).sample(combinations, len(combinations))
    covered: set[tuple[tuple[int, int], ...]] = set()
    quick = set()
    # Combinations that cover many new tuples of values are chosen first, so that fewer are needed.
    for new in range(math.comb(len(axes), together), 0, -1):
        for combination in shuffled:
            tuples = set(itertools.combinations(enumerate(combination), together))
            if combination not in quick and len(tuples - covered) >= new:
                quick.add(combination)
                covered |= tuples
    marks = {combination: () if combination in quick else (pytest.mark.slow,) for combination in combinations}
    return [pytest.param(*_values(axes, combination), marks=marks[combination]) for combination in combinations]


def _values(axes: Sequence[Sequence[Any]], combination: Sequence[int]) -> list[Any]:
    values = [axis[index] for axis, index in zip(axes, combination, strict=True)]
    return [parameter for value in values for parameter in _parameters(value)]


def _parameters(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
