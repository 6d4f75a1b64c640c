"""swap_in against a plain-Python model, over poisoned memory. Defects are those of the peers, by their numbers.

The tests run with the reference. Started with TRITON_INTERPRET=1 they run with the Triton kernels on CPU tensors
instead; Triton reads that variable once per process, so one test starts a second process with it.
"""

import importlib
import os
import subprocess
import sys
from dataclasses import fields, replace
from types import ModuleType

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from swap_in_model import POISON, Batch, Shape, World

from hotset.base.errors import ConfigError
from hotset.kernels import EMPTY
from hotset.kernels.swap_in import SeatTables, Swap, copy, plan, reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OP: ModuleType = importlib.import_module("hotset.kernels.swap_in.triton_impl") if INTERPRETED else reference
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True, database=None)
if INTERPRETED:  # slow: an example that fails is not made smaller
    EXAMPLES = settings(EXAMPLES, max_examples=16, phases=[Phase.generate])

CPU = torch.device("cpu")
WIDTHS = [*range(1, 41), 656, 1152]

# k and slots are no powers of two, slots fill their pages only in part, pages have 5 rows.
ODD = Shape(k=6, slots=11, page_rows=5, words_per_page=7, context_pages=9)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    k = draw(st.integers(1, 9))
    return Shape(
        k=k,
        slots=k + draw(st.integers(0, 9)),
        page_rows=draw(st.integers(1, 6)),
        words_per_page=draw(st.integers(1, 9)),
        context_pages=draw(st.integers(1, 9)),
        tiered=draw(st.integers(1, 3)),
        resident=draw(st.integers(0, 2)),
    )


def one_seat(world: World, positions: list[int], *, stamp: int, tail_first: int | None = None) -> Batch:
    """Seat 0, which is tiered, alone; positions are padded with EMPTY to k."""
    padded = positions + [EMPTY] * (world.shape.k - len(positions))
    return Batch([padded], [0], [stamp], [world.shape.context if tail_first is None else tail_first])


@EXAMPLES
@given(shapes(), st.integers(0, 2**31), st.booleans())
def test_every_step_equals_the_model_in_rows_copies_counts_and_every_map_word(
    shape: Shape, seed: int, full: bool
) -> None:
    world = World(shape, seed, full=full)
    for _ in range(4 if INTERPRETED else 10):
        world.check_step(OP, world.draw_batch())


@pytest.mark.parametrize(
    "shape",
    [
        Shape(k=130, slots=300, page_rows=16, words_per_page=64, context_pages=40),
        Shape(k=100, slots=2500, page_rows=48, words_per_page=333, context_pages=64, tiered=1),
    ],
    ids=["130 of 300 slots", "100 of 2500 slots"],
)
def test_sequences_over_many_slots_equal_the_model(shape: Shape) -> None:
    world = World(shape, seed=1, full=True)
    for _ in range(6 if INTERPRETED else 30):
        world.check_step(OP, world.draw_batch())


def test_the_oldest_slots_give_way_and_of_equally_old_ones_the_lower() -> None:
    world = World(Shape(k=4, slots=6, page_rows=4, words_per_page=16, context_pages=8), seed=2)
    for stamp, positions in enumerate([[10, 11], [12, 13], [14, 15], [11, 14]]):
        world.check_step(OP, one_seat(world, positions, stamp=stamp))
    assert world.maps[0].last_used == [0, 3, 1, 1, 3, 2]
    world.check_step(OP, one_seat(world, [20, 21], stamp=4))
    assert world.maps[0].position_of == [20, 11, 21, 13, 14, 15]


def test_a_second_plan_with_the_same_stamp_spares_the_slots_of_the_first() -> None:
    world = World(Shape(k=3, slots=6, page_rows=4, words_per_page=16, context_pages=8), seed=3)
    world.check_step(OP, one_seat(world, [7, 8, 9], stamp=5))
    world.check_step(OP, one_seat(world, [1, 8, 2], stamp=5))
    assert world.maps[0].position_of == [7, 8, 9, 1, 2, EMPTY]


def test_k_positions_take_every_slot_when_there_are_no_more_than_k() -> None:
    world = World(Shape(k=5, slots=5, page_rows=3, words_per_page=4, context_pages=9), seed=4)
    for stamp in range(4):
        world.check_step(OP, one_seat(world, [(7 * stamp + 4 * i) % 27 for i in range(5)], stamp=stamp))


def test_a_context_that_fits_the_slots_misses_every_position_once_only() -> None:
    world = World(Shape(k=6, slots=20, page_rows=5, words_per_page=8, context_pages=4), seed=5)
    for stamp in range(12 if INTERPRETED else 40):
        chosen = world.random.sample(range(20), 6)
        world.check_step(OP, one_seat(world, chosen, stamp=stamp))
    assert int(world.counts[1]) <= 20


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
def test_empty_padding_and_duplicates_do_not_corrupt_counts_defect_5(positions: list[int]) -> None:
    world = World(ODD, seed=6)
    world.check_step(OP, one_seat(world, positions, stamp=1))  # all miss
    there = [position for position in positions if position != EMPTY]
    assert world.counts.tolist() == [len(there), len(set(there))]
    world.check_step(OP, one_seat(world, positions, stamp=2))  # all hit
    assert world.counts.tolist() == [2 * len(there), len(set(there))]


def test_positions_in_the_tail_touch_neither_maps_nor_counts() -> None:
    world = World(ODD, seed=7)
    before = world.words.clone()
    swap = world.check_step(OP, one_seat(world, [40, 44, 35, 39, 35], stamp=1, tail_first=35))
    assert torch.equal(world.words, before) and world.counts.tolist() == [0, 0]
    assert (swap.missing_host == EMPTY).all()


def test_padded_rows_of_the_batch_touch_nothing_whatever_they_hold() -> None:
    world = World(ODD, seed=8)
    before = world.words.clone()
    swap = world.check_step(OP, Batch([[2**40, 0, 1, 2, 3, -7]], [EMPTY], [2**40], [-1]))
    assert torch.equal(world.words, before) and (swap.rows == EMPTY).all()


def test_resident_seats_may_fill_a_batch_without_a_tiered_one() -> None:
    world = World(replace(ODD, tiered=0, resident=2), seed=9)
    positions = [[3, EMPTY, 44, 3, 0, 1], [40, 41, 42, 43, 44, EMPTY], [5, 4, 3, 2, 1, 0]]
    world.check_step(OP, Batch(positions, [1, 0, 1], [1, 1, 1], [0, 7, 45]))


def test_a_swap_is_replayed_for_every_layer_that_shares_the_plan() -> None:
    world = World(ODD, seed=10)
    swap = world.run(OP, one_seat(world, [4, 17, 30], stamp=1))
    for layer in range(3):
        host, device = world.host_rows + layer, torch.full_like(world.device_rows, POISON)
        OP.copy(swap, host, device)
        for i, position in enumerate([4, 17, 30]):
            assert torch.equal(device[swap.rows[0, i]], host[world.host_row(0, position)])


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_any_byte_size_keep_their_tail_and_spare_what_follows_defect_6(width: int) -> None:
    check_row_bytes(OP, width, CPU)


def check_row_bytes(op: ModuleType, width: int, device: torch.device) -> None:
    """Two rows of `width` bytes are copied, and no byte beside them, however rows are spaced and aligned."""
    swap = Swap(torch.tensor([[5, 2, EMPTY, 0]]), torch.tensor([[1, 6, EMPTY, EMPTY]]))
    on_device = Swap(swap.rows.to(device), swap.missing_host.to(device))
    aligned = -(-width // 16) * 16
    for stride, offset in ((width, 0), (aligned, 0), (aligned, 8), (width + 4, 4), (width + 1, 1)):
        host = torch.arange(7 * stride + offset).mul(37).remainder(251).to(torch.uint8)
        expected = torch.full((7 * stride + offset,), POISON, dtype=torch.uint8)
        written = expected.to(device, copy=True)
        for device_row, host_row in ((5, 1), (2, 6)):
            source = host[offset + host_row * stride :][:width]
            expected[offset + device_row * stride :][:width] = source
        readable = host if device == CPU else host.pin_memory()
        op.copy(on_device, *(torch.as_strided(flat, (7, width), (stride, 1), offset) for flat in (readable, written)))
        assert torch.equal(written.to(CPU), expected), f"rows of {width} bytes, {stride} apart, from byte {offset}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_rows_of_any_dtype_are_copied_bit_by_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    host = torch.randint(0, 256, (4, 3 * dtype.itemsize), dtype=torch.uint8, generator=generator)  # NaN among them
    device = torch.full_like(host, POISON)
    OP.copy(Swap(torch.tensor([[3, 1]]), torch.tensor([[0, 2]])), host.view(dtype), device.view(dtype))
    assert torch.equal(device[[3, 1]], host[[0, 2]]) and (device[[0, 2]] == POISON).all()


def test_host_page_ids_are_never_taken_for_device_page_ids_defect_7() -> None:
    world = World(ODD, seed=12)
    swap = world.check_step(OP, one_seat(world, [0, 12, 24, 36, 44], stamp=1))
    slot_rows = {int(page) * 5 + offset for page in world.tables.slot_pages[0] for offset in range(5)}
    assert set(swap.rows[0, :5].tolist()) <= slot_rows
    assert swap.missing_host[0, :5].tolist() == [world.host_row(0, position) for position in (0, 12, 24, 36, 44)]


def test_row_numbers_beyond_32_bits_are_exact_defect_7() -> None:
    world = World(ODD, seed=13)
    far = {name: getattr(world.tables, name) for name in ("row_pages", "host_pages", "slot_pages", "tail_pages")}
    world.tables = replace(world.tables, **{name: pages % 1000 + 2**31 + 3 for name, pages in far.items()})
    batch = Batch([[1, 2, 3, 30, 31, 44], [44, 43, 0, 1, 2, 3]], [0, 2], [1, 1], [30, 0])
    swap = world.run(OP, batch)
    expected = world.expect(batch)
    assert (swap.rows.tolist(), swap.missing_host.tolist()) == (expected.rows, expected.missing_host)
    assert int(swap.rows.min()) > 2**33 and int(swap.missing_host.max()) > 2**33


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies whole tensors; the GPU test does this for Triton")
def test_row_offsets_beyond_32_bits_are_exact_defect_7() -> None:
    rows, stride = 2**16 + 2, 2**15  # more than 2**31 bytes of address space, of which almost nothing is touched
    host, device = (torch.empty(rows, stride, dtype=torch.uint8)[:, :24] for _ in range(2))
    host[rows - 1], device[rows - 2 : rows] = torch.arange(24, dtype=torch.uint8), POISON
    OP.copy(Swap(torch.tensor([[rows - 2]]), torch.tensor([[rows - 1]])), host, device)
    assert torch.equal(device[rows - 2], host[rows - 1]) and (device[rows - 1] == POISON).all()


@pytest.mark.parametrize("misses", [4, 8])
def test_a_full_page_of_misses_still_copies_single_rows_defect_8(misses: int) -> None:
    world = World(Shape(k=8, slots=12, page_rows=4, words_per_page=8, context_pages=12), seed=14)
    scattered = [(5 * i + 3) % 48 for i in range(misses)]
    world.check_step(OP, one_seat(world, scattered, stamp=1))
    assert int((world.device_rows != POISON).any(1).sum()) == misses  # no row of 5 random bytes equals the poison
    together = list(range(16, 16 + misses))
    world.check_step(OP, one_seat(world, together, stamp=2))


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
def test_impossible_tables_are_refused_before_the_maps_are_touched(changed: dict[str, int], message: str) -> None:
    one = torch.zeros(1, dtype=torch.int64)
    words = torch.full((64,), 7, dtype=torch.int32)
    with pytest.raises(ConfigError, match=message):
        plan(torch.tensor([[1, 2, 3]]), one, one, one, tiny_tables(**changed), words, 64, torch.zeros(2).long())
    assert (words == 7).all()


@pytest.mark.parametrize(
    ("host", "device", "message"),
    [
        (torch.zeros(2, 6), torch.zeros(2, 5), "host rows of 6 values, device rows of 5"),
        (torch.zeros(2, 6), torch.zeros(2, 6).half(), "torch.float32 cannot be copied to device rows of torch.float16"),
    ],
)
def test_rows_that_differ_between_the_tiers_are_refused(host: torch.Tensor, device: torch.Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        copy(Swap(torch.tensor([[0]]), torch.tensor([[1]])), host, device)


@pytest.mark.skipif(INTERPRETED, reason="this is what starts the interpreted run")
def test_triton_kernels_pass_all_of_this_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def on_gpu(tables: SeatTables) -> SeatTables:
    named = {field.name: getattr(tables, field.name) for field in fields(tables)}
    return replace(tables, **{name: value.cuda() for name, value in named.items() if isinstance(value, torch.Tensor)})


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        ODD,
        Shape(k=2048, slots=4096, page_rows=64, words_per_page=1152, context_pages=256, tiered=6, width=656),
        Shape(k=1500, slots=9000, page_rows=48, words_per_page=333, context_pages=300, tiered=3, width=1152),
        # Hardly any position occurs once: the threads of a program race for the same entries.
        Shape(k=4096, slots=5000, page_rows=16, words_per_page=64, context_pages=20, tiered=4, width=37),
    ],
    ids=str,
)
def test_triton_on_a_gpu_equals_the_reference(shape: Shape) -> None:
    world = World(shape, seed=15, full=shape.context >= shape.slots)
    tables, words, counts = on_gpu(world.tables), world.words.cuda(), world.counts.cuda()
    host_rows, device_rows = world.host_rows.pin_memory(), world.device_rows.cuda()
    for _ in range(12):
        batch = world.draw_batch()
        columns = [torch.tensor(column).cuda() for column in (batch.positions, batch.seats, batch.stamps)]
        tail_first = torch.tensor(batch.tail_first).cuda()
        swap = plan(*columns, tail_first, tables, words, shape.words_per_page, counts)
        copy(swap, host_rows, device_rows)
        expected = world.run(reference, batch)
        reference.copy(expected, world.host_rows, world.device_rows)
        assert torch.equal(swap.rows.cpu(), expected.rows)
        assert torch.equal(swap.missing_host.cpu(), expected.missing_host)
        assert torch.equal(words.cpu(), world.words) and torch.equal(counts.cpu(), world.counts)
        assert torch.equal(device_rows.cpu(), world.device_rows)


@pytest.mark.gpu
def test_triton_on_a_gpu_copies_rows_of_any_byte_size_defect_6() -> None:
    triton_impl = importlib.import_module("hotset.kernels.swap_in.triton_impl")
    for width in WIDTHS:
        check_row_bytes(triton_impl, width, torch.device("cuda"))


@pytest.mark.gpu
def test_triton_on_a_gpu_reaches_rows_beyond_32_bits_defect_7() -> None:
    rows, stride = 2**16 + 2, 2**15
    host = torch.empty(rows, stride, dtype=torch.uint8, pin_memory=True)[:, :24]
    device = torch.empty(rows, stride, dtype=torch.uint8, device="cuda")[:, :24]
    host[rows - 1], device[rows - 2 : rows] = torch.arange(24, dtype=torch.uint8), POISON
    copy(Swap(torch.tensor([[rows - 2]]).cuda(), torch.tensor([[rows - 1]]).cuda()), host, device)
    assert torch.equal(device[rows - 2].cpu(), host[rows - 1]) and bool((device[rows - 1] == POISON).all())
