"""The state of one handoff at the sender, its phases, their timeouts (SENDER_TIMEOUTS), and the sender's tombstones.

`sender.py` handles the events and changes the state.
"""

from dataclasses import dataclass, field
from enum import Enum

from hotset.base.processes import ProcessIdentity
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.deliveries import Delivery, RowWrites
from hotset.fleet.handoff.delivery_choice import DeliveryChoice
from hotset.fleet.handoff.messages import Hello, Store
from hotset.fleet.handoff.timers import PhaseTimeout, PhaseTimer
from hotset.fleet.transfer.api import WriteState
from hotset.schedule.handoffs import FirstTokenSampled, HandoffId, RowsComputed

NO_ATTEMPT = -1  # lower than any attempt number


class SenderPhase(Enum):
    ACCEPTED = "accepted"  # HandoffAccepted is retransmitted; the engine may compute, but nothing is written
    WRITING = "writing"  # StartWrites has arrived; rows are written as the engine announces them
    DRAINING = "draining"  # the handoff has failed or was cancelled, and waits for writes in flight
    WRITES_HUNG = "writes hung"  # a write did not end in time; the handoff was reported as not quiesced
    NOTIFYING = "notifying"  # HandoffDone or HandoffFailed is retransmitted; no write is in flight, pages are released
    CLOSED = "closed"  # only the tombstone remains


SENDER_TRANSITIONS: dict[SenderPhase, frozenset[SenderPhase]] = {
    SenderPhase.ACCEPTED: frozenset({SenderPhase.WRITING, SenderPhase.NOTIFYING, SenderPhase.CLOSED}),
    SenderPhase.WRITING: frozenset({SenderPhase.DRAINING, SenderPhase.NOTIFYING, SenderPhase.CLOSED}),
    SenderPhase.DRAINING: frozenset({SenderPhase.WRITES_HUNG, SenderPhase.NOTIFYING, SenderPhase.CLOSED}),
    SenderPhase.WRITES_HUNG: frozenset({SenderPhase.NOTIFYING, SenderPhase.CLOSED}),
    SenderPhase.NOTIFYING: frozenset({SenderPhase.CLOSED}),
    SenderPhase.CLOSED: frozenset(),
}

# The limit of WRITING restarts when the engine announces rows, a list of writes ends, or a piece is unpacked. The limit
# is long because the prompt may wait in the engine's queue.
SENDER_TIMEOUTS: dict[SenderPhase, PhaseTimeout] = {
    SenderPhase.ACCEPTED: PhaseTimeout(10.0, retransmit_every=0.5),
    SenderPhase.WRITING: PhaseTimeout(600.0, retransmit_every=1.0),
    SenderPhase.DRAINING: PhaseTimeout(10.0, retransmit_every=1.0),
    SenderPhase.WRITES_HUNG: PhaseTimeout(600.0, retransmit_every=1.0),
    SenderPhase.NOTIFYING: PhaseTimeout(60.0, retransmit_every=0.5),
}

OPEN_PHASES = frozenset({SenderPhase.ACCEPTED, SenderPhase.WRITING})  # the outcome is not decided
_WRITE_PHASES = frozenset({SenderPhase.WRITING, SenderPhase.DRAINING, SenderPhase.WRITES_HUNG})
_RELEASED_PHASES = frozenset({SenderPhase.WRITES_HUNG, SenderPhase.NOTIFYING})


class EndReason(Enum):
    FAILED = "failed"  # HandoffFailed is retransmitted until the receiver acknowledges it
    CANCELLED = "cancelled"  # the receiver has sent Cancel, or a newer attempt; the answer is Cancelled
    PEER_LOST = "peer lost"  # no message is sent


@dataclass(slots=True)
class ListInFlight:
    """A list of writes that has not ended."""

    rows: RowWrites
    deadline: float


@dataclass(slots=True, eq=False)
class OutgoingHandoff:
    """The state of one handoff at the sender. Only the sender changes it."""

    peer: str
    request: msg.HandoffRequest
    hello: Hello
    timer: PhaseTimer[SenderPhase]
    choice: DeliveryChoice
    delivery: Delivery | None = None  # set by StartWrites
    waiting: RowsComputed | None = None  # in ACCEPTED: the announced rows, merged into one range
    in_flight: dict[int, ListInFlight] = field(default_factory=dict)  # by number of the list
    announced: int = 0  # the engine has announced rows [0, announced)
    sampled: FirstTokenSampled | None = None
    has_unknown_write: bool = False  # a write ended in an unknown state and may still change the receiver's memory
    pages_released: bool = False
    end_reason: EndReason | None = None
    retry: bool = False  # for HandoffFailed
    failure: str = ""  # for HandoffFailed
    # Set to None again when the receiver has acknowledged it, the handoff is cancelled, or the peer is lost.
    final_message: msg.HandoffDone | msg.HandoffFailed | None = None

    @property
    def phase(self) -> SenderPhase:
        return self.timer.phase

    @property
    def id(self) -> HandoffId:
        return self.peer, self.request.key

    @property
    def landed(self) -> int:
        """Returns the end of the rows [0, landed) that are in the receiver's pages."""
        return 0 if self.delivery is None else self.delivery.landed

    @property
    def writing(self) -> Delivery | None:
        """Returns the delivery in phase WRITING, in which it may send and write; None in all other phases."""
        return self.delivery if self.phase is SenderPhase.WRITING else None

    @property
    def target(self) -> Store:
        return self.hello.stores[self.request.landing]

    @property
    def quiesced(self) -> bool:
        return not self.in_flight and not self.has_unknown_write

    @property
    def deadline(self) -> float:
        """Returns the deadline of the phase or, in WRITING, of the delivery or a list, whichever is earlier."""
        if (delivery := self.writing) is None:
            return self.timer.deadline
        return min([self.timer.deadline, delivery.deadline, *(entry.deadline for entry in self.in_flight.values())])

    @property
    def next_deadline(self) -> float:
        """Returns when the next timeout or retransmit is due."""
        of_delivery = [] if self.writing is None else [self.writing.next_deadline]
        return min([self.deadline, self.timer.retransmit_at, *of_delivery])

    @property
    def complete(self) -> bool:
        """Returns whether the first token is sampled, and the delivery is finished. Writes may still be in flight."""
        return self.sampled is not None and self.delivery is not None and self.delivery.finished

    def audit(self) -> None:
        """Asserts that writes and source pages are accounted for, and that the handoff will end."""
        name, phase = self.id, self.phase
        assert phase is not SenderPhase.CLOSED, f"{name} is closed, but still in the table of handoffs"
        assert self.deadline < float("inf"), f"{name} has no deadline"
        assert not self.in_flight or phase in _WRITE_PHASES, f"{name} has writes in flight in phase {phase}"
        released = self.pages_released
        assert released == (phase in _RELEASED_PHASES), f"{name}: pages_released is {released} in phase {phase}"
        assert self.waiting is None or phase is SenderPhase.ACCEPTED, f"{name} keeps rows from its delivery"
        assert self.landed <= max(self.announced, self.request.first), f"{name} has lost rows"
        assert (self.end_reason is None) == (phase in OPEN_PHASES) or self.final_message, name
        assert phase is not SenderPhase.WRITING or self.delivery is not None, f"{name} has no delivery"
        if self.writing is not None:
            self.writing.audit([entry.rows for entry in self.in_flight.values()])


def refusal(request: msg.HandoffRequest, hello: Hello) -> str:
    """Returns why this request can never be served, or an empty string if it can."""
    target, rows = hello.stores.get(request.landing), len(request.prompt)
    if target is None:
        return f"landing {request.landing!r} is not one of the stores in Hello, {sorted(hello.stores)}"
    if not rows:
        return "the prompt has no tokens"
    row_span, first = target.shards[0].span, request.first
    if not 0 <= first < rows or first % row_span.part_rows:
        return f"row {first} of {rows} is not the first row of a page of {row_span.part_rows} rows"
    for what, span, pages in (("rows", row_span, request.row_pages), ("keys", target.keys, request.key_pages)):
        needed = 0 if span is None else span.pages_for(rows) - span.pages_before(first)
        if len(pages) < needed:
            return f"{len(pages)} pages are too few for {what} [{first}, {rows}), which need {needed} pages"
    return ""


@dataclass(slots=True)
class Tombstone:
    """The sender's record of a handoff that has ended. Writes that were still in flight are observed, so that the
    sender can later confirm that they have ended."""

    until: float  # time at which the tombstone expires
    process: ProcessIdentity | None  # of the peer that requested the handoff; None if unknown
    has_unknown_write: bool  # a write ended in an unknown state, or the sender has no record of the writes
    in_flight: set[int]  # numbers of lists of writes that have not ended

    @property
    def quiesced(self) -> bool:
        """Returns whether it is certain that no further byte will be written."""
        return not self.in_flight and not self.has_unknown_write


class Tombstones:
    """Records of handoffs that have ended, or were cancelled before they began, so that a late HandoffRequest does not
    begin them again. Each tombstone is kept for `limit` seconds. If there are more than `max_count`, the oldest are
    removed."""

    def __init__(self, limit: float, max_count: int) -> None:
        self._limit, self._max_count = limit, max_count
        self._tombstones: dict[HandoffId, Tombstone] = {}  # in the order in which they expire
        self._attempts: dict[tuple[str, str], set[int]] = {}  # (peer, request id) -> attempts that have a tombstone

    def __len__(self) -> int:
        return len(self._tombstones)

    def get(self, handoff: HandoffId) -> Tombstone | None:
        return self._tombstones.get(handoff)

    def newest_attempt(self, peer: str, request_id: str) -> int:
        """Returns the highest attempt of this request that has a tombstone, or NO_ATTEMPT."""
        return max(self._attempts.get((peer, request_id), ()), default=NO_ATTEMPT)

    def add_ended(self, handoff: OutgoingHandoff, now: float) -> None:
        """Adds the tombstone of a handoff that has ended. Some of its writes may still be in flight."""
        until, unknown = now + self._limit, handoff.has_unknown_write
        self._add(handoff.id, Tombstone(until, handoff.hello.process, unknown, set(handoff.in_flight)))

    def add_unknown(self, handoff: HandoffId, process: ProcessIdentity | None, now: float) -> None:
        """Adds a tombstone for a handoff of which the sender has no record, unless there is one."""
        if handoff not in self._tombstones:
            self._add(handoff, Tombstone(now + self._limit, process, True, set()))

    def on_write_ended(self, handoff: HandoffId, number: int, state: WriteState) -> None:
        """Records the end of a list of writes. Ignores lists that no tombstone mentions."""
        tombstone = self._tombstones.get(handoff)
        if tombstone is not None and number in tombstone.in_flight:
            tombstone.in_flight.remove(number)
            tombstone.has_unknown_write |= state is WriteState.FAILED_UNKNOWN

    def forget_other_processes(self, peer: str, process: ProcessIdentity | None) -> None:
        """Removes the peer's tombstones for other processes, which may have used the same keys."""
        others = [
            handoff for handoff, entry in self._tombstones.items() if handoff[0] == peer and entry.process != process
        ]
        for handoff in others:
            self._remove(handoff)

    def expire(self, now: float) -> None:
        while self._tombstones:
            oldest = next(iter(self._tombstones))
            if self._tombstones[oldest].until > now and len(self._tombstones) <= self._max_count:
                return
            self._remove(oldest)

    def audit(self) -> None:
        """Asserts that the index of attempts contains exactly the handoffs with a tombstone."""
        count = len(self._tombstones)
        assert count <= self._max_count, f"there are {count} tombstones, more than {self._max_count}"
        indexed = {
            (peer, request_id, attempt)
            for (peer, request_id), attempts in self._attempts.items()
            for attempt in attempts
        }
        buried = {(peer, key.request_id, key.attempt) for peer, key in self._tombstones}
        assert indexed == buried, "the index of attempts differs from the tombstones"

    def _add(self, handoff: HandoffId, tombstone: Tombstone) -> None:
        """Adds a tombstone. It replaces an older one of the same handoff."""
        peer, key = handoff
        self._tombstones.pop(handoff, None)
        self._tombstones[handoff] = tombstone
        self._attempts.setdefault((peer, key.request_id), set()).add(key.attempt)
        self.expire(tombstone.until - self._limit)

    def _remove(self, handoff: HandoffId) -> None:
        peer, key = handoff
        del self._tombstones[handoff]
        attempts = self._attempts[peer, key.request_id]
        attempts.remove(key.attempt)
        if not attempts:
            del self._attempts[peer, key.request_id]
