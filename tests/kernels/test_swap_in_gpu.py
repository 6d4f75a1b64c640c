"""swap_in's CUDA kernels on a GPU against the reference, over poisoned memory."""

from dataclasses import fields, replace

import pytest
import torch
from swap_in_model import ODD, POISON, Shape, World, check_row_bytes, copies_of, listed

from hotset.kernels import EMPTY
from hotset.kernels.swap_in import SeatTables, Swap, copy, cuda_impl, plan, reference

pytestmark = pytest.mark.gpu


def together(cluster: cuda_impl.Cluster | None) -> cuda_impl.SwapInTuning:
    """Whatever the batch; its rows take turns."""
    return cuda_impl.SwapInTuning(clusters=((1, cluster),), lists_at_once=2)


def on_gpu(tables: SeatTables) -> SeatTables:
    named = {field.name: getattr(tables, field.name) for field in fields(tables)}
    return replace(tables, **{name: value.cuda() for name, value in named.items() if isinstance(value, torch.Tensor)})


@pytest.mark.parametrize(
    ("shape", "stamp", "tuning"),
    [
        (ODD, 40, together(cuda_impl.Cluster(1))),
        (
            Shape(k=2048, slots=4096, page_rows=64, words_per_page=1152, context_pages=256, tiered=6, width=656),
            2**17,
            cuda_impl.TUNED,
        ),
        (
            Shape(k=2048, slots=8192, page_rows=64, words_per_page=10496, context_pages=256, tiered=2, width=656),
            2**30,
            together(None),
        ),
        (
            Shape(k=1500, slots=9000, page_rows=48, words_per_page=333, context_pages=300, tiered=3, width=1152),
            14_000,
            together(cuda_impl.Cluster(8)),
        ),
        # Hardly any position occurs once: the threads of a block race for the same places.
        (
            Shape(k=4096, slots=5000, page_rows=16, words_per_page=64, context_pages=20, tiered=4, width=37),
            10**6,
            together(cuda_impl.Cluster(2)),
        ),
        (
            Shape(k=5000, slots=6000, page_rows=64, words_per_page=512, context_pages=256, tiered=2, width=16),
            10**6,
            together(cuda_impl.Cluster(4, rows_at_once=1)),
        ),
    ],
    ids=lambda each: str(each) if isinstance(each, Shape) else "",
)
def test_on_a_gpu_every_step_equals_the_reference(shape: Shape, stamp: int, tuning: cuda_impl.SwapInTuning) -> None:
    world = World(shape, seed=15, full=shape.context >= shape.slots, stamp=stamp)
    tables, words, counts = on_gpu(world.tables), world.words.cuda(), world.counts.cuda()
    host_rows, device_rows = world.host_rows.pin_memory(), world.device_rows.cuda()
    for _ in range(12):
        batch = world.draw_batch()
        columns = [torch.tensor(column).cuda() for column in (batch.positions, batch.seats, batch.stamps)]
        maps = (tables, words, shape.words_per_page, counts)
        rows = {"host_rows": host_rows, "device_rows": device_rows}
        swap = cuda_impl.plan(*columns, *maps, **rows, ignore_tail=batch.ignore_tail, tuning=tuning)
        expected = world.run(reference, batch, host_rows=world.host_rows, device_rows=world.device_rows)
        assert torch.equal(swap.rows.cpu(), expected.rows)
        assert listed(swap.copies) == listed(expected.copies)
        assert torch.equal(words.cpu(), world.words) and torch.equal(counts.cpu(), world.counts)
        assert torch.equal(device_rows.cpu(), world.device_rows)


def test_on_a_gpu_a_captured_step_equals_the_reference_when_replayed() -> None:
    """Inputs change between replays."""
    shape = Shape(k=2048, slots=4096, page_rows=64, words_per_page=1152, context_pages=128, tiered=5, width=656)
    world = World(shape, seed=16, full=True, stamp=9000)
    tables, words, counts = on_gpu(world.tables), world.words.cuda(), world.counts.cuda()
    host_rows, device_rows = world.host_rows.pin_memory(), world.device_rows.cuda()
    inputs = [torch.zeros(8, 2048).long().cuda(), torch.full((8,), EMPTY).cuda(), torch.zeros(8).long().cuda()]
    columns = [torch.empty_like(each) for each in inputs]

    def step() -> Swap:
        for column, source in zip(columns, inputs, strict=True):
            torch.add(source, 0, out=column)  # written by the kernels right before
        rows = {"host_rows": host_rows, "device_rows": device_rows}
        return plan(*columns, tables, words, shape.words_per_page, counts, **rows)

    step()  # compiles; padded rows do nothing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        swap = step()
    for _ in range(8):
        batch = replace(world.draw_batch(), ignore_tail=False)
        rows = len(batch.seats)
        inputs[1].fill_(EMPTY)
        for column, values in zip(inputs, (batch.positions, batch.seats, batch.stamps), strict=True):
            column[:rows] = torch.tensor(values).cuda()
        graph.replay()
        expected = world.run(reference, batch, host_rows=world.host_rows, device_rows=world.device_rows)
        assert torch.equal(swap.rows[:rows].cpu(), expected.rows) and bool((swap.rows[rows:] == EMPTY).all())
        assert listed(swap.copies)[:rows] == listed(expected.copies)
        assert torch.equal(words.cpu(), world.words) and torch.equal(counts.cpu(), world.counts)
        assert torch.equal(device_rows.cpu(), world.device_rows)


def test_on_a_gpu_rows_of_any_byte_size_are_copied_defect_6() -> None:
    for width in (*range(1, 20), 37, 132, 656, 1152, 5000):
        check_row_bytes(cuda_impl, width, torch.device("cuda"))


def test_on_a_gpu_rows_beyond_32_bits_are_reached_defect_7() -> None:
    rows, stride = 2**16 + 2, 2**15
    host = torch.empty(rows, stride, dtype=torch.uint8, pin_memory=True)[:, :24]
    device = torch.empty(rows, stride, dtype=torch.uint8, device="cuda")[:, :24]
    host[rows - 1], device[rows - 2 : rows] = torch.arange(24, dtype=torch.uint8), POISON
    copy(copies_of([(rows - 1, rows - 2)], device=torch.device("cuda")), host, device)
    assert torch.equal(device[rows - 2].cpu(), host[rows - 1]) and bool((device[rows - 1] == POISON).all())
