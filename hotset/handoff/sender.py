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
    Accepted,
    Ask,
    Cancel,
    Drop,
    Go,
    HandoffDone,
    HandoffFailed,
    Hello,
    Key,
    Lent,
    Message,
    Name,
    NotComputed,
    Prefill,
    Progress,
    Received,
    Sampled,
    Send,
    SenderCommand,
    SenderFact,
    Space,
    Stopped,
    Store,
    Submit,
    Unpacked,
    Written,
)
from hotset.handoff.outgoing import MOST_LISTS, NEXT, WAITS, Chunk, Ending, Outgoing, Phase, Tombstones, refusal
from hotset.handoff.staged_out import PIECE_NEXT, PIECE_WAITS, Buffers, PiecePhase, StagedOut, offer
from hotset.handoff.staging import FEW_WRITES
from hotset.handoff.timers import PhaseTable, PhaseTimer, Wait, earliest
from hotset.transfer.api import State, WriteTicket

WRITE_LIMIT = 40.0  # seconds that one list of writes may take; the transfer engine's own limit should be shorter
TOMBSTONE_LIMIT = 900.0  # longer than a receiver stays unsure: it must not be answered by a second handoff of that key
MAX_TOMBSTONES = 20_000


class Sender:
    """Every handoff out of this worker. One thread calls it; after each call `take_actions` says what to do.

    The engine hears `Prefill` when a prompt is to be computed, and for each one `Drop`, exactly once: until then it
    keeps the request's pages, whatever becomes of the request.
    """

    def __init__(
        self,
        store: Store,
        waits: Mapping[Phase, Wait] = WAITS,
        *,
        write_limit: float = WRITE_LIMIT,
        tombstone_limit: float = TOMBSTONE_LIMIT,
        max_tombstones: int = MAX_TOMBSTONES,
        buffers: Sequence[Space] = (),
        few_writes: int = FEW_WRITES,
        piece_waits: Mapping[PiecePhase, Wait] = PIECE_WAITS,
    ) -> None:
        """`store` is the memory that the engine's pages are numbered in; `buffers`, all of one size, are for contexts
        that travel packed: those that would take more than `few_writes`, if these are small."""
        self.table = PhaseTable(NEXT, waits)
        self.pieces = PhaseTable(PIECE_NEXT, piece_waits)
        self.resent = 0  # messages that were said again
        self._store, self._write_limit = store, write_limit
        self._hellos: dict[str, Hello] = {}
        self._handoffs: dict[Name, Outgoing] = {}
        self._tombstones = Tombstones(tombstone_limit, max_tombstones)
        self._buffers, self._few_writes = Buffers(buffers), few_writes
        self._turns = itertools.count()
        self._actions: list[Send | Submit | SenderFact] = []

    def peer_known(self, peer: str, hello: Hello) -> None:
        """It introduced itself, and `check_peers` had nothing against it. After `peer_lost`, if it had before."""
        self._hellos[peer] = hello
        self._tombstones.forget_others(peer, hello)

    def peer_lost(self, peer: str, reason: str, now: float) -> None:
        """It died, or came back as another incarnation. Writes under way are still waited for."""
        self._hellos.pop(peer, None)
        for handoff in [each for each in self._handoffs.values() if each.peer == peer]:
            handoff.verdict = None
            self._end(handoff, Ending.LOST, False, reason, now)

    def take(self, peer: str, message: Message, now: float) -> None:
        """What `peer` has to say. What is not about handoffs, or does not fit where one stands, changes nothing."""
        match message:
            case Ask():
                self._asked(peer, message, now)
            case Cancel(key):
                self._cancelled(peer, key, now)
            case Go(key, staged) if handoff := self._handoffs.get((peer, key)):
                self._go(handoff, staged, now)
            case Lent(key) | Unpacked(key) if handoff := self._handoffs.get((peer, key)):
                if handoff.staged is not None and handoff.phase is Phase.WRITING:
                    self._take_staged(handoff, handoff.staged, message, now)
            case Received(key) if handoff := self._handoffs.get((peer, key)):
                self._received(handoff, now)

    def tell(self, command: SenderCommand, now: float) -> None:
        """What the engine has to say. About a handoff that is over: nothing happens."""
        handoff = self._handoffs.get((command.peer, command.key))
        if handoff is None or handoff.phase not in (Phase.OFFERED, Phase.WRITING):
            return
        match command:
            case Written():
                self._written(handoff, command, now)
            case Sampled():
                told, wanted = handoff.written, len(handoff.ask.prompt)
                assert told == wanted, f"{command.key}: sampled after {told} of {wanted} rows were told"
                handoff.sampled = command
                self._settle(handoff, now)
            case NotComputed():
                self._end(handoff, Ending.FAILED, command.retry, command.reason, now)

    def submitted(self, peer: str, key: Key, ticket: WriteTicket) -> None:
        """The answer to the oldest `Submit` of this handoff that has none yet."""
        self._buffers.submitted((peer, key), ticket.number)
        handoff = self._handoffs.get((peer, key))
        if handoff is not None:
            chunk = next((each for each in handoff.open if each.ticket is None), None)
            assert chunk is not None, f"{key}: ticket {ticket.number} for nothing that was asked"
            chunk.ticket = ticket.number

    def ended(self, peer: str, key: Key, ticket: WriteTicket, state: State, now: float) -> None:
        """A ticket is not pending any more. One that was given up: nothing happens."""
        assert state is not State.PENDING, f"ticket {ticket.number} has not ended"
        freed = self._buffers.ended((peer, key), ticket.number)
        self._ended(peer, key, ticket, state, now)
        if freed:
            self._stage(now)

    @property
    def looks(self) -> bool:
        """Forward passes have to be looked at, by `look`."""
        writing = [each.staged for each in self._handoffs.values() if each.phase is Phase.WRITING]
        return any(staged.looks for staged in writing if staged is not None)

    def look(self, now: float) -> None:
        """Looks which forward passes have happened: what was computed may be packed."""
        self._stage(now)

    def end_all(self, reason: str, now: float) -> None:
        """This worker stops: what has no end yet gets one, and its receiver is told when its writes have ended."""
        for handoff in list(self._handoffs.values()):
            if handoff.phase in (Phase.OFFERED, Phase.WRITING):
                self._end(handoff, Ending.FAILED, False, reason, now)

    def tick(self, now: float) -> None:
        """Lets time pass: what is overdue is said again, or given up."""
        self._tombstones.lapse(now)
        for handoff in list(self._handoffs.values()):
            if now >= handoff.deadline:
                self._expire(handoff, now)
            elif handoff.timer.due(now):
                self.resent += handoff.phase is Phase.OFFERED or handoff.verdict is not None
                self._speak(handoff)
            if handoff.staged is not None and handoff.phase is Phase.WRITING:
                for message in handoff.staged.due(now):
                    self.resent += 1
                    self._send(handoff.peer, message)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if nothing happens before."""
        return earliest(handoff.next_time for handoff in self._handoffs.values())

    def take_actions(self) -> list[Send | Submit | SenderFact]:
        """What is to be sent, submitted and told, in this order. Each is given out once."""
        actions, self._actions = self._actions, []
        return actions

    def open_keys(self, peer: str) -> list[Key]:
        """The handoffs for which this peer has to be alive."""
        return [
            key for (owner, key), each in self._handoffs.items() if owner == peer and each.ending is not Ending.LOST
        ]

    def phases(self) -> dict[Name, Phase]:
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

    def _asked(self, peer: str, ask: Ask, now: float) -> None:
        key, hello = ask.key, self._hellos.get(peer)
        mine = [each for each in self._handoffs.values() if each.peer == peer]
        attempts = [each for each in mine if each.ask.key.request_id == key.request_id]
        known = [each.ask.key.attempt for each in attempts]
        known.append(self._tombstones.newest_attempt(peer, key.request_id))
        if handoff := self._handoffs.get((peer, key)):
            if handoff.ending is not Ending.LOST:  # else: of an incarnation before; it asks again
                self._speak(handoff)
        elif tombstone := self._tombstones.get((peer, key)):
            self._send(peer, Stopped(key, tombstone.quiesced))
        elif max(known) > key.attempt:
            self._send(peer, Stopped(key, False))
        elif hello is None or (reason := refusal(ask, hello)):
            # Whoever keeps no record vouches for nothing: not quiesced, though nothing was begun now.
            why = "this worker does not know you: say Hello first" if hello is None else reason
            self._send(peer, HandoffFailed(key, quiesced=False, retry=hello is None, reason=why))
        else:
            for each in attempts:
                self._cancel(each, now)
            offered = offer(self._store, hello, ask, self._buffers.spaces, self._few_writes)
            handoff = Outgoing(peer, ask, hello, PhaseTimer(self.table, Phase.OFFERED, now), offered)
            self._handoffs[handoff.name] = handoff
            self._speak(handoff)
            self._actions.append(Prefill(peer, key, ask.prompt))

    def _cancelled(self, peer: str, key: Key, now: float) -> None:
        if handoff := self._handoffs.get((peer, key)):
            self._cancel(handoff, now)
            return
        if self._tombstones.get((peer, key)) is None:
            # Its Ask may come yet, and must not begin anything.
            self._tombstones.add((peer, key), False, self._hellos.get(peer), now)
        tombstone = self._tombstones.get((peer, key))
        self._send(peer, Stopped(key, tombstone is not None and tombstone.quiesced))

    def _cancel(self, handoff: Outgoing, now: float) -> None:
        handoff.verdict = None
        self._end(handoff, Ending.CANCELLED, False, "cancelled", now)

    def _go(self, handoff: Outgoing, staged: bool, now: float) -> None:
        if handoff.phase is not Phase.OFFERED:
            return
        if staged and handoff.offer is None:
            self._end(handoff, Ending.FAILED, False, "it should be staged, which was not offered", now)
            return
        self._move(handoff, Phase.WRITING, now)
        if staged and handoff.offer is not None:
            total = len(handoff.ask.prompt)
            handoff.staged = StagedOut(handoff.ask.key, total, handoff.offer, self.pieces)
        self._submit(handoff, now)
        self._settle(handoff, now)

    def _take_staged(self, handoff: Outgoing, staged: StagedOut, message: Message, now: float) -> None:
        if isinstance(message, Lent):
            staged.lend(message, next(self._turns), now)
            self._stage(now)
        elif isinstance(message, Unpacked) and staged.unpacked(message, now):
            handoff.landed = staged.landed
            handoff.timer.stay(now)
            for want in staged.want(now):
                self._send(handoff.peer, want)
            self._settle(handoff, now)

    def _stage(self, now: float) -> None:
        """Has pieces packed and written for which there is room in the ring, as long as there are buffers."""
        ready = []
        for handoff in self._handoffs.values():
            if handoff.staged is not None and handoff.phase is Phase.WRITING:
                handoff.staged.look()
                ready += [(piece.turn, handoff, handoff.staged, piece) for piece in handoff.staged.ready()]
        for _, handoff, staged, piece in sorted(ready, key=lambda each: each[0]):
            buffer = self._buffers.take(handoff.name)
            if buffer is None:
                return
            assert piece.lent is not None
            target = staged.offered.ring.address + piece.lent.offset
            planned = np.array([[buffer.address, target, staged.nbytes(piece)]], np.int64)
            handoff.open.append(Chunk(piece.first, piece.last, now + self._write_limit, piece=piece.number))
            packed = staged.packed(piece, self._store, handoff.target, buffer.address)
            staged.begin(piece, now)
            self._actions.append(Submit(handoff.peer, handoff.ask.key, planned, None, packed))

    def _ended(self, peer: str, key: Key, ticket: WriteTicket, state: State, now: float) -> None:
        handoff = self._handoffs.get((peer, key))
        chunk = next((each for each in handoff.open if each.ticket == ticket.number), None) if handoff else None
        if handoff is None or chunk is None:
            return
        handoff.open.remove(chunk)
        handoff.tainted |= state is State.FAILED_UNKNOWN
        if state is not State.DONE and handoff.phase is Phase.WRITING:
            rows = f"rows {chunk.first} to {chunk.last}"
            self._end(handoff, Ending.FAILED, True, f"writing {rows} ended as '{state.value}'", now)
            return
        if handoff.phase is Phase.WRITING and handoff.staged is not None:
            assert chunk.piece is not None
            handoff.timer.stay(now)
            self._send(peer, handoff.staged.written(chunk.piece, now))
        elif handoff.phase is Phase.WRITING:
            handoff.landed = min([each.first for each in handoff.open], default=handoff.begun)
            handoff.timer.stay(now)
            self._submit(handoff, now)
            self._speak(handoff)
        self._settle(handoff, now)

    def _received(self, handoff: Outgoing, now: float) -> None:
        handoff.verdict = None
        if handoff.phase is Phase.TELLING:
            self._move(handoff, Phase.CLOSED, now)

    def _written(self, handoff: Outgoing, written: Written, now: float) -> None:
        key, told = handoff.ask.key, handoff.written
        assert told == written.first <= written.last, f"{key}: rows {told} are told, now [{written.first}, ...)"
        handoff.written, before = written.last, handoff.waiting
        if before is not None:
            assert written.pages[: len(before.pages)] == before.pages, f"{key}: rows that were told have moved"
            # Events are of one stream: when the newest has happened, so have those before.
            written = replace(written, first=before.first)
        handoff.waiting = written
        if handoff.phase is Phase.WRITING:
            handoff.timer.stay(now)
            self._submit(handoff, now)

    def _submit(self, handoff: Outgoing, now: float) -> None:
        """Begins to write what waits, as one list, unless enough is under way. Staged: asks for room."""
        written = handoff.waiting
        if written is not None and handoff.staged is not None:
            handoff.waiting = None
            for want in handoff.staged.told(written, now):
                self._send(handoff.peer, want)
            return
        if written is None or len(handoff.open) >= MOST_LISTS:
            return
        ask, span = handoff.ask, (written.first, written.last)
        planned = context_writes(self._store, written.pages, handoff.target, ask.row_pages, ask.key_pages, *span)
        handoff.waiting = None
        handoff.open.append(Chunk(*span, due=now + self._write_limit))
        self._actions.append(Submit(handoff.peer, ask.key, planned, written.after))

    def _settle(self, handoff: Outgoing, now: float) -> None:
        """Ends what has nothing left to wait for."""
        if handoff.open:
            return
        if handoff.phase in (Phase.ENDING, Phase.STUCK):
            self._conclude(handoff, now)
        elif handoff.phase is Phase.WRITING and handoff.complete:
            told = handoff.sampled
            assert told is not None
            handoff.verdict = HandoffDone(told.key, told.token_id, told.alternatives)
            self._drop(handoff)
            self._move(handoff, Phase.TELLING, now)

    def _end(self, handoff: Outgoing, ending: Ending, retry: bool, reason: str, now: float) -> None:
        """Begins nothing more, and concludes when the writes under way have ended."""
        handoff.ending, handoff.retry, handoff.reason = ending, retry, reason
        handoff.waiting = None
        if handoff.phase is Phase.WRITING and handoff.open:
            self._move(handoff, Phase.ENDING, now)
        elif handoff.phase is not Phase.ENDING:
            self._conclude(handoff, now)

    def _conclude(self, handoff: Outgoing, now: float) -> None:
        """Tells how it ended: its writes have, or are waited for no longer (then it is stuck)."""
        self._drop(handoff)
        key, stuck = handoff.ask.key, bool(handoff.open)
        if handoff.ending is Ending.FAILED and (handoff.phase is not Phase.STUCK or handoff.verdict):
            handoff.verdict = HandoffFailed(key, handoff.quiesced, handoff.retry, handoff.reason)
            self._move(handoff, Phase.STUCK if stuck else Phase.TELLING, now)
            return
        if handoff.ending is not Ending.LOST:
            self._send(handoff.peer, Stopped(key, handoff.quiesced))
        if stuck and handoff.ending is not Ending.LOST:
            if handoff.phase is not Phase.STUCK:
                self._move(handoff, Phase.STUCK, now)
        else:
            self._move(handoff, Phase.CLOSED, now)

    def _expire(self, handoff: Outgoing, now: float) -> None:
        limit = self.table.waits[handoff.phase].limit
        match handoff.phase:
            case Phase.OFFERED:
                self._end(handoff, Ending.FAILED, True, f"no Go came within {limit:g} s", now)
            case Phase.WRITING if now >= handoff.timer.deadline:
                self._end(handoff, Ending.FAILED, True, f"the engine has told nothing for {limit:g} s", now)
            case Phase.WRITING:
                why = handoff.staged.overdue(now) if handoff.staged is not None else ""
                why = why or f"a write has not ended within {self._write_limit:g} s"
                self._end(handoff, Ending.FAILED, True, why, now)
            case Phase.ENDING:
                self._conclude(handoff, now)
            case _:
                self._move(handoff, Phase.CLOSED, now)

    def _move(self, handoff: Outgoing, to: Phase, now: float) -> None:
        handoff.timer.move(to, now)
        if to is Phase.CLOSED:
            del self._handoffs[handoff.name]
            self._tombstones.add(handoff.name, handoff.quiesced, handoff.hello, now)
        elif to is not Phase.WRITING:
            self._speak(handoff)

    def _drop(self, handoff: Outgoing) -> None:
        if not handoff.dropped:
            handoff.dropped = True
            self._actions.append(Drop(*handoff.name))

    def _speak(self, handoff: Outgoing) -> None:
        """Says what this phase has to say until it is answered, or that it is alive."""
        key = handoff.ask.key
        if handoff.phase is Phase.OFFERED:
            self._send(handoff.peer, Accepted(key, 0 if handoff.offer is None else handoff.offer.piece_bytes))
        elif handoff.phase is Phase.WRITING or (handoff.ending is Ending.FAILED and handoff.phase is Phase.ENDING):
            self._send(handoff.peer, Progress(key, handoff.landed))
        elif handoff.verdict is not None:
            self._send(handoff.peer, handoff.verdict)

    def _send(self, peer: str, message: Message) -> None:
        self._actions.append(Send(peer, message))
