"""The state machine of the decode worker: requests contexts, permits writes, and reports the end of each handoff.

It has no threads and no clock; callers pass the current time. Once writes are permitted, a handoff ends when its sender
confirms that it has stopped, or when the role reports that the sender can no longer write (`end_writers`). If neither
happens in time, the engine receives a failure that is not quiesced. If the handoff is staged, only this worker writes
to its pages, so the engine receives a quiesced failure instead, and the handoff's leases in the ring are quarantined.
The quarantine of pages or leases ends when the sender confirms, or can no longer write.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.messages import Hello, Message
from hotset.fleet.handoff.staging import ReceiverStaging
from hotset.fleet.handoff.timers import PhaseTable, PhaseTimeout, PhaseTimer
from hotset.schedule.handoffs import HandoffKey


class ReceiverPhase(Enum):
    REQUESTING = "requesting"  # HandoffRequest is retransmitted; StartWrites was not sent, so nothing can be written
    LANDING = "landing"  # StartWrites was sent: rows may be written at any time
    CANCELLING = "cancelling"  # Cancel is retransmitted; the pages may be written to until the sender confirms
    ABANDONED = "abandoned"  # failed before any write; the engine has the pages back; Cancel is retransmitted
    FENCING = "fencing"  # failed, not reported yet: the sender may still write, and is being stopped
    QUARANTINED = "quarantined"  # failed and reported; the pages, or leases if staged, must not be used
    CLOSED = "closed"  # removed from the table of handoffs


RECEIVER_TRANSITIONS: dict[ReceiverPhase, frozenset[ReceiverPhase]] = {
    ReceiverPhase.REQUESTING: frozenset({ReceiverPhase.LANDING, ReceiverPhase.ABANDONED, ReceiverPhase.CLOSED}),
    ReceiverPhase.LANDING: frozenset(
        {ReceiverPhase.CANCELLING, ReceiverPhase.FENCING, ReceiverPhase.QUARANTINED, ReceiverPhase.CLOSED}
    ),
    ReceiverPhase.CANCELLING: frozenset({ReceiverPhase.FENCING, ReceiverPhase.QUARANTINED, ReceiverPhase.CLOSED}),
    ReceiverPhase.ABANDONED: frozenset({ReceiverPhase.CLOSED}),
    ReceiverPhase.FENCING: frozenset({ReceiverPhase.QUARANTINED, ReceiverPhase.CLOSED}),
    ReceiverPhase.QUARANTINED: frozenset({ReceiverPhase.CLOSED}),
    ReceiverPhase.CLOSED: frozenset(),
}

# The limit of LANDING restarts at every sign of life of the handoff. The limit of CANCELLING is longer than the limit
# of a sender's DRAINING, in which the sender waits for its writes to end. FENCING and QUARANTINED retransmit Cancel,
# because a sender that was only slow can still confirm. QUARANTINED lasts until nothing more can be written.
RECEIVER_TIMEOUTS: dict[ReceiverPhase, PhaseTimeout] = {
    ReceiverPhase.REQUESTING: PhaseTimeout(10.0, retransmit_every=1.0),
    ReceiverPhase.LANDING: PhaseTimeout(15.0),
    ReceiverPhase.CANCELLING: PhaseTimeout(15.0, retransmit_every=0.5),
    ReceiverPhase.ABANDONED: PhaseTimeout(10.0, retransmit_every=1.0),
    ReceiverPhase.FENCING: PhaseTimeout(5.0, retransmit_every=0.5),
    ReceiverPhase.QUARANTINED: PhaseTimeout(float("inf"), retransmit_every=5.0),
}

# In these phases the peer must be alive.
OPEN_PHASES = frozenset({ReceiverPhase.REQUESTING, ReceiverPhase.LANDING, ReceiverPhase.CANCELLING})
UNREPORTED_PHASES = OPEN_PHASES | {ReceiverPhase.FENCING}  # the engine has received neither Landed nor FetchFailed
UNCONFIRMED_PHASES = frozenset({ReceiverPhase.FENCING, ReceiverPhase.QUARANTINED})  # failed; the sender may still write


@dataclass(slots=True, eq=False)
class _Handoff:
    peer: str
    request: msg.HandoffRequest
    timer: PhaseTimer[ReceiverPhase]
    staging: ReceiverStaging | None = None  # set if pieces arrive in the ring
    reason: str = ""  # why it failed
    retry: bool = False  # whether a retry may succeed

    @property
    def phase(self) -> ReceiverPhase:
        return self.timer.phase


class Receiver:
    """All handoffs into this worker. One thread calls it. After each call, that thread must run the actions that
    `take_actions` returns.

    The engine receives `Landed` or `FetchFailed` exactly once for each `Fetch` that is not ignored, and perhaps
    `Quiesced` after a `FetchFailed` that was not quiesced. The pages belong to the handoff until `Landed`, a quiesced
    `FetchFailed`, or `Quiesced`.
    """

    def __init__(
        self,
        timeouts: Mapping[ReceiverPhase, PhaseTimeout] = RECEIVER_TIMEOUTS,
        staging: ReceiverStaging | None = None,
    ) -> None:
        self.table = PhaseTable(RECEIVER_TRANSITIONS, timeouts)
        self.num_retransmits = 0
        self._staging = staging
        self._hellos: dict[str, Hello] = {}
        self._handoffs: dict[HandoffKey, _Handoff] = {}
        self._actions: list[msg.SendMessage | msg.UnpackPiece | msg.ReceiverEvent] = []

    def add_peer(self, peer: str, hello: Hello) -> None:
        """Adds a peer that `check_peers` accepts. If it was added before, call `peer_lost` first."""
        self._hellos[peer] = hello

    def fetch(self, fetch: msg.Fetch, now: float) -> None:
        """Begins a handoff and cancels older attempts of its request. Ignores a key whose handoff is not closed.
        Fails at once if there is a newer attempt."""
        key = fetch.request.key
        if key in self._handoffs:
            return
        attempts = [known for known in self._handoffs if known.request_id == key.request_id]
        if any(known.attempt > key.attempt for known in attempts):
            reason = "a newer attempt of the request is in progress"
            self._actions.append(msg.FetchFailed(key, quiesced=True, retry=False, reason=reason))
            return
        for known in attempts:
            self.cancel(known, now)
        timer = PhaseTimer(self.table, ReceiverPhase.REQUESTING, now)
        handoff = self._handoffs[key] = _Handoff(fetch.peer, fetch.request, timer)
        self._transmit(handoff)

    def cancel(self, key: HandoffKey, now: float) -> None:
        """Cancels a handoff. Ignores one that has ended or never began."""
        handoff = self._handoffs.get(key)
        if handoff is not None:
            self._begin_cancel(handoff, False, "cancelled", now)

    def handle_message(self, peer: str, message: Message, now: float) -> None:
        """Handles a message from `peer`. Ignores messages that do not concern handoffs, and messages that the handoff's
        phase does not expect. Answers signs of life of an unknown handoff with Cancel."""
        match message:
            case msg.HandoffDone(key) | msg.HandoffFailed(key):
                self._send(peer, msg.HandoffAck(key))
            case (
                msg.HandoffAccepted(key)
                | msg.Progress(key)
                | msg.LeaseRequest(key)
                | msg.PieceWritten(key)
                | msg.Cancelled(key)
            ):
                pass
            case _:
                return
        handoff = self._handoffs.get(key)
        if handoff is None or handoff.peer != peer:
            if isinstance(message, msg.HandoffAccepted | msg.Progress | msg.LeaseRequest | msg.PieceWritten):
                self._send(peer, msg.Cancel(key))
            return
        match message:
            case msg.HandoffAccepted() | msg.Progress():
                self._on_sign_of_life(handoff, message, now)
            case msg.LeaseRequest() | msg.PieceWritten():
                self._on_staging_message(handoff, message, now)
            case msg.HandoffDone():
                self._on_done(handoff, message, now)
            case msg.HandoffFailed():
                self._on_end(handoff, message.quiesced, message.retry, message.reason, now)
            case msg.Cancelled():
                self._on_end(handoff, message.quiesced, False, "the prefill worker cancelled it", now)

    def on_unpacked(self, key: HandoffKey, piece: int) -> None:
        """Records that a piece is in its pages. Ignores handoffs that have ended."""
        handoff = self._handoffs.get(key)
        if handoff is not None and handoff.staging is not None:
            handoff.staging.on_unpacked(key, piece)
            if handoff.phase is ReceiverPhase.LANDING:
                self._send(handoff.peer, msg.PieceUnpacked(key, piece))

    def peer_lost(self, peer: str, reason: str, now: float, *, retry: bool = False) -> None:
        """Handles a peer that died or restarted, or that has forgotten this worker. Its writes may still arrive, so
        handoffs in UNCONFIRMED_PHASES stay. `retry` tells whether another attempt may succeed."""
        self._hellos.pop(peer, None)
        for handoff in [entry for entry in self._handoffs.values() if entry.peer == peer]:
            if handoff.phase in OPEN_PHASES:
                self._fail(handoff, handoff.phase is ReceiverPhase.REQUESTING, retry, reason, now)
            elif handoff.phase is ReceiverPhase.ABANDONED:
                self._move(handoff, ReceiverPhase.CLOSED, now)

    def end_writers(self, keys: Iterable[HandoffKey], now: float) -> None:
        """Ends these handoffs, except any that are not in UNCONFIRMED_PHASES. The caller ensures that no byte can be
        written for them any more."""
        ended = self.unconfirmed_keys() & set(keys)
        for handoff in [handoff for key, handoff in self._handoffs.items() if key in ended]:
            self._on_end(handoff, True, False, "", now)

    def unconfirmed_keys(self, peer: str | None = None) -> set[HandoffKey]:
        """Returns the failed handoffs, of this peer or of all, for which bytes may still be written."""
        of_peer = [handoff for handoff in self._handoffs.values() if peer in (None, handoff.peer)]
        return {handoff.request.key for handoff in of_peer if handoff.phase in UNCONFIRMED_PHASES}

    def tick(self, now: float) -> None:
        """Runs the timeouts and retransmits that are due."""
        for handoff in list(self._handoffs.values()):
            if now >= handoff.timer.deadline:
                self._expire(handoff, now)
            elif handoff.timer.retransmit_due(now):
                self.num_retransmits += 1
                self._transmit(handoff)

    def next_deadline(self) -> float:
        """Returns when `tick` must be called next, or infinity if there is no handoff."""
        timers = [handoff.timer for handoff in self._handoffs.values()]
        return min((min(timer.deadline, timer.retransmit_at) for timer in timers), default=float("inf"))

    def take_actions(self) -> list[msg.SendMessage | msg.UnpackPiece | msg.ReceiverEvent]:
        """Returns the new actions. The caller must run them in order and complete each before it begins the next."""
        if self._staging is not None:
            self._actions += self._staging.take_grants()
        actions, self._actions = self._actions, []
        return actions

    def open_keys(self, peer: str) -> list[HandoffKey]:
        """Returns the peer's handoffs in OPEN_PHASES, for which the peer must be alive."""
        return [key for key, handoff in self._handoffs.items() if handoff.peer == peer and handoff.phase in OPEN_PHASES]

    def phases(self) -> dict[HandoffKey, ReceiverPhase]:
        """Returns the phase of every handoff that is not closed."""
        return {key: handoff.phase for key, handoff in self._handoffs.items()}

    @property
    def ring_quarantined_bytes(self) -> int:
        return 0 if self._staging is None else self._staging.ring.quarantined

    def audit(self) -> None:
        """Asserts that every handoff will end, and that each request has at most one active attempt."""
        active_phases = (ReceiverPhase.REQUESTING, ReceiverPhase.LANDING)
        active = [key.request_id for key, handoff in self._handoffs.items() if handoff.phase in active_phases]
        assert len(active) == len(set(active)), "two attempts of one request are in progress"
        for key, handoff in self._handoffs.items():
            closed = handoff.phase is ReceiverPhase.CLOSED
            assert handoff.request.key == key and not closed, f"{key} is closed, but still in the table of handoffs"
            retransmits = handoff.timer.retransmit_at < float("inf")
            assert handoff.timer.deadline < float("inf") or retransmits, f"{key} would never end"
        if self._staging is not None:
            self._staging.audit({key for key, handoff in self._handoffs.items() if handoff.staging is not None})

    def _on_sign_of_life(self, handoff: _Handoff, message: msg.HandoffAccepted | msg.Progress, now: float) -> None:
        if handoff.phase is ReceiverPhase.REQUESTING and isinstance(message, msg.HandoffAccepted):
            self._move(handoff, ReceiverPhase.LANDING, now)
            hello, staging = self._hellos.get(handoff.peer), self._staging
            if staging is not None and hello is not None and message.piece_bytes:
                begun = staging.begin(handoff.peer, hello, handoff.request, message.piece_bytes)
                handoff.staging = staging if begun else None
        if handoff.phase is ReceiverPhase.LANDING:
            handoff.timer.extend(now)
            if isinstance(message, msg.HandoffAccepted):
                self._send(handoff.peer, msg.StartWrites(message.key, handoff.staging is not None))

    def _on_staging_message(self, handoff: _Handoff, message: msg.LeaseRequest | msg.PieceWritten, now: float) -> None:
        staging = handoff.staging
        if handoff.phase is not ReceiverPhase.LANDING or staging is None:
            return
        handoff.timer.extend(now)
        if isinstance(message, msg.LeaseRequest):
            self._actions += staging.request_lease(message)
            return
        packed = staging.on_piece_written(message)
        if packed is not None:
            self._actions.append(msg.UnpackPiece(message.key, message.piece, packed))
        if staging.is_unpacked(message.key, message.piece):
            self._send(handoff.peer, msg.PieceUnpacked(message.key, message.piece))

    def _on_done(self, handoff: _Handoff, done: msg.HandoffDone, now: float) -> None:
        rows = self._landed_rows(handoff)
        if handoff.phase is ReceiverPhase.LANDING and rows < len(handoff.request.prompt):
            self._on_end(handoff, True, True, f"the prefill worker ended the handoff after {rows} rows", now)
        elif handoff.phase is ReceiverPhase.LANDING:
            self._actions.append(msg.Landed(done.key, done.token_id, done.alternatives))
            self._move(handoff, ReceiverPhase.CLOSED, now)
        else:
            self._on_end(handoff, True, False, "the prefill worker sent HandoffDone before StartWrites", now)

    def _landed_rows(self, handoff: _Handoff) -> int:
        """Returns how many rows are in their pages when HandoffDone arrives."""
        if handoff.staging is not None:
            return handoff.request.first + handoff.staging.unpacked_rows(handoff.request.key)
        return len(handoff.request.prompt)

    def _on_end(self, handoff: _Handoff, quiesced: bool, retry: bool, reason: str, now: float) -> None:
        """Handles the sender's report that it has ended this handoff."""
        match handoff.phase:
            case ReceiverPhase.REQUESTING:
                self._fail(handoff, True, retry, reason, now)
            case ReceiverPhase.LANDING | ReceiverPhase.CANCELLING:
                self._fail(handoff, quiesced, retry, reason, now)
            case ReceiverPhase.ABANDONED:
                self._move(handoff, ReceiverPhase.CLOSED, now)
            case ReceiverPhase.FENCING if quiesced:
                self._report_failure(handoff, True, now)
            case ReceiverPhase.QUARANTINED if quiesced:
                if handoff.staging is not None:
                    handoff.staging.end_quarantine(handoff.request.key)
                else:
                    self._actions.append(msg.Quiesced(handoff.request.key))
                self._move(handoff, ReceiverPhase.CLOSED, now)

    def _begin_cancel(self, handoff: _Handoff, retry: bool, reason: str, now: float) -> None:
        if handoff.phase is ReceiverPhase.REQUESTING:
            self._actions.append(msg.FetchFailed(handoff.request.key, quiesced=True, retry=retry, reason=reason))
            self._move(handoff, ReceiverPhase.ABANDONED, now)
        elif handoff.phase is ReceiverPhase.LANDING:
            handoff.reason, handoff.retry = reason, retry
            self._move(handoff, ReceiverPhase.CANCELLING, now)

    def _fail(self, handoff: _Handoff, quiesced: bool, retry: bool, reason: str, now: float) -> None:
        """Reports the failure. If the sender may still write, first waits in FENCING for `end_writers` or Cancelled."""
        if handoff.phase is not ReceiverPhase.CANCELLING:
            handoff.reason, handoff.retry = reason, retry
        if quiesced or handoff.staging is not None:
            self._report_failure(handoff, quiesced, now)
        else:
            self._move(handoff, ReceiverPhase.FENCING, now)

    def _report_failure(self, handoff: _Handoff, quiesced: bool, now: float) -> None:
        """Sends FetchFailed. Unless `quiesced`, quarantines the pages, or the leases if the handoff is staged."""
        key = handoff.request.key
        if handoff.staging is not None and not quiesced:
            # Only this worker writes to the pages, so they are free. The sender's leases, if it has any, are not.
            self._actions.append(msg.FetchFailed(key, True, handoff.retry, handoff.reason))
            quiesced = not handoff.staging.quarantine(key)
        else:
            self._actions.append(msg.FetchFailed(key, quiesced, handoff.retry, handoff.reason))
        self._move(handoff, ReceiverPhase.CLOSED if quiesced else ReceiverPhase.QUARANTINED, now)

    def _expire(self, handoff: _Handoff, now: float) -> None:
        limit = self.table.timeouts[handoff.phase].limit
        match handoff.phase:
            case ReceiverPhase.REQUESTING | ReceiverPhase.LANDING:
                self._begin_cancel(handoff, True, f"no message from {handoff.peer} for {limit:g} s", now)
            case ReceiverPhase.CANCELLING:
                self._fail(handoff, False, handoff.retry, handoff.reason, now)
            case ReceiverPhase.FENCING:
                self._report_failure(handoff, False, now)
            case _:
                self._move(handoff, ReceiverPhase.CLOSED, now)

    def _move(self, handoff: _Handoff, to: ReceiverPhase, now: float) -> None:
        handoff.timer.move(to, now)
        if handoff.staging is not None and to is ReceiverPhase.CANCELLING:
            handoff.staging.stop(handoff.request.key)
        if to is ReceiverPhase.CLOSED:
            if handoff.staging is not None:
                handoff.staging.remove(handoff.request.key)
            del self._handoffs[handoff.request.key]
        else:
            self._transmit(handoff)

    def _transmit(self, handoff: _Handoff) -> None:
        """Sends HandoffRequest or Cancel, which the phase repeats until it is answered. LANDING repeats nothing."""
        requesting = handoff.phase is ReceiverPhase.REQUESTING
        message: msg.HandoffRequest | msg.Cancel = handoff.request if requesting else msg.Cancel(handoff.request.key)
        if handoff.phase is not ReceiverPhase.LANDING:
            self._send(handoff.peer, message)

    def _send(self, peer: str, message: Message) -> None:
        self._actions.append(msg.SendMessage(peer, message))
