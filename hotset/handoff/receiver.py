"""The decode side of handoffs: asks, says go, and tells the engine how each one ended. Pure: no threads, no clock.

A handoff that may be written to is never given up silently: either its sender says that it has stopped, or the engine
is told that nobody knows. If it is staged, nobody but this worker writes to its pages: then it is room in the ring that
is kept until its sender has stopped.
"""

from collections.abc import Mapping
from enum import Enum

from hotset.handoff.messages import (
    Cancel,
    Cancelled,
    Fetch,
    FetchFailed,
    HandoffAccepted,
    HandoffAck,
    HandoffDone,
    HandoffFailed,
    HandoffKey,
    HandoffRequest,
    Hello,
    Landed,
    LeaseRequest,
    Message,
    PieceUnpacked,
    PieceWritten,
    Progress,
    Quiesced,
    ReceiverEvent,
    SendMessage,
    StartWrites,
    UnpackPiece,
)
from hotset.handoff.staging import ReceiverStaging
from hotset.handoff.timers import PhaseTable, PhaseTimeout, PhaseTimer, earliest


class ReceiverPhase(Enum):
    REQUESTING = "requesting"  # Ask is said again; no Go was sent, so nothing can be written
    LANDING = "landing"  # Go was sent: rows may be written at any time
    CANCELLING = "cancelling"  # Cancel is said again; the engine waits to hear whether writing has stopped
    ABANDONED = "abandoned"  # the engine knows that it is lost, and the pages are its own; the sender is told to stop
    QUARANTINED = "quarantined"  # failed; the engine must not use the pages; Cancel is retransmitted
    CLOSED = "closed"  # forgotten


RECEIVER_TRANSITIONS: dict[ReceiverPhase, frozenset[ReceiverPhase]] = {
    ReceiverPhase.REQUESTING: frozenset({ReceiverPhase.LANDING, ReceiverPhase.ABANDONED, ReceiverPhase.CLOSED}),
    ReceiverPhase.LANDING: frozenset({ReceiverPhase.CANCELLING, ReceiverPhase.QUARANTINED, ReceiverPhase.CLOSED}),
    ReceiverPhase.CANCELLING: frozenset({ReceiverPhase.QUARANTINED, ReceiverPhase.CLOSED}),
    ReceiverPhase.ABANDONED: frozenset({ReceiverPhase.CLOSED}),
    ReceiverPhase.QUARANTINED: frozenset({ReceiverPhase.CLOSED}),
    ReceiverPhase.CLOSED: frozenset(),
}

# LANDING counts from the last sign of life. STOPPING outlasts the time that a sender waits for its writes to end.
RECEIVER_TIMEOUTS: dict[ReceiverPhase, PhaseTimeout] = {
    ReceiverPhase.REQUESTING: PhaseTimeout(10.0, again=1.0),
    ReceiverPhase.LANDING: PhaseTimeout(15.0),
    ReceiverPhase.CANCELLING: PhaseTimeout(15.0, again=0.5),
    ReceiverPhase.ABANDONED: PhaseTimeout(10.0, again=1.0),
    ReceiverPhase.QUARANTINED: PhaseTimeout(600.0, again=5.0),
}

OPEN = frozenset(
    {ReceiverPhase.REQUESTING, ReceiverPhase.LANDING, ReceiverPhase.CANCELLING}
)  # the engine has not been told of an end


class _Handoff:
    __slots__ = ("ask", "peer", "reason", "retry", "staged", "timer")

    def __init__(self, fetch: Fetch, timer: PhaseTimer[ReceiverPhase]) -> None:
        self.peer, self.ask, self.timer = fetch.peer, fetch.ask, timer
        self.reason, self.retry = "", False  # why it is being stopped
        self.staged = False  # its rows come by way of the ring

    @property
    def phase(self) -> ReceiverPhase:
        return self.timer.phase


class Receiver:
    """Every handoff into this worker. One thread calls it; after each call `take_actions` says what to do.

    The engine receives `Landed` or `FetchFailed` for each `Fetch`, exactly once, and perhaps `Quiesced` after a
    `FetchFailed` that was not quiesced. Until then the pages belong to the handoff.
    """

    def __init__(
        self, waits: Mapping[ReceiverPhase, PhaseTimeout] = RECEIVER_TIMEOUTS, staging: ReceiverStaging | None = None
    ) -> None:
        self.table = PhaseTable(RECEIVER_TRANSITIONS, waits)
        self.resent = 0  # messages that were said again
        self._staging = staging
        self._hellos: dict[str, Hello] = {}
        self._handoffs: dict[HandoffKey, _Handoff] = {}
        self._actions: list[SendMessage | UnpackPiece | ReceiverEvent] = []

    def peer_known(self, peer: str, hello: Hello) -> None:
        """It introduced itself, and `check_peers` had nothing against it. After `peer_lost`, if it had before."""
        self._hellos[peer] = hello

    def fetch(self, fetch: Fetch, now: float) -> None:
        """Begins a handoff. One of this key that is under way already goes on as if nothing had been said."""
        key = fetch.ask.key
        if key in self._handoffs:
            return
        others = [other for other in self._handoffs if other.request_id == key.request_id]
        if any(other.attempt > key.attempt for other in others):
            self._actions.append(FetchFailed(key, quiesced=True, retry=False, reason="a later attempt is under way"))
            return
        for other in others:
            self.give_up(other, now)
        handoff = self._handoffs[key] = _Handoff(fetch, PhaseTimer(self.table, ReceiverPhase.REQUESTING, now))
        self._speak(handoff)

    def give_up(self, key: HandoffKey, now: float) -> None:
        """Nobody wants it any more. A handoff that has ended, or was never begun: nothing happens."""
        handoff = self._handoffs.get(key)
        if handoff is not None:
            self._stop(handoff, False, "given up", now)

    def take(self, peer: str, message: Message, now: float) -> None:
        """What `peer` has to say. What is not about handoffs, or does not fit where one stands, changes nothing."""
        if not isinstance(
            message, HandoffAccepted | Progress | HandoffDone | HandoffFailed | Cancelled | LeaseRequest | PieceWritten
        ):
            return
        if isinstance(message, HandoffDone | HandoffFailed):
            self._send(peer, HandoffAck(message.key))
        handoff = self._handoffs.get(message.key)
        if handoff is None or handoff.peer != peer:
            if isinstance(message, HandoffAccepted | Progress | LeaseRequest | PieceWritten):
                self._send(peer, Cancel(message.key))
            return
        match message:
            case HandoffAccepted() | Progress():
                self._alive(handoff, message, now)
            case LeaseRequest() | PieceWritten():
                self._take_staged(handoff, message, now)
            case HandoffDone():
                self._done(handoff, message, now)
            case HandoffFailed():
                self._over(handoff, message.quiesced, message.retry, message.reason, now)
            case Cancelled():
                self._over(handoff, message.quiesced, False, "the prefill worker stopped it", now)

    def peer_lost(self, peer: str, reason: str, now: float) -> None:
        """It died, or came back as another incarnation. What it began to write may still arrive."""
        self._hellos.pop(peer, None)
        for handoff in [each for each in self._handoffs.values() if each.peer == peer]:
            if handoff.phase in OPEN:
                self._lose(handoff, handoff.phase is ReceiverPhase.REQUESTING, False, reason, now)
            elif handoff.phase is ReceiverPhase.ABANDONED:
                self._move(handoff, ReceiverPhase.CLOSED, now)
            # UNSURE: if it was only slow, it may say yet that it has stopped; another incarnation never does.

    def tick(self, now: float) -> None:
        """Lets time pass: what is overdue is said again, or given up."""
        for handoff in list(self._handoffs.values()):
            if now >= handoff.timer.deadline:
                self._expire(handoff, now)
            elif handoff.timer.due(now):
                self.resent += 1
                self._speak(handoff)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if nothing happens before."""
        courses = [handoff.timer for handoff in self._handoffs.values()]
        return earliest(min(timer.deadline, timer.again_at) for timer in courses)

    def take_actions(self) -> list[SendMessage | UnpackPiece | ReceiverEvent]:
        """What is to be unpacked, sent and told, each to its end before the next. Each is given out once."""
        if self._staging is not None:
            self._actions += self._staging.granted()
        actions, self._actions = self._actions, []
        return actions

    def open_keys(self, peer: str) -> list[HandoffKey]:
        """The handoffs for which this peer has to be alive."""
        return [key for key, each in self._handoffs.items() if each.peer == peer and each.phase in OPEN]

    def phases(self) -> dict[HandoffKey, ReceiverPhase]:
        """Where every handoff stands that is not forgotten yet."""
        return {key: handoff.phase for key, handoff in self._handoffs.items()}

    @property
    def ring_quarantined(self) -> int:
        """Bytes of the ring that nobody may use."""
        return 0 if self._staging is None else self._staging.ring.quarantined

    def audit(self) -> None:
        """Proves that every handoff has an end in sight, and that of one request at most one attempt is wanted."""
        wanted = [
            key.request_id
            for key, each in self._handoffs.items()
            if each.phase in (ReceiverPhase.REQUESTING, ReceiverPhase.LANDING)
        ]
        assert len(wanted) == len(set(wanted)), "two attempts of one request are under way"
        for key, handoff in self._handoffs.items():
            assert handoff.ask.key == key and handoff.phase is not ReceiverPhase.CLOSED, f"{key} should be forgotten"
            assert handoff.timer.deadline < float("inf"), f"{key} would wait for ever"
        if self._staging is not None:
            self._staging.audit({key for key, handoff in self._handoffs.items() if handoff.staged})

    def _alive(self, handoff: _Handoff, message: HandoffAccepted | Progress, now: float) -> None:
        if handoff.phase is ReceiverPhase.REQUESTING and isinstance(message, HandoffAccepted):
            self._move(handoff, ReceiverPhase.LANDING, now)
            hello = self._hellos.get(handoff.peer)
            if self._staging is not None and hello is not None and message.piece_bytes:
                handoff.staged = self._staging.begin(handoff.peer, hello, handoff.ask, message.piece_bytes)
        if handoff.phase is ReceiverPhase.LANDING:
            handoff.timer.stay(now)
            if isinstance(message, HandoffAccepted):
                self._send(handoff.peer, StartWrites(message.key, handoff.staged))

    def _take_staged(self, handoff: _Handoff, message: LeaseRequest | PieceWritten, now: float) -> None:
        if handoff.phase is not ReceiverPhase.LANDING or not handoff.staged:
            return
        assert self._staging is not None
        handoff.timer.stay(now)
        if isinstance(message, LeaseRequest):
            self._actions += self._staging.want(message)
            return
        packed = self._staging.staged(message)
        if packed is not None:
            self._actions.append(UnpackPiece(packed))
        if self._staging.is_unpacked(message.key, message.piece):
            self._send(handoff.peer, PieceUnpacked(message.key, message.piece))

    def _done(self, handoff: _Handoff, done: HandoffDone, now: float) -> None:
        rows = self._rows(handoff)
        if handoff.phase is ReceiverPhase.LANDING and rows < len(handoff.ask.prompt):
            self._over(handoff, True, True, f"the prefill worker ended it after {rows} rows", now)
        elif handoff.phase is ReceiverPhase.LANDING:
            self._actions.append(Landed(done.key, done.token_id, done.alternatives))
            self._move(handoff, ReceiverPhase.CLOSED, now)
        else:
            self._over(handoff, True, False, "the prefill worker ended it before it began", now)

    def _rows(self, handoff: _Handoff) -> int:
        """So many have landed, if the sender says that all have."""
        staged = self._staging is not None and handoff.staged
        return self._staging.rows(handoff.ask.key) if self._staging and staged else len(handoff.ask.prompt)

    def _over(self, handoff: _Handoff, quiesced: bool, retry: bool, reason: str, now: float) -> None:
        """Its sender does nothing more about it."""
        match handoff.phase:
            case ReceiverPhase.REQUESTING:
                self._lose(handoff, True, retry, reason, now)
            case ReceiverPhase.LANDING | ReceiverPhase.CANCELLING:
                self._lose(handoff, quiesced, retry, reason, now)
            case ReceiverPhase.ABANDONED:
                self._move(handoff, ReceiverPhase.CLOSED, now)
            case ReceiverPhase.QUARANTINED if quiesced:
                if self._staging is not None and handoff.staged:
                    self._staging.end_quarantine(handoff.ask.key)
                else:
                    self._actions.append(Quiesced(handoff.ask.key))
                self._move(handoff, ReceiverPhase.CLOSED, now)

    def _stop(self, handoff: _Handoff, retry: bool, reason: str, now: float) -> None:
        if handoff.phase is ReceiverPhase.REQUESTING:
            self._actions.append(FetchFailed(handoff.ask.key, quiesced=True, retry=retry, reason=reason))
            self._move(handoff, ReceiverPhase.ABANDONED, now)
        elif handoff.phase is ReceiverPhase.LANDING:
            handoff.reason, handoff.retry = reason, retry
            self._move(handoff, ReceiverPhase.CANCELLING, now)

    def _lose(self, handoff: _Handoff, quiesced: bool, retry: bool, reason: str, now: float) -> None:
        if handoff.phase is ReceiverPhase.CANCELLING:
            reason, retry = handoff.reason, handoff.retry
        if self._staging is not None and handoff.staged and not quiesced:
            # Only this worker writes to its pages; what is in doubt is its room in the ring, if it has any.
            self._actions.append(FetchFailed(handoff.ask.key, True, retry, reason))
            quiesced = not self._staging.doubt(handoff.ask.key)
        else:
            self._actions.append(FetchFailed(handoff.ask.key, quiesced, retry, reason))
        self._move(handoff, ReceiverPhase.CLOSED if quiesced else ReceiverPhase.QUARANTINED, now)

    def _expire(self, handoff: _Handoff, now: float) -> None:
        limit = self.table.waits[handoff.phase].limit
        match handoff.phase:
            case ReceiverPhase.REQUESTING | ReceiverPhase.LANDING:
                self._stop(handoff, True, f"{handoff.peer} has said nothing for {limit:g} s", now)
            case ReceiverPhase.CANCELLING:
                self._lose(handoff, False, handoff.retry, handoff.reason, now)
            case _:
                self._move(handoff, ReceiverPhase.CLOSED, now)

    def _move(self, handoff: _Handoff, to: ReceiverPhase, now: float) -> None:
        handoff.timer.move(to, now)
        if self._staging is not None and handoff.staged and to is ReceiverPhase.CANCELLING:
            self._staging.stop(handoff.ask.key)
        if to is ReceiverPhase.CLOSED:
            if self._staging is not None and handoff.staged:
                self._staging.end(handoff.ask.key)
            del self._handoffs[handoff.ask.key]
        else:
            self._speak(handoff)

    def _speak(self, handoff: _Handoff) -> None:
        """Says what this phase has to say until it is answered."""
        message: HandoffRequest | Cancel = (
            handoff.ask if handoff.phase is ReceiverPhase.REQUESTING else Cancel(handoff.ask.key)
        )
        if handoff.phase is not ReceiverPhase.LANDING:
            self._send(handoff.peer, message)

    def _send(self, peer: str, message: Message) -> None:
        self._actions.append(SendMessage(peer, message))
