"""Timers of handoffs: deadlines and retransmits of phases, and liveness of peers. Callers pass the current time.

The timeouts of the phases themselves are tables beside the phases: RECEIVER_TIMEOUTS in `receiver.py`, SENDER_TIMEOUTS
in `outgoing.py`, PIECE_TIMEOUTS in `staged_delivery.py`. `PeerTiming` below applies to peers, not to handoffs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from hotset.base.errors import IllegalTransition, InternalError

P = TypeVar("P", bound=Enum)

MAX_PEERS = 1024


@dataclass(frozen=True, slots=True)
class PhaseTimeout:
    """The time limit of a phase, and the interval at which it sends its message again (a retransmit, or Progress)."""

    limit: float  # seconds
    retransmit_every: float | None = None  # seconds; None if the phase repeats no message
    doubles_until: float = 0.0  # seconds: the interval doubles at each retransmit until it has reached this


class PhaseTable(Generic[P]):
    """One state machine's transitions and timeouts, and the seconds that handoffs or pieces spent in each phase."""

    def __init__(self, transitions: Mapping[P, frozenset[P]], timeouts: Mapping[P, PhaseTimeout]) -> None:
        """Requires a timeout for every phase except the terminal ones, which have no transitions."""
        if timeouts.keys() != {phase for phase, successors in transitions.items() if successors}:
            raise InternalError("a phase without a timeout")
        self.transitions, self.timeouts = transitions, timeouts
        self.seconds = dict.fromkeys(timeouts, 0.0)


class PhaseTimer(Generic[P]):
    """The phase of one handoff or piece, its deadline and its next retransmit.

    `move` raises IllegalTransition if the table does not contain the transition.
    """

    __slots__ = ("_entered", "_interval", "_table", "deadline", "phase", "retransmit_at")

    def __init__(self, table: PhaseTable[P], phase: P, now: float) -> None:
        self._table = table
        self._enter(phase, now)

    def _enter(self, phase: P, now: float) -> None:
        self.phase, self._entered = phase, now
        timeout = self._table.timeouts.get(phase)
        self.deadline = now + timeout.limit if timeout is not None else float("inf")
        every = None if timeout is None else timeout.retransmit_every
        self._interval = float("inf") if every is None else every
        self.retransmit_at = now + self._interval

    def move(self, to: P, now: float) -> None:
        if to not in self._table.transitions[self.phase]:
            raise IllegalTransition(self.phase, to)
        self._table.seconds[self.phase] += now - self._entered
        self._enter(to, now)

    def extend(self, now: float) -> None:
        """Restarts the time limit of the current phase."""
        self.deadline = now + self._table.timeouts[self.phase].limit

    def retransmit_due(self, now: float) -> bool:
        """Returns whether the caller must retransmit now, and if so schedules the next retransmit."""
        if now < self.retransmit_at:
            return False
        if self._interval < self._table.timeouts[self.phase].doubles_until:
            self._interval *= 2
        self.retransmit_at = now + self._interval
        return True


@dataclass(frozen=True, slots=True)
class PeerTiming:
    """Intervals and timeouts of Hello and Ping, and the interval at which writes are polled. All are in seconds."""

    hello_every: float = 0.5  # interval between retransmits of Hello
    # Limit for opening an endpoint, which registers all memory: with RDMA, minutes for a terabyte in small pages.
    open_timeout: float = 1800.0
    hello_timeout: float = 30.0  # limit from the first Hello to its answer, which comes after the memory is connected
    ping_every: float = 1.0
    peer_timeout: float = 4.0  # a watched peer that sends no message for this long is lost, and needs a new Hello
    forget_after: float = 900.0  # a peer on which no handoff depends is forgotten after this long without a message
    poll_every: float = 0.001  # interval between polls of writes in flight


class Liveness:
    """Records when each peer last sent a message. Watched peers are pinged. A watched peer that sends nothing for
    `peer_timeout` seconds is lost."""

    def __init__(self, timing: PeerTiming) -> None:
        self._timing = timing
        self._heard: dict[str, float] = {}  # time of each peer's newest message, oldest first
        self._pinged: dict[str, float] = {}  # time of the last ping to each watched peer
        self._watched_since: dict[str, float] = {}
        self.num_pings = 0  # the number of the newest Ping

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

    def watch(self, peers: Iterable[str], now: float) -> dict[str, int]:
        """Replaces the set of watched peers. Returns the peers to ping now, with the number of each Ping."""
        watched = set(peers)
        for peer in self._watched_since.keys() - watched:
            del self._watched_since[peer], self._pinged[peer]
        pings: dict[str, int] = {}
        for peer in sorted(watched):
            self._watched_since.setdefault(peer, now)
            if now - self._pinged.get(peer, float("-inf")) >= self._timing.ping_every:
                self._pinged[peer] = now
                self.num_pings += 1
                pings[peer] = self.num_pings
        return pings

    def timed_out(self, now: float) -> list[str]:
        """Returns the watched peers that must be treated as lost."""
        limit = self._timing.peer_timeout
        return [
            peer
            for peer, began in self._watched_since.items()
            if now - max(began, self._heard.get(peer, began)) > limit
        ]

    def expired(self, now: float) -> list[str]:
        """Returns peers that are not watched and have sent nothing for `forget_after` seconds."""
        limit, watched = self._timing.forget_after, self._watched_since
        return [peer for peer, heard_at in self._heard.items() if peer not in watched and now - heard_at > limit]
