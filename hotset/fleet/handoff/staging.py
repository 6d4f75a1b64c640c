"""Staging: a context that would take many small writes is packed into pieces, each of which takes one write.

This happens mostly if the two sides shard rows differently. A piece is rows [first, last) of a context with their index
keys. A packed piece contains its blocks (see `Block`), each as [layer][row][bytes of the block], and then the index
keys, as [group][row][key]. Both sides compute this layout from the two stores. `packing.py` copies the bytes.

Every process and kind of memory that holds shards has its own staging memory, and all have the same size. A piece is at
the same offset in all of them, and each holds only the blocks of its own shards. If each side has all its shards in one
memory, a piece takes one write. Otherwise it takes one for each pair of memories that exchange blocks.

`ReceiverStaging` is the receiver's part. Its staging memory is a ring, in which space is leased: after `LeaseGranted`,
the sender may write there until it sends `PieceWritten` or reports that it has stopped. Only the receiver writes to the
pages of a staged context. If the sender fails, its leases may have to be quarantined, but the pages are not.

This file has no threads and no clock, and accesses no memory.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from hotset.base.errors import ConfigError
from hotset.base.paged_span import PagedSpan
from hotset.base.units import MIB, ceil_div, show_bytes
from hotset.engine.ports import Route
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.layout import (
    ByteRanges,
    count_writes,
    landing_pages,
    merged,
    overlaps,
    plan_writes,
    row_bytes,
)
from hotset.fleet.handoff.messages import Hello, Store
from hotset.fleet.handoff.ring import ALIGN, Ring
from hotset.fleet.handoff.routes import EXPENSIVE_WRITE_SECONDS
from hotset.fleet.transfer.api import MemoryKind, Writes
from hotset.schedule.handoffs import ContextPages, HandoffKey

# A transfer engine has a fixed cost per write. Below SMALL_WRITE_BYTES, this cost exceeds the cost of copying each byte
# twice more. Up to MAX_DIRECT_WRITES writes are fast enough at any size.
SMALL_WRITE_BYTES = 16 << 10
MAX_DIRECT_WRITES = 64
# Bytes per second that are packed and unpacked. If GPU memory is involved, or if the measured cost of a write is high,
# the limit is computed from that cost and these speeds instead of SMALL_WRITE_BYTES.
HOST_COPY_SPEED, DEVICE_COPY_SPEED = 2e9, 500e9

SOURCE = "host"  # the store of a prefill worker; a piece from its device pool has the same layout
RING_PIECES = 4  # number of pieces that fit into a ring, and number of a sender's buffers


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


@dataclass(frozen=True, slots=True)
class PieceLayout:
    """The offsets of the parts of a packed piece, in bytes from its beginning."""

    blocks: tuple[tuple[int, int, Block], ...]  # offset, length, block
    keys: int
    nbytes: int


def piece_layout(source: Store, target: Store, rows: int) -> PieceLayout:
    """Returns the layout of a piece of this many rows."""
    layers, offset, placed = len(source.shards[0].span.bases), 0, []
    for block in blocks(source, target):
        nbytes = rows * layers * block.row_bytes
        placed.append((offset, nbytes, block))
        offset += nbytes
    return PieceLayout(tuple(placed), keys=offset, nbytes=rows * packed_row_bytes(source, target))


def piece_writes(source: Store, target: Store, rows: int, source_offset: int, target_offset: int) -> Writes:
    """Plans the writes of a piece from the source's staging memory to the target's, at these offsets."""
    layout = piece_layout(source, target, rows)
    parts = [(offset, nbytes, block.source, block.targets) for offset, nbytes, block in layout.blocks]
    if layout.keys < layout.nbytes:
        parts.append((layout.keys, layout.nbytes - layout.keys, 0, tuple(range(len(target.all_keys)))))
    writes = [
        (source.staging[shard].address + source_offset + offset, ring + target_offset + offset, nbytes)
        for offset, nbytes, shard, targets in parts
        for ring in {target.staging[number].address for number in targets}
    ]
    return np.array(merged(sorted(writes, key=lambda write: write[1])), np.int64)


def can_pack_pages(source: Store, target: Store) -> bool:
    """Returns whether rows can be packed in the order of the target's pages: each target shard gets whole rows from one
    source shard, and the model has no index keys. Both sides must be host memory, because writes of pages are too
    small between GPUs."""
    whole = all(
        target.shards[number].span.row_bytes == block.row_bytes
        for block in blocks(source, target)
        for number in block.targets
    )
    on_host = source.memory == target.memory == MemoryKind.HOST.value
    return whole and on_host and can_stage(source) and source.keys is None


def page_writes(source: Store, target: Store, pages: ContextPages, first: int, last: int, offset: int) -> Writes:
    """Plans the writes of a packed piece from its buffer, at this offset of the source's staging memory, to the pages
    of the target. `can_pack_pages` must hold."""
    layers, plans = len(source.shards[0].span.bases), []
    for begin, _, block in piece_layout(source, target, last - first).blocks:
        address = source.staging[block.source].address + offset + begin
        packed = packed_span(address, layers, block.row_bytes, first, last)
        for number in block.targets:
            plans.append(plan_writes(packed, (0,), target.shards[number].span, pages.rows, first, last))
    return np.concatenate(plans)


def packed_span(address: int, layers: int, row_bytes: int, first: int, last: int) -> PagedSpan:
    """Describes packed rows (or keys), [layer][row], which begin at `address`, as a span with a single page, page 0.

    The page has `last` rows, so that position p of the context is row p of the page. Only rows [first, last) exist: the
    bases lie `first` rows before the packed ones.
    """
    layer_bytes = (last - first) * row_bytes
    bases = tuple((address + layer * layer_bytes - first * row_bytes,) for layer in range(layers))
    return PagedSpan(bases=bases, page_bytes=last * row_bytes, part_rows=last, row_bytes=row_bytes)


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
    source: Store,
    target: Store,
    request: msg.HandoffRequest,
    max_direct_writes: int = MAX_DIRECT_WRITES,
    *,
    route: Route | None = None,
    run_pages: int | None = None,
) -> bool:
    """Returns whether direct writes of the context would be many and small. `route` is the measured route between the
    two stores. The pages of the source are not known yet. They are expected in runs of `run_pages` consecutive pages
    or, if that is None, in one run."""
    last, pages = len(request.prompt), landing_pages(request, target)
    spans = [source.shards[0].span, *([] if source.keys is None else [source.keys])]
    numbers = range(max(span.pages_for(last) for span in spans))
    expected = tuple(number + (number // run_pages if run_pages else 0) for number in numbers)
    count = count_writes(source, ContextPages(expected, expected), target, pages, request.first, last)
    nbytes = (last - request.first) * packed_row_bytes(source, target)
    return count > max_direct_writes and nbytes < count * small_write_bytes(source, target, route)


def small_write_bytes(source: Store, target: Store, route: Route | None) -> int:
    """Returns the size below which a write costs more than copies of its bytes. `route` is that of `should_stage`."""
    if route is not None and MemoryKind.DEVICE.value in (source.memory, target.memory):
        return max(SMALL_WRITE_BYTES, int(route.seconds_per_write * DEVICE_COPY_SPEED))
    if route is not None and route.seconds_per_write > EXPENSIVE_WRITE_SECONDS:
        return int(route.seconds_per_write * HOST_COPY_SPEED)
    return SMALL_WRITE_BYTES


def can_stage(store: Store) -> bool:
    """Returns whether contexts can be staged from or to this store: it has staging memory, and the rows of a page are
    contiguous in each layer."""
    return bool(store.staging) and all(len(shard.span.bases[0]) == 1 for shard in store.shards)


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


class SenderBuffers:
    """The sender's buffers, shared by all its handoffs: RING_PIECES equal parts of its staging memory.

    A buffer is free again when the write from it has ended in any state. If the state is unknown, the transfer engine
    may still copy from the buffer, but only into a quarantined lease, which is never unpacked.
    """

    def __init__(self, staging_bytes: int) -> None:
        """If `staging_bytes` is 0, there are no buffers, and nothing can be staged."""
        self.nbytes = staging_bytes // RING_PIECES // ALIGN * ALIGN  # of each buffer
        self._buffer_of: dict[int, int] = {}  # the number of the buffer that a list of writes uses, by list

    @property
    def users(self) -> Set[int]:
        """Returns the numbers of the lists of writes that use a buffer."""
        return self._buffer_of.keys()

    def acquire(self, list_number: int) -> int | None:
        """Returns the offset of a free buffer, which this list of writes then uses, or None if all are in use."""
        free = next((buffer for buffer in range(RING_PIECES) if buffer not in self._buffer_of.values()), None)
        if free is None:
            return None
        self._buffer_of[list_number] = free
        return free * self.nbytes

    def on_write_ended(self, list_number: int) -> bool:
        """Frees the buffer of this list of writes. Returns False if it did not use one."""
        return self._buffer_of.pop(list_number, None) is not None


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

    def packed_piece(self, piece: int, offset: int) -> msg.PackedPiece:
        first, last = self.pieces[piece]
        pages = landing_pages(self.request, self.target)
        return msg.PackedPiece(self.source, self.target, pages, first, last, offset)


class ReceiverStaging:
    """The ring, and all staged contexts that land in this worker. Only the receiver changes it."""

    def __init__(self, stores: Mapping[msg.StoreName, Store]) -> None:
        """At least one of the stores has staging memory."""
        self._stores = {name: store for name, store in stores.items() if can_stage(store)}
        self.ring = Ring(next(store.staging[0].nbytes for store in stores.values() if store.staging))
        self._contexts: dict[HandoffKey, _StagedContext] = {}

    def begin(self, peer: str, hello: Hello, request: msg.HandoffRequest, piece_bytes: int) -> bool:
        """Begins a staged context. Returns False if it cannot be staged, for example because too much of the ring is
        in quarantine."""
        source, target = hello.stores.get(SOURCE), self._stores.get(request.landing)
        if source is None or target is None or not self.ring.fits(piece_bytes):
            return False
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
            key, piece = lease.owner
            messages.append(
                msg.SendMessage(self._contexts[key].peer, msg.LeaseGranted(key, piece, lease.number, lease.first))
            )
        return messages

    def on_piece_written(self, written: msg.PieceWritten) -> msg.PackedPiece | None:
        """Returns the piece to unpack; `on_unpacked` must follow. Returns None if the piece does not (or no longer)
        have this lease, or is already being unpacked."""
        context, owner = self._contexts[written.key], (written.key, written.piece)
        lease = self.ring.lease_of(owner)
        if written.piece in context.unpacking:
            return None
        if lease is None or lease.number != written.lease:
            return None
        context.unpacking.add(written.piece)
        return context.packed_piece(written.piece, lease.first)

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
            if piece in context.unpacking:  # the piece is in the ring, so its sender does not write there any more
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
        """Forgets a context that has ended, and frees its leases. Leases in quarantine then stay there for good."""
        self.stop(key)
        for piece in self._contexts.pop(key).pieces:
            self.ring.withdraw((key, piece))

    def audit(self, keys: set[HandoffKey]) -> None:
        """Asserts that exactly these contexts are staged, and that they own every lease and every waiting request."""
        self.ring.audit()
        assert self._contexts.keys() == keys, f"contexts {self._contexts.keys()} are staged, not {keys}"
        owners = {(key, piece) for key, context in self._contexts.items() for piece in context.pieces}
        leased = sum(self.ring.lease_of(owner) is not None for owner in owners)
        assert leased + self.ring.waiting == len(owners), f"{self.ring.waiting} wait and {leased} have leases: {owners}"
        assert leased or self.ring.held == self.ring.quarantined, "bytes of the ring are leased, but have no owner"
        for key, context in self._contexts.items():
            assert not context.unpacked.keys() & context.pieces.keys(), f"{key}: an unpacked piece holds a lease"
            assert context.unpacking <= context.pieces.keys(), f"{key}: a piece is unpacked without a lease"
