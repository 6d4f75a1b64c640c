"""Where one handoff stands, and until when: what both state machines keep time by."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from hotset.base.errors import IllegalTransition

P = TypeVar("P", bound=Enum)


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a phase may last, in seconds, and after how many of them its message is said again."""

    limit: float
    again: float | None = None


class PhaseTable(Generic[P]):
    """One machine's table of transitions, its waits, and the seconds that handoffs have spent in each phase."""

    def __init__(self, following: Mapping[P, frozenset[P]], waits: Mapping[P, Wait]) -> None:
        """A phase that nothing follows is an end: it has no wait. Every other must have one."""
        assert waits.keys() == {phase for phase, after in following.items() if after}, "a phase without a limit"
        self.following, self.waits = following, waits
        self.seconds = dict.fromkeys(waits, 0.0)


class PhaseTimer(Generic[P]):
    """One handoff's phase. Moves along the table, or raises IllegalTransition."""

    __slots__ = ("_entered", "_table", "again_at", "deadline", "phase")

    def __init__(self, table: PhaseTable[P], phase: P, now: float) -> None:
        self._table = table
        self._enter(phase, now)

    def _enter(self, phase: P, now: float) -> None:
        self.phase, self._entered = phase, now
        wait = self._table.waits.get(phase)
        self.deadline = now + wait.limit if wait is not None else float("inf")
        self.again_at = now + wait.again if wait is not None and wait.again is not None else float("inf")

    def move(self, to: P, now: float) -> None:
        if to not in self._table.following[self.phase]:
            raise IllegalTransition(self.phase, to)
        self._table.seconds[self.phase] += now - self._entered
        self._enter(to, now)

    def stay(self, now: float) -> None:
        """A sign of life: the phase may last its full time again."""
        self.deadline = now + self._table.waits[self.phase].limit

    def due(self, now: float) -> bool:
        """Whether its message is to be said again now. Saying it is the caller's; the next time is noted here."""
        if now < self.again_at:
            return False
        again = self._table.waits[self.phase].again
        assert again is not None
        self.again_at = now + again
        return True


def earliest(times: Iterable[float]) -> float | None:
    """The first of them, or None if there is none to wait for."""
    first = min(times, default=float("inf"))
    return None if first == float("inf") else first
