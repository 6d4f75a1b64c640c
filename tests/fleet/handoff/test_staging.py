"""Tests of staging. Unpacked bytes are compared with heads that are written one by one. Contexts are staged only if it
saves time, and pieces fit into the ring and the buffers."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from sharded_memory import HEAD_BYTES, KEY_BYTES, POISON, ShardedMemory, fresh_pages

from hotset.base.errors import ConfigError
from hotset.base.paged_span import PagedSpan
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.engine.ports import Route
from hotset.fleet.handoff.layout import whole_rows
from hotset.fleet.handoff.messages import HandoffRequest, PackedPiece, Store
from hotset.fleet.handoff.packing import EngineCopies, StagingMemory, pack, unpack
from hotset.fleet.handoff.staging import (
    MAX_DIRECT_WRITES,
    SMALL_WRITE_BYTES,
    SenderBuffers,
    blocks,
    check_staging,
    packed_row_bytes,
    piece_rows,
    piece_writes,
    should_stage,
)
from hotset.fleet.transfer.api import MemoryKind
from hotset.schedule.handoffs import HandoffKey

RANKS = (1, 2, 4, 8)
TOKENS = tuple(range(50))


@examples(40)
@given(st.data())
def test_random_pages_rows_and_shardings_are_packed_exactly(data: st.DataObject) -> None:
    heads = data.draw(st.integers(1, 8))
    ranks = st.sampled_from([rank for rank in RANKS if heads % rank == 0 or rank % heads == 0])
    page_rows = st.integers(1, 20)
    parts = data.draw(st.integers(1, 3))  # pages of index keys have several parts in the device pool
    source = ShardedMemory(data.draw(ranks), heads, page_rows=data.draw(page_rows), seed=1)
    target = ShardedMemory(
        data.draw(ranks),
        heads,
        page_rows=data.draw(page_rows),
        key_page_rows=4 * parts,
        key_parts=parts,
        key_spare=3,
    )
    rows = data.draw(st.integers(1, 50))
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    at_source, at_target = fresh_pages(source, target, rows=rows, seed=data.draw(st.integers(0, 99)))
    source.write(at_source, TOKENS, 0, rows)
    nbytes = (last - first) * packed_row_bytes(source.store, target.store)
    memory = StagingMemory(nbytes + 9)
    memory._bytes.fill_(POISON)
    stores = memory.beside(source.store), memory.beside(target.store)
    pack(PackedPiece(*stores, at_source, first, last, 0))
    assert (memory._bytes[nbytes:] == POISON).all(), "bytes after the end of the piece were written"
    unpack(PackedPiece(*stores, at_target, first, last, 0))
    target.check_alone(at_target, TOKENS, first, last)


def test_the_staging_memory_of_every_rank_gets_the_index_keys() -> None:
    """Each rank of the target has staging memory and a copy of the index keys of its own."""
    source, first, second = (ShardedMemory(ranks, 2, page_rows=8, seed=ranks) for ranks in (1, 2, 2))
    at_source, at_target = fresh_pages(source, first, rows=30)
    source.write(at_source, TOKENS, 0, 30)
    nbytes = 30 * packed_row_bytes(source.store, first.store)
    packed, *rings = (StagingMemory(nbytes) for _ in range(3))
    for ring in rings:
        ring._bytes.fill_(POISON)
    assert first.keys is not None and second.keys is not None
    staging = tuple(ring.memory_range for ring in rings)
    stores = packed.beside(source.store), replace(first.store, key_copies=(second.keys.span,), staging=staging)
    pack(PackedPiece(*stores, at_source, 0, 30, 0))
    for local, remote, length in piece_writes(*stores, 30, 0, 0).tolist():
        ctypes.memmove(remote, local, length)
    unpack(PackedPiece(*stores, at_target, 0, 30, 0))
    first.check_alone(at_target, TOKENS, 0, 30)
    np.testing.assert_array_equal(np.stack(second.keys.units), np.stack(first.keys.units))


def test_a_head_that_several_ranks_hold_is_packed_once() -> None:
    source, target = (ShardedMemory(ranks, 2, page_rows=4).store for ranks in (1, 8))
    assert [block.targets for block in blocks(source, target)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert packed_row_bytes(source, target) == 3 * 2 * 2 * HEAD_BYTES + 2 * KEY_BYTES


def request(rows: int, pages: int) -> HandoffRequest:
    page_numbers = tuple(range(0, 2 * pages, 2))  # no two pages are consecutive
    return HandoffRequest(
        HandoffKey("r", 0), PromptSpec((1,) * rows, SamplingParams()), "host", page_numbers, page_numbers
    )


@pytest.mark.parametrize(
    ("source_ranks", "target_ranks", "staged"), [(2, 4, True), (4, 2, True), (1, 2, True), (2, 2, False)]
)
def test_contexts_are_staged_if_the_shardings_differ(source_ranks: int, target_ranks: int, staged: bool) -> None:
    shapes = {"page_rows": 64, "pages": 1, "layers": 30, "groups": 0, "head_bytes": 256}
    source, target = (ShardedMemory(ranks, 8, **shapes).store for ranks in (source_ranks, target_ranks))
    assert should_stage(source, target, request(1000, 16)) is staged


def test_contexts_that_need_large_writes_or_few_writes_are_not_staged() -> None:
    def store(row_bytes: int) -> Store:
        return Store(
            whole_rows(PagedSpan(tuple((layer << 30,) for layer in range(1, 31)), 16 * row_bytes, 16, row_bytes)),
            None,
        )

    large, small = store(SMALL_WRITE_BYTES // 16), store(SMALL_WRITE_BYTES // 32)
    assert not should_stage(large, large, request(160, 10)), "a context with large writes must not be staged"
    assert should_stage(small, small, request(160, 10))
    assert not should_stage(small, small, request(32, 2)), (
        f"a context with at most {MAX_DIRECT_WRITES} writes must not be staged"
    )


def test_pieces_fit_into_a_quarter_of_the_ring_and_into_a_buffer() -> None:
    source, target = (ShardedMemory(ranks, 4, page_rows=4).store for ranks in (2, 4))
    row = packed_row_bytes(source, target)
    assert piece_rows(source, target, 1 << 16, 1 << 12) == (1 << 12) // row
    assert piece_rows(source, target, 1 << 13, 1 << 12) == (1 << 11) // row
    assert piece_rows(source, target, 4 * 256, 255) == 1 and piece_rows(source, target, 3 * 256, 255) == 0
    assert SenderBuffers(5000).nbytes == 1024


def test_staging_memory_too_small_for_one_row_is_refused_with_the_minimum() -> None:
    store = ShardedMemory(2, 8, page_rows=4, pages=1, layers=61, groups=1, head_bytes=9000).store
    minimum = 4 * (61 * 16 * 9000 // 256 * 256 + 256)
    check_staging(minimum, store)
    with pytest.raises(ConfigError, match=r"--staging-mib 34 or more") as raised:
        check_staging(minimum - 1, store)
    assert f"{61 * 16 * 9000 + KEY_BYTES} bytes over 61 layers" in str(raised.value)


class DeviceMemory:
    """A copy of sharded memory on a device, with staging memory beside it."""

    def __init__(self, memory: ShardedMemory, device: torch.device, nbytes: int) -> None:
        self.memory, self.bytes = memory, torch.from_numpy(memory.buffer.copy()).to(device)
        self.staging = StagingMemory(nbytes, device, MemoryKind.DEVICE)
        self.staging._bytes.fill_(POISON)
        distance = self.bytes.data_ptr() - memory.buffer.ctypes.data

        def moved(span: PagedSpan) -> PagedSpan:
            return replace(span, bases=tuple(tuple(base + distance for base in parts) for parts in span.bases))

        shards = tuple(replace(shard, span=moved(shard.span)) for shard in memory.store.shards)
        keys = None if memory.store.keys is None else moved(memory.store.keys)
        self.store = self.staging.beside(replace(memory.store, shards=shards, keys=keys, memory="device"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("source_ranks", "target_ranks", "head_bytes"), [(2, 4, 7), (4, 2, 64), (1, 1, 16)])
def test_contexts_on_a_device_are_packed_and_unpacked_there(
    device: str, source_ranks: int, target_ranks: int, head_bytes: int
) -> None:
    on = torch.device(device)
    source = ShardedMemory(source_ranks, 4, page_rows=16, seed=1, row_spare=16, head_bytes=head_bytes)
    target = ShardedMemory(target_ranks, 4, page_rows=6, head_bytes=head_bytes)
    at_source, at_target = fresh_pages(source, target, rows=40)
    source.write(at_source, TOKENS, 0, 40)
    nbytes = 40 * packed_row_bytes(source.store, target.store)
    near, far = DeviceMemory(source, on, nbytes + 512), DeviceMemory(target, on, nbytes + 512)
    before = far.bytes.clone()
    EngineCopies(on, ()).warm_up(far.store)
    assert torch.equal(far.bytes, before), "warming up has changed a store"
    for first, last in ((0, 17), (17, 40)):
        piece = PackedPiece(near.store, far.store, at_source, first, last, 256)
        pack(piece, 0, on)
        for local, remote, length in piece_writes(near.store, far.store, last - first, 256, 128).tolist():
            begin = local - near.staging.memory_range.address, remote - far.staging.memory_range.address
            far.staging._bytes[begin[1] : begin[1] + length] = near.staging._bytes[begin[0] : begin[0] + length]
        far.staging._bytes[128 + length :] = POISON
        if device == "cuda":
            torch.cuda.synchronize()
        unpack(replace(piece, pages=at_target, offset=128), 0, on)
    target.buffer[:] = far.bytes.cpu().numpy()
    target.check_alone(at_target, TOKENS, 0, 40)


@pytest.mark.parametrize(
    ("memory", "per_write", "staged"),
    [("device", 4e-6, True), ("device", 1e-8, False), ("host", 4e-6, False), ("host", 100e-6, True)],
    ids=["device", "device, cheap writes", "host", "host, expensive writes"],
)
def test_measured_costs_of_writes_decide_whether_pages_between_equal_splits_are_packed(
    memory: str, per_write: float, staged: bool
) -> None:
    """The pages of the decode worker are not consecutive. Each write has 64 rows of 1 KiB."""
    span = PagedSpan(tuple((layer << 30,) for layer in range(1, 31)), 64 << 10, 64, 1 << 10)
    store = Store(whole_rows(span), None, memory=memory)
    route = Route(memory, memory, 10.0, per_write)
    assert should_stage(store, store, request(1000, 16), route=route) is staged


def test_scattered_pages_of_the_prefill_worker_count_like_those_of_the_decode_worker() -> None:
    span = PagedSpan(tuple((layer << 30,) for layer in range(1, 31)), 8 << 10, 16, 512)
    store, pages = Store(whole_rows(span), None), tuple(range(20))
    consecutive = HandoffRequest(HandoffKey("r", 0), PromptSpec((1,) * 320, SamplingParams()), "host", pages, ())
    assert not should_stage(store, store, consecutive)
    assert should_stage(store, store, consecutive, run_pages=1)
