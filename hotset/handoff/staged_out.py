"""The prefill side of staging: one context's pieces on their way through the receiver's ring, and the sender's buffers.

Pure, like the machine that owns it. A piece is asked room for only when the engine has told of its last row: whoever
holds a part of the ring then waits for nothing but a forward pass that is under way, so those behind it get theirs.
(Rows are told when their forward pass is handed to the device: the ring is asked ahead of what it has to hold.)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from hotset.handoff.messages import (
    HandoffId,
    HandoffKey,
    HandoffRequest,
    Hello,
    LeaseGranted,
    LeaseRequest,
    MemoryRange,
    PackedPiece,
    PieceUnpacked,
    PieceWritten,
    RowsComputed,
    Store,
)
from hotset.handoff.staging import can_unpack, is_worth_it, packed_row_bytes, piece_rows
from hotset.handoff.timers import PhaseTable, PhaseTimeout, PhaseTimer, earliest
from hotset.transfer.api import DeviceEvent

WINDOW = 4  # pieces of one context on their way at a time: as many as fit into a ring


class PiecePhase(Enum):
    REQUESTED = "requested"  # Want is said again; there is no room yet, or the answer was lost
    LEASED = "leased"  # there is room; its forward pass is waited for, and a buffer
    WRITING = "writing"  # packed, and under way
    WRITTEN = "written"  # it is in the ring: Staged is said again
    UNPACKED = "unpacked"  # over


PIECE_TRANSITIONS: dict[PiecePhase, frozenset[PiecePhase]] = {
    PiecePhase.REQUESTED: frozenset({PiecePhase.LEASED}),
    PiecePhase.LEASED: frozenset({PiecePhase.WRITING}),
    PiecePhase.WRITING: frozenset({PiecePhase.WRITTEN}),
    PiecePhase.WRITTEN: frozenset({PiecePhase.UNPACKED}),
    PiecePhase.UNPACKED: frozenset(),
}

# Many may stand before it in the queue for the ring. A write has a shorter limit of its own.
PIECE_TIMEOUTS: dict[PiecePhase, PhaseTimeout] = {
    PiecePhase.REQUESTED: PhaseTimeout(120.0, again=0.5),
    PiecePhase.LEASED: PhaseTimeout(120.0),
    PiecePhase.WRITING: PhaseTimeout(120.0),
    PiecePhase.WRITTEN: PhaseTimeout(40.0, again=0.5),
}


@dataclass(frozen=True, slots=True)
class StagingOffer:
    """How a context would be staged."""

    rows: int  # of a piece; the last may have fewer
    row_bytes: int  # packed
    ring: MemoryRange

    @property
    def piece_bytes(self) -> int:
        return self.rows * self.row_bytes


def offer(
    store: Store, hello: Hello, ask: HandoffRequest, buffers: Sequence[MemoryRange], max_direct_writes: int
) -> StagingOffer | None:
    """None: it goes straight to its pages, since that is better, or since nobody has memory for anything else."""
    target = hello.stores[ask.landing]
    if hello.ring is None or not buffers or not can_unpack(store) or not can_unpack(target):
        return None
    rows = piece_rows(store, target, hello.ring.nbytes, buffers[0].nbytes)
    if rows < 1 or not is_worth_it(store, target, ask, max_direct_writes):
        return None
    return StagingOffer(min(rows, len(ask.prompt)), packed_row_bytes(store, target), hello.ring)


@dataclass(slots=True, eq=False)
class Piece:
    number: int
    first: int
    last: int
    timer: PhaseTimer[PiecePhase]
    lent: LeaseGranted | None = None
    turn: int = 0  # among all pieces that were lent room: the order in which they are packed


class SenderStaging:
    """One context's pieces. Only the sender changes it."""

    def __init__(self, key: HandoffKey, total: int, offered: StagingOffer, table: PhaseTable[PiecePhase]) -> None:
        self._key, self._total, self.offered, self._table = key, total, offered, table
        self.pages: tuple[int, ...] = ()  # of the source
        self._told = 0  # rows [0, told) are computed, or about to be
        self._computed = 0  # rows [0, computed) are there
        self._events: list[
            tuple[int, DeviceEvent | None]
        ] = []  # of rows [computed, told): each with the end of its rows
        self._pieces: dict[int, Piece] = {}  # on their way
        self._begun = 0  # pieces that were asked room for

    @property
    def landed(self) -> int:
        """Rows [0, landed) are in their pages."""
        return min((piece.first for piece in self._pieces.values()), default=self._asked)

    @property
    def finished(self) -> bool:
        return self.landed == self._total

    @property
    def looks(self) -> bool:
        """Room was lent for rows whose forward pass has to be looked at."""
        return bool(self._events) and any(each.timer.phase is PiecePhase.LEASED for each in self._pieces.values())

    @property
    def deadline(self) -> float:
        return min((piece.timer.deadline for piece in self._pieces.values()), default=float("inf"))

    def next_time(self) -> float | None:
        """When something is overdue, or to be said again."""
        return earliest(min(piece.timer.deadline, piece.timer.again_at) for piece in self._pieces.values())

    def told(self, written: RowsComputed, now: float) -> list[LeaseRequest]:
        """Rows were told by the engine, those before them too. Returns what there is to say."""
        self.pages, self._told = written.pages, written.last
        self._events.append((written.last, written.after))
        return self.want(now)

    def want(self, now: float) -> list[LeaseRequest]:
        """Asks room for the next pieces."""
        wants = []
        while len(self._pieces) < WINDOW and self._asked < self._total:
            first, last = self._asked, min(self._asked + self.offered.rows, self._total)
            if last > self._told:
                break
            piece = Piece(self._begun, first, last, PhaseTimer(self._table, PiecePhase.REQUESTED, now))
            self._pieces[piece.number] = piece
            self._begun += 1
            wants.append(LeaseRequest(self._key, piece.number, first, last))
        return wants

    def lend(self, lent: LeaseGranted, turn: int, now: float) -> None:
        """The receiver has room for a piece. One that does not wait for it: nothing happens."""
        piece, end = self._pieces.get(lent.piece), self.offered.ring.nbytes
        if piece is None or piece.timer.phase is not PiecePhase.REQUESTED or lent.offset + self.nbytes(piece) > end:
            return
        piece.lent, piece.turn = lent, turn
        piece.timer.move(PiecePhase.LEASED, now)

    def look(self) -> None:
        """Looks which forward passes have happened."""
        while self._events and (self._events[0][1] is None or self._events[0][1].query()):
            self._computed = self._events.pop(0)[0]

    def ready(self) -> Iterator[Piece]:
        """Pieces that could be packed now."""
        for piece in self._pieces.values():
            if piece.timer.phase is PiecePhase.LEASED and piece.last <= self._computed:
                yield piece

    def begin(self, piece: Piece, now: float) -> None:
        """It is packed, and written."""
        piece.timer.move(PiecePhase.WRITING, now)

    def written(self, number: int, now: float) -> PieceWritten:
        """It is in the ring. Returns what there is to say."""
        piece = self._pieces[number]
        piece.timer.move(PiecePhase.WRITTEN, now)
        return self._staged(piece)

    def unpacked(self, message: PieceUnpacked, now: float) -> bool:
        """False: it was known, or cannot be."""
        piece = self._pieces.get(message.piece)
        if piece is None or piece.timer.phase is not PiecePhase.WRITTEN:
            return False
        piece.timer.move(PiecePhase.UNPACKED, now)
        del self._pieces[message.piece]
        return True

    def nbytes(self, piece: Piece) -> int:
        return (piece.last - piece.first) * self.offered.row_bytes

    def packed(self, piece: Piece, source: Store, target: Store, address: int) -> PackedPiece:
        return PackedPiece(source, target, self.pages, self.pages, piece.first, piece.last, address)

    def due(self, now: float) -> list[LeaseRequest | PieceWritten]:
        """What has to be said again."""
        said: list[LeaseRequest | PieceWritten] = []
        for piece in self._pieces.values():
            if piece.timer.due(now):
                wanted = piece.timer.phase is PiecePhase.REQUESTED
                said.append(
                    LeaseRequest(self._key, piece.number, piece.first, piece.last) if wanted else self._staged(piece)
                )
        return said

    def overdue(self, now: float) -> str:
        """What has taken too long; empty if nothing has."""
        for piece in self._pieces.values():
            if now >= piece.timer.deadline:
                limit = self._table.waits[piece.timer.phase].limit
                rows = f"rows {piece.first} to {piece.last}"
                return f"{rows} were '{piece.timer.phase.value}' in the receiver's ring for {limit:g} s"
        return ""

    def audit(self) -> None:
        assert len(self._pieces) <= WINDOW, f"{self._key}: {len(self._pieces)} pieces on their way"
        assert self.landed <= self._asked <= self._told, f"{self._key}: room asked for what is not computed"
        assert self._computed <= self._told and bool(self._events) == (self._computed < self._told), self._key
        for piece in self._pieces.values():
            assert (piece.lent is None) == (piece.timer.phase is PiecePhase.REQUESTED), f"{self._key}: {piece}"

    def in_flight(self) -> set[int]:
        """Pieces that are being written."""
        return {number for number, each in self._pieces.items() if each.timer.phase is PiecePhase.WRITING}

    @property
    def _asked(self) -> int:
        """Rows [0, asked) were asked room for."""
        return min(self._begun * self.offered.rows, self._total)

    def _staged(self, piece: Piece) -> PieceWritten:
        assert piece.lent is not None
        return PieceWritten(self._key, piece.number, piece.lent.lease)


@dataclass(slots=True)
class _Use:
    name: HandoffId
    ticket: int | None = None  # None: not submitted yet


class SenderBuffers:
    """The sender's buffers, for all its handoffs. One is free again when the write out of it has ended, however it did:
    what a write that nobody knows the end of may still read goes to a lease that nobody reads."""

    def __init__(self, spaces: Sequence[MemoryRange]) -> None:
        self.spaces = tuple(spaces)
        self._uses: dict[int, _Use] = {}

    @property
    def uses(self) -> Mapping[int, HandoffId]:
        """Who has which."""
        return {number: use.name for number, use in self._uses.items()}

    def take(self, name: HandoffId) -> MemoryRange | None:
        """None: all are in use."""
        for number, space in enumerate(self.spaces):
            if number not in self._uses:
                self._uses[number] = _Use(name)
                return space
        return None

    def submitted(self, name: HandoffId, ticket: int) -> None:
        """The write out of the oldest buffer of this handoff that had none."""
        use = next((each for each in self._uses.values() if each.name == name and each.ticket is None), None)
        if use is not None:
            use.ticket = ticket

    def ended(self, name: HandoffId, ticket: int) -> bool:
        """Whether a buffer has become free."""
        for number, use in self._uses.items():
            if (use.name, use.ticket) == (name, ticket):
                del self._uses[number]
                return True
        return False
