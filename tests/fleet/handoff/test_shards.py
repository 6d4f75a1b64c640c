"""Tests of the planned writes between stores with different shardings. The writes are performed on poisoned memory, and
the result is compared with heads that are copied one by one."""

import ctypes
from dataclasses import replace

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from sharded_memory import HEAD_BYTES, ShardedMemory, fresh_pages

from hotset.base.paged_span import PagedSpan
from hotset.fleet.handoff.deliveries import DirectDelivery, Sources, rotated
from hotset.fleet.handoff.layout import (
    check_peers,
    count_writes,
    first_gap,
    head_shards,
    overlaps,
    plan_context_writes,
    row_bytes,
    store_overlaps,
)
from hotset.fleet.handoff.messages import Hello, ModelIdentity, PackedPiece, Shard, Store
from hotset.fleet.handoff.packing import StagingMemory, pack, unpack
from hotset.fleet.handoff.staging import SenderBuffers, packed_row_bytes, piece_writes
from hotset.schedule.handoffs import ContextPages, HandoffKey, RowsComputed

RANKS = (1, 2, 4, 8)
TOKENS = tuple(range(60))


@examples(50)
@given(st.data())
def test_random_pages_rows_and_shardings_are_written_exactly(data: st.DataObject) -> None:
    heads = data.draw(st.integers(1, 8))
    ranks = [rank for rank in RANKS if heads % rank == 0 or rank % heads == 0]
    page_rows, in_use = st.integers(1, 20), st.sampled_from(ranks)
    source = ShardedMemory(
        data.draw(in_use), heads, page_rows=data.draw(page_rows), row_spare=data.draw(st.sampled_from([0, 5]))
    )
    target = ShardedMemory(
        data.draw(in_use), heads, page_rows=data.draw(page_rows), row_spare=data.draw(st.sampled_from([0, 3])), seed=1
    )
    rows = data.draw(st.integers(1, 60))
    first = data.draw(st.integers(0, rows))
    last = data.draw(st.integers(first, rows))
    at_source, at_target = fresh_pages(source, target, rows=rows, seed=data.draw(st.integers(0, 99)))
    source.write(at_source, TOKENS, 0, rows)
    context = source.store, at_source, target.store, at_target, first, last
    planned = plan_context_writes(*context)
    assert count_writes(*context) == len(planned)
    for local, remote, nbytes in planned.tolist():
        assert source.contains(local, nbytes) and target.contains(remote, nbytes)
        ctypes.memmove(remote, local, nbytes)
    target.check_alone(at_target, TOKENS, first, last)


def test_a_head_that_several_ranks_hold_is_read_evenly_from_all_of_them() -> None:
    source, target = (ShardedMemory(ranks, 2, page_rows=4).store for ranks in (4, 8))
    assert [(overlap.source, overlap.target) for overlap in store_overlaps(source, target)] == [
        *((0, 0), (0, 1), (1, 2), (1, 3)),
        *((2, 4), (2, 5), (3, 6), (3, 7)),
    ]


def test_equal_shardings_are_written_in_whole_runs() -> None:
    source, target = (ShardedMemory(2, 4, page_rows=page_rows).store for page_rows in (64, 16))
    at_source = ContextPages(tuple(range(1, 5)), tuple(range(1, 5)))
    at_target = ContextPages(tuple(range(2, 18)), tuple(range(3, 19)))
    assert len(plan_context_writes(source, at_source, target, at_target, 0, 256)) == 2 * 3 + 2, (
        "there must be one write for each pair of shard and layer, and one for each index group"
    )


def test_shards_are_described_by_their_byte_slices_of_the_whole_row() -> None:
    spans = [PagedSpan(((8,),), 64, 4, 16)] * 4
    assert [shard.slices for shard in head_shards(spans, 8, 4)] == [
        *(((0, 8), (32, 8)), ((8, 8), (40, 8)), ((16, 8), (48, 8)), ((24, 8), (56, 8)))
    ]
    assert [shard.slices for shard in head_shards(spans, 2, 4)] == [((0, 4), (8, 4))] * 2 + [((4, 4), (12, 4))] * 2
    assert head_shards(spans[:1], 2, 4)[0].slices == ((0, 8), (8, 8))


def test_slices_that_are_adjacent_on_both_sides_become_one_range() -> None:
    (found,) = overlaps((((0, 8), (8, 8)),), (((0, 16),),))
    assert found.byte_ranges == ((0, 0, 16),) and found.row_bytes == 16


MODEL = ModelIdentity("m", 3, "any", "5 bytes", 2, "w")


def hello(store: Store) -> Hello:
    return Hello("127.0.0.1:1", MODEL, {"host": store}, "loopback", b"")


def test_peers_with_different_shardings_are_compatible() -> None:
    stores = [ShardedMemory(ranks, 4, page_rows=4).store for ranks in (2, 8)]
    assert check_peers(hello(stores[0]), hello(stores[1])) is None
    assert {row_bytes(store) for store in stores} == {2 * 4 * HEAD_BYTES} and first_gap(stores[1]) is None


def test_whole_rows_of_another_size_are_refused_with_both_values() -> None:
    reason = check_peers(hello(ShardedMemory(2, 4, page_rows=4).store), hello(ShardedMemory(4, 8, page_rows=4).store))
    assert reason is not None and "rows of 56 bytes" in reason and "rows of 112 bytes" in reason


def _without_shard(store: Store, shard: int) -> Store:
    return replace(store, shards=(*store.shards[:shard], *store.shards[shard + 1 :]))


def _with_last_shard(store: Store, shard: Shard) -> Store:
    return replace(store, shards=(*store.shards[:-1], shard))


def test_a_store_with_invalid_shards_is_refused() -> None:
    valid = ShardedMemory(4, 4, page_rows=4).store
    last = valid.shards[-1]
    for store, error in (
        (_without_shard(valid, 1), "none of its 3 shards holds byte 7 of rows of 56 bytes"),
        (_without_shard(_without_shard(_without_shard(_without_shard(valid, 0), 0), 0), 0), "it has 0 shards"),
        (_with_last_shard(valid, replace(last, slices=())), "a shard has 0 slices"),
        (_with_last_shard(valid, replace(last, slices=((0, 0), (1, 4)))), "or an empty slice"),
        (
            _with_last_shard(valid, replace(last, slices=((0, 100),))),
            "slices of a shard have 100 bytes, but its rows only 14",
        ),
        (_with_last_shard(valid, replace(last, span=replace(last.span, part_rows=5))), "pages of [4, 5] rows"),
        (
            _with_last_shard(valid, replace(last, span=replace(last.span, bases=((8,),)))),
            "its rows have 1 layers or groups, not 3",
        ),
    ):
        reason = check_peers(hello(valid), hello(store))
        assert reason is not None and error in reason, f"{reason!r} does not contain {error!r}"


def test_every_copy_of_rows_and_index_keys_is_written() -> None:
    """Ranks whose rows have no heads hold whole rows on the device, and all index keys."""
    source = ShardedMemory(1, 1, page_rows=16, seed=1)
    copies = [ShardedMemory(1, 1, page_rows=8) for _ in range(3)]
    at_source, at_target = fresh_pages(source, copies[0], rows=40)
    source.write(at_source, TOKENS, 0, 40)
    first, *further = (copy.store for copy in copies)
    keys = tuple(store.keys for store in further if store.keys is not None)
    target = Store(tuple(shard for copy in copies for shard in copy.store.shards), first.keys, keys)
    planned = plan_context_writes(source.store, at_source, target, at_target, 0, 40)
    assert len(planned) == count_writes(source.store, at_source, target, at_target, 0, 40)
    for local, remote, nbytes in planned.tolist():
        ctypes.memmove(remote, local, nbytes)
    for copy in copies:
        copy.check_alone(at_target, TOKENS, 0, 40)


def replicas(count: int, **options: int) -> tuple[list[ShardedMemory], Store]:
    """Returns the memory of ranks which all hold whole rows and all index keys, and their store."""
    ranks = [ShardedMemory(1, 1, **options) for _ in range(count)]
    keys = tuple(rank.store.keys for rank in ranks if rank.store.keys is not None)
    return ranks, Store(tuple(shard for rank in ranks for shard in rank.store.shards), keys[0], keys[1:])


def owners(ranks: list[ShardedMemory], addresses: list[int]) -> set[int]:
    return {number for number, rank in enumerate(ranks) if any(rank.contains(address, 1) for address in addresses)}


def test_ranks_that_hold_the_same_bytes_take_turns_to_write_the_lists_of_a_context() -> None:
    ranks, store = replicas(4, page_rows=8, seed=1)
    target = ShardedMemory(1, 1, page_rows=16)
    at_source, at_target = fresh_pages(ranks[0], target, rows=40)
    for rank in ranks:
        rank.write(at_source, TOKENS, 0, 40)
    host = ShardedMemory(1, 1, page_rows=8, seed=1)
    delivery = DirectDelivery(Sources(host.store, store), target.store, at_target)
    senders = []
    for number, first in enumerate(range(0, 40, 8)):
        rows = RowsComputed("peer", HandoffKey("r", 0), first, first + 8, at_source.rows, device_pages=at_source)
        delivery.add_rows(rows, 0.0)
        written = delivery.begin(number, SenderBuffers(0), 0.0)
        assert written is not None
        for local, remote, nbytes in written.writes.tolist():
            ctypes.memmove(remote, local, nbytes)
        senders.append(owners(ranks, written.writes[:, 0].tolist()))
    assert senders == [{0}, {1}, {2}, {3}, {0}]
    target.check_alone(at_target, TOKENS, 0, 40)


def test_ranks_that_hold_the_same_bytes_take_turns_to_pack_pieces() -> None:
    """The receiver does not know whose turn it is, and unpacks all pieces alike."""
    ranks, store = replicas(3, page_rows=8, seed=1)
    target = ShardedMemory(1, 1, page_rows=16)
    at_source, at_target = fresh_pages(ranks[0], target, rows=40)
    for rank in ranks:
        rank.write(at_source, TOKENS, 0, 40)
    nbytes = 40 * packed_row_bytes(store, target.store)
    *buffers, ring = (StagingMemory(nbytes) for _ in range(4))
    store = replace(store, staging=tuple(buffer.memory_range for buffer in buffers))
    far = ring.beside(target.store)
    used = []
    for number, first in enumerate((0, 10, 20, 30)):
        source = rotated(store, number)
        pack(PackedPiece(source, far, at_source, first, first + 10, 0))
        ((local, remote, length),) = piece_writes(source, far, 10, 0, 0).tolist()
        used.append([buffer.memory_range.address for buffer in buffers].index(local))
        ctypes.memmove(remote, local, length)
        unpack(PackedPiece(store, far, at_target, first, first + 10, 0))
    assert used == [0, 1, 2, 0]
    target.check_alone(at_target, TOKENS, 0, 40)


def test_divided_rows_and_single_copies_of_index_keys_are_read_where_they_are() -> None:
    divided, (_, whole) = ShardedMemory(2, 2, page_rows=4).store, replicas(2, page_rows=4)
    one_copy = replace(whole, key_copies=())
    assert [rotated(store, 1) for store in (divided, one_copy)] == [divided, one_copy]


def test_as_many_ranks_on_both_sides_write_to_one_another_rows_and_index_keys() -> None:
    (ranks, source), (targets, target) = replicas(4, page_rows=4), replicas(4, page_rows=4, seed=1)
    at_source, at_target = fresh_pages(ranks[0], targets[0], rows=4)
    planned = plan_context_writes(source, at_source, target, at_target, 0, 4)
    for number, rank in enumerate(targets):
        sent = [local for local, remote, _ in planned.tolist() if rank.contains(remote, 1)]
        assert len(sent) == len(planned) // 4 and owners(ranks, sent) == {number}
