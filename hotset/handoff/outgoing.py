"""One handoff on the prefill side: its phases, and what it holds."""

from dataclasses import dataclass
from enum import Enum

from hotset.handoff.layout import pages_for
from hotset.handoff.messages import Ask, HandoffDone, HandoffFailed, Hello, Name, Sampled, Store, Written
from hotset.handoff.staged_out import Offer, StagedOut
from hotset.handoff.timers import PhaseTimer, Wait

MOST_LISTS = 2  # of writes under way for one handoff; what is told meanwhile goes together, in longer writes


class Phase(Enum):
    OFFERED = "offered"  # Accepted is said again; the engine may compute, and what it tells waits
    WRITING = "writing"  # Go came: rows are written as the engine tells them, a few lists at a time
    ENDING = "ending"  # its end is decided; writes under way are waited for
    STUCK = "stuck"  # a write would not end: the receiver knows that nobody knows
    TELLING = "telling"  # Done or Failed is said again; nothing is under way, the engine has its pages back
    CLOSED = "closed"  # only its tomb is left


NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.OFFERED: frozenset({Phase.WRITING, Phase.TELLING, Phase.CLOSED}),
    Phase.WRITING: frozenset({Phase.ENDING, Phase.TELLING, Phase.CLOSED}),
    Phase.ENDING: frozenset({Phase.STUCK, Phase.TELLING, Phase.CLOSED}),
    Phase.STUCK: frozenset({Phase.TELLING, Phase.CLOSED}),
    Phase.TELLING: frozenset({Phase.CLOSED}),
    Phase.CLOSED: frozenset(),
}

# WRITING counts from the engine's last word; a request may stand in its queue for long.
WAITS: dict[Phase, Wait] = {
    Phase.OFFERED: Wait(10.0, again=0.5),
    Phase.WRITING: Wait(600.0, again=1.0),
    Phase.ENDING: Wait(10.0, again=1.0),
    Phase.STUCK: Wait(600.0, again=1.0),
    Phase.TELLING: Wait(60.0, again=0.5),
}


class Ending(Enum):
    FAILED = "failed"  # the receiver is told, until it has heard
    CANCELLED = "cancelled"  # the receiver wished it: it is answered
    LOST = "lost"  # there is no receiver any more


@dataclass(slots=True)
class Chunk:
    """Rows [first, last), being written."""

    first: int
    last: int
    due: float
    ticket: int | None = None  # None: not submitted yet
    piece: int | None = None  # its number, where the handoff is staged


class Outgoing:
    """One handoff. Only the sender changes it."""

    __slots__ = (
        *("ask", "timer", "dropped", "ending", "hello", "landed", "offer", "open", "peer"),
        *("reason", "retry", "sampled", "staged", "tainted", "verdict", "waiting", "written"),
    )

    def __init__(self, peer: str, ask: Ask, hello: Hello, timer: PhaseTimer[Phase], offer: Offer | None = None) -> None:
        self.peer, self.ask, self.hello, self.timer, self.offer = peer, ask, hello, timer, offer
        self.staged: StagedOut | None = None  # its way through the receiver's ring, if the receiver takes the offer
        self.waiting: Written | None = None  # all that was told and is not being written yet
        self.open: list[Chunk] = []  # that have not ended
        self.landed = 0  # rows [0, landed) are in place
        self.written = 0  # rows [0, written) were told by the engine
        self.sampled: Sampled | None = None
        self.tainted = False  # a write ended, and nobody knows whether it still writes
        self.dropped = False
        self.ending: Ending | None = None
        self.retry, self.reason = False, ""  # of the ending
        self.verdict: HandoffDone | HandoffFailed | None = None  # what the receiver has yet to acknowledge

    @property
    def phase(self) -> Phase:
        return self.timer.phase

    @property
    def name(self) -> Name:
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
        if self.phase is Phase.WRITING:
            staged = [] if self.staged is None else [self.staged.deadline]
            return min([self.timer.deadline, *staged, *(chunk.due for chunk in self.open)])
        return self.timer.deadline

    @property
    def next_time(self) -> float:
        """When something is overdue, or to be said again."""
        staged = self.staged.next_time() if self.staged is not None and self.phase is Phase.WRITING else None
        return min([self.deadline, self.timer.again_at, *([] if staged is None else [staged])])

    @property
    def complete(self) -> bool:
        """Nothing is left to write."""
        return self.sampled is not None and (self.staged is None or self.staged.finished)

    def audit(self) -> None:
        """Proves that its writes and source pages are accounted for, and that it has an end in sight."""
        name, phase = self.name, self.phase
        assert phase is not Phase.CLOSED, f"{name} should be forgotten"
        assert self.deadline < float("inf"), f"{name} would wait for ever"
        assert not self.open or phase in (Phase.WRITING, Phase.ENDING, Phase.STUCK), f"{name} writes in {phase}"
        assert self.dropped == (phase in (Phase.STUCK, Phase.TELLING)), f"{name}: pages of {phase}"
        waits = phase is Phase.OFFERED or (phase is Phase.WRITING and len(self.open) == MOST_LISTS)
        assert self.waiting is None or waits, f"{name} holds back what it may write"
        assert self.landed <= self.begun <= self.written, f"{name} has lost rows"
        assert (self.ending is None) == (phase in (Phase.OFFERED, Phase.WRITING)) or self.verdict, name
        if self.staged is None:
            assert len(self.open) <= MOST_LISTS, f"{name} has {len(self.open)} lists under way"
        else:
            self.staged.audit()
            pieces = {chunk.piece for chunk in self.open}
            assert phase is not Phase.WRITING or pieces == self.staged.in_flight(), f"{name} has lost a piece"


def refusal(ask: Ask, hello: Hello) -> str:
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
        self._tombstones: dict[Name, Tombstone] = {}  # in the order in which they lapse
        self._newest: dict[tuple[str, str], int] = {}  # (peer, request): its highest attempt that lies here

    def __len__(self) -> int:
        return len(self._tombstones)

    def get(self, name: Name) -> Tombstone | None:
        return self._tombstones.get(name)

    def newest_attempt(self, peer: str, request_id: str) -> int:
        """The highest that is remembered; lower than any if none is."""
        return self._newest.get((peer, request_id), NEVER)

    def add(self, name: Name, quiesced: bool, hello: Hello | None, now: float) -> None:
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

    def _remove(self, name: Name) -> None:
        peer, key = name
        del self._tombstones[name]
        if self._newest.get((peer, key.request_id)) == key.attempt:
            del self._newest[peer, key.request_id]
