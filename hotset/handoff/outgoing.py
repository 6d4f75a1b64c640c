"""One handoff on the prefill side: its phases, and what it holds."""

from dataclasses import dataclass
from enum import Enum

from hotset.handoff.layout import pages_for
from hotset.handoff.messages import (
    FirstTokenSampled,
    HandoffDone,
    HandoffFailed,
    HandoffId,
    HandoffRequest,
    Hello,
    RowsComputed,
    Store,
)
from hotset.handoff.staged_out import SenderStaging, StagingOffer
from hotset.handoff.timers import PhaseTimeout, PhaseTimer

MAX_WRITES_IN_FLIGHT = 2  # of writes under way for one handoff; what is told meanwhile goes together, in longer writes


class SenderPhase(Enum):
    ACCEPTED = "accepted"  # Accepted is said again; the engine may compute, and what it tells waits
    WRITING = "writing"  # Go came: rows are written as the engine tells them, a few lists at a time
    DRAINING = "draining"  # its end is decided; writes under way are waited for
    WRITES_HUNG = "writes hung"  # a write would not end: the receiver knows that nobody knows
    NOTIFYING = "notifying"  # Done or Failed is said again; nothing is under way, the engine has its pages back
    CLOSED = "closed"  # only its tomb is left


SENDER_TRANSITIONS: dict[SenderPhase, frozenset[SenderPhase]] = {
    SenderPhase.ACCEPTED: frozenset({SenderPhase.WRITING, SenderPhase.NOTIFYING, SenderPhase.CLOSED}),
    SenderPhase.WRITING: frozenset({SenderPhase.DRAINING, SenderPhase.NOTIFYING, SenderPhase.CLOSED}),
    SenderPhase.DRAINING: frozenset({SenderPhase.WRITES_HUNG, SenderPhase.NOTIFYING, SenderPhase.CLOSED}),
    SenderPhase.WRITES_HUNG: frozenset({SenderPhase.NOTIFYING, SenderPhase.CLOSED}),
    SenderPhase.NOTIFYING: frozenset({SenderPhase.CLOSED}),
    SenderPhase.CLOSED: frozenset(),
}

# WRITING counts from the engine's last word; a request may stand in its queue for long.
SENDER_TIMEOUTS: dict[SenderPhase, PhaseTimeout] = {
    SenderPhase.ACCEPTED: PhaseTimeout(10.0, again=0.5),
    SenderPhase.WRITING: PhaseTimeout(600.0, again=1.0),
    SenderPhase.DRAINING: PhaseTimeout(10.0, again=1.0),
    SenderPhase.WRITES_HUNG: PhaseTimeout(600.0, again=1.0),
    SenderPhase.NOTIFYING: PhaseTimeout(60.0, again=0.5),
}


class EndReason(Enum):
    FAILED = "failed"  # the receiver is told, until it has heard
    CANCELLED = "cancelled"  # the receiver wished it: it is answered
    PEER_LOST = "peer lost"  # there is no receiver any more


@dataclass(slots=True)
class ChunkInFlight:
    """Rows [first, last), being written."""

    first: int
    last: int
    due: float
    ticket: int | None = None  # None: not submitted yet
    piece: int | None = None  # its number, where the handoff is staged


class OutgoingHandoff:
    """One handoff. Only the sender changes it."""

    __slots__ = (
        *("ask", "timer", "dropped", "ending", "hello", "landed", "offer", "open", "peer"),
        *("reason", "retry", "sampled", "staged", "tainted", "verdict", "waiting", "written"),
    )

    def __init__(
        self,
        peer: str,
        ask: HandoffRequest,
        hello: Hello,
        timer: PhaseTimer[SenderPhase],
        offer: StagingOffer | None = None,
    ) -> None:
        self.peer, self.ask, self.hello, self.timer, self.offer = peer, ask, hello, timer, offer
        self.staged: SenderStaging | None = None  # its way through the receiver's ring, if the receiver takes the offer
        self.waiting: RowsComputed | None = None  # all that was told and is not being written yet
        self.open: list[ChunkInFlight] = []  # that have not ended
        self.landed = 0  # rows [0, landed) are in place
        self.written = 0  # rows [0, written) were told by the engine
        self.sampled: FirstTokenSampled | None = None
        self.tainted = False  # a write ended, and nobody knows whether it still writes
        self.dropped = False
        self.ending: EndReason | None = None
        self.retry, self.reason = False, ""  # of the ending
        self.verdict: HandoffDone | HandoffFailed | None = None  # what the receiver has yet to acknowledge

    @property
    def phase(self) -> SenderPhase:
        return self.timer.phase

    @property
    def name(self) -> HandoffId:
        return self.peer, self.ask.key

    @property
    def begun(self) -> int:
        """Rows [0, begun) are written, or being written."""
        return self.written if self.waiting is None else self.waiting.first

    @property
    def target(self) -> Store:
        return self.hello.stores[self.ask.landing]

    @property
    def quiesced(self) -> bool:
        return not self.open and not self.tainted

    @property
    def deadline(self) -> float:
        if self.phase is SenderPhase.WRITING:
            staged = [] if self.staged is None else [self.staged.deadline]
            return min([self.timer.deadline, *staged, *(chunk.due for chunk in self.open)])
        return self.timer.deadline

    @property
    def next_time(self) -> float:
        """When something is overdue, or to be said again."""
        staged = self.staged.next_time() if self.staged is not None and self.phase is SenderPhase.WRITING else None
        return min([self.deadline, self.timer.again_at, *([] if staged is None else [staged])])

    @property
    def complete(self) -> bool:
        """Nothing is left to write."""
        return self.sampled is not None and (self.staged is None or self.staged.finished)

    def audit(self) -> None:
        """Proves that its writes and source pages are accounted for, and that it has an end in sight."""
        name, phase = self.name, self.phase
        assert phase is not SenderPhase.CLOSED, f"{name} should be forgotten"
        assert self.deadline < float("inf"), f"{name} would wait for ever"
        assert not self.open or phase in (SenderPhase.WRITING, SenderPhase.DRAINING, SenderPhase.WRITES_HUNG), (
            f"{name} writes in {phase}"
        )
        assert self.dropped == (phase in (SenderPhase.WRITES_HUNG, SenderPhase.NOTIFYING)), f"{name}: pages of {phase}"
        waits = phase is SenderPhase.ACCEPTED or (
            phase is SenderPhase.WRITING and len(self.open) == MAX_WRITES_IN_FLIGHT
        )
        assert self.waiting is None or waits, f"{name} holds back what it may write"
        assert self.landed <= self.begun <= self.written, f"{name} has lost rows"
        assert (self.ending is None) == (phase in (SenderPhase.ACCEPTED, SenderPhase.WRITING)) or self.verdict, name
        if self.staged is None:
            assert len(self.open) <= MAX_WRITES_IN_FLIGHT, f"{name} has {len(self.open)} lists under way"
        else:
            self.staged.audit()
            pieces = {chunk.piece for chunk in self.open}
            assert phase is not SenderPhase.WRITING or pieces == self.staged.in_flight(), f"{name} has lost a piece"


def refusal(ask: HandoffRequest, hello: Hello) -> str:
    """Why what this peer asks can never be served; empty if it can."""
    target, rows = hello.stores.get(ask.landing), len(ask.prompt)
    if target is None:
        return f"landing {ask.landing!r} was not offered, only {sorted(hello.stores)}"
    if not rows:
        return "a prompt without tokens"
    row_span = target.shards[0].span
    for what, span, pages in (("rows", row_span, ask.row_pages), ("keys", target.keys, ask.key_pages)):
        if span is not None and len(pages) < pages_for(span, rows):
            return f"{len(pages)} pages for {rows} {what}, {span.page_rows} to a page"
    return ""


NEVER = -1


@dataclass(frozen=True, slots=True)
class Tombstone:
    quiesced: bool  # nothing is written any more, and the sender knows it
    until: float
    hello: Hello | None  # of the incarnation that asked; None: it had not introduced itself


class Tombstones:
    """For `limit` seconds each, and never more than `most` of them: the oldest give way."""

    def __init__(self, limit: float, most: int) -> None:
        self._limit, self._most = limit, most
        self._tombstones: dict[HandoffId, Tombstone] = {}  # in the order in which they lapse
        self._newest: dict[tuple[str, str], int] = {}  # (peer, request): its highest attempt that lies here

    def __len__(self) -> int:
        return len(self._tombstones)

    def get(self, name: HandoffId) -> Tombstone | None:
        return self._tombstones.get(name)

    def newest_attempt(self, peer: str, request_id: str) -> int:
        """The highest that is remembered; lower than any if none is."""
        return self._newest.get((peer, request_id), NEVER)

    def add(self, name: HandoffId, quiesced: bool, hello: Hello | None, now: float) -> None:
        """One of the same name before gives way to it."""
        peer, key = name
        self._tombstones.pop(name, None)
        self._tombstones[name] = Tombstone(quiesced, now + self._limit, hello)
        self._newest[peer, key.request_id] = max(key.attempt, self._newest.get((peer, key.request_id), key.attempt))
        self.lapse(now)

    def forget_others(self, peer: str, hello: Hello) -> None:
        """Another incarnation of the peer may use the same keys for other requests."""
        stale = [name for name, each in self._tombstones.items() if name[0] == peer and each.hello != hello]
        for name in stale:
            self._remove(name)

    def lapse(self, now: float) -> None:
        while self._tombstones:
            oldest = next(iter(self._tombstones))
            if self._tombstones[oldest].until > now and len(self._tombstones) <= self._most:
                return
            self._remove(oldest)

    def audit(self) -> None:
        """Proves that nothing is remembered for longer than its tomb."""
        assert len(self._tombstones) <= self._most, f"{len(self._tombstones)} tombs, {self._most} at the most"
        newest = {(peer, request_id, attempt) for (peer, request_id), attempt in self._newest.items()}
        assert newest <= {(peer, key.request_id, key.attempt) for peer, key in self._tombstones}, (
            "a name without a tomb"
        )

    def _remove(self, name: HandoffId) -> None:
        peer, key = name
        del self._tombstones[name]
        if self._newest.get((peer, key.request_id)) == key.attempt:
            del self._newest[peer, key.request_id]
