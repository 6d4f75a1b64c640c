"""Rows with different sharding on both sides: the planned writes, performed on poisoned memory, compared with heads
that are copied one by one in plain Python."""

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_memory import HEAD_BYTES, Sharded, fresh_pages

from hotset.handoff.layout import (
    check_peers,
    first_gap,
    head_shards,
    overlaps,
    plan_context_writes,
    plan_writes,
    row_bytes,
    store_overlaps,
    whole_rows,
)
from hotset.handoff.messages import Hello, ModelIdentity, PagedSpan, Shard, Store

RANKS = (1, 2, 4, 8)


def carry(source: Sharded, target: Sharded, pages: Sequence[Sequence[int]], first: int, last: int) -> int:
    """Performs the planned writes, checks that each stays within registered memory, and returns their number."""
    planned = plan_context_writes(source.store, pages[0], target.store, pages[1], pages[2], first, last)
    for here, there, nbytes in planned.tolist():
        assert source.holds(here, nbytes) and target.holds(there, nbytes)
        ctypes.memmove(there, here, nbytes)
    return len(planned)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("there", RANKS)
@pytest.mark.parametrize("here", RANKS)
def test_every_rank_gets_its_heads(here: int, there: int, heads: int) -> None:
    source, target = Sharded(here, heads, page_rows=64, seed=1), Sharded(there, heads, page_rows=16)
    pages = fresh_pages(source, target, rows=70)
    source.compute(pages[0], 0, 70)
    for first, last in ((0, 33), (33, 34), (34, 70)):
        carry(source, target, pages, first, last)
    target.check(pages[1], pages[2], 0, 70)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_pages_and_any_rows(data: st.DataObject) -> None:
    heads = data.draw(st.integers(1, 8))
    ranks = [rank for rank in RANKS if heads % rank == 0 or rank % heads == 0]
    sides = [
        Sharded(
            data.draw(st.sampled_from(ranks)), heads, page_rows=data.draw(st.integers(1, 20)), spare=spare, seed=seed
        )
        for seed, spare in enumerate(data.draw(st.tuples(st.sampled_from([0, 5]), st.sampled_from([0, 3]))))
    ]
    rows = data.draw(st.integers(1, 60))
    first = data.draw(st.integers(0, rows))
    last = data.draw(st.integers(first, rows))
    pages = fresh_pages(*sides, rows=rows, seed=data.draw(st.integers(0, 99)))
    sides[0].compute(pages[0], 0, rows)
    carry(*sides, pages, first, last)
    sides[1].check(pages[1], pages[2], first, last)


def test_a_head_that_many_ranks_hold_is_read_from_all_of_them_in_turn() -> None:
    source, target = (Sharded(ranks, 2, page_rows=4).store for ranks in (4, 8))
    assert [(each.source, each.target) for each in store_overlaps(source, target)] == [
        *((0, 0), (0, 1), (1, 2), (1, 3)),
        *((2, 4), (2, 5), (3, 6), (3, 7)),
    ]


def test_equal_shardings_use_whole_runs() -> None:
    source, target = Sharded(2, 4, page_rows=64), Sharded(2, 4, page_rows=16)
    pages = (range(1, 5), range(2, 18), range(3, 19))
    planned = plan_context_writes(source.store, pages[0], target.store, pages[1], pages[2], 0, 256)
    assert len(planned) == 2 * source.layers + source.groups, "one for each shard and layer, and for each group's keys"


def test_whole_rows_are_planned_as_without_shards() -> None:
    span = PagedSpan(((1 << 20,), (1 << 21,)), 64 * 48, 64, 64, 48)
    there = replace(span, bases=((1 << 22,), (1 << 23,)), page_rows=16, part_rows=16, page_bytes=16 * 48)
    stores = Store(whole_rows(span), None), Store(whole_rows(there), None)
    planned = plan_context_writes(stores[0], (5, 3), stores[1], range(8), (), 3, 100)
    np.testing.assert_array_equal(planned, plan_writes(span, (5, 3), there, range(8), 3, 100))


def test_layers_of_pipeline_stages_may_be_anywhere() -> None:
    """Each stage has its own store: a span locates a layer by its base alone."""
    source, target = Sharded(2, 2, page_rows=8, seed=1), Sharded(1, 2, page_rows=8)
    assert len({parts[0] % 4096 for parts in source.store.shards[0].span.bases}) == source.layers
    pages = fresh_pages(source, target, rows=20)
    source.compute(pages[0], 0, 20)
    carry(source, target, pages, 0, 20)
    target.check(pages[1], pages[2], 0, 20)


def test_heads_of_ranks_are_named_by_their_bytes_in_the_whole_row() -> None:
    spans = [PagedSpan(((8,),), 64, 4, 4, 16)] * 4
    assert [each.slices for each in head_shards(spans, 8, 4)] == [
        *(((0, 8), (32, 8)), ((8, 8), (40, 8)), ((16, 8), (48, 8)), ((24, 8), (56, 8)))
    ]
    assert [each.slices for each in head_shards(spans, 2, 4)] == [((0, 4), (8, 4))] * 2 + [((4, 4), (12, 4))] * 2
    assert head_shards(spans[:1], 2, 4)[0].slices == ((0, 8), (8, 8))


def test_slices_that_are_adjacent_on_both_sides_are_one_range() -> None:
    (found,) = overlaps((((0, 8), (8, 8)),), (((0, 16),),))
    assert found.byte_ranges == ((0, 0, 16),) and found.row_bytes == 16


MODEL = ModelIdentity("m", 3, "any", "5 bytes", 2, "w")


def hello(store: Store) -> Hello:
    return Hello("127.0.0.1:1", MODEL, {"host": store}, "loopback", b"")


@pytest.mark.parametrize("there", RANKS)
@pytest.mark.parametrize("here", RANKS)
def test_peers_with_different_sharding_are_compatible(here: int, there: int) -> None:
    stores = [Sharded(ranks, 4, page_rows=4).store for ranks in (here, there)]
    assert check_peers(hello(stores[0]), hello(stores[1])) is None
    assert {row_bytes(store) for store in stores} == {2 * 4 * HEAD_BYTES} and first_gap(stores[1]) is None


def test_whole_rows_of_another_size_are_refused_with_both_values() -> None:
    reason = check_peers(hello(Sharded(2, 4, page_rows=4).store), hello(Sharded(4, 8, page_rows=4).store))
    assert reason is not None and "rows of 56 bytes" in reason and "rows of 112 bytes" in reason


def _without(store: Store, shard: int) -> Store:
    return replace(store, shards=(*store.shards[:shard], *store.shards[shard + 1 :]))


def _with(store: Store, shard: Shard) -> Store:
    return replace(store, shards=(*store.shards[:-1], shard))


def test_a_store_with_invalid_shards_is_refused() -> None:
    sound = Sharded(4, 4, page_rows=4).store
    last = sound.shards[-1]
    for store, error in (
        (_without(sound, 1), "byte 7 of rows of 56 bytes is in none of its 3 shards"),
        (_without(_without(_without(_without(sound, 0), 0), 0), 0), "rows in 0 shards"),
        (_with(sound, replace(last, slices=())), "holds 0 slices"),
        (_with(sound, replace(last, slices=((0, 0), (1, 4)))), "an empty one"),
        (_with(sound, replace(last, slices=((0, 100),))), "slices of 100 bytes in rows of 14"),
        (_with(sound, replace(last, span=replace(last.span, page_rows=5))), "pages of [4, 5] rows"),
        (_with(sound, replace(last, span=replace(last.span, bases=((8,),)))), "rows of 1 units, not 3"),
    ):
        reason = check_peers(hello(sound), hello(store))
        assert reason is not None and error in reason, f"{reason} does not say {error}"
