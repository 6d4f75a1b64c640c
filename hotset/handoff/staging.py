"""Staging: where two sides divide rows differently, they travel packed, by one write for a piece of a context.

A piece is rows [first, last) of a context with their index keys. Packed, it is one block for each `Block` below, as
[layer][row][bytes of the block], and then the index keys, as [group][row][key]. Both sides compute that from the two
stores, so nobody has to be told. Pure arithmetic; `packing.py` moves the bytes.
"""

from dataclasses import dataclass
from functools import lru_cache

from hotset.base.errors import ConfigError
from hotset.base.units import MIB, ceil_div, show_bytes
from hotset.handoff.layout import count_writes
from hotset.handoff.messages import Ask, Slices, Space, Store
from hotset.handoff.shards import overlaps, row_bytes

# A transfer engine is paid by the write: below this size the writes of a context take longer than its bytes do, and two
# copies more of each byte cost less than that. A handful of writes is quick whatever their size.
SMALL_WRITE_BYTES = 16 << 10
FEW_WRITES = 64

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
def _blocks(source: tuple[Slices, ...], target: tuple[Slices, ...]) -> tuple[Block, ...]:
    takers: dict[Slices, list[int]] = {}
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


def is_worth_it(source: Store, target: Store, ask: Ask, few_writes: int = FEW_WRITES) -> bool:
    """Whether the context would take many small writes, wherever its pages of the source will lie."""
    rows = len(ask.token_ids)
    count = count_writes(source, target, ask.row_pages, ask.key_pages, rows)
    return count > few_writes and rows * packed_row_bytes(source, target) < count * SMALL_WRITE_BYTES


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


def sender_buffers(space: Space) -> tuple[Space, ...]:
    """Memory of a sender, as its buffers."""
    nbytes = space.nbytes // SHARE // ALIGN * ALIGN
    return tuple(Space(space.address + number * nbytes, nbytes) for number in range(SHARE))
