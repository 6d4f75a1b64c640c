"""Staging at the sender: the pieces of a context, their phases and timeouts (PIECE_TIMEOUTS), and the buffers.

It has no threads and no clock, like the sender, which owns it. The engine announces rows when their forward pass is
submitted to the device. A lease is requested only after the last row of the piece was announced. The lease can arrive
before the rows are computed, but the piece then waits only for a forward pass that is already submitted, and for a
buffer. Every lease therefore ends, and every waiting piece gets a lease, unless too much of the ring is in quarantine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from hotset.handoff import messages as msg
from hotset.handoff.messages import HandoffId, Hello, MemoryRange, Store
from hotset.handoff.staging import can_pack, packed_row_bytes, piece_rows, should_stage
from hotset.handoff.timers import PhaseTable, PhaseTimeout, PhaseTimer, earliest
from hotset.transfer.api import DeviceEvent

WINDOW = 4  # maximum pieces of one context that are requested and not unpacked: as many as fit into a ring


class PiecePhase(Enum):
    REQUESTED = "requested"  # LeaseRequest is retransmitted until the lease is granted
    LEASED = "leased"  # the piece waits for its forward pass and for a buffer
    WRITING = "writing"  # the piece is packed, and its write is in flight
    WRITTEN = "written"  # the piece is in the ring; PieceWritten is retransmitted
    UNPACKED = "unpacked"


PIECE_TRANSITIONS: dict[PiecePhase, frozenset[PiecePhase]] = {
    PiecePhase.REQUESTED: frozenset({PiecePhase.LEASED}),
    PiecePhase.LEASED: frozenset({PiecePhase.WRITING}),
    PiecePhase.WRITING: frozenset({PiecePhase.WRITTEN}),
    PiecePhase.WRITTEN: frozenset({PiecePhase.UNPACKED}),
    PiecePhase.UNPACKED: frozenset(),
}

# REQUESTED and LEASED may last long, because pieces of other contexts may be ahead in the queue. WRITING never reaches
# this limit, because each list of writes has a shorter one (WRITE_LIMIT in sender.py).
PIECE_TIMEOUTS: dict[PiecePhase, PhaseTimeout] = {
    PiecePhase.REQUESTED: PhaseTimeout(120.0, retransmit_every=0.5),
    PiecePhase.LEASED: PhaseTimeout(120.0),
    PiecePhase.WRITING: PhaseTimeout(120.0),
    PiecePhase.WRITTEN: PhaseTimeout(40.0, retransmit_every=0.5),
}


@dataclass(frozen=True, slots=True)
class StagingOffer:
    """The sizes with which a context would be staged."""

    rows: int  # rows of each piece; the last piece may have fewer
    row_bytes: int  # packed bytes of one row in all layers, with its index keys
    ring: MemoryRange  # the receiver's ring

    @property
    def piece_bytes(self) -> int:
        return self.rows * self.row_bytes


def make_offer(
    store: Store, hello: Hello, request: msg.HandoffRequest, buffers: Sequence[MemoryRange], max_direct_writes: int
) -> StagingOffer | None:
    """Returns how this context can be staged, or None if direct writes are better, either side lacks the memory,
    or a store cannot be packed."""
    target = hello.stores[request.landing]
    if hello.ring is None or not buffers or not can_pack(store) or not can_pack(target):
        return None
    rows = piece_rows(store, target, hello.ring.nbytes, buffers[0].nbytes)
    if rows < 1 or not should_stage(store, target, request, max_direct_writes):
        return None
    return StagingOffer(min(rows, len(request.prompt) - request.first), packed_row_bytes(store, target), hello.ring)


@dataclass(slots=True, eq=False)
class Piece:
    """Rows [first, last) of a staged context, which are written together."""

    number: int
    first: int
    last: int
    timer: PhaseTimer[PiecePhase]
    lease: msg.LeaseGranted | None = None
    grant_order: int = 0  # counts the grants of all contexts; pieces are packed in this order


class SenderStaging:
    """The pieces of one staged context at the sender: rows from `request.first` on. Only the sender changes it."""

    def __init__(self, request: msg.HandoffRequest, offer: StagingOffer, table: PhaseTable[PiecePhase]) -> None:
        self._key, self._first, self._total = request.key, request.first, len(request.prompt)
        self.offer, self._table = offer, table
        self.pages: tuple[int, ...] = ()  # the context's pages in the prefill worker's store
        self._announced = self._first  # rows [first, announced) are computed, or their forward pass is in flight
        self._computed = self._first  # rows [first, computed) are in the prefill worker's pages
        # Events of rows [computed, announced), in order. Rows [0, last) are computed when the event has happened.
        self._events: list[tuple[int, DeviceEvent | None]] = []  # (last, event)
        self._pieces: dict[int, Piece] = {}  # pieces that are requested and not unpacked, by number
        self._num_requested = 0  # pieces requested since the start

    @property
    def landed(self) -> int:
        """Returns the end of the rows [0, landed) that are in the receiver's pages."""
        return min((piece.first for piece in self._pieces.values()), default=self._requested)

    @property
    def finished(self) -> bool:
        return self.landed == self._total

    @property
    def has_pending_events(self) -> bool:
        """Returns whether a leased piece may wait for its forward pass, so that `poll_events` must be called."""
        return bool(self._events) and any(piece.timer.phase is PiecePhase.LEASED for piece in self._pieces.values())

    @property
    def deadline(self) -> float:
        return min((piece.timer.deadline for piece in self._pieces.values()), default=float("inf"))

    def next_deadline(self) -> float | None:
        """Returns when the next timeout or retransmit is due."""
        return earliest(min(piece.timer.deadline, piece.timer.retransmit_at) for piece in self._pieces.values())

    def on_rows_computed(self, rows: msg.RowsComputed, now: float) -> list[msg.LeaseRequest]:
        """Records rows that the engine has announced, in order. Returns the lease requests to send."""
        self.pages, self._announced = rows.pages, rows.last
        self._events.append((rows.last, rows.after))
        return self.request_leases(now)

    def request_leases(self, now: float) -> list[msg.LeaseRequest]:
        """Begins the next pieces, as far as WINDOW and the announced rows allow. Returns the lease requests to send."""
        requests = []
        while len(self._pieces) < WINDOW and self._requested < self._total:
            first, last = self._requested, min(self._requested + self.offer.rows, self._total)
            if last > self._announced:
                break
            piece = Piece(self._num_requested, first, last, PhaseTimer(self._table, PiecePhase.REQUESTED, now))
            self._pieces[piece.number] = piece
            self._num_requested += 1
            requests.append(msg.LeaseRequest(self._key, piece.number, first, last))
        return requests

    def on_lease_granted(self, lease: msg.LeaseGranted, grant_order: int, now: float) -> None:
        """Records the lease of a piece. Ignores a grant that the piece does not wait for, or that leaves the ring."""
        piece, end = self._pieces.get(lease.piece), self.offer.ring.nbytes
        if piece is None or piece.timer.phase is not PiecePhase.REQUESTED or lease.offset + self.nbytes(piece) > end:
            return
        piece.lease, piece.grant_order = lease, grant_order
        piece.timer.move(PiecePhase.LEASED, now)

    def poll_events(self) -> None:
        """Checks which forward passes have finished."""
        while self._events and (self._events[0][1] is None or self._events[0][1].query()):
            self._computed = self._events.pop(0)[0]

    def ready(self) -> Iterator[Piece]:
        """Yields the pieces that can be packed now."""
        for piece in self._pieces.values():
            if piece.timer.phase is PiecePhase.LEASED and piece.last <= self._computed:
                yield piece

    def start_write(self, piece: Piece, now: float) -> None:
        piece.timer.move(PiecePhase.WRITING, now)

    def finish_write(self, number: int, now: float) -> msg.PieceWritten:
        """Records that a piece is in the ring. Returns the message to send."""
        piece = self._pieces[number]
        piece.timer.move(PiecePhase.WRITTEN, now)
        return self._piece_written(piece)

    def on_unpacked(self, message: msg.PieceUnpacked, now: float) -> bool:
        """Removes a piece that the receiver has unpacked. Returns False if it was removed before, or is not written."""
        piece = self._pieces.get(message.piece)
        if piece is None or piece.timer.phase is not PiecePhase.WRITTEN:
            return False
        piece.timer.move(PiecePhase.UNPACKED, now)
        del self._pieces[message.piece]
        return True

    def nbytes(self, piece: Piece) -> int:
        return (piece.last - piece.first) * self.offer.row_bytes

    def packed_piece(self, piece: Piece, source: Store, target: Store, address: int) -> msg.PackedPiece:
        return msg.PackedPiece(source, target, self.pages, self.pages, piece.first, piece.last, address)

    def retransmits(self, now: float) -> list[msg.LeaseRequest | msg.PieceWritten]:
        """Returns the messages whose retransmit is due."""
        messages: list[msg.LeaseRequest | msg.PieceWritten] = []
        for piece in self._pieces.values():
            if piece.timer.retransmit_due(now):
                if piece.timer.phase is PiecePhase.REQUESTED:
                    messages.append(msg.LeaseRequest(self._key, piece.number, piece.first, piece.last))
                else:
                    messages.append(self._piece_written(piece))
        return messages

    def timeout_reason(self, now: float) -> str:
        """Returns a text that names a piece that has timed out, or an empty string if none has."""
        for piece in self._pieces.values():
            if now >= piece.timer.deadline:
                limit = self._table.timeouts[piece.timer.phase].limit
                rows = f"[{piece.first}, {piece.last})"
                return f"the piece with rows {rows} was in phase '{piece.timer.phase.value}' for {limit:g} s"
        return ""

    def audit(self) -> None:
        """Asserts that the window is respected, and that leases were requested only for announced rows."""
        assert len(self._pieces) <= WINDOW, f"{self._key} has {len(self._pieces)} pieces, more than {WINDOW}"
        assert self.landed <= self._requested <= self._announced, f"{self._key} requested a lease for unannounced rows"
        assert self._computed <= self._announced and bool(self._events) == (self._computed < self._announced), self._key
        for piece in self._pieces.values():
            assert (piece.lease is None) == (piece.timer.phase is PiecePhase.REQUESTED), f"{self._key}: {piece}"

    def writing_pieces(self) -> set[int]:
        """Returns the numbers of the pieces whose write is in flight."""
        return {number for number, piece in self._pieces.items() if piece.timer.phase is PiecePhase.WRITING}

    @property
    def _requested(self) -> int:
        """Returns the end of the rows [first, requested) for which leases were requested."""
        return min(self._first + self._num_requested * self.offer.rows, self._total)

    def _piece_written(self, piece: Piece) -> msg.PieceWritten:
        assert piece.lease is not None
        return msg.PieceWritten(self._key, piece.number, piece.lease.lease)


@dataclass(slots=True)
class _BufferUse:
    handoff: HandoffId
    ticket: int | None = None  # assigned when the write is submitted to the transfer engine


class SenderBuffers:
    """The sender's buffers, shared by all its handoffs.

    A buffer is free again when the write from it has ended in any state. If the state is unknown, the transfer engine
    may still copy from the buffer, but only into a quarantined lease, which is never unpacked.
    """

    def __init__(self, buffers: Sequence[MemoryRange]) -> None:
        self.buffers = tuple(buffers)
        self._uses: dict[int, _BufferUse] = {}

    @property
    def users(self) -> Mapping[int, HandoffId]:
        """Returns the handoff that uses each buffer, by the buffer's number."""
        return {number: use.handoff for number, use in self._uses.items()}

    def acquire(self, handoff: HandoffId) -> MemoryRange | None:
        """Returns a free buffer, which then belongs to `handoff`, or None if all are in use."""
        for number, buffer in enumerate(self.buffers):
            if number not in self._uses:
                self._uses[number] = _BufferUse(handoff)
                return buffer
        return None

    def on_submitted(self, handoff: HandoffId, ticket: int) -> None:
        """Assigns the ticket to the handoff's oldest buffer that has none."""
        pending = (use for use in self._uses.values() if use.handoff == handoff and use.ticket is None)
        use = next(pending, None)
        if use is not None:
            use.ticket = ticket

    def on_write_ended(self, handoff: HandoffId, ticket: int) -> bool:
        """Frees the buffer of this write. Returns False if the write did not use one."""
        for number, use in self._uses.items():
            if (use.handoff, use.ticket) == (handoff, ticket):
                del self._uses[number]
                return True
        return False
