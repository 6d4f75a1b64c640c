"""The prefill side of handoffs: accepts, has prompts computed, plans the writes, and says how each one ended.

Pure: no threads, no clock. Nothing is written before the receiver said Go. Once something is, the handoff is kept until
its last write has ended, or the receiver was told that nobody knows.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hotset.handoff.layout import context_writes
from hotset.handoff.messages import (
    Cancel,
    Cancelled,
    FirstTokenSampled,
    HandoffAccepted,
    HandoffAck,
    HandoffDone,
    HandoffFailed,
    HandoffId,
    HandoffKey,
    HandoffRequest,
    Hello,
    LeaseGranted,
    MemoryRange,
    Message,
    PieceUnpacked,
    PrefillFailed,
    Progress,
    ReleasePages,
    RowsComputed,
    SenderCommand,
    SenderEvent,
    SendMessage,
    StartPrefill,
    StartWrites,
    Store,
    SubmitWrites,
)
from hotset.handoff.outgoing import (
    MAX_WRITES_IN_FLIGHT,
    SENDER_TIMEOUTS,
    SENDER_TRANSITIONS,
    ChunkInFlight,
    EndReason,
    OutgoingHandoff,
    SenderPhase,
    Tombstones,
    refusal,
)
from hotset.handoff.staged_out import PIECE_TIMEOUTS, PIECE_TRANSITIONS, PiecePhase, SenderBuffers, SenderStaging, offer
from hotset.handoff.staging import MAX_DIRECT_WRITES
from hotset.handoff.timers import PhaseTable, PhaseTimeout, PhaseTimer, earliest
from hotset.transfer.api import WriteState, WriteTicket

WRITE_LIMIT = 40.0  # seconds that one list of writes may take; the transfer engine's own limit should be shorter
TOMBSTONE_LIMIT = 900.0  # longer than a receiver stays unsure: it must not be answered by a second handoff of that key
MAX_TOMBSTONES = 20_000


class Sender:
    """Every handoff out of this worker. One thread calls it; after each call `take_actions` says what to do.

    The engine receives `StartPrefill` when it has to compute a prompt, and exactly one `ReleasePages` for each: until
    then it keeps the request's pages, even if the request has ended.
    """

    def __init__(
        self,
        store: Store,
        waits: Mapping[SenderPhase, PhaseTimeout] = SENDER_TIMEOUTS,
        *,
        write_limit: float = WRITE_LIMIT,
        tombstone_limit: float = TOMBSTONE_LIMIT,
        max_tombstones: int = MAX_TOMBSTONES,
        buffers: Sequence[MemoryRange] = (),
        max_direct_writes: int = MAX_DIRECT_WRITES,
        piece_timeouts: Mapping[PiecePhase, PhaseTimeout] = PIECE_TIMEOUTS,
    ) -> None:
        """`store` is the memory that the engine's pages are numbered in; `buffers`, all of one size, are for contexts
        that travel packed: those that would take more than `max_direct_writes`, if these are small."""
        self.table = PhaseTable(SENDER_TRANSITIONS, waits)
        self.pieces = PhaseTable(PIECE_TRANSITIONS, piece_timeouts)
        self.resent = 0  # messages that were said again
        self._store, self._write_limit = store, write_limit
        self._hellos: dict[str, Hello] = {}
        self._handoffs: dict[HandoffId, OutgoingHandoff] = {}
        self._tombstones = Tombstones(tombstone_limit, max_tombstones)
        self._buffers, self._few_writes = SenderBuffers(buffers), max_direct_writes
        self._turns = itertools.count()
        self._actions: list[SendMessage | SubmitWrites | SenderEvent] = []

    def peer_known(self, peer: str, hello: Hello) -> None:
        """It introduced itself, and `check_peers` had nothing against it. After `peer_lost`, if it had before."""
        self._hellos[peer] = hello
        self._tombstones.forget_others(peer, hello)

    def peer_lost(self, peer: str, reason: str, now: float) -> None:
        """It died, or came back as another incarnation. Writes under way are still waited for."""
        self._hellos.pop(peer, None)
        for handoff in [each for each in self._handoffs.values() if each.peer == peer]:
            handoff.verdict = None
            self._end(handoff, EndReason.PEER_LOST, False, reason, now)

    def take(self, peer: str, message: Message, now: float) -> None:
        """What `peer` has to say. What is not about handoffs, or does not fit where one stands, changes nothing."""
        match message:
            case HandoffRequest():
                self._asked(peer, message, now)
            case Cancel(key):
                self._cancelled(peer, key, now)
            case StartWrites(key, staged) if handoff := self._handoffs.get((peer, key)):
                self._go(handoff, staged, now)
            case LeaseGranted(key) | PieceUnpacked(key) if handoff := self._handoffs.get((peer, key)):
                if handoff.staged is not None and handoff.phase is SenderPhase.WRITING:
                    self._take_staged(handoff, handoff.staged, message, now)
            case HandoffAck(key) if handoff := self._handoffs.get((peer, key)):
                self._received(handoff, now)

    def tell(self, command: SenderCommand, now: float) -> None:
        """What the engine has to say. About a handoff that is over: nothing happens."""
        handoff = self._handoffs.get((command.peer, command.key))
        if handoff is None or handoff.phase not in (SenderPhase.ACCEPTED, SenderPhase.WRITING):
            return
        match command:
            case RowsComputed():
                self._written(handoff, command, now)
            case FirstTokenSampled():
                told, wanted = handoff.written, len(handoff.ask.prompt)
                assert told == wanted, f"{command.key}: sampled after {told} of {wanted} rows were told"
                handoff.sampled = command
                self._settle(handoff, now)
            case PrefillFailed():
                self._end(handoff, EndReason.FAILED, command.retry, command.reason, now)

    def submitted(self, peer: str, key: HandoffKey, ticket: WriteTicket) -> None:
        """The answer to the oldest `SubmitWrites` of this handoff that has none yet."""
        self._buffers.submitted((peer, key), ticket.number)
        handoff = self._handoffs.get((peer, key))
        if handoff is not None:
            chunk = next((each for each in handoff.open if each.ticket is None), None)
            assert chunk is not None, f"{key}: ticket {ticket.number} for nothing that was asked"
            chunk.ticket = ticket.number

    def ended(self, peer: str, key: HandoffKey, ticket: WriteTicket, state: WriteState, now: float) -> None:
        """A ticket is not pending any more. One that was given up: nothing happens."""
        assert state is not WriteState.PENDING, f"ticket {ticket.number} has not ended"
        freed = self._buffers.ended((peer, key), ticket.number)
        self._ended(peer, key, ticket, state, now)
        if freed:
            self._stage(now)

    @property
    def looks(self) -> bool:
        """Forward passes have to be looked at, by `look`."""
        writing = [each.staged for each in self._handoffs.values() if each.phase is SenderPhase.WRITING]
        return any(staged.looks for staged in writing if staged is not None)

    def look(self, now: float) -> None:
        """Looks which forward passes have happened: what was computed may be packed."""
        self._stage(now)

    def end_all(self, reason: str, now: float) -> None:
        """This worker stops: what has no end yet gets one, and its receiver is told when its writes have ended."""
        for handoff in list(self._handoffs.values()):
            if handoff.phase in (SenderPhase.ACCEPTED, SenderPhase.WRITING):
                self._end(handoff, EndReason.FAILED, False, reason, now)

    def tick(self, now: float) -> None:
        """Lets time pass: what is overdue is said again, or given up."""
        self._tombstones.lapse(now)
        for handoff in list(self._handoffs.values()):
            if now >= handoff.deadline:
                self._expire(handoff, now)
            elif handoff.timer.due(now):
                self.resent += handoff.phase is SenderPhase.ACCEPTED or handoff.verdict is not None
                self._speak(handoff)
            if handoff.staged is not None and handoff.phase is SenderPhase.WRITING:
                for message in handoff.staged.due(now):
                    self.resent += 1
                    self._send(handoff.peer, message)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if nothing happens before."""
        return earliest(handoff.next_time for handoff in self._handoffs.values())

    def take_actions(self) -> list[SendMessage | SubmitWrites | SenderEvent]:
        """What is to be sent, submitted and told, in this order. Each is given out once."""
        actions, self._actions = self._actions, []
        return actions

    def open_keys(self, peer: str) -> list[HandoffKey]:
        """The handoffs for which this peer has to be alive."""
        return [
            key
            for (owner, key), each in self._handoffs.items()
            if owner == peer and each.ending is not EndReason.PEER_LOST
        ]

    def phases(self) -> dict[HandoffId, SenderPhase]:
        """Where every handoff stands that is not over yet."""
        return {name: handoff.phase for name, handoff in self._handoffs.items()}

    def audit(self) -> None:
        """Proves that writes, buffers and pages are accounted for, and that every handoff has an end in sight."""
        self._tombstones.audit()
        users = list(self._buffers.uses.values())
        for name, handoff in self._handoffs.items():
            assert handoff.name == name, f"{name} is filed wrongly"
            assert self._tombstones.get(name) is None, f"{name} is open and buried"
            handoff.audit()
            # More, if one of that name before, of another incarnation, was given up while it wrote.
            buffers = len(handoff.open) if handoff.staged is not None else 0
            assert users.count(name) >= buffers, f"{name} has {users.count(name)} buffers for {buffers} writes"

    def _asked(self, peer: str, ask: HandoffRequest, now: float) -> None:
        key, hello = ask.key, self._hellos.get(peer)
        mine = [each for each in self._handoffs.values() if each.peer == peer]
        attempts = [each for each in mine if each.ask.key.request_id == key.request_id]
        known = [each.ask.key.attempt for each in attempts]
        known.append(self._tombstones.newest_attempt(peer, key.request_id))
        if handoff := self._handoffs.get((peer, key)):
            if handoff.ending is not EndReason.PEER_LOST:  # else: of an incarnation before; it asks again
                self._speak(handoff)
        elif tombstone := self._tombstones.get((peer, key)):
            self._send(peer, Cancelled(key, tombstone.quiesced))
        elif max(known) > key.attempt:
            self._send(peer, Cancelled(key, False))
        elif hello is None or (reason := refusal(ask, hello)):
            # Whoever keeps no record vouches for nothing: not quiesced, though nothing was begun now.
            why = "this worker does not know you: say Hello first" if hello is None else reason
            self._send(peer, HandoffFailed(key, quiesced=False, retry=hello is None, reason=why))
        else:
            for each in attempts:
                self._cancel(each, now)
            offered = offer(self._store, hello, ask, self._buffers.spaces, self._few_writes)
            handoff = OutgoingHandoff(peer, ask, hello, PhaseTimer(self.table, SenderPhase.ACCEPTED, now), offered)
            self._handoffs[handoff.name] = handoff
            self._speak(handoff)
            self._actions.append(StartPrefill(peer, key, ask.prompt))

    def _cancelled(self, peer: str, key: HandoffKey, now: float) -> None:
        if handoff := self._handoffs.get((peer, key)):
            self._cancel(handoff, now)
            return
        if self._tombstones.get((peer, key)) is None:
            # Its Ask may come yet, and must not begin anything.
            self._tombstones.add((peer, key), False, self._hellos.get(peer), now)
        tombstone = self._tombstones.get((peer, key))
        self._send(peer, Cancelled(key, tombstone is not None and tombstone.quiesced))

    def _cancel(self, handoff: OutgoingHandoff, now: float) -> None:
        handoff.verdict = None
        self._end(handoff, EndReason.CANCELLED, False, "cancelled", now)

    def _go(self, handoff: OutgoingHandoff, staged: bool, now: float) -> None:
        if handoff.phase is not SenderPhase.ACCEPTED:
            return
        if staged and handoff.offer is None:
            self._end(handoff, EndReason.FAILED, False, "it should be staged, which was not offered", now)
            return
        self._move(handoff, SenderPhase.WRITING, now)
        if staged and handoff.offer is not None:
            total = len(handoff.ask.prompt)
            handoff.staged = SenderStaging(handoff.ask.key, total, handoff.offer, self.pieces)
        self._submit(handoff, now)
        self._settle(handoff, now)

    def _take_staged(self, handoff: OutgoingHandoff, staged: SenderStaging, message: Message, now: float) -> None:
        if isinstance(message, LeaseGranted):
            staged.lend(message, next(self._turns), now)
            self._stage(now)
        elif isinstance(message, PieceUnpacked) and staged.unpacked(message, now):
            handoff.landed = staged.landed
            handoff.timer.stay(now)
            for want in staged.want(now):
                self._send(handoff.peer, want)
            self._settle(handoff, now)

    def _stage(self, now: float) -> None:
        """Has pieces packed and written for which there is room in the ring, as long as there are buffers."""
        ready = []
        for handoff in self._handoffs.values():
            if handoff.staged is not None and handoff.phase is SenderPhase.WRITING:
                handoff.staged.look()
                ready += [(piece.turn, handoff, handoff.staged, piece) for piece in handoff.staged.ready()]
        for _, handoff, staged, piece in sorted(ready, key=lambda each: each[0]):
            buffer = self._buffers.take(handoff.name)
            if buffer is None:
                return
            assert piece.lent is not None
            target = staged.offered.ring.address + piece.lent.offset
            planned = np.array([[buffer.address, target, staged.nbytes(piece)]], np.int64)
            handoff.open.append(ChunkInFlight(piece.first, piece.last, now + self._write_limit, piece=piece.number))
            packed = staged.packed(piece, self._store, handoff.target, buffer.address)
            staged.begin(piece, now)
            self._actions.append(SubmitWrites(handoff.peer, handoff.ask.key, planned, None, packed))

    def _ended(self, peer: str, key: HandoffKey, ticket: WriteTicket, state: WriteState, now: float) -> None:
        handoff = self._handoffs.get((peer, key))
        chunk = next((each for each in handoff.open if each.ticket == ticket.number), None) if handoff else None
        if handoff is None or chunk is None:
            return
        handoff.open.remove(chunk)
        handoff.tainted |= state is WriteState.FAILED_UNKNOWN
        if state is not WriteState.DONE and handoff.phase is SenderPhase.WRITING:
            rows = f"rows {chunk.first} to {chunk.last}"
            self._end(handoff, EndReason.FAILED, True, f"writing {rows} ended as '{state.value}'", now)
            return
        if handoff.phase is SenderPhase.WRITING and handoff.staged is not None:
            assert chunk.piece is not None
            handoff.timer.stay(now)
            self._send(peer, handoff.staged.written(chunk.piece, now))
        elif handoff.phase is SenderPhase.WRITING:
            handoff.landed = min([each.first for each in handoff.open], default=handoff.begun)
            handoff.timer.stay(now)
            self._submit(handoff, now)
            self._speak(handoff)
        self._settle(handoff, now)

    def _received(self, handoff: OutgoingHandoff, now: float) -> None:
        handoff.verdict = None
        if handoff.phase is SenderPhase.NOTIFYING:
            self._move(handoff, SenderPhase.CLOSED, now)

    def _written(self, handoff: OutgoingHandoff, written: RowsComputed, now: float) -> None:
        key, told = handoff.ask.key, handoff.written
        assert told == written.first <= written.last, f"{key}: rows {told} are told, now [{written.first}, ...)"
        handoff.written, before = written.last, handoff.waiting
        if before is not None:
            assert written.pages[: len(before.pages)] == before.pages, f"{key}: rows that were told have moved"
            # Events are of one stream: when the newest has happened, so have those before.
            written = replace(written, first=before.first)
        handoff.waiting = written
        if handoff.phase is SenderPhase.WRITING:
            handoff.timer.stay(now)
            self._submit(handoff, now)

    def _submit(self, handoff: OutgoingHandoff, now: float) -> None:
        """Begins to write what waits, as one list, unless enough is under way. Staged: asks for room."""
        written = handoff.waiting
        if written is not None and handoff.staged is not None:
            handoff.waiting = None
            for want in handoff.staged.told(written, now):
                self._send(handoff.peer, want)
            return
        if written is None or len(handoff.open) >= MAX_WRITES_IN_FLIGHT:
            return
        ask, span = handoff.ask, (written.first, written.last)
        planned = context_writes(self._store, written.pages, handoff.target, ask.row_pages, ask.key_pages, *span)
        handoff.waiting = None
        handoff.open.append(ChunkInFlight(*span, due=now + self._write_limit))
        self._actions.append(SubmitWrites(handoff.peer, ask.key, planned, written.after))

    def _settle(self, handoff: OutgoingHandoff, now: float) -> None:
        """Ends what has nothing left to wait for."""
        if handoff.open:
            return
        if handoff.phase in (SenderPhase.DRAINING, SenderPhase.WRITES_HUNG):
            self._conclude(handoff, now)
        elif handoff.phase is SenderPhase.WRITING and handoff.complete:
            told = handoff.sampled
            assert told is not None
            handoff.verdict = HandoffDone(told.key, told.token_id, told.alternatives)
            self._drop(handoff)
            self._move(handoff, SenderPhase.NOTIFYING, now)

    def _end(self, handoff: OutgoingHandoff, ending: EndReason, retry: bool, reason: str, now: float) -> None:
        """Begins nothing more, and concludes when the writes under way have ended."""
        handoff.ending, handoff.retry, handoff.reason = ending, retry, reason
        handoff.waiting = None
        if handoff.phase is SenderPhase.WRITING and handoff.open:
            self._move(handoff, SenderPhase.DRAINING, now)
        elif handoff.phase is not SenderPhase.DRAINING:
            self._conclude(handoff, now)

    def _conclude(self, handoff: OutgoingHandoff, now: float) -> None:
        """Tells how it ended: its writes have, or are waited for no longer (then it is stuck)."""
        self._drop(handoff)
        key, stuck = handoff.ask.key, bool(handoff.open)
        if handoff.ending is EndReason.FAILED and (handoff.phase is not SenderPhase.WRITES_HUNG or handoff.verdict):
            handoff.verdict = HandoffFailed(key, handoff.quiesced, handoff.retry, handoff.reason)
            self._move(handoff, SenderPhase.WRITES_HUNG if stuck else SenderPhase.NOTIFYING, now)
            return
        if handoff.ending is not EndReason.PEER_LOST:
            self._send(handoff.peer, Cancelled(key, handoff.quiesced))
        if stuck and handoff.ending is not EndReason.PEER_LOST:
            if handoff.phase is not SenderPhase.WRITES_HUNG:
                self._move(handoff, SenderPhase.WRITES_HUNG, now)
        else:
            self._move(handoff, SenderPhase.CLOSED, now)

    def _expire(self, handoff: OutgoingHandoff, now: float) -> None:
        limit = self.table.waits[handoff.phase].limit
        match handoff.phase:
            case SenderPhase.ACCEPTED:
                self._end(handoff, EndReason.FAILED, True, f"no Go came within {limit:g} s", now)
            case SenderPhase.WRITING if now >= handoff.timer.deadline:
                self._end(handoff, EndReason.FAILED, True, f"the engine has told nothing for {limit:g} s", now)
            case SenderPhase.WRITING:
                why = handoff.staged.overdue(now) if handoff.staged is not None else ""
                why = why or f"a write has not ended within {self._write_limit:g} s"
                self._end(handoff, EndReason.FAILED, True, why, now)
            case SenderPhase.DRAINING:
                self._conclude(handoff, now)
            case _:
                self._move(handoff, SenderPhase.CLOSED, now)

    def _move(self, handoff: OutgoingHandoff, to: SenderPhase, now: float) -> None:
        handoff.timer.move(to, now)
        if to is SenderPhase.CLOSED:
            del self._handoffs[handoff.name]
            self._tombstones.add(handoff.name, handoff.quiesced, handoff.hello, now)
        elif to is not SenderPhase.WRITING:
            self._speak(handoff)

    def _drop(self, handoff: OutgoingHandoff) -> None:
        if not handoff.dropped:
            handoff.dropped = True
            self._actions.append(ReleasePages(*handoff.name))

    def _speak(self, handoff: OutgoingHandoff) -> None:
        """Says what this phase has to say until it is answered, or that it is alive."""
        key = handoff.ask.key
        if handoff.phase is SenderPhase.ACCEPTED:
            self._send(handoff.peer, HandoffAccepted(key, 0 if handoff.offer is None else handoff.offer.piece_bytes))
        elif handoff.phase is SenderPhase.WRITING or (
            handoff.ending is EndReason.FAILED and handoff.phase is SenderPhase.DRAINING
        ):
            self._send(handoff.peer, Progress(key, handoff.landed))
        elif handoff.verdict is not None:
            self._send(handoff.peer, handoff.verdict)

    def _send(self, peer: str, message: Message) -> None:
        self._actions.append(SendMessage(peer, message))
