"""Compares swap_in's CUDA kernels on a GPU with the reference, over poisoned memory."""

from dataclasses import replace

import pytest
import torch
from kernel_tensors import on_device
from swap_in_model import ODD, POISON, Shape, SwapInModel, check_copied_bytes, make_copies, pairs_by_query

from hotset.kernels import EMPTY
from hotset.kernels.swap_in import SwapPlan, copy, cuda_impl, plan, reference

pytestmark = pytest.mark.gpu


def for_every_batch(cluster: cuda_impl.BlockCluster | None) -> cuda_impl.SwapInTuning:
    """Returns a tuning that uses `cluster` for every batch. Queries with many missing rows copy two at a time."""
    turns = {"max_batch_without_turns": 1, "lists_at_once": 2, "turn_rows": 100, "copy_lists_at_once": 2}
    return cuda_impl.SwapInTuning(clusters=((1, cluster),), **turns)


@pytest.mark.parametrize(
    ("shape", "stamp", "tuning"),
    [
        (ODD, 40, for_every_batch(cuda_impl.BlockCluster(1))),
        (
            Shape(k=2048, slots=4096, page_rows=64, words_per_page=1152, context_pages=256, tiered=6, width=656),
            2**17,
            cuda_impl.TUNED,
        ),
        (
            Shape(k=2048, slots=8192, page_rows=64, words_per_page=10496, context_pages=256, tiered=2, width=656),
            2**30,
            for_every_batch(None),
        ),
        (
            Shape(k=1500, slots=9000, page_rows=48, words_per_page=333, context_pages=300, tiered=3, width=1152),
            14_000,
            for_every_batch(cuda_impl.BlockCluster(8)),
        ),
        # Most positions occur several times: the threads of a block race for the same entries of the hash table.
        (
            Shape(k=4096, slots=5000, page_rows=16, words_per_page=64, context_pages=20, tiered=4, width=37),
            10**6,
            for_every_batch(cuda_impl.BlockCluster(2)),
        ),
        (
            Shape(k=5000, slots=6000, page_rows=64, words_per_page=512, context_pages=256, tiered=2, width=16),
            10**6,
            for_every_batch(cuda_impl.BlockCluster(4, rows_at_once=1)),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Shape) else "",
)
def test_on_a_gpu_every_step_equals_the_reference(shape: Shape, stamp: int, tuning: cuda_impl.SwapInTuning) -> None:
    model = SwapInModel(shape, seed=15, full=shape.context >= shape.slots, stamp=stamp)
    tables, words, counts = on_device(model.tables, "cuda"), model.words.cuda(), model.counts.cuda()
    host_rows, device_rows = model.host_rows.pin_memory(), model.device_rows.cuda()
    for _ in range(12):
        batch = model.draw_batch()
        swap = cuda_impl.plan(
            positions=torch.tensor(batch.positions).cuda(),
            seats=torch.tensor(batch.seats).cuda(),
            stamps=torch.tensor(batch.stamps).cuda(),
            tables=tables,
            words=words,
            words_per_page=shape.words_per_page,
            counts=counts,
            ignore_tail=batch.ignore_tail,
            host_rows=host_rows,
            device_rows=device_rows,
            tuning=tuning,
        )
        expected = model.run(reference, batch, host_rows=model.host_rows, device_rows=model.device_rows)
        assert torch.equal(swap.rows.cpu(), expected.rows)
        assert pairs_by_query(swap.copies) == pairs_by_query(expected.copies)
        assert torch.equal(words.cpu(), model.words) and torch.equal(counts.cpu(), model.counts)
        assert torch.equal(device_rows.cpu(), model.device_rows)


def test_on_a_gpu_a_replayed_step_equals_the_reference() -> None:
    shape = Shape(k=2048, slots=4096, page_rows=64, words_per_page=1152, context_pages=128, tiered=5, width=656)
    model = SwapInModel(shape, seed=16, full=True, stamp=9000)
    tables, words, counts = on_device(model.tables, "cuda"), model.words.cuda(), model.counts.cuda()
    host_rows, device_rows = model.host_rows.pin_memory(), model.device_rows.cuda()
    inputs = [torch.zeros(8, 2048).long().cuda(), torch.full((8,), EMPTY).cuda(), torch.zeros(8).long().cuda()]
    columns = [torch.empty_like(column) for column in inputs]

    def step() -> SwapPlan:
        for column, source in zip(columns, inputs, strict=True):
            torch.add(source, 0, out=column)  # kernels write the inputs just before the plan reads them
        positions, seats, stamps = columns
        return plan(
            positions=positions,
            seats=seats,
            stamps=stamps,
            tables=tables,
            words=words,
            words_per_page=shape.words_per_page,
            counts=counts,
            host_rows=host_rows,
            device_rows=device_rows,
        )

    step()  # compiles the kernels; all queries are padding, so nothing is written
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        swap = step()
    for _ in range(8):
        batch = replace(model.draw_batch(), ignore_tail=False)
        rows = len(batch.seats)
        inputs[1].fill_(EMPTY)
        for column, values in zip(inputs, (batch.positions, batch.seats, batch.stamps), strict=True):
            column[:rows] = torch.tensor(values).cuda()
        graph.replay()
        expected = model.run(reference, batch, host_rows=model.host_rows, device_rows=model.device_rows)
        assert torch.equal(swap.rows[:rows].cpu(), expected.rows) and bool((swap.rows[rows:] == EMPTY).all())
        assert pairs_by_query(swap.copies)[:rows] == pairs_by_query(expected.copies)
        assert torch.equal(words.cpu(), model.words) and torch.equal(counts.cpu(), model.counts)
        assert torch.equal(device_rows.cpu(), model.device_rows)


def test_on_a_gpu_rows_of_any_byte_size_are_copied_defect_6() -> None:
    for width in (*range(1, 20), 37, 132, 656, 1152, 5000):
        check_copied_bytes(cuda_impl, width, torch.device("cuda"))


def test_on_a_gpu_row_offsets_beyond_32_bits_are_exact_defect_7() -> None:
    rows, stride = 2**16 + 2, 2**15
    host = torch.empty(rows, stride, dtype=torch.uint8, pin_memory=True)[:, :24]
    device = torch.empty(rows, stride, dtype=torch.uint8, device="cuda")[:, :24]
    host[rows - 1], device[rows - 2 : rows] = torch.arange(24, dtype=torch.uint8), POISON
    copy(make_copies([(rows - 1, rows - 2)], device=torch.device("cuda")), host, device)
    assert torch.equal(device[rows - 2].cpu(), host[rows - 1]) and bool((device[rows - 1] == POISON).all())
