"""Where one handoff stands, and until when: what both state machines keep time by."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from hotset.base.errors import IllegalTransition

P = TypeVar("P", bound=Enum)


@dataclass(frozen=True, slots=True)
class PhaseTimeout:
    """How long a phase may last, in seconds, and after how many of them its message is said again."""

    limit: float
    again: float | None = None


class PhaseTable(Generic[P]):
    """One machine's table of transitions, its waits, and the seconds that handoffs have spent in each phase."""

    def __init__(self, following: Mapping[P, frozenset[P]], waits: Mapping[P, PhaseTimeout]) -> None:
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


PEERS_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Timing:
    """In seconds."""

    hello_again: float = 0.5  # until Hello is said again
    introduced_within: float = 30.0  # from the first Hello to its answer, which may wait for connecting
    ping_every: float = 1.0
    lost_after: float = 4.0  # of silence; so long, too, an introduction holds without a word
    forget_after: float = 900.0  # of silence, where nothing depends on the peer
    poll_every: float = 0.002  # between looks at writes under way


class Liveness:
    """When each peer was heard last. Time comes as an argument."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._heard: dict[str, float] = {}
        self._asked: dict[str, float] = {}  # peers on which something depends: when they were pinged last
        self._since: dict[str, float] = {}  # the same peers: since when something does

    def heard(self, peer: str, now: float) -> None:
        self._heard.pop(peer, None)
        self._heard[peer] = now  # the one heard last comes last
        if len(self._heard) > PEERS_KEPT:
            del self._heard[next(iter(self._heard))]

    def fresh(self, peer: str, now: float) -> bool:
        """It was heard of late."""
        return peer in self._heard and now - self._heard[peer] <= self._timing.lost_after

    def forget(self, peer: str) -> None:
        for table in (self._heard, self._asked, self._since):
            table.pop(peer, None)

    def watch(self, peers: Iterable[str], now: float) -> list[str]:
        """From now on something depends on these and on no others. Returns whom to ping now."""
        watched = set(peers)
        for peer in self._since.keys() - watched:
            del self._since[peer], self._asked[peer]
        due = []
        for peer in sorted(watched):
            self._since.setdefault(peer, now)
            if now - self._asked.get(peer, float("-inf")) >= self._timing.ping_every:
                self._asked[peer] = now
                due.append(peer)
        return due

    def silent(self, now: float) -> list[str]:
        """The watched peers that must be taken for lost."""
        limit = self._timing.lost_after
        return [peer for peer, since in self._since.items() if now - max(since, self._heard.get(peer, since)) > limit]

    def long_silent(self, now: float) -> list[str]:
        """Peers on which nothing depends, and of which nothing was heard for so long that they can be forgotten."""
        limit = self._timing.forget_after
        return [peer for peer, at in self._heard.items() if peer not in self._since and now - at > limit]
