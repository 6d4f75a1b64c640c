"""Staging: where two sides shard rows differently, rows travel packed, with one write for each piece of a context.

A piece is rows [first, last) of a context with their index keys. Packed, it consists of one block for each `Block`
below, as [layer][row][bytes of the block], and then the index keys, as [group][row][key]. Both sides compute this
layout from the two stores, so it needs no message. `packing.py` moves the bytes.

`ReceiverStaging` is the decode side. Space in the ring is leased: from `LeaseGranted` on, the sender may write there,
until it sends `PieceWritten` or reports that it has stopped. Only this worker writes to the pages of a staged context.
If the sender fails, its leases may have to be quarantined, but never its pages.

Everything here is pure: no threads, no clock, no memory access.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from hotset.base.errors import ConfigError
from hotset.base.units import MIB, ceil_div, show_bytes
from hotset.handoff.layout import ByteRanges, count_writes, overlaps, row_bytes
from hotset.handoff.messages import (
    HandoffKey,
    HandoffRequest,
    Hello,
    LeaseGranted,
    LeaseRequest,
    MemoryRange,
    PackedPiece,
    PieceUnpacked,
    PieceWritten,
    RowSlices,
    SendMessage,
    Store,
    StoreName,
)
from hotset.memory.ring import Ring

# The cost of a transfer engine is per write. Below this size the writes of a context take longer than its bytes, and
# two more copies of each byte cost less. A few writes are quick at any size.
SMALL_WRITE_BYTES = 16 << 10
MAX_DIRECT_WRITES = 64

RING_PIECES = 4  # pieces that fit into a ring, and buffers of a sender: one is packed while others are in flight
ALIGN = 256  # of leases, and so of packed pieces


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes of a row that one shard of the source provides and several shards of the target receive."""

    source: int
    targets: tuple[int, ...]
    byte_ranges: ByteRanges

    @property
    def row_bytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.byte_ranges)


def blocks(source: Store, target: Store) -> tuple[Block, ...]:
    """Returns the blocks that are packed of each row, in order. Target shards with the same bytes share a block."""
    return _blocks(tuple(shard.slices for shard in source.shards), tuple(shard.slices for shard in target.shards))


@lru_cache(maxsize=1024)
def _blocks(source: tuple[RowSlices, ...], target: tuple[RowSlices, ...]) -> tuple[Block, ...]:
    targets: dict[RowSlices, list[int]] = {}
    for number, slices in enumerate(target):
        targets.setdefault(slices, []).append(number)
    distinct = tuple(targets)
    return tuple(
        Block(overlap.source, tuple(targets[distinct[overlap.target]]), overlap.byte_ranges)
        for overlap in overlaps(source, distinct)
    )


def packed_row_bytes(source: Store, target: Store) -> int:
    """Returns the packed bytes of one position of a context: its rows in all layers, and its index keys."""
    layers = len(source.shards[0].span.bases)
    keys = 0 if source.keys is None else len(source.keys.bases) * source.keys.row_bytes
    return layers * sum(block.row_bytes for block in blocks(source, target)) + keys


def piece_rows(source: Store, target: Store, ring_bytes: int, buffer_bytes: int) -> int:
    """Returns how many rows of a piece fit into the sender's buffer and its share of the ring; perhaps 0."""
    return min(ring_bytes // RING_PIECES // ALIGN * ALIGN, buffer_bytes) // packed_row_bytes(source, target)


def should_stage(
    source: Store, target: Store, request: HandoffRequest, max_direct_writes: int = MAX_DIRECT_WRITES
) -> bool:
    """Returns whether the context would take many small writes, for any pages of the source."""
    rows = len(request.prompt)
    count = count_writes(source, target, request.row_pages, request.key_pages, rows)
    return count > max_direct_writes and rows * packed_row_bytes(source, target) < count * SMALL_WRITE_BYTES


def can_pack(store: Store) -> bool:
    """Returns whether pages of this store can be packed and unpacked. Pages in several parts cannot."""
    return all(len(shard.span.bases[0]) == 1 for shard in store.shards)


def check_staging(nbytes: int, store: Store) -> None:
    """Raises ConfigError at start-up if the staging memory is too small for any piece of this store."""
    keys = 0 if store.keys is None else len(store.keys.bases) * store.keys.row_bytes
    layers = len(store.shards[0].span.bases)
    position_bytes = layers * row_bytes(store) + keys
    minimum = RING_PIECES * ceil_div(position_bytes, ALIGN) * ALIGN
    if nbytes < minimum:
        raise ConfigError(
            f"staging memory of {show_bytes(nbytes)} holds less than {RING_PIECES} pieces of one row, which is "
            f"{position_bytes} bytes over {layers} layers: use --staging-mib {ceil_div(minimum, MIB)} or more"
        )


def split_into_buffers(memory: MemoryRange) -> tuple[MemoryRange, ...]:
    """Divides a sender's staging memory into buffers."""
    nbytes = memory.nbytes // RING_PIECES // ALIGN * ALIGN
    return tuple(MemoryRange(memory.address + number * nbytes, nbytes) for number in range(RING_PIECES))


@dataclass(slots=True)
class _StagedContext:
    peer: str
    request: HandoffRequest
    source: Store
    target: Store
    piece_bytes: int  # at most
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)  # rows of pieces that have or wait for a lease
    unpacked: dict[int, int] = field(default_factory=dict)  # number of rows, by piece
    stopping: bool = False  # it gets no further leases
    quarantined: list[int] = field(default_factory=list)  # numbers of its leases in quarantine

    def packed_piece(self, piece: int, address: int) -> PackedPiece:
        first, last = self.pieces[piece]
        return PackedPiece(
            source=self.source,
            target=self.target,
            row_pages=self.request.row_pages,
            key_pages=self.request.key_pages,
            first=first,
            last=last,
            address=address,
        )


class ReceiverStaging:
    """The ring, and every context that passes through it. Only the receiver changes it."""

    def __init__(self, memory: MemoryRange, stores: Mapping[StoreName, Store]) -> None:
        """`memory` is the ring's. `stores` are the landings into which this process can unpack."""
        self.ring = Ring(memory.nbytes)
        self._memory, self._stores = memory, dict(stores)
        self._contexts: dict[HandoffKey, _StagedContext] = {}

    def begin(self, peer: str, hello: Hello, request: HandoffRequest, piece_bytes: int) -> bool:
        """Returns False if the context cannot be staged, for example because too much of the ring is quarantined."""
        target = self._stores.get(request.landing)
        if target is None or len(hello.stores) != 1 or not self.ring.fits(piece_bytes):
            return False
        (source,) = hello.stores.values()
        self._contexts[request.key] = _StagedContext(peer, request, source, target, piece_bytes)
        return True

    def request_lease(self, wanted: LeaseRequest) -> list[SendMessage]:
        """Queues a piece for a lease. Returns what can be answered now; `take_grants` returns the grants."""
        context, owner = self._contexts[wanted.key], (wanted.key, wanted.piece)
        if wanted.piece in context.unpacked:
            return [SendMessage(context.peer, PieceUnpacked(wanted.key, wanted.piece))]
        lease = self.ring.lease_of(owner)
        if lease is not None:
            return [SendMessage(context.peer, LeaseGranted(wanted.key, wanted.piece, lease.number, lease.first))]
        nbytes = (wanted.last - wanted.first) * packed_row_bytes(context.source, context.target)
        valid = 0 <= wanted.first < wanted.last <= len(context.request.prompt) and nbytes <= context.piece_bytes
        if valid and not context.stopping and wanted.piece not in context.pieces:
            context.pieces[wanted.piece] = wanted.first, wanted.last
            self.ring.request(owner, nbytes)
        return []

    def take_grants(self) -> list[SendMessage]:
        """Returns the messages for leases that the ring has granted since the last call."""
        messages = []
        for lease in self.ring.take_granted():
            key, piece = self._owner(lease.owner)
            messages.append(SendMessage(self._contexts[key].peer, LeaseGranted(key, piece, lease.number, lease.first)))
        return messages

    def on_piece_written(self, written: PieceWritten) -> PackedPiece | None:
        """Returns the piece to unpack, or None if it was unpacked before or the lease is not that piece's. This ends
        the lease, so the caller must unpack before it sends any message."""
        context, owner = self._contexts[written.key], (written.key, written.piece)
        lease = self.ring.lease_of(owner)
        if lease is None or lease.number != written.lease:
            return None
        packed = context.packed_piece(written.piece, self._memory.address + lease.first)
        del context.pieces[written.piece]
        context.unpacked[written.piece] = packed.last - packed.first
        self.ring.release(lease.number)
        return packed

    def is_unpacked(self, key: HandoffKey, piece: int) -> bool:
        return piece in self._contexts[key].unpacked

    def unpacked_rows(self, key: HandoffKey) -> int:
        return sum(self._contexts[key].unpacked.values())

    def stop(self, key: HandoffKey) -> None:
        """Withdraws the context's waiting lease requests. Its sender may still write to the leases that it has."""
        context = self._contexts[key]
        context.stopping = True
        for piece in list(context.pieces):
            if self.ring.lease_of((key, piece)) is None:
                self.ring.withdraw((key, piece))
                del context.pieces[piece]

    def quarantine(self, key: HandoffKey) -> bool:
        """Quarantines the context's leases until `end_quarantine`. Returns whether it has any."""
        self.stop(key)
        context = self._contexts[key]
        for piece in context.pieces:
            lease = self.ring.lease_of((key, piece))
            assert lease is not None
            self.ring.quarantine(lease.number)
            context.quarantined.append(lease.number)
        context.pieces.clear()
        return bool(context.quarantined)

    def end_quarantine(self, key: HandoffKey) -> None:
        """Frees the context's quarantined leases, because its sender has stopped."""
        for number in self._contexts[key].quarantined:
            self.ring.end_quarantine(number)

    def remove(self, key: HandoffKey) -> None:
        """Forgets a context that has ended. Leases that are still quarantined remain so for good."""
        self.stop(key)
        for piece in self._contexts.pop(key).pieces:
            self.ring.withdraw((key, piece))

    def audit(self, keys: set[HandoffKey]) -> None:
        """Asserts that exactly these contexts hold or request leases."""
        self.ring.audit()
        assert self._contexts.keys() == keys, f"staged contexts {self._contexts.keys()}, not {keys}"
        owners = {(key, piece) for key, context in self._contexts.items() for piece in context.pieces}
        leased = sum(self.ring.lease_of(owner) is not None for owner in owners)
        assert leased + self.ring.waiting == len(owners), f"{self.ring.waiting} wait, {leased} have leases: {owners}"
        assert leased or self.ring.held == self.ring.quarantined, "a part of the ring has no owner and is not free"
        for key, context in self._contexts.items():
            assert not context.unpacked.keys() & context.pieces.keys(), f"{key}: an unpacked piece holds a lease"

    @staticmethod
    def _owner(owner: object) -> tuple[HandoffKey, int]:
        assert isinstance(owner, tuple)
        key, piece = owner
        return key, piece
