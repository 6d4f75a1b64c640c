"""The state machine of the prefill worker: accepts requests, makes the engine compute prompts, plans writes, and
reports the end of each handoff.

It has no threads and no clock; callers pass the current time. Nothing is written before the receiver has sent
StartWrites. A handoff that has written is kept until its last write has ended, or until a time limit has passed. In the
latter case it is not quiesced, and the receiver is notified of this unless the peer is lost. The phases and their
timeouts are in `outgoing.py`.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from hotset.base.errors import InternalError
from hotset.engine.ports import Route
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.deliveries import Delivery, Sources, merge_rows
from hotset.fleet.handoff.delivery_choice import choose_delivery
from hotset.fleet.handoff.messages import Hello, Message
from hotset.fleet.handoff.outgoing import (
    OPEN_PHASES,
    SENDER_TIMEOUTS,
    SENDER_TRANSITIONS,
    EndReason,
    ListInFlight,
    OutgoingHandoff,
    SenderPhase,
    Tombstones,
    refusal,
)
from hotset.fleet.handoff.staged_delivery import PIECE_TIMEOUTS, PIECE_TRANSITIONS, PiecePhase, StagedDelivery
from hotset.fleet.handoff.staging import MAX_DIRECT_WRITES, SenderBuffers
from hotset.fleet.handoff.timers import PhaseTable, PhaseTimeout, PhaseTimer
from hotset.fleet.transfer.api import WriteState
from hotset.schedule.handoffs import FirstTokenSampled, HandoffId, HandoffKey, PrefillFailed, RowsComputed

WRITE_LIMIT = 40.0  # seconds for one list of writes; the transfer engine's own deadline should be shorter
# Seconds. Longer than a receiver stays in QUARANTINED: the receiver's late retransmits must still find the tombstone.
TOMBSTONE_LIMIT = 900.0
MAX_TOMBSTONES = 20_000


class Sender:
    """All handoffs out of this worker. One thread calls it. After each call, that thread must run the actions that
    `take_actions` returns.

    The engine receives `StartPrefill` for each prompt that it must compute, and later exactly one `ReleasePages` for
    that prompt. Until then the engine keeps the request's pages, even if the request has ended.
    """

    def __init__(
        self,
        sources: Sources,
        timeouts: Mapping[SenderPhase, PhaseTimeout] = SENDER_TIMEOUTS,
        *,
        write_limit: float = WRITE_LIMIT,
        tombstone_limit: float = TOMBSTONE_LIMIT,
        max_tombstones: int = MAX_TOMBSTONES,
        max_direct_writes: int = MAX_DIRECT_WRITES,
        piece_timeouts: Mapping[PiecePhase, PhaseTimeout] = PIECE_TIMEOUTS,
    ) -> None:
        """`sources` is the memory that contexts are read from. If it has staging memory, staging is offered for
        contexts that would take more than `max_direct_writes` small writes."""
        self.table = PhaseTable(SENDER_TRANSITIONS, timeouts)
        self.piece_table = PhaseTable(PIECE_TRANSITIONS, piece_timeouts)
        self.num_retransmits = 0
        self.outcomes = {"done": 0, **{end.value: 0 for end in EndReason}}  # of handoffs whose pages are released
        self.ring_quarantined_bytes = 0  # a sender has no ring
        self._sources, self._write_limit = sources, write_limit
        self.peers: dict[str, Hello] = {}
        self._routes: dict[str, Sequence[Route]] = {}  # from this worker to each peer; empty if not measured
        self._run_pages: dict[str, int] = {}  # by kind of memory: length of the runs of pages in the newest context
        self._handoffs: dict[HandoffId, OutgoingHandoff] = {}
        self._tombstones = Tombstones(tombstone_limit, max_tombstones)
        self._max_direct_writes = max_direct_writes
        self._buffers = SenderBuffers(sources.host.staging[0].nbytes if sources.host.staging else 0)
        self._grant_numbers = itertools.count()
        self._num_lists = 0  # lists of writes that were submitted so far
        self._actions: list[msg.SendMessage | msg.SubmitWrites | msg.SenderEvent] = []

    def add_peer(self, peer: str, hello: Hello, routes: Sequence[Route] = ()) -> None:
        """Adds a peer that `check_peers` accepts, and the measured routes to it. If it was added before, call
        `peer_lost` first."""
        self.peers[peer], self._routes[peer] = hello, routes
        self._tombstones.forget_other_processes(peer, hello.process)

    def peer_lost(self, peer: str, reason: str, now: float) -> None:
        """Handles a peer that died, restarted or was silent. Its handoffs are kept until their writes in flight have
        ended or count as hung. Its tombstones stay, because a peer that was only silent will ask whether writes have
        ended."""
        self.peers.pop(peer, None)
        self._routes.pop(peer, None)
        for handoff in [entry for entry in self._handoffs.values() if entry.peer == peer]:
            handoff.final_message = None
            self._begin_end(handoff, EndReason.PEER_LOST, False, reason, now)

    def handle_message(self, peer: str, message: Message, now: float) -> None:
        """Handles a message from `peer`. Ignores messages that do not concern handoffs, and messages that the handoff's
        phase does not expect."""
        match message:
            case msg.HandoffRequest():
                self._on_request(peer, message, now)
            case msg.Cancel(key):
                self._on_cancel(peer, key, now)
            case msg.StartWrites(key, staged) if handoff := self._handoffs.get((peer, key)):
                self._on_start_writes(handoff, staged, now)
            case msg.LeaseGranted(key) | msg.PieceUnpacked(key) if handoff := self._handoffs.get((peer, key)):
                self._on_delivery_message(handoff, message, now)
            case msg.HandoffAck(key) if handoff := self._handoffs.get((peer, key)):
                self._on_ack(handoff, now)

    def handle_command(self, command: msg.SenderCommand, now: float) -> None:
        """Handles a command of the engine. Ignores commands about handoffs that are not in OPEN_PHASES."""
        handoff = self._handoffs.get((command.peer, command.key))
        if handoff is None or handoff.phase not in OPEN_PHASES:
            return
        match command:
            case RowsComputed():
                self._on_rows_computed(handoff, command, now)
            case FirstTokenSampled():
                announced, total = handoff.announced, len(handoff.request.prompt)
                if announced != total:
                    raise InternalError(f"{command.key} was sampled after {announced} of {total} rows were announced")
                handoff.sampled = command
                self._finish_if_idle(handoff, now)
            case PrefillFailed():
                self._begin_end(handoff, EndReason.FAILED, command.retry, command.reason, now)

    def on_write_ended(self, peer: str, key: HandoffKey, number: int, state: WriteState, now: float) -> None:
        """Handles the end of a list of writes. Ignores lists that the handoff no longer waits for."""
        if state is WriteState.PENDING:
            raise InternalError(f"list {number} has not ended")
        freed = self._buffers.on_write_ended(number)
        self._on_list_ended(peer, key, number, state, now)
        if freed:
            self.poll_events(now)

    @property
    def has_pending_events(self) -> bool:
        """Returns whether a handoff may wait for a forward pass, so that `poll_events` must be called."""
        return any(handoff.writing and handoff.writing.has_pending_events for handoff in self._handoffs.values())

    def poll_events(self, now: float) -> None:
        """Submits the lists of all handoffs that can now be submitted."""
        self._submit(self._handoffs.values(), now)

    def fail_all(self, reason: str, now: float) -> None:
        """Ends every open handoff because this worker stops. Receivers are notified when the writes have ended."""
        for handoff in list(self._handoffs.values()):
            if handoff.phase in OPEN_PHASES:
                self._begin_end(handoff, EndReason.FAILED, False, reason, now)

    def tick(self, now: float) -> None:
        """Runs the timeouts and retransmits that are due."""
        self._tombstones.expire(now)
        for handoff in list(self._handoffs.values()):
            if now >= handoff.deadline:
                self._expire(handoff, now)
            elif handoff.timer.retransmit_due(now):
                retransmits = handoff.phase is SenderPhase.ACCEPTED or handoff.final_message is not None
                self.num_retransmits += retransmits  # Progress does not count as a retransmit
                self._transmit(handoff)
            for message in handoff.writing.retransmits(now) if handoff.writing is not None else ():
                self.num_retransmits += 1
                self._send(handoff.peer, message)

    def next_deadline(self) -> float:
        """Returns when `tick` must be called next, or infinity if there is no handoff."""
        return min((handoff.next_deadline for handoff in self._handoffs.values()), default=float("inf"))

    def take_actions(self) -> list[msg.SendMessage | msg.SubmitWrites | msg.SenderEvent]:
        """Returns the new actions. The caller must run them in this order."""
        actions, self._actions = self._actions, []
        return actions

    def open_keys(self, peer: str) -> list[HandoffKey]:
        """Returns the handoffs for which this peer must be alive."""
        of_peer = [handoff for handoff in self._handoffs.values() if handoff.peer == peer]
        return [handoff.request.key for handoff in of_peer if handoff.end_reason is not EndReason.PEER_LOST]

    def phases(self) -> dict[HandoffId, SenderPhase]:
        """Returns the phase of every handoff that is not closed."""
        return {name: handoff.phase for name, handoff in self._handoffs.items()}

    def audit(self) -> None:
        """Asserts that writes, buffers and pages are accounted for, and that every handoff will end."""
        self._tombstones.audit()
        for name, handoff in self._handoffs.items():
            assert handoff.id == name, f"{handoff.id} is in the table under {name}"
            assert self._tombstones.get(name) is None, f"{name} is not closed, but has a tombstone"
            handoff.audit()
            packed = {number for number, entry in handoff.in_flight.items() if entry.rows.packed is not None}
            assert packed <= self._buffers.users, f"{name} has lists of packed rows without a buffer"

    def _on_request(self, peer: str, request: msg.HandoffRequest, now: float) -> None:
        key, hello = request.key, self.peers.get(peer)
        of_peer = [handoff for handoff in self._handoffs.values() if handoff.peer == peer]
        attempts = [handoff for handoff in of_peer if handoff.request.key.request_id == key.request_id]
        known = [handoff.request.key.attempt for handoff in attempts]
        known.append(self._tombstones.newest_attempt(peer, key.request_id))
        if handoff := self._handoffs.get((peer, key)):
            # A handoff with PEER_LOST began before the peer was lost. The new request gets no answer until that handoff
            # is closed.
            if handoff.end_reason is not EndReason.PEER_LOST:
                self._transmit(handoff)
        elif tombstone := self._tombstones.get((peer, key)):
            self._send(peer, msg.Cancelled(key, tombstone.quiesced))
        elif max(known) > key.attempt:
            self._send(peer, msg.Cancelled(key, False))
        elif hello is None or (reason := refusal(request, hello)):
            # This worker begins nothing now, but it has no record of the past. An earlier handoff with this key may
            # still write, so this worker reports "not quiesced".
            why = "this worker has no Hello from you: send Hello first" if hello is None else reason
            self._send(peer, msg.HandoffFailed(key, quiesced=False, retry=hello is None, reason=why))
        else:
            for attempt in attempts:
                self._cancel(attempt, now)
            choice = choose_delivery(
                self._sources,
                hello.stores[request.landing],
                request,
                self._routes.get(peer, ()),
                self._run_pages,
                buffer_bytes=self._buffers.nbytes,
                max_direct_writes=self._max_direct_writes,
            )
            timer = PhaseTimer(self.table, SenderPhase.ACCEPTED, now)
            handoff = OutgoingHandoff(peer, request, hello, timer, choice)
            self._handoffs[handoff.id] = handoff
            self._transmit(handoff)
            from_device = choice.source is self._sources.device
            self._actions.append(msg.StartPrefill(peer, key, request.prompt, from_device))

    def _on_cancel(self, peer: str, key: HandoffKey, now: float) -> None:
        if handoff := self._handoffs.get((peer, key)):
            self._cancel(handoff, now)
            return
        # The HandoffRequest may arrive after this Cancel. The tombstone then prevents that it begins a handoff.
        hello = self.peers.get(peer)
        self._tombstones.add_unknown((peer, key), None if hello is None else hello.process, now)
        tombstone = self._tombstones.get((peer, key))
        self._send(peer, msg.Cancelled(key, tombstone is not None and tombstone.quiesced))

    def _cancel(self, handoff: OutgoingHandoff, now: float) -> None:
        handoff.final_message = None
        self._begin_end(handoff, EndReason.CANCELLED, False, "cancelled", now)

    def _on_start_writes(self, handoff: OutgoingHandoff, staged: bool, now: float) -> None:
        if handoff.phase is not SenderPhase.ACCEPTED:
            return
        offer = handoff.choice.offer
        if staged and offer is None:
            why = "the receiver requested staging, which this worker had not offered"
            self._begin_end(handoff, EndReason.FAILED, False, why, now)
            return
        self._move(handoff, SenderPhase.WRITING, now)
        if offer is not None and staged:
            handoff.delivery = StagedDelivery(
                sources=self._sources,
                target=handoff.target,
                request=handoff.request,
                offer=offer,
                table=self.piece_table,
                grants=self._grant_numbers,
            )
        else:
            handoff.delivery = handoff.choice.direct(self._sources, handoff.target, handoff.request)
        waiting, handoff.waiting = handoff.waiting, None
        if waiting is not None:
            self._deliver(handoff, handoff.delivery, waiting, now)
        self._finish_if_idle(handoff, now)

    def _deliver(self, handoff: OutgoingHandoff, delivery: Delivery, rows: RowsComputed, now: float) -> None:
        for message in delivery.add_rows(rows, now):
            self._send(handoff.peer, message)
        self._submit([handoff], now)

    def _on_delivery_message(self, handoff: OutgoingHandoff, message: Message, now: float) -> None:
        """Handles LeaseGranted or PieceUnpacked."""
        answers = None if handoff.writing is None else handoff.writing.handle_message(message, now)
        if answers is None:
            return
        for answer in answers:
            self._send(handoff.peer, answer)
        handoff.timer.extend(now)
        self._submit([handoff], now)  # only this handoff: while a buffer is free, no other handoff waits for a buffer
        self._finish_if_idle(handoff, now)

    def _submit(self, handoffs: Iterable[OutgoingHandoff], now: float) -> None:
        """Submits the lists of these handoffs that are ready, lowest order first, until no buffer is free."""
        while ready := [
            (order, handoff, delivery)
            for handoff in handoffs
            if (delivery := handoff.writing) is not None
            and (order := delivery.next_order(len(handoff.in_flight))) is not None
        ]:
            _, handoff, delivery = min(ready, key=lambda entry: entry[0])
            number = self._num_lists
            rows = delivery.begin(number, self._buffers, now)
            if rows is None:
                return
            self._num_lists += 1
            handoff.in_flight[number] = ListInFlight(rows, deadline=now + self._write_limit)
            submit = msg.SubmitWrites(handoff.peer, handoff.request.key, number, rows.writes, rows.after, rows.packed)
            self._actions.append(submit)

    def _on_list_ended(self, peer: str, key: HandoffKey, number: int, state: WriteState, now: float) -> None:
        handoff = self._handoffs.get((peer, key))
        ended = None if handoff is None else handoff.in_flight.pop(number, None)
        if handoff is None or ended is None:
            self._tombstones.on_write_ended((peer, key), number, state)
            return
        handoff.has_unknown_write |= state is WriteState.FAILED_UNKNOWN
        if (delivery := handoff.writing) is not None and state is not WriteState.DONE:
            why = f"the writes of rows [{ended.rows.first}, {ended.rows.last}) ended as '{state.value}'"
            self._begin_end(handoff, EndReason.FAILED, True, why, now)
            return
        if delivery is not None:
            handoff.timer.extend(now)
            message = delivery.on_written(ended.rows, [entry.rows for entry in handoff.in_flight.values()], now)
            self._submit([handoff], now)
            self._send(peer, message or msg.Progress(key, handoff.landed))
        self._finish_if_idle(handoff, now)

    def _on_ack(self, handoff: OutgoingHandoff, now: float) -> None:
        handoff.final_message = None
        if handoff.phase is SenderPhase.NOTIFYING:
            self._move(handoff, SenderPhase.CLOSED, now)

    def _on_rows_computed(self, handoff: OutgoingHandoff, rows: RowsComputed, now: float) -> None:
        key, announced = handoff.request.key, handoff.announced
        if not announced == rows.first <= rows.last:
            raise InternalError(f"{key}: {announced} rows are announced, but the next begin at {rows.first}")
        handoff.announced = rows.last
        if rows.last == len(handoff.request.prompt):
            source, pages = self._sources.locate(rows)
            num_runs = 1 + sum(after != before + 1 for before, after in pairwise(pages.rows))
            self._run_pages[source.memory] = max(1, len(pages.rows) // num_runs)
        if rows.last > handoff.request.first:  # otherwise the receiver has all these rows
            rows = replace(rows, first=max(rows.first, handoff.request.first))
            if (delivery := handoff.writing) is None:
                handoff.waiting = merge_rows(handoff.waiting, rows)
            else:
                self._deliver(handoff, delivery, rows, now)
        if handoff.phase is SenderPhase.WRITING:
            handoff.timer.extend(now)

    def _finish_if_idle(self, handoff: OutgoingHandoff, now: float) -> None:
        """Ends a complete handoff, or reports an end that waited for writes. Does nothing if a write is in flight."""
        if handoff.in_flight:
            return
        if handoff.phase in (SenderPhase.DRAINING, SenderPhase.WRITES_HUNG):
            self._report_end(handoff, now)
        elif handoff.phase is SenderPhase.WRITING and handoff.complete:
            sampled = handoff.sampled
            assert sampled is not None
            handoff.final_message = msg.HandoffDone(sampled.key, sampled.token_id, sampled.alternatives)
            self._release_pages(handoff)
            self._move(handoff, SenderPhase.NOTIFYING, now)

    def _begin_end(self, handoff: OutgoingHandoff, end: EndReason, retry: bool, failure: str, now: float) -> None:
        """Submits nothing more. Reports the end now, or when the writes in flight have ended or count as hung."""
        handoff.end_reason, handoff.retry, handoff.failure = end, retry, failure
        handoff.waiting = None
        if handoff.phase is SenderPhase.WRITING and handoff.in_flight:
            self._move(handoff, SenderPhase.DRAINING, now)
        elif handoff.phase is not SenderPhase.DRAINING:
            self._report_end(handoff, now)

    def _report_end(self, handoff: OutgoingHandoff, now: float) -> None:
        """Reports the end to the receiver, unless it is lost, and releases the pages. Writes that are still in
        flight count as hung."""
        self._release_pages(handoff)
        key, hung = handoff.request.key, bool(handoff.in_flight)
        end, was_hung = handoff.end_reason, handoff.phase is SenderPhase.WRITES_HUNG
        if end is EndReason.FAILED and (not was_hung or handoff.final_message):
            handoff.final_message = msg.HandoffFailed(key, handoff.quiesced, handoff.retry, handoff.failure)
            self._move(handoff, SenderPhase.WRITES_HUNG if hung else SenderPhase.NOTIFYING, now)
            return
        if end is not EndReason.PEER_LOST:
            self._send(handoff.peer, msg.Cancelled(key, handoff.quiesced))
        if hung and end is not EndReason.PEER_LOST:
            if not was_hung:
                self._move(handoff, SenderPhase.WRITES_HUNG, now)
        else:
            self._move(handoff, SenderPhase.CLOSED, now)

    def _expire(self, handoff: OutgoingHandoff, now: float) -> None:
        limit = self.table.timeouts[handoff.phase].limit
        match handoff.phase:
            case SenderPhase.ACCEPTED:
                self._begin_end(handoff, EndReason.FAILED, True, f"no StartWrites within {limit:g} s", now)
            case SenderPhase.WRITING if now >= handoff.timer.deadline:
                why = f"no rows were computed or written for {limit:g} s"
                self._begin_end(handoff, EndReason.FAILED, True, why, now)
            case SenderPhase.WRITING:
                why = handoff.delivery.timeout_reason(now) if handoff.delivery is not None else ""
                why = why or f"a list of writes has not ended within {self._write_limit:g} s"
                self._begin_end(handoff, EndReason.FAILED, True, why, now)
            case SenderPhase.DRAINING:
                self._report_end(handoff, now)
            case _:
                self._move(handoff, SenderPhase.CLOSED, now)

    def _move(self, handoff: OutgoingHandoff, to: SenderPhase, now: float) -> None:
        handoff.timer.move(to, now)
        if to is SenderPhase.CLOSED:
            del self._handoffs[handoff.id]
            self._tombstones.add_ended(handoff, now)
        elif to is not SenderPhase.WRITING:
            self._transmit(handoff)

    def _release_pages(self, handoff: OutgoingHandoff) -> None:
        """Releases the pages of a handoff whose outcome is decided."""
        if not handoff.pages_released:
            handoff.pages_released = True
            self.outcomes["done" if handoff.end_reason is None else handoff.end_reason.value] += 1
            self._actions.append(msg.ReleasePages(*handoff.id))

    def _transmit(self, handoff: OutgoingHandoff) -> None:
        """Sends the message that the phase repeats until it is answered, or Progress as a sign of life. Sends nothing
        if the phase has no message."""
        key, failing = handoff.request.key, handoff.end_reason is EndReason.FAILED
        if handoff.phase is SenderPhase.ACCEPTED:
            offer = handoff.choice.offer
            self._send(handoff.peer, msg.HandoffAccepted(key, 0 if offer is None else offer.piece_bytes))
        elif handoff.phase is SenderPhase.WRITING or (failing and handoff.phase is SenderPhase.DRAINING):
            self._send(handoff.peer, msg.Progress(key, handoff.landed))
        elif handoff.final_message is not None:
            self._send(handoff.peer, handoff.final_message)

    def _send(self, peer: str, message: Message) -> None:
        self._actions.append(msg.SendMessage(peer, message))
