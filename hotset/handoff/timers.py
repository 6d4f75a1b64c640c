"""Timekeeping of handoffs: deadlines and retransmits of phases, and liveness of peers. Time comes as an argument."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from hotset.base.errors import IllegalTransition

P = TypeVar("P", bound=Enum)

MAX_PEERS = 1024


@dataclass(frozen=True, slots=True)
class PhaseTimeout:
    """How long a phase may last, in seconds, and how often it sends its message again (a retransmit, or Progress)."""

    limit: float
    retransmit_every: float | None = None


class PhaseTable(Generic[P]):
    """One state machine's transitions and timeouts, and the seconds that handoffs have spent in each phase."""

    def __init__(self, transitions: Mapping[P, frozenset[P]], timeouts: Mapping[P, PhaseTimeout]) -> None:
        """A phase without transitions is terminal and has no timeout. Every other phase must have one."""
        assert timeouts.keys() == {phase for phase, following in transitions.items() if following}, (
            "a phase without a timeout"
        )
        self.transitions, self.timeouts = transitions, timeouts
        self.seconds = dict.fromkeys(timeouts, 0.0)


class PhaseTimer(Generic[P]):
    """The phase of one handoff, its deadline and its next retransmit. It raises IllegalTransition outside the table."""

    __slots__ = ("_entered", "_table", "deadline", "phase", "retransmit_at")

    def __init__(self, table: PhaseTable[P], phase: P, now: float) -> None:
        self._table = table
        self._enter(phase, now)

    def _enter(self, phase: P, now: float) -> None:
        self.phase, self._entered = phase, now
        timeout = self._table.timeouts.get(phase)
        self.deadline = now + timeout.limit if timeout is not None else float("inf")
        self.retransmit_at = float("inf")
        if timeout is not None and timeout.retransmit_every is not None:
            self.retransmit_at = now + timeout.retransmit_every

    def move(self, to: P, now: float) -> None:
        if to not in self._table.transitions[self.phase]:
            raise IllegalTransition(self.phase, to)
        self._table.seconds[self.phase] += now - self._entered
        self._enter(to, now)

    def extend(self, now: float) -> None:
        """Restarts the deadline of the phase after a sign of life."""
        self.deadline = now + self._table.timeouts[self.phase].limit

    def retransmit_due(self, now: float) -> bool:
        """Returns whether the caller must retransmit now, and if so schedules the next retransmit."""
        if now < self.retransmit_at:
            return False
        interval = self._table.timeouts[self.phase].retransmit_every
        assert interval is not None
        self.retransmit_at = now + interval
        return True


def earliest(times: Iterable[float]) -> float | None:
    """Returns the smallest time, or None if all are infinite or there is none."""
    first = min(times, default=float("inf"))
    return None if first == float("inf") else first


@dataclass(frozen=True, slots=True)
class Timing:
    """Intervals and timeouts between peers, in seconds."""

    hello_every: float = 0.5  # between retransmits of Hello
    hello_timeout: float = 30.0  # from the first Hello to its answer, which may wait for the connection
    ping_every: float = 1.0
    peer_timeout: float = 4.0  # without a message the peer is lost, and must be introduced again
    forget_after: float = 900.0  # without a message, for peers that no handoff depends on
    poll_every: float = 0.002  # between polls of writes in flight


class Liveness:
    """Records when a message last came from each peer. Watched peers are pinged, and are lost if they stay silent."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._heard: dict[str, float] = {}  # time of the last message; the most recent peer is last
        self._pinged: dict[str, float] = {}  # watched peers: when the last ping was sent
        self._watched_since: dict[str, float] = {}

    def mark_heard(self, peer: str, now: float) -> None:
        self._heard.pop(peer, None)
        self._heard[peer] = now
        if len(self._heard) > MAX_PEERS:
            del self._heard[next(iter(self._heard))]

    def heard_recently(self, peer: str, now: float) -> bool:
        return peer in self._heard and now - self._heard[peer] <= self._timing.peer_timeout

    def forget(self, peer: str) -> None:
        for table in (self._heard, self._pinged, self._watched_since):
            table.pop(peer, None)

    def watch(self, peers: Iterable[str], now: float) -> list[str]:
        """Replaces the set of watched peers. Returns the peers to ping now."""
        watched = set(peers)
        for peer in self._watched_since.keys() - watched:
            del self._watched_since[peer], self._pinged[peer]
        due = []
        for peer in sorted(watched):
            self._watched_since.setdefault(peer, now)
            if now - self._pinged.get(peer, float("-inf")) >= self._timing.ping_every:
                self._pinged[peer] = now
                due.append(peer)
        return due

    def timed_out(self, now: float) -> list[str]:
        """Returns the watched peers that must be treated as lost."""
        limit = self._timing.peer_timeout
        since = self._watched_since.items()
        return [peer for peer, began in since if now - max(began, self._heard.get(peer, began)) > limit]

    def expired(self, now: float) -> list[str]:
        """Returns peers that are not watched and were silent for so long that they can be forgotten."""
        limit = self._timing.forget_after
        return [peer for peer, at in self._heard.items() if peer not in self._watched_since and now - at > limit]
