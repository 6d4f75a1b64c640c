"""Policies that decide which rows leave a hot buffer: the engine's, the best possible one, and policies from files.

A policy is a function `victims(rows, count)`: it returns the indices into `rows` of the `count` rows to evict. `rows`
are the rows that may be evicted, ordered by slot. A policy with state is a class with a method `victims`. An instance
is made for each hot buffer, from the number of slots and the selections of its request and layer at all steps.
"""

import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.base.errors import ConfigError

Integers = NDArray[np.int64]
Selections = Sequence[NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class EvictableRows:
    """The rows of a hot buffer that no selection of this step uses. All arrays have one entry per row."""

    step: int  # number of the current step in the trace
    slots: Integers  # ascending
    positions: Integers  # in the context
    last_used: Integers  # the step that last selected the row, or loaded it
    loaded_at: Integers  # the step that loaded it
    uses: Integers  # steps that have selected it since then


Victims = Callable[[EvictableRows, int], Any]
PolicyMaker = Callable[[int, Selections], Victims]  # of (slots, selections by step)


def lru(rows: EvictableRows, count: int) -> Integers:
    """Evicts the least recently used rows, as the engine does."""
    return np.argsort(rows.last_used, kind="stable")[:count]


class Belady:
    """Evicts the rows whose next use is farthest away. No policy without knowledge of the future misses less."""

    def __init__(self, slots: int, selections: Selections) -> None:
        self._steps = len(selections)
        uses = [positions.astype(np.int64) * self._steps + step for step, positions in enumerate(selections)]
        self._uses = np.sort(np.concatenate(uses)) if uses else np.empty(0, dtype=np.int64)

    def victims(self, rows: EvictableRows, count: int) -> Integers:
        # A use is the number position * steps + step. The next one of a row is the first above that of this step.
        index = np.searchsorted(self._uses, rows.positions * self._steps + rows.step, side="right")
        found = self._uses[np.minimum(index, len(self._uses) - 1)]
        is_used = (index < len(self._uses)) & (found // self._steps == rows.positions)
        next_use = np.where(is_used, found % self._steps, self._steps)
        return np.argsort(-next_use, kind="stable")[:count]


def _stateless(victims: Victims) -> PolicyMaker:
    return lambda slots, selections: victims


POLICIES: dict[str, PolicyMaker] = {
    "lru": _stateless(lru),
    "belady": lambda slots, selections: Belady(slots, selections).victims,
}


def find_policy(name: str) -> PolicyMaker:
    """Returns the policy called `name`, which may also be the path of a .py file.

    The file defines a function `victims` or a class `Policy`. Raises ConfigError if there is no such policy, or if the
    file cannot be run.
    """
    if name in POLICIES:
        return POLICIES[name]
    path = Path(name)
    if path.suffix != ".py":
        raise ConfigError(f"--policy {name}: use one of {', '.join(POLICIES)}, or a file that ends in .py")
    if not path.is_file():
        raise ConfigError(f"--policy {name}: there is no such file")
    try:
        defined = runpy.run_path(name)
    except Exception as error:
        raise ConfigError(f"--policy {name} cannot be run: {type(error).__name__}: {error}") from error
    if "Policy" in defined:
        return lambda slots, selections: defined["Policy"](slots, selections).victims
    if "victims" not in defined:
        raise ConfigError(f"--policy {name} must define a function victims(rows, count), or a class Policy")
    return _stateless(defined["victims"])
