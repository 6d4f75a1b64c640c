"""Staging: a context that would take many small writes is packed into pieces, each of which takes one write.

This happens mostly if the two sides shard rows differently. A piece is rows [first, last) of a context with their index
keys. A packed piece contains its blocks (see `Block`), each as [layer][row][bytes of the block], and then the index
keys, as [group][row][key]. Both sides compute this layout from the two stores. `packing.py` copies the bytes.

`ReceiverStaging` is the receiver's part. Its staging memory is a ring, in which space is leased: after `LeaseGranted`,
the sender may write there until it sends `PieceWritten` or reports that it has stopped. Only the receiver writes to the
pages of a staged context. If the sender fails, its leases may have to be quarantined, but the pages are not.

This file has no threads and no clock, and accesses no memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from hotset.base.errors import ConfigError
from hotset.base.units import MIB, ceil_div, show_bytes
from hotset.handoff import messages as msg
from hotset.handoff.layout import ByteRanges, count_writes, landing_pages, overlaps, row_bytes
from hotset.handoff.messages import HandoffId, HandoffKey, Hello, MemoryRange, Store
from hotset.memory.ring import Ring

# A transfer engine has a fixed cost per write. If writes are smaller than SMALL_WRITE_BYTES, this cost exceeds that of
# two additional copies of each byte. Up to MAX_DIRECT_WRITES writes are fast enough at any size.
SMALL_WRITE_BYTES = 16 << 10
MAX_DIRECT_WRITES = 64

RING_PIECES = 4  # number of pieces that fit into a ring, and of a sender's buffers
ALIGN = 256  # alignment of leases in bytes, and so of packed pieces


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes of a row that come from one shard of the source and go to one or more shards of the target."""

    source: int  # number of the shard
    targets: tuple[int, ...]  # numbers of the shards, which all hold the same bytes
    byte_ranges: ByteRanges

    @property
    def row_bytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.byte_ranges)


def blocks(source: Store, target: Store) -> tuple[Block, ...]:
    """Returns the blocks of a packed row, in order. Target shards that hold the same bytes share a block."""
    return _blocks(tuple(shard.slices for shard in source.shards), tuple(shard.slices for shard in target.shards))


@lru_cache(maxsize=1024)
def _blocks(source: tuple[msg.RowSlices, ...], target: tuple[msg.RowSlices, ...]) -> tuple[Block, ...]:
    targets: dict[msg.RowSlices, list[int]] = {}
    for number, slices in enumerate(target):
        targets.setdefault(slices, []).append(number)
    distinct = tuple(targets)
    return tuple(
        Block(overlap.source, tuple(targets[distinct[overlap.target]]), overlap.byte_ranges)
        for overlap in overlaps(source, distinct)
    )


def packed_row_bytes(source: Store, target: Store) -> int:
    """Returns the packed bytes of one position of a context: its row in every layer, and its index keys."""
    layers = len(source.shards[0].span.bases)
    keys = 0 if source.keys is None else len(source.keys.bases) * source.keys.row_bytes
    return layers * sum(block.row_bytes for block in blocks(source, target)) + keys


def piece_rows(source: Store, target: Store, ring_bytes: int, buffer_bytes: int) -> int:
    """Returns how many rows a piece can have: it must fit into a buffer of the sender and into a quarter of the ring.
    The result is 0 if not even one row fits."""
    return min(ring_bytes // RING_PIECES // ALIGN * ALIGN, buffer_bytes) // packed_row_bytes(source, target)


def should_stage(
    source: Store, target: Store, request: msg.HandoffRequest, max_direct_writes: int = MAX_DIRECT_WRITES
) -> bool:
    """Returns whether direct writes of the context would be many and small, even with consecutive source pages."""
    pages, last = landing_pages(request, target), len(request.prompt)
    count, rows = count_writes(source, target, pages.rows, pages.keys, request.first, last), last - request.first
    return count > max_direct_writes and rows * packed_row_bytes(source, target) < count * SMALL_WRITE_BYTES


def can_pack(store: Store) -> bool:
    """Returns whether pages of this store can be packed: the rows of a page must be contiguous in each layer."""
    return all(len(shard.span.bases[0]) == 1 for shard in store.shards)


def check_staging(nbytes: int, store: Store) -> None:
    """Raises ConfigError if the staging memory is too small for RING_PIECES pieces of one row of this store."""
    keys = 0 if store.keys is None else len(store.keys.bases) * store.keys.row_bytes
    layers = len(store.shards[0].span.bases)
    position_bytes = layers * row_bytes(store) + keys
    minimum = RING_PIECES * ceil_div(position_bytes, ALIGN) * ALIGN
    if nbytes < minimum:
        raise ConfigError(
            f"staging memory of {show_bytes(nbytes)} cannot hold {RING_PIECES} pieces of one row each, because a row "
            f"takes {position_bytes} bytes over {layers} layers: use --staging-mib {ceil_div(minimum, MIB)} or more"
        )


def split_into_buffers(memory: MemoryRange) -> tuple[MemoryRange, ...]:
    """Divides a sender's staging memory into RING_PIECES buffers of equal size."""
    nbytes = memory.nbytes // RING_PIECES // ALIGN * ALIGN
    return tuple(MemoryRange(memory.address + number * nbytes, nbytes) for number in range(RING_PIECES))


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


@dataclass(slots=True)
class _StagedContext:
    peer: str
    request: msg.HandoffRequest
    source: Store
    target: Store
    piece_bytes: int  # size of the largest piece
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)  # rows of each piece that has or awaits a lease
    unpacking: set[int] = field(default_factory=set)  # pieces that are being copied to their pages; they have a lease
    unpacked: dict[int, int] = field(default_factory=dict)  # number of rows of each unpacked piece
    stopping: bool = False  # no further lease is granted
    quarantined: list[int] = field(default_factory=list)  # numbers of the leases in quarantine

    def packed_piece(self, piece: int, address: int) -> msg.PackedPiece:
        first, last = self.pieces[piece]
        pages = landing_pages(self.request, self.target)
        return msg.PackedPiece(
            source=self.source,
            target=self.target,
            row_pages=pages.rows,
            key_pages=pages.keys,
            first=first,
            last=last,
            address=address,
        )


class ReceiverStaging:
    """The ring, and all staged contexts that land in this worker. Only the receiver changes it."""

    def __init__(self, memory: MemoryRange, stores: Mapping[msg.StoreName, Store]) -> None:
        """`memory` is the memory of the ring. `stores` are those into which this process can unpack."""
        self.ring = Ring(memory.nbytes)
        self._memory, self._stores = memory, dict(stores)
        self._contexts: dict[HandoffKey, _StagedContext] = {}

    def begin(self, peer: str, hello: Hello, request: msg.HandoffRequest, piece_bytes: int) -> bool:
        """Begins a staged context. Returns False if it cannot be staged, for example because too much of the ring is
        in quarantine."""
        target = self._stores.get(request.landing)
        if target is None or len(hello.stores) != 1 or not self.ring.fits(piece_bytes):
            return False
        (source,) = hello.stores.values()
        self._contexts[request.key] = _StagedContext(peer, request, source, target, piece_bytes)
        return True

    def request_lease(self, request: msg.LeaseRequest) -> list[msg.SendMessage]:
        """Queues a piece for a lease. Ignores invalid requests. If the lease was granted before, or the piece is
        unpacked, returns the answer; `take_grants` returns new grants."""
        context, owner = self._contexts[request.key], (request.key, request.piece)
        if request.piece in context.unpacked:
            return [msg.SendMessage(context.peer, msg.PieceUnpacked(request.key, request.piece))]
        lease = self.ring.lease_of(owner)
        if lease is not None:
            return [
                msg.SendMessage(context.peer, msg.LeaseGranted(request.key, request.piece, lease.number, lease.first))
            ]
        nbytes = (request.last - request.first) * packed_row_bytes(context.source, context.target)
        first, last = context.request.first, len(context.request.prompt)
        valid = first <= request.first < request.last <= last and nbytes <= context.piece_bytes
        if valid and not context.stopping and request.piece not in context.pieces:
            context.pieces[request.piece] = request.first, request.last
            self.ring.request(owner, nbytes)
        return []

    def take_grants(self) -> list[msg.SendMessage]:
        """Returns the messages for leases that the ring has granted since the last call."""
        messages = []
        for lease in self.ring.take_granted():
            key, piece = self._owner(lease.owner)
            messages.append(
                msg.SendMessage(self._contexts[key].peer, msg.LeaseGranted(key, piece, lease.number, lease.first))
            )
        return messages

    def on_piece_written(self, written: msg.PieceWritten) -> msg.PackedPiece | None:
        """Returns the piece to unpack; `on_unpacked` must follow. Returns None if the piece does not have this lease
        (any more), or is being unpacked."""
        context, owner = self._contexts[written.key], (written.key, written.piece)
        lease = self.ring.lease_of(owner)
        if written.piece in context.unpacking:
            return None
        if lease is None or lease.number != written.lease:
            return None
        context.unpacking.add(written.piece)
        return context.packed_piece(written.piece, self._memory.address + lease.first)

    def on_unpacked(self, key: HandoffKey, piece: int) -> None:
        """Ends the lease of a piece that is in its pages. Ignores a piece whose lease was freed before."""
        context = self._contexts[key]
        if piece in context.unpacking:
            context.unpacking.remove(piece)
            first, last = context.pieces.pop(piece)
            context.unpacked[piece] = last - first
            self.ring.withdraw((key, piece))

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
        """Quarantines the context's leases until `end_quarantine`. Returns whether the context has any."""
        self.stop(key)
        context = self._contexts[key]
        for piece in context.pieces:
            lease = self.ring.lease_of((key, piece))
            assert lease is not None
            if piece in context.unpacking:  # it is written, so its sender does not write there any more
                self.ring.withdraw((key, piece))
                continue
            self.ring.quarantine(lease.number)
            context.quarantined.append(lease.number)
        context.pieces.clear()
        context.unpacking.clear()
        return bool(context.quarantined)

    def end_quarantine(self, key: HandoffKey) -> None:
        """Frees the context's quarantined leases, because its sender has stopped."""
        for number in self._contexts[key].quarantined:
            self.ring.end_quarantine(number)

    def remove(self, key: HandoffKey) -> None:
        """Forgets a context that has ended, and frees its leases. Those that are in quarantine stay there for good."""
        self.stop(key)
        for piece in self._contexts.pop(key).pieces:
            self.ring.withdraw((key, piece))

    def audit(self, keys: set[HandoffKey]) -> None:
        """Asserts that exactly these contexts are staged, and that every lease and every waiting request is theirs."""
        self.ring.audit()
        assert self._contexts.keys() == keys, f"contexts {self._contexts.keys()} are staged, not {keys}"
        owners = {(key, piece) for key, context in self._contexts.items() for piece in context.pieces}
        leased = sum(self.ring.lease_of(owner) is not None for owner in owners)
        assert leased + self.ring.waiting == len(owners), f"{self.ring.waiting} wait and {leased} have leases: {owners}"
        assert leased or self.ring.held == self.ring.quarantined, "bytes of the ring are leased, but have no owner"
        for key, context in self._contexts.items():
            assert not context.unpacked.keys() & context.pieces.keys(), f"{key}: an unpacked piece holds a lease"
            assert context.unpacking <= context.pieces.keys(), f"{key}: a piece is unpacked without a lease"

    @staticmethod
    def _owner(owner: object) -> tuple[HandoffKey, int]:
        assert isinstance(owner, tuple)
        key, piece = owner
        return key, piece
