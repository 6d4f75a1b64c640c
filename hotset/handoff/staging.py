"""Staging: where two sides divide rows differently, they travel packed, by one write for a piece of a context.

A piece is rows [first, last) of a context with their index keys. Packed, it is one block for each `Block` below, as
[layer][row][bytes of the block], and then the index keys, as [group][row][key]. Both sides compute that from the two
stores, so nobody has to be told. Pure arithmetic; `packing.py` moves the bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from hotset.base.errors import ConfigError
from hotset.base.units import MIB, ceil_div, show_bytes
from hotset.handoff.layout import count_writes, overlaps, row_bytes
from hotset.handoff.messages import (
    HandoffKey,
    HandoffRequest,
    Hello,
    Landing,
    LeaseGranted,
    LeaseRequest,
    MemoryRange,
    PackedPiece,
    PieceUnpacked,
    PieceWritten,
    RowSlices,
    SendMessage,
    Store,
)
from hotset.memory.ring import Ring

# A transfer engine is paid by the write: below this size the writes of a context take longer than its bytes do, and two
# copies more of each byte cost less than that. A handful of writes is quick whatever their size.
SMALL_WRITE_BYTES = 16 << 10
MAX_DIRECT_WRITES = 64

SHARE = 4  # pieces that fit into a ring at a time, and buffers of a sender: one is packed while others travel
ALIGN = 256  # of leases, and so of what is packed


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that one shard of the source gives, and all these shards of the target take."""

    source: int
    targets: tuple[int, ...]
    pieces: tuple[tuple[int, int, int], ...]  # (first byte in the source's stored row, in the targets', bytes)

    @property
    def row_bytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.pieces)


def blocks(source: Store, target: Store) -> tuple[Block, ...]:
    """What is packed of each row, in this order. Shards of the target that hold the same get one block."""
    return _blocks(tuple(each.slices for each in source.shards), tuple(each.slices for each in target.shards))


@lru_cache(maxsize=1024)
def _blocks(source: tuple[RowSlices, ...], target: tuple[RowSlices, ...]) -> tuple[Block, ...]:
    takers: dict[RowSlices, list[int]] = {}
    for number, slices in enumerate(target):
        takers.setdefault(slices, []).append(number)
    distinct = tuple(takers)
    return tuple(
        Block(each.source, tuple(takers[distinct[each.target]]), each.pieces) for each in overlaps(source, distinct)
    )


def packed_row_bytes(source: Store, target: Store) -> int:
    """Of one row of a context: all layers, and its index keys."""
    layers = len(source.shards[0].span.bases)
    keys = 0 if source.keys is None else len(source.keys.bases) * source.keys.row_bytes
    return layers * sum(block.row_bytes for block in blocks(source, target)) + keys


def piece_rows(source: Store, target: Store, ring_bytes: int, buffer_bytes: int) -> int:
    """Rows of a piece: what fits the sender's buffer and this share of the ring. 0: not even one row does."""
    return min(ring_bytes // SHARE // ALIGN * ALIGN, buffer_bytes) // packed_row_bytes(source, target)


def is_worth_it(source: Store, target: Store, ask: HandoffRequest, max_direct_writes: int = MAX_DIRECT_WRITES) -> bool:
    """Whether the context would take many small writes, wherever its pages of the source will lie."""
    rows = len(ask.prompt)
    count = count_writes(source, target, ask.row_pages, ask.key_pages, rows)
    return count > max_direct_writes and rows * packed_row_bytes(source, target) < count * SMALL_WRITE_BYTES


def can_unpack(store: Store) -> bool:
    """Pages in parts are for direct writes alone."""
    return all(len(shard.span.bases[0]) == 1 for shard in store.shards)


def check_staging(nbytes: int, store: Store) -> None:
    """For start-up: ConfigError if so little staging memory could carry nothing from or to this store."""
    keys = 0 if store.keys is None else len(store.keys.bases) * store.keys.row_bytes
    layers = len(store.shards[0].span.bases)
    row = layers * row_bytes(store) + keys
    least = SHARE * ceil_div(row, ALIGN) * ALIGN
    if nbytes < least:
        raise ConfigError(
            f"staging of {show_bytes(nbytes)} holds less than {SHARE} pieces of one row, which is {row} bytes over "
            f"{layers} layers: --staging-mib {ceil_div(least, MIB)} is the least that works"
        )


def sender_buffers(space: MemoryRange) -> tuple[MemoryRange, ...]:
    """Memory of a sender, as its buffers."""
    nbytes = space.nbytes // SHARE // ALIGN * ALIGN
    return tuple(MemoryRange(space.address + number * nbytes, nbytes) for number in range(SHARE))


Owner = tuple[HandoffKey, int]  # of a lease: the handoff, and the number of a piece


@dataclass(slots=True)
class _Context:
    peer: str
    ask: HandoffRequest
    source: Store
    target: Store
    piece_bytes: int  # at the most
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)  # that wait for room, or have it: their rows
    unpacked: dict[int, int] = field(default_factory=dict)  # by number: rows
    stopping: bool = False  # room that it does not have yet is wanted no more
    doubtful: list[int] = field(default_factory=list)  # leases in quarantine

    def packed(self, piece: int, address: int) -> PackedPiece:
        first, last = self.pieces[piece]
        pages = self.ask.row_pages, self.ask.key_pages
        return PackedPiece(self.source, self.target, *pages, first, last, address)


class ReceiverStaging:
    """The ring, and every context on its way through it. Only the receiver changes it."""

    def __init__(self, space: MemoryRange, stores: Mapping[Landing, Store]) -> None:
        """`space` is the ring's memory. `stores` are the landings into which this process can unpack."""
        self.ring = Ring(space.nbytes)
        self._space, self._stores = space, dict(stores)
        self._contexts: dict[HandoffKey, _Context] = {}

    def begin(self, peer: str, hello: Hello, ask: HandoffRequest, piece_bytes: int) -> bool:
        """False: it cannot come this way. Too much of the ring may be in quarantine."""
        target = self._stores.get(ask.landing)
        if target is None or len(hello.stores) != 1 or not self.ring.fits(piece_bytes):
            return False
        (source,) = hello.stores.values()
        self._contexts[ask.key] = _Context(peer, ask, source, target, piece_bytes)
        return True

    def want(self, want: LeaseRequest) -> list[SendMessage]:
        """Puts a piece in the queue for room. Returns what there is to say now; the rest comes with `granted`."""
        context, owner = self._contexts[want.key], (want.key, want.piece)
        if want.piece in context.unpacked:
            return [SendMessage(context.peer, PieceUnpacked(want.key, want.piece))]
        lease = self.ring.lease_of(owner)
        if lease is not None:
            return [SendMessage(context.peer, LeaseGranted(want.key, want.piece, lease.number, lease.first))]
        nbytes = (want.last - want.first) * packed_row_bytes(context.source, context.target)
        sound = 0 <= want.first < want.last <= len(context.ask.prompt) and nbytes <= context.piece_bytes
        if sound and not context.stopping and want.piece not in context.pieces:
            context.pieces[want.piece] = want.first, want.last
            self.ring.request(owner, nbytes)
        return []

    def granted(self) -> list[SendMessage]:
        """What there is to say to those who have got room since this was called last."""
        said = []
        for lease in self.ring.take_granted():
            key, piece = self._owner(lease.owner)
            said.append(SendMessage(self._contexts[key].peer, LeaseGranted(key, piece, lease.number, lease.first)))
        return said

    def staged(self, staged: PieceWritten) -> PackedPiece | None:
        """A piece is in the ring: what is to be unpacked. None: it was, or the lease is not that piece's. The caller
        unpacks before it says anything to anybody: the room is given to others here."""
        context, owner = self._contexts[staged.key], (staged.key, staged.piece)
        lease = self.ring.lease_of(owner)
        if lease is None or lease.number != staged.lease:
            return None
        packed = context.packed(staged.piece, self._space.address + lease.first)
        del context.pieces[staged.piece]
        context.unpacked[staged.piece] = packed.last - packed.first
        self.ring.release(lease.number)
        return packed

    def is_unpacked(self, key: HandoffKey, piece: int) -> bool:
        return piece in self._contexts[key].unpacked

    def rows(self, key: HandoffKey) -> int:
        """Of a context: so many are in their pages."""
        return sum(self._contexts[key].unpacked.values())

    def stop(self, key: HandoffKey) -> None:
        """Nobody wants this context any more. Its sender may still write to the room that it has."""
        context = self._contexts[key]
        context.stopping = True
        for piece in list(context.pieces):
            if self.ring.lease_of((key, piece)) is None:
                self.ring.withdraw((key, piece))
                del context.pieces[piece]

    def doubt(self, key: HandoffKey) -> bool:
        """Quarantines the context's leases until `end_quarantine`. Returns whether it has any."""
        self.stop(key)
        context = self._contexts[key]
        for piece in context.pieces:
            lease = self.ring.lease_of((key, piece))
            assert lease is not None
            self.ring.quarantine(lease.number)
            context.doubtful.append(lease.number)
        context.pieces.clear()
        return bool(context.doubtful)

    def end_quarantine(self, key: HandoffKey) -> None:
        """Its sender has stopped."""
        for number in self._contexts[key].doubtful:
            self.ring.end_quarantine(number)

    def end(self, key: HandoffKey) -> None:
        """Nothing more comes of it. Room that is in doubt stays so for good."""
        self.stop(key)
        for piece in self._contexts.pop(key).pieces:
            self.ring.withdraw((key, piece))

    def audit(self, keys: set[HandoffKey]) -> None:
        """Proves that these contexts, and no others, hold or want room."""
        self.ring.audit()
        assert self._contexts.keys() == keys, f"staged contexts {self._contexts.keys()}, not {keys}"
        owners = {(key, piece) for key, context in self._contexts.items() for piece in context.pieces}
        leased = sum(self.ring.lease_of(owner) is not None for owner in owners)
        assert leased + self.ring.waiting == len(owners), f"{self.ring.waiting} wait, {leased} have room: {owners}"
        assert leased or self.ring.held == self.ring.quarantined, "room that nobody has is not free"
        for key, context in self._contexts.items():
            assert not context.unpacked.keys() & context.pieces.keys(), f"{key}: unpacked, and wanted"

    @staticmethod
    def _owner(owner: object) -> Owner:
        assert isinstance(owner, tuple)
        key, piece = owner
        return key, piece
