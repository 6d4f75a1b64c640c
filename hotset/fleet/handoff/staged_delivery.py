"""Delivers rows in pieces through leases of the receiver's ring. Pieces have phases and timeouts (PIECE_TIMEOUTS).

A lease is requested only after the last row of the piece was announced. The lease can arrive before the rows are
computed. The piece then waits only for a buffer and for a forward pass that is already submitted. Every lease therefore
ends, and every waiting piece gets a lease, unless too much of the ring is in quarantine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from hotset.base.units import ceil_div
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.deliveries import AnnouncedRows, Delivery, RowWrites, Sources, rotated
from hotset.fleet.handoff.messages import Message, Store
from hotset.fleet.handoff.staging import (
    RING_PIECES,
    SenderBuffers,
    can_stage,
    packed_row_bytes,
    piece_rows,
    piece_writes,
)
from hotset.fleet.handoff.timers import PhaseTable, PhaseTimeout, PhaseTimer
from hotset.schedule.handoffs import RowsComputed

SMALLEST_PIECE_BYTES = 256 << 10  # a piece waits for rows until it is this large, or full
# Maximum pieces of one context that are requested and not unpacked: as many as fit into a ring, and two more. When
# space becomes free, the two further leases are granted without waiting for another request.
WINDOW = RING_PIECES + 2


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

# REQUESTED and LEASED may last long, because pieces of other contexts may be ahead in the queue. The interval of
# REQUESTED doubles: with 32 contexts, requests repeated twice a second would be half of all messages. WRITING never
# reaches its limit, because each list of writes has a shorter limit (WRITE_LIMIT in sender.py).
PIECE_TIMEOUTS: dict[PiecePhase, PhaseTimeout] = {
    PiecePhase.REQUESTED: PhaseTimeout(120.0, retransmit_every=0.5, doubles_until=4.0),
    PiecePhase.LEASED: PhaseTimeout(120.0),
    PiecePhase.WRITING: PhaseTimeout(120.0),
    PiecePhase.WRITTEN: PhaseTimeout(40.0, retransmit_every=0.5),
}


@dataclass(frozen=True, slots=True)
class StagingOffer:
    """The sizes with which a context would be staged."""

    rows: int  # maximum rows of a piece
    row_bytes: int  # packed bytes of one row in all layers, with its index keys
    ring_bytes: int  # size of the receiver's ring

    @property
    def piece_bytes(self) -> int:
        return self.rows * self.row_bytes


def make_offer(source: Store, target: Store, request: msg.HandoffRequest, buffer_bytes: int) -> StagingOffer | None:
    """Returns how this context can be staged, or None if a store does not allow it or a side has too little memory."""
    if not can_stage(source) or not can_stage(target):
        return None
    ring_bytes = target.staging[0].nbytes
    rows = piece_rows(source, target, ring_bytes, buffer_bytes)
    if rows < 1:
        return None
    return StagingOffer(min(rows, len(request.prompt) - request.first), packed_row_bytes(source, target), ring_bytes)


@dataclass(slots=True, eq=False)
class _Piece:
    """Rows [first, last) of a staged context, which are written together."""

    number: int
    first: int
    last: int
    timer: PhaseTimer[PiecePhase]
    lease: msg.LeaseGranted | None = None
    grant_order: int = 0  # counts the grants of all contexts; pieces are packed in this order


class StagedDelivery(Delivery):
    """Packs rows from `request.first` on into pieces, and writes each into a lease of the receiver's ring."""

    def __init__(
        self,
        sources: Sources,
        target: Store,
        request: msg.HandoffRequest,
        offer: StagingOffer,
        table: PhaseTable[PiecePhase],
        grants: Iterator[int],
    ) -> None:
        """`grants` numbers the grants of all contexts."""
        self._sources, self._target, self._offer, self._table, self._grants = sources, target, offer, table, grants
        self._key, self._first, self._total = request.key, request.first, len(request.prompt)
        self._announced = AnnouncedRows(self._first)
        self._pieces: dict[int, _Piece] = {}  # pieces that are requested and not unpacked, by number
        self._num_requested = 0  # pieces requested since the start
        self._requested = self._first  # leases are requested for rows [first, requested)

    @property
    def landed(self) -> int:
        return min((piece.first for piece in self._pieces.values()), default=self._requested)

    @property
    def finished(self) -> bool:
        return self.landed == self._total

    @property
    def has_pending_events(self) -> bool:
        return self._announced.pending and any(
            piece.timer.phase is PiecePhase.LEASED for piece in self._pieces.values()
        )

    @property
    def deadline(self) -> float:
        return min((piece.timer.deadline for piece in self._pieces.values()), default=float("inf"))

    @property
    def next_deadline(self) -> float:
        return min((piece.timer.retransmit_at for piece in self._pieces.values()), default=self.deadline)

    def add_rows(self, rows: RowsComputed, now: float) -> Sequence[Message]:
        self._announced.add(rows)
        return self._request_leases(now)

    def next_order(self, num_in_flight: int) -> int | None:
        return min((piece.grant_order for piece in self._ready()), default=None)

    def begin(self, number: int, buffers: SenderBuffers, now: float) -> RowWrites | None:
        piece = min(self._ready(), key=lambda ready: ready.grant_order)
        buffer = buffers.acquire(number)
        if buffer is None:
            return None
        assert piece.lease is not None
        piece.timer.move(PiecePhase.WRITING, now)
        source, pages = self._announced.locate(self._sources)
        source = rotated(source, number)
        writes = piece_writes(source, self._target, piece.last - piece.first, buffer, piece.lease.offset)
        packed = msg.PackedPiece(source, self._target, pages, piece.first, piece.last, buffer)
        return RowWrites(piece.first, piece.last, writes, None, packed, piece.number)

    def on_written(self, written: RowWrites, in_flight: Sequence[RowWrites], now: float) -> Message | None:
        assert written.piece is not None
        piece = self._pieces[written.piece]
        piece.timer.move(PiecePhase.WRITTEN, now)
        return self._piece_written(piece)

    def handle_message(self, message: Message, now: float) -> Sequence[Message] | None:
        """Records a lease, or a piece that the receiver has unpacked. Ignores a lease that the piece does not wait for,
        or that is not inside the ring."""
        piece = self._pieces.get(message.piece) if isinstance(message, msg.LeaseGranted | msg.PieceUnpacked) else None
        if piece is None:
            return None
        phase = piece.timer.phase
        if isinstance(message, msg.LeaseGranted):
            if phase is not PiecePhase.REQUESTED or message.offset + self._nbytes(piece) > self._offer.ring_bytes:
                return None
            piece.lease, piece.grant_order = message, next(self._grants)
            piece.timer.move(PiecePhase.LEASED, now)
            return ()
        if phase is not PiecePhase.WRITTEN:
            return None
        piece.timer.move(PiecePhase.UNPACKED, now)
        del self._pieces[piece.number]
        return self._request_leases(now)

    def retransmits(self, now: float) -> Sequence[Message]:
        due = [piece for piece in self._pieces.values() if piece.timer.retransmit_due(now)]
        return [
            self._lease_request(piece) if piece.timer.phase is PiecePhase.REQUESTED else self._piece_written(piece)
            for piece in due
        ]

    def timeout_reason(self, now: float) -> str:
        for piece in self._pieces.values():
            if now >= piece.timer.deadline:
                limit = self._table.timeouts[piece.timer.phase].limit
                rows = f"[{piece.first}, {piece.last})"
                return f"the piece with rows {rows} was in phase '{piece.timer.phase.value}' for {limit:g} s"
        return ""

    def audit(self, in_flight: Sequence[RowWrites]) -> None:
        """Asserts that the window is respected, and that leases were requested only for announced rows."""
        assert len(self._pieces) <= WINDOW, f"{self._key} has {len(self._pieces)} pieces, more than {WINDOW}"
        self._announced.audit()
        requested = self._requested
        assert self.landed <= requested <= self._announced.announced, (
            f"{self._key} requested a lease for unannounced rows"
        )
        for piece in self._pieces.values():
            assert (piece.lease is None) == (piece.timer.phase is PiecePhase.REQUESTED), f"{self._key}: {piece}"
        writing = {number for number, piece in self._pieces.items() if piece.timer.phase is PiecePhase.WRITING}
        assert {chunk.piece for chunk in in_flight} == writing, f"{self._key} has lost a piece"

    def _request_leases(self, now: float) -> list[msg.LeaseRequest]:
        """Begins the next pieces, as far as WINDOW and the announced rows allow. Returns the lease requests to send.

        A piece of SMALLEST_PIECE_BYTES does not wait for further rows, so that rows are sent while later ones are
        computed. While WINDOW pieces are on their way, announced rows are collected for the next one.
        """
        requests = []
        fewest_rows = min(self._offer.rows, ceil_div(SMALLEST_PIECE_BYTES, self._offer.row_bytes))
        while len(self._pieces) < WINDOW and self._requested < self._total:
            first, last = self._requested, min(self._requested + self._offer.rows, self._announced.announced)
            if last - first < fewest_rows and last < self._total:
                break
            piece = _Piece(self._num_requested, first, last, PhaseTimer(self._table, PiecePhase.REQUESTED, now))
            self._pieces[piece.number] = piece
            self._num_requested += 1
            self._requested = last
            requests.append(self._lease_request(piece))
        return requests

    def _ready(self) -> list[_Piece]:
        """Returns the pieces that can be packed now."""
        leased = [piece for piece in self._pieces.values() if piece.timer.phase is PiecePhase.LEASED]
        computed = self._announced.computed()
        return [piece for piece in leased if piece.last <= computed]

    def _nbytes(self, piece: _Piece) -> int:
        return (piece.last - piece.first) * self._offer.row_bytes

    def _lease_request(self, piece: _Piece) -> msg.LeaseRequest:
        return msg.LeaseRequest(self._key, piece.number, piece.first, piece.last)

    def _piece_written(self, piece: _Piece) -> msg.PieceWritten:
        assert piece.lease is not None
        return msg.PieceWritten(self._key, piece.number, piece.lease.lease)
