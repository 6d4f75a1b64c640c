"""Compares swap_in with a plain-Python model, over poisoned memory.

A defect number at the end of a test's name refers to the file of that number in scripts/sabotage.d.

Most tests run with the reference and with the CUDA kernels, which a host compiler builds for the CPU.
"""

import random
from dataclasses import replace
from typing import Any
from unittest import mock

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import needs_compiler
from examples import examples, times
from hypothesis import given
from hypothesis import strategies as st
from swap_in_model import (
    CPU,
    ODD,
    POISON,
    Batch,
    Op,
    Shape,
    SwapInModel,
    check_copied_bytes,
    make_copies,
    pairs_by_query,
)
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels import EMPTY, cuda_source
from hotset.kernels.swap_in import RowCopies, SeatTables, SwapPlan, copy, cuda_impl, plan, reference


class CudaOnCpu:
    """Runs the CUDA kernels on CPU tensors. Blocks are small, because every thread costs time at every barrier."""

    def __init__(self, tuning: cuda_impl.SwapInTuning) -> None:
        self._tuning = tuning

    def plan(self, **arguments: Any) -> SwapPlan:
        with mock.patch.object(cuda_source, "kernel", cuda_on_cpu.kernel):
            swap = cuda_impl.plan(**arguments, tuning=self._tuning)
        taken, finished = cuda_impl._turns(arguments["positions"].device).tolist()
        assert taken == finished  # or else later plans would wait for ever, or not at all
        return swap

    def copy(self, copies: RowCopies, host_rows: Tensor, device_rows: Tensor) -> None:
        with mock.patch.object(cuda_source, "kernel", cuda_on_cpu.kernel):
            cuda_impl.copy(copies, host_rows, device_rows, tuning=self._tuning)


def small_tuning(*clusters: tuple[int, cuda_impl.BlockCluster | None]) -> cuda_impl.SwapInTuning:
    smaller = tuple((max_batch, cluster and replace(cluster, threads=64)) for max_batch, cluster in clusters)
    return cuda_impl.SwapInTuning(
        plan_threads=64,
        clusters=smaller,
        max_batch_without_turns=2,
        lists_at_once=2,
        turn_rows=20,
        copy_blocks=3,
        copy_threads=64,
        copy_lists_at_once=2,
        rows_at_once=2,
    )


TWO_LAUNCHES = small_tuning((1, None))
CLUSTERS = small_tuning((1, cuda_impl.BlockCluster(3, rows_at_once=1)), (9, cuda_impl.BlockCluster(2)))
COPIES = [
    pytest.param(reference, id="reference"),
    pytest.param(CudaOnCpu(TWO_LAUNCHES), id="cuda", marks=needs_compiler),
]
OPS = [*COPIES, pytest.param(CudaOnCpu(CLUSTERS), id="cuda in clusters", marks=needs_compiler)]
with_each_op = pytest.mark.parametrize("op", OPS)
with_each_copy = pytest.mark.parametrize("op", COPIES)
EXAMPLES = examples(10)

WIDTHS = [*range(1, 18), 30, 37, 656, 1152]  # in bytes; the widest access of a copy has 16


def random_shape(seed: int) -> Shape:
    draw = random.Random(seed).randint
    k = draw(1, 9)
    return Shape(
        k=k,
        slots=k + draw(0, 9),
        page_rows=draw(1, 6),
        words_per_page=draw(1, 9),
        context_pages=draw(1, 9),
        tiered=draw(1, 3),
        resident=draw(0, 2),
    )


# The kernels are compiled for each shape, so `make test` has few of them. In the first, k positions can use every slot.
SHAPES = [Shape(k=5, slots=5, page_rows=3, words_per_page=4, context_pages=9), *map(random_shape, range(times(4)))]


def one_seat(model: SwapInModel, positions: list[int], *, stamp: int, ignore_tail: bool = True) -> Batch:
    """Returns a batch of one query on seat 0, which is tiered. Positions are padded with EMPTY to k."""
    padded = positions + [EMPTY] * (model.shape.k - len(positions))
    return Batch([padded], [0], [stamp], ignore_tail)


@with_each_op
@EXAMPLES
@given(
    st.sampled_from(SHAPES), st.integers(0, 2**31), st.booleans(), st.sampled_from([6, 40, 300, 150_000, 2**31 - 100])
)
def test_random_steps_equal_the_model(op: Op, shape: Shape, seed: int, full: bool, stamp: int) -> None:
    model = SwapInModel(shape, seed, full=full, stamp=stamp)
    for _ in range(10):
        model.check_step(op, model.draw_batch())


@with_each_op
@pytest.mark.parametrize(
    ("shape", "stamp"),
    [
        (Shape(k=130, slots=300, page_rows=16, words_per_page=64, context_pages=40), 620),
        (Shape(k=100, slots=2500, page_rows=48, words_per_page=333, context_pages=64, tiered=1), 3000),
        (Shape(k=130, slots=400, page_rows=16, words_per_page=12, context_pages=40, tiered=1), 2**30),
    ],
    ids=["130 of 300 slots", "100 of 2500 slots", "stamps far apart"],
)
def test_random_steps_over_many_slots_equal_the_model(op: Op, shape: Shape, stamp: int) -> None:
    model = SwapInModel(shape, seed=1, full=True, stamp=stamp)
    for _ in range(8):
        model.check_step(op, model.draw_batch())


@with_each_op
def test_the_oldest_slots_are_evicted_and_among_equals_the_lower_ones(op: Op) -> None:
    model = SwapInModel(Shape(k=5, slots=6, page_rows=4, words_per_page=16, context_pages=8), seed=2)
    for stamp, positions in enumerate([[10, 11], [12, 13], [14, 15], [11, 14]]):
        model.check_step(op, one_seat(model, positions, stamp=stamp))
    assert model.maps[0].last_used == [0, 3, 1, 1, 3, 2]
    model.check_step(op, one_seat(model, [20, 21], stamp=4))
    assert model.maps[0].position_of == [20, 11, 21, 13, 14, 15]


@with_each_op
@pytest.mark.parametrize(
    ("stamp", "last_used"),
    [
        (3000, [5, 2, 7, 2, 3, 6, 2, 4]),
        (2**18 + 12_000, [1, 9, 1025, 1026, 1024, 1, 2049, 3]),
        (2**28 - 1, [1, 2**20, 2**20 + 4097, 2**20 + 4097, 2**20 + 4096, 1, 2**20 + 1, 3]),
    ],
    ids=["one round", "two rounds", "three rounds"],
)
def test_the_oldest_slots_are_evicted_when_all_ages_are_similar(op: Op, stamp: int, last_used: list[int]) -> None:
    """All ages fall into one bucket of the CUDA kernel, which divides the bucket in one, two or three rounds."""
    for misses in range(1, 9):
        model = SwapInModel(Shape(k=8, slots=8, page_rows=4, words_per_page=16, context_pages=8), seed=24)
        model.maps[0].position_of[:], model.maps[0].last_used[:] = range(8), last_used
        model.write_maps(model.words)
        model.check_step(op, one_seat(model, list(range(8, 8 + misses)), stamp=stamp))


@with_each_op
def test_a_second_plan_with_the_same_stamp_evicts_no_slot_of_the_first(op: Op) -> None:
    model = SwapInModel(Shape(k=5, slots=6, page_rows=4, words_per_page=16, context_pages=8), seed=3)
    model.check_step(op, one_seat(model, [7, 8, 9], stamp=5))
    model.check_step(op, one_seat(model, [1, 8, 2], stamp=5))
    assert model.maps[0].position_of == [7, 8, 9, 1, 2, EMPTY]


@with_each_op
@pytest.mark.parametrize(
    "positions",
    [
        [EMPTY] * 6,
        [EMPTY, 7, EMPTY, EMPTY, 3, EMPTY],
        [9, 9, 9, 9, 9, 9],
        [EMPTY, 8, 2, 8, EMPTY, 2],
        [3, 2, 3, 2, 2, 3],
        [44, 0, 44, 43, EMPTY, 0],
        [7, 6, 5, 4, 3, 2],
    ],
    ids=str,
)
def test_empty_padding_and_duplicates_do_not_corrupt_counts_defect_5(op: Op, positions: list[int]) -> None:
    model = SwapInModel(ODD, seed=6)
    model.check_step(op, one_seat(model, positions, stamp=1))  # all miss
    present = [position for position in positions if position != EMPTY]
    assert model.counts.tolist() == [len(present), len(set(present))]
    model.check_step(op, one_seat(model, positions, stamp=2))  # all hit
    assert model.counts.tolist() == [2 * len(present), len(set(present))]


@with_each_op
def test_pages_of_drafts_are_in_a_longer_tail(op: Op) -> None:
    model = SwapInModel(replace(ODD, tail_pages=3), seed=9)
    # The first token of the step is in page 6, so the tail holds positions from 25 on. Drafts are in pages 6 and 7.
    swap = model.check_step(op, one_seat(model, [39, 25, 34, 24, 30, 35], stamp=32, ignore_tail=False))
    assert model.counts.tolist() == [1, 1] and swap.copies.counts.tolist() == [1]
    assert len({row // ODD.page_rows for row in swap.rows[0].tolist()}) == 4, "three tail pages and a slot"


@with_each_copy
def test_every_layer_of_an_index_group_can_copy_with_the_same_plan(op: Op) -> None:
    model = SwapInModel(ODD, seed=10)
    swap = model.run(op, one_seat(model, [4, 17, 30], stamp=1))
    for layer in range(3):
        host, device = model.host_rows + layer, torch.full_like(model.device_rows, POISON)
        op.copy(swap.copies, host, device)
        for i, position in enumerate([4, 17, 30]):
            assert torch.equal(device[swap.rows[0, i]], host[model.host_row(0, position)])


@with_each_copy
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_any_byte_size_are_copied_completely_and_nothing_else_defect_6(op: Op, width: int) -> None:
    check_copied_bytes(op, width, CPU)


@with_each_copy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_rows_of_any_dtype_are_copied_bit_by_bit(op: Op, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    host = torch.randint(0, 256, (4, 3 * dtype.itemsize), dtype=torch.uint8, generator=generator)  # any bits
    device = torch.full_like(host, POISON)
    op.copy(make_copies([(0, 3), (2, 1)]), host.view(dtype), device.view(dtype))
    assert torch.equal(device[[3, 1]], host[[0, 2]]) and (device[[0, 2]] == POISON).all()


@with_each_op
def test_host_page_ids_are_never_used_as_device_page_ids_defect_7(op: Op) -> None:
    model = SwapInModel(ODD, seed=12)
    swap = model.check_step(op, one_seat(model, [0, 12, 24, 36, 44], stamp=1))
    slot_rows = {int(page) * 5 + offset for page in model.tables.slot_pages[0] for offset in range(5)}
    assert set(swap.rows[0, :5].tolist()) <= slot_rows
    host_rows = [model.host_row(0, position) for position in (0, 12, 24, 36, 44)]
    assert [host_row for _, host_row in pairs_by_query(swap.copies)[0]] == host_rows


@with_each_op
def test_row_numbers_beyond_32_bits_are_exact_defect_7(op: Op) -> None:
    model = SwapInModel(ODD, seed=13)
    tables = {name: getattr(model.tables, name) for name in ("row_pages", "host_pages", "slot_pages", "tail_pages")}
    model.tables = replace(model.tables, **{name: pages % 1000 + 2**31 + 3 for name, pages in tables.items()})
    batch = Batch([[1, 2, 3, 30, 31, 44], [44, 43, 0, 1, 2, 3]], [0, 2], [39, 1])
    swap = model.run(op, batch)
    expected = model.expect(batch)
    assert (swap.rows.tolist(), pairs_by_query(swap.copies)) == (expected.rows, expected.copies)
    assert int(swap.rows.min()) > 2**33 and min(pairs_by_query(swap.copies)[0][0]) > 2**33


@with_each_copy
def test_row_offsets_beyond_32_bits_are_exact_defect_7(op: Op) -> None:
    rows, stride = 2**16 + 2, 2**15  # more than 2**31 bytes of virtual memory; only a few pages are touched
    host, device = (torch.empty(rows, stride, dtype=torch.uint8)[:, :24] for _ in range(2))
    host[rows - 1], device[rows - 2 : rows] = torch.arange(24, dtype=torch.uint8), POISON
    op.copy(make_copies([(rows - 1, rows - 2)]), host, device)
    assert torch.equal(device[rows - 2], host[rows - 1]) and (device[rows - 1] == POISON).all()


def tiny_tables(**changed: int) -> SeatTables:
    pages = torch.zeros(1, 2, dtype=torch.int64)
    sizes = {"page_rows": 4, "slots": 8} | changed
    return SeatTables(pages, pages, pages, pages, pages, torch.tensor([True]), **sizes)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"slots": 2}, "3 positions cannot be held in 2 slots"),
        ({"slots": 32_768}, "32768 slots are more than the 32767"),
        ({"page_rows": 0}, "page of 0 rows"),
    ],
)
def test_impossible_tables_are_refused_before_the_maps_are_written(changed: dict[str, int], message: str) -> None:
    one = torch.zeros(1, dtype=torch.int64)
    words = torch.full((64,), 7, dtype=torch.int32)
    with pytest.raises(ConfigError, match=message):
        plan(torch.tensor([[1, 2, 3]]), one, one, tiny_tables(**changed), words, 64, torch.zeros(2).long())
    assert (words == 7).all()


@pytest.mark.parametrize(
    ("host", "device", "message"),
    [
        (torch.zeros(2, 6), torch.zeros(2, 5), "host rows have 6 values, but device rows have 5"),
        (torch.zeros(2, 6), torch.zeros(2, 6).half(), "torch.float32, but device rows have torch.float16"),
    ],
)
def test_rows_that_differ_between_the_tiers_are_refused(host: torch.Tensor, device: torch.Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        copy(make_copies([(0, 1)]), host, device)


@with_each_copy
@pytest.mark.parametrize("lists", [1, 3, 128, 300])
def test_every_listed_row_of_a_batch_is_copied_once(op: Op, lists: int) -> None:
    generator = torch.Generator().manual_seed(lists)
    counts = torch.randint(0, 4, (lists,), generator=generator).tolist()
    order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    pairs = [
        [(order[sum(counts[:row]) + i], sum(counts[:row]) + i) for i in range(counts[row])] for row in range(lists)
    ]
    host = torch.randint(0, 256, (len(order), 24), dtype=torch.uint8, generator=generator)
    device = torch.full_like(host, POISON)
    op.copy(make_copies(*pairs), host, device)
    assert torch.equal(device[:-2], host[order[:-2]]) and (device[-2:] == POISON).all()


@needs_compiler
@pytest.mark.parametrize("rows_at_once", [1, 2, 4])
def test_a_warp_may_have_any_number_of_rows_in_flight(rows_at_once: int) -> None:
    op = CudaOnCpu(replace(TWO_LAUNCHES, copy_blocks=1, copy_threads=32, rows_at_once=rows_at_once))
    host = torch.randint(0, 256, (40, 656), dtype=torch.uint8)
    device = torch.full_like(host, POISON)
    op.copy(make_copies([(i, 39 - i) for i in range(23)]), host, device)
    assert torch.equal(device[17:], host[:23].flip(0)) and (device[:17] == POISON).all()


@needs_compiler
@pytest.mark.parametrize("threads", [32, 128])
def test_a_plan_may_have_any_number_of_threads(threads: int) -> None:
    op = CudaOnCpu(replace(TWO_LAUNCHES, clusters=((1, cuda_impl.BlockCluster(2, threads=threads)),)))
    model = SwapInModel(Shape(k=150, slots=256, page_rows=8, words_per_page=20, context_pages=50), seed=20, full=True)
    for _ in range(6):
        model.check_step(op, model.draw_batch(min_queries=3))


@needs_compiler
@pytest.mark.parametrize(
    ("blocks", "max_batch_without_turns", "turn_rows"),
    # No query takes turns, those with many missing rows do, or all.
    [(1, 16, 0), (2, 2, 20), (3, 2, 0), (4, 16, 0), (6, 2, 20), (8, 2, 0)],
)
def test_a_cluster_may_have_any_number_of_blocks(blocks: int, max_batch_without_turns: int, turn_rows: int) -> None:
    """If a query does not wait for its turn, blocks that do not plan load its rows before victims are known."""
    tuning = small_tuning((9, cuda_impl.BlockCluster(blocks)))
    op = CudaOnCpu(replace(tuning, max_batch_without_turns=max_batch_without_turns, turn_rows=turn_rows))
    shape = Shape(k=60, slots=100, page_rows=8, words_per_page=20, context_pages=50, tiered=4, resident=2, width=48)
    model = SwapInModel(shape, seed=22, full=True)
    for _ in range(6):
        model.check_step(op, model.draw_batch(min_queries=3))


@needs_compiler
@pytest.mark.parametrize("width", [1, 37, 3000])
def test_rows_copied_by_a_plan_are_complete_and_nothing_else_is_written_defect_6(width: int) -> None:
    op, model = CudaOnCpu(CLUSTERS), SwapInModel(replace(ODD, width=width), seed=23)
    for stamp in range(3):
        model.check_step(op, one_seat(model, [(7 * stamp + 11 * i) % 45 for i in range(6)], stamp=stamp))


@needs_compiler
@pytest.mark.parametrize("batch", [3, 40])
def test_a_plan_with_the_sizes_and_tuning_of_a_gpu_equals_the_reference(batch: int) -> None:
    """A few drawn queries are padded to the size of the batch: emulating as many real queries would take too long."""
    op = CudaOnCpu(cuda_impl.TUNED)
    shape = Shape(k=2048, slots=8192, page_rows=64, words_per_page=10496, context_pages=256, tiered=2, width=16)
    model = SwapInModel(shape, seed=21, full=True, stamp=2**30)
    drawn = model.draw_batch()
    padding = batch - len(drawn.seats)
    step = Batch(
        positions=drawn.positions + [[0] * 2048] * padding,
        seats=drawn.seats + [EMPTY] * padding,
        stamps=drawn.stamps + [0] * padding,
    )
    words, counts, device_rows = model.words.clone(), model.counts.clone(), model.device_rows.clone()
    swap = model.run(op, step, host_rows=model.host_rows, device_rows=model.device_rows)
    after = (model.words.clone(), model.counts.clone(), model.device_rows.clone())
    for tensor, before in ((model.words, words), (model.counts, counts), (model.device_rows, device_rows)):
        tensor.copy_(before)
    expected = model.run(reference, step, host_rows=model.host_rows, device_rows=model.device_rows)
    assert torch.equal(swap.rows, expected.rows) and pairs_by_query(swap.copies) == pairs_by_query(expected.copies)
    assert all(map(torch.equal, after, (model.words, model.counts, model.device_rows)))


def test_more_positions_than_a_gpu_supports_are_refused() -> None:
    one = torch.zeros(1, dtype=torch.int64)
    words = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ConfigError, match="top-20000 is more than the 8192 positions"):
        positions = torch.zeros(1, 20_000, dtype=torch.int64)
        cuda_impl.plan(positions, one, one, tiny_tables(slots=30_000), words, 64, torch.zeros(2).long())


@needs_compiler
def test_the_kernel_traps_if_there_are_more_misses_than_evictable_slots() -> None:
    op = CudaOnCpu(CLUSTERS)
    model = SwapInModel(Shape(k=5, slots=6, page_rows=4, words_per_page=16, context_pages=8), seed=3)
    model.check_step(op, one_seat(model, [7, 8, 9, 10, 11], stamp=5))
    with pytest.raises(AssertionError, match="the kernel trapped"):
        model.run(op, one_seat(model, [1, 2], stamp=5))
