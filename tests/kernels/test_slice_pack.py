"""Compares copy_slices with plain loops, over poisoned memory.

The tests cover the reference, the interpreted kernel, and the kernel on a GPU.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from interpreted import INTERPRETED, triton_impl
from kernel_tensors import all_bytes
from numpy.typing import NDArray
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.base.paged_span import PagedSpan
from hotset.kernels.slice_pack import RowSlices, SlicedRows, copy_slices, reference

POISON = 0xAB
GUARD = 48  # number of bytes before and after a packed buffer, which must not change
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Case:
    """A context in the pages of several stores, one per unit (a layer). Gaps and the offset are in bytes."""

    row_bytes: int
    spans: tuple[tuple[int, int], ...]
    first: int
    last: int
    page_rows: int = 4
    units: int = 2
    count: int = 9  # pages per store
    row_gap: int = 0
    page_gap: int = 0
    offset: int = 0

    @property
    def slices(self) -> RowSlices:
        return RowSlices(self.spans)

    def stores(self) -> list[Tensor]:
        """Returns one store of random bytes per unit, each in its own memory."""
        row = self.row_bytes + self.row_gap
        page = self.page_rows * row + self.page_gap
        shape, strides = (self.count, self.page_rows, self.row_bytes), (page, row, 1)
        flat = [torch.randint(0, 256, (self.offset + self.count * page,), dtype=torch.uint8) for _ in range(self.units)]
        return [store.as_strided(shape, strides, self.offset) for store in flat]

    def pages(self) -> list[int]:
        """Returns all pages in random order, except that pages 0 and 1 are consecutive."""
        pages = random.sample(range(2, self.count), self.count - 2)
        pages[self.count // 2 : self.count // 2] = [0, 1]
        return pages

    def packed(self) -> Tensor:
        """Returns a poisoned buffer between guards, with the same offset as the stores."""
        nbytes = self.units * (self.last - self.first) * self.slices.nbytes
        return torch.full((2 * GUARD + self.offset + nbytes,), POISON, dtype=torch.uint8)

    def inner(self, buffer: Tensor) -> Tensor:
        return buffer[GUARD + self.offset : len(buffer) - GUARD]


def rows_of(stores: Sequence[Tensor], slices: RowSlices) -> SlicedRows:
    """Describes slices of the rows of stores [pages, page rows, row bytes], one per layer."""
    page_bytes, row_bytes, _ = stores[0].stride()
    bases = tuple((store.data_ptr(),) for store in stores)
    return SlicedRows(PagedSpan(bases, page_bytes, stores[0].shape[1], row_bytes), slices)


def copy(
    blocks: Sequence[SlicedRows], pages: Sequence[int], first: int, last: int, packed: Tensor, *, unpack: bool
) -> None:
    """Copies between stores and a piece, both on the CPU, by the kernel or by the reference."""
    if INTERPRETED:
        device = torch.device("cpu")
        triton_impl("slice_pack").copy(blocks, pages, first, last, packed.data_ptr(), device, unpack=unpack)
    else:
        reference.copy(blocks, pages, first, last, packed.data_ptr(), unpack=unpack)


def slice_locations(case: Case, pages: Sequence[int]) -> list[tuple[int, int, int, int, int]]:
    """Returns (unit, page, row, first byte in the row, bytes) of every slice, in the order in which they are packed."""
    return [
        (unit, pages[position // case.page_rows], position % case.page_rows, begin, nbytes)
        for unit in range(case.units)
        for position in range(case.first, case.last)
        for begin, nbytes in case.spans
    ]


CASES = {
    "16 bytes at a time": Case(64, ((0, 16), (32, 16)), 2, 27),
    "8 bytes at a time": Case(40, ((8, 8), (24, 16)), 0, 36),
    "4 bytes at a time": Case(132, ((0, 132),), 5, 20),
    "2 bytes at a time": Case(64, ((2, 6), (34, 6)), 1, 30),
    "single bytes": Case(37, ((0, 1), (36, 1), (5, 17)), 3, 33),
    "slices out of order": Case(64, ((48, 16), (0, 32)), 0, 13),
    "gaps between rows and pages": Case(48, ((16, 16), (0, 16)), 2, 19, row_gap=16, page_gap=32),
    "unaligned gaps": Case(48, ((16, 16), (0, 16)), 2, 19, row_gap=3, page_gap=7),
    "unaligned memory": Case(64, ((16, 48),), 0, 9, offset=5),
    "memory aligned to 4": Case(64, ((16, 48),), 0, 9, offset=4),
    "a long slice": Case(1600, ((16, 1152), (1184, 16)), 3, 22),
    "a whole row of 656 bytes": Case(656, ((0, 656),), 0, 20),
    "one row in the middle of a page": Case(64, ((0, 64),), 5, 6),
    "more rows than one program copies": Case(32, ((0, 16),), 7, 2500, page_rows=300, units=3),
    "pages of one row": Case(32, ((16, 16),), 1, 8, page_rows=1),
    "no rows": Case(32, ((16, 16),), 5, 5),
    "no slices": Case(32, (), 0, 5),
}
with_each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@with_each_case
def test_slices_are_packed_in_order_and_nothing_else_is_written(case: Case) -> None:
    random.seed(case.last)
    stores, pages, buffer = case.stores(), case.pages(), case.packed()
    before = [all_bytes(store).clone() for store in stores]
    expected = [
        stores[unit][page, row, begin : begin + nbytes]
        for unit, page, row, begin, nbytes in slice_locations(case, pages)
    ]
    copy([rows_of(stores, case.slices)], pages, case.first, case.last, case.inner(buffer), unpack=False)
    assert torch.equal(case.inner(buffer), torch.cat([*expected, torch.empty(0, dtype=torch.uint8)]))
    guards = torch.cat((buffer[: GUARD + case.offset], buffer[len(buffer) - GUARD :]))
    assert (guards == POISON).all(), "bytes outside the buffer were written"
    assert all(torch.equal(all_bytes(store), old) for store, old in zip(stores, before, strict=True))


@with_each_case
def test_slices_are_unpacked_and_nothing_else_is_written(case: Case) -> None:
    random.seed(case.last)
    stores, pages, buffer = case.stores(), case.pages(), case.packed()
    case.inner(buffer).random_()
    before = buffer.clone()
    for store in stores:
        all_bytes(store).fill_(POISON)
    expected = [
        all_bytes(store).clone().as_strided(store.shape, store.stride(), store.storage_offset()) for store in stores
    ]
    packed = 0
    for unit, page, row, begin, nbytes in slice_locations(case, pages):
        expected[unit][page, row, begin : begin + nbytes] = case.inner(buffer)[packed : packed + nbytes]
        packed += nbytes
    copy([rows_of(stores, case.slices)], pages, case.first, case.last, case.inner(buffer), unpack=True)
    for store, expected_store in zip(stores, expected, strict=True):
        assert torch.equal(all_bytes(store), all_bytes(expected_store)), "a slice is wrong, or other bytes changed"
    assert torch.equal(buffer, before)


def ranks_of_head(heads: int, ranks: int, head: int) -> list[int]:
    """Returns the ranks that hold a head: one, or several if there are more ranks than heads."""
    if ranks <= heads:
        return [head // (heads // ranks)]
    return [rank for rank in range(ranks) if rank // (ranks // heads) == head]


def heads_of_rank(heads: int, ranks: int, rank: int) -> list[int]:
    return [head for head in range(heads) if rank in ranks_of_head(heads, ranks, head)]


def stored_rows(context: Bytes, held: Sequence[int], stride: int) -> Bytes:
    """Stores [units, rows, K and V, heads, bytes] as a rank does: K of its heads, V of its heads, padding."""
    units, rows, _, _, head_bytes = context.shape
    result = np.full((units, rows, stride), POISON, np.uint8)
    for half in range(2):
        for i, head in enumerate(held):
            begin = (half * len(held) + i) * head_bytes
            result[:, :, begin : begin + head_bytes] = context[:, :, half, head]
    return result


def to_pages(rows: Bytes, pages: Sequence[int], count: int, page_rows: int) -> Bytes:
    result = np.full((rows.shape[0], count, page_rows, rows.shape[2]), POISON, np.uint8)
    for position in range(rows.shape[1]):
        result[:, pages[position // page_rows], position % page_rows] = rows[:, position]
    return result


def slices_of_heads(held: Sequence[int], moved: Sequence[int], head_bytes: int) -> RowSlices:
    """Returns the slices of K and then V of the heads `moved`, in a row of the heads `held`."""
    spans = [((half * len(held) + held.index(head)) * head_bytes, head_bytes) for half in range(2) for head in moved]
    return RowSlices(tuple(spans))


def check_transfer(heads: int, source_ranks: int, target_ranks: int, head_bytes: int) -> None:
    """Transfers each head of every target rank from one source rank, in chunks that need not end at page boundaries."""
    draw = np.random.default_rng(heads * 100 + source_ranks * 10 + target_ranks)
    units, rows, chunks = 2, 11, ((0, 3), (3, 10), (10, 11))
    context = draw.integers(0, 256, (units, rows, 2, heads, head_bytes), np.uint8)
    source_pages = [int(page) for page in draw.permutation(6)[:4]]  # of 3 rows
    target_pages = [int(page) for page in draw.permutation(7)[:3]]  # of 4 rows

    def stride(ranks: int) -> int:
        return -(-2 * len(heads_of_rank(heads, ranks, 0)) * head_bytes // 16) * 16

    held_by = [heads_of_rank(heads, source_ranks, rank) for rank in range(source_ranks)]
    sources = [
        [
            torch.from_numpy(unit)
            for unit in to_pages(stored_rows(context, held, stride(source_ranks)), source_pages, 6, 3)
        ]
        for held in held_by
    ]
    for rank in range(target_ranks):
        target_heads = heads_of_rank(heads, target_ranks, rank)
        target = [torch.full((7, 4, stride(target_ranks)), POISON, dtype=torch.uint8) for _ in range(units)]
        for source in {ranks_of_head(heads, source_ranks, head)[-1] for head in target_heads}:
            moved = [head for head in held_by[source] if head in target_heads]
            read, written = (slices_of_heads(held, moved, head_bytes) for held in (held_by[source], target_heads))
            for first, last in chunks:
                packed = torch.full((units * (last - first) * read.nbytes,), POISON, dtype=torch.uint8)
                copy([rows_of(sources[source], read)], source_pages, first, last, packed, unpack=False)
                copy([rows_of(target, written)], target_pages, first, last, packed, unpack=True)
        expected = to_pages(stored_rows(context, target_heads, stride(target_ranks)), target_pages, 7, 4)
        assert np.array_equal(np.stack([unit.numpy() for unit in target]), expected), (source_ranks, target_ranks, rank)


@pytest.mark.not_interpreted
@pytest.mark.parametrize("heads", range(1, 9))
def test_heads_are_transferred_between_any_two_degrees_of_tensor_parallelism(heads: int) -> None:
    degrees = [ranks for ranks in range(1, 9) if heads % ranks == 0 or ranks % heads == 0]
    for source, target in itertools.product(degrees, repeat=2):
        check_transfer(heads, source, target, head_bytes=6 if (source + target) % 2 else 32)


class Recorder:
    """Replaces the kernel and records the bytes per access of its launch."""

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        return self.launch

    def launch(self, *, word_bytes: int, vector: int, **others: Any) -> None:
        self.width = word_bytes * vector


MISALIGNED = {  # what is misaligned: (widest possible access in bytes, changes to the aligned case)
    "nothing": (16, {}),
    "the end of a slice": (8, {"spans": ((0, 24), (32, 16))}),
    "the beginning of a slice": (4, {"spans": ((0, 16), (20, 16))}),
    "rows": (2, {"row_gap": 2}),
    "pages": (1, {"page_gap": 1}),
    "a unit": (4, {"moved_unit": 4}),
    "the buffer": (8, {"moved_buffer": 8}),
}


@pytest.mark.interpreted
@pytest.mark.parametrize(("width", "changed"), MISALIGNED.values(), ids=MISALIGNED)
def test_the_kernel_uses_no_wider_accesses_than_the_alignment_allows(width: int, changed: dict[str, Any]) -> None:
    """The interpreter does not check alignment, but a GPU requires it."""
    impl, recorder = triton_impl("slice_pack"), Recorder()
    moved_unit, moved_buffer = changed.pop("moved_unit", 0), changed.pop("moved_buffer", 0)
    case = replace(Case(64, ((0, 16), (32, 16)), 2, 27), **changed)
    stores, other = case.stores(), replace(case, offset=moved_unit).stores()
    nbytes = case.units * (case.last - case.first) * case.slices.nbytes
    buffer = torch.zeros(moved_buffer + nbytes, dtype=torch.uint8)[moved_buffer:]
    with mock.patch.object(impl, "_copy_kernel", recorder):
        copy([rows_of([stores[0], other[1]], case.slices)], case.pages(), case.first, case.last, buffer, unpack=True)
    assert recorder.width == width


@pytest.mark.not_interpreted
def test_packed_slices_can_be_unpacked_through_the_op() -> None:
    case = Case(64, ((0, 16), (32, 16)), 2, 27)
    stores, copies, pages = case.stores(), case.stores(), case.pages()
    buffer = case.inner(case.packed())
    arguments = pages, case.first, case.last, buffer.data_ptr(), torch.device("cpu")
    copy_slices([rows_of(stores, case.slices)], *arguments, unpack=False)
    copy_slices([rows_of(copies, case.slices)], *arguments, unpack=True)
    for unit, page, row, begin, nbytes in slice_locations(case, pages):
        moved = slice(begin, begin + nbytes)
        assert torch.equal(copies[unit][page, row, moved], stores[unit][page, row, moved])


@pytest.mark.parametrize("spans", [((0, 0),), ((-1, 4),), ((0, 4), (3, 4)), ((4, -2),)])
def test_empty_negative_and_overlapping_slices_are_refused(spans: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ConfigError, match="slices"):
        RowSlices(spans)


def test_slices_outside_the_row_are_refused() -> None:
    rows = rows_of([torch.zeros(2, 4, 8, dtype=torch.uint8)], RowSlices(((4, 5),)))
    with pytest.raises(ConfigError, match="exceed a row of 8 bytes"):
        copy_slices([rows], [0], 0, 4, torch.zeros(20, dtype=torch.uint8).data_ptr(), torch.device("cpu"), unpack=False)


@pytest.mark.parametrize(
    ("pages", "first", "last", "message"),
    [
        ([0], 0, 5, r"rows \[0, 5\) of 1 pages with parts of 4"),
        ([0], 3, 2, r"rows \[3, 2\)"),
        ([0], -1, 2, r"rows \[-1, 2\)"),
    ],
)
@pytest.mark.parametrize("unpack", [False, True])
def test_wrong_rows_are_refused_early(pages: list[int], first: int, last: int, message: str, unpack: bool) -> None:
    stores, packed = [torch.zeros(2, 4, 8, dtype=torch.uint8)], torch.ones(20, dtype=torch.uint8)
    rows = [rows_of(stores, RowSlices(((0, 4),)))]
    with pytest.raises(AssertionError, match=message):
        copy_slices(rows, pages, first, last, packed.data_ptr(), torch.device("cpu"), unpack=unpack)
    assert not stores[0].any() and packed.all()


@dataclass(frozen=True)
class TurnsCase:
    """Layers that take turns in using the parts of a page, as index keys do in a device pool."""

    layers: int
    parts: int
    step: int
    part_rows: int = 3
    row_bytes: int = 12

    def span(self, memory: Tensor) -> PagedSpan:
        """Describes memory [parts, pages, rows, bytes]. Layers have the same bases, and differ in their parts."""
        bases = tuple(part.data_ptr() for part in memory)
        return PagedSpan((bases,) * self.layers, memory.stride(1), self.part_rows, self.row_bytes, self.step)

    def place(self, layer: int, position: int) -> tuple[int, int, int]:
        """Returns the number of the page in the context, its part, and the row in the part, by the definition."""
        number = position // self.part_rows * self.step + layer * self.step // self.layers
        return number // self.parts, number % self.parts, position % self.part_rows


TURNS = [TurnsCase(1, 2, 1), TurnsCase(3, 3, 3), TurnsCase(2, 5, 2), TurnsCase(2, 5, 4), TurnsCase(4, 7, 4, 2, 7)]


@pytest.mark.parametrize("case", TURNS, ids=str)
@pytest.mark.parametrize("simplified", [False, True])
def test_layers_that_take_turns_are_packed_and_unpacked_behind_another_block(case: TurnsCase, simplified: bool) -> None:
    """Both blocks of a piece are copied by one call. Unpacking restores each byte, and changes no other."""
    first, last, count = 4, 17, 20
    memory = torch.randint(0, 256, (case.parts, count, case.part_rows, case.row_bytes), dtype=torch.uint8)
    rows = torch.randint(0, 256, (2, count, 4, 16), dtype=torch.uint8)
    span = case.span(memory)
    pages = list(range(2, 2 + max(span.pages_for(last), 5)))  # part 1 of a page is not behind part 0 of the page before
    pages[2], pages[4] = pages[4], pages[2]
    if simplified:
        span = span.simplified()
    slices = RowSlices(((8, 4), (0, 4)))
    blocks = [rows_of([*rows], slices), SlicedRows(span, RowSlices(((0, case.row_bytes),)), before=2 * slices.nbytes)]
    expected = [rows[u, pages[p // 4], p % 4][[8, 9, 10, 11, 0, 1, 2, 3]] for u in range(2) for p in range(first, last)]
    for layer in range(case.layers):
        places = [case.place(layer, position) for position in range(first, last)]
        expected += [memory[part, pages[number], row] for number, part, row in places]
    piece = torch.full((sum(map(len, expected)) + 2 * GUARD,), POISON, dtype=torch.uint8)
    copy(blocks, pages, first, last, piece[GUARD:], unpack=False)
    assert torch.equal(piece[GUARD:-GUARD], torch.cat(expected))
    assert (piece[:GUARD] == POISON).all() and (piece[-GUARD:] == POISON).all()
    stored = memory.clone()
    for layer in range(case.layers):
        for position in range(first, last):
            number, part, row = case.place(layer, position)
            memory[part, pages[number], row] = POISON
    copy(blocks[1:], pages, first, last, piece[GUARD:], unpack=True)
    assert torch.equal(memory, stored)


GPU_CASES = [
    Case(1024, ((0, 512), (512, 512)), 37, 1990, page_rows=64, units=5, count=40),
    Case(2048, ((512, 512), (1536, 512)), 0, 2048, page_rows=64, units=5, count=40),
    Case(656, ((0, 656),), 5, 701, page_rows=16, units=3, count=60),
    Case(1152, ((0, 1152),), 100, 101, page_rows=64, units=3, count=9),
    Case(132, ((4, 60), (64, 68)), 5, 700, page_rows=32, units=3, count=40),
    Case(96, ((6, 6), (54, 6)), 5, 700, page_rows=32, units=3, count=40),
    Case(37, ((0, 1), (36, 1), (5, 17)), 3, 500, page_rows=16, units=3, count=40, row_gap=3, page_gap=7),
    Case(64, ((0, 16), (32, 16)), 3, 500, page_rows=16, units=3, count=40, offset=4),
    Case(64, ((0, 16), (32, 16)), 3, 500, page_rows=16, units=3, count=40, offset=5),
]


def copied_to(tensor: Tensor, tier: str) -> Tensor:
    """Returns a copy in device memory or in pinned host memory, with the same strides."""
    flat = all_bytes(tensor).cuda() if tier == "device" else all_bytes(tensor).pin_memory()
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.gpu
@pytest.mark.parametrize(("store_tier", "buffer_tier"), [("device", "device"), ("device", "host"), ("host", "device")])
@pytest.mark.parametrize("pages_on_device", [False, True])
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: f"{case.row_bytes}")
def test_on_a_gpu_slices_are_exact(case: Case, store_tier: str, buffer_tier: str, pages_on_device: bool) -> None:
    stores, pages, buffer = case.stores(), case.pages(), case.packed()
    copied_stores, copied_buffer = [copied_to(store, store_tier) for store in stores], copied_to(buffer, buffer_tier)
    page_list = torch.tensor(pages).cuda() if pages_on_device else pages
    rows, copied_rows, device = rows_of(stores, case.slices), rows_of(copied_stores, case.slices), torch.device("cuda")
    inner = case.inner(copied_buffer)
    copy_slices([copied_rows], page_list, case.first, case.last, inner.data_ptr(), device, unpack=False)
    reference.copy([rows], pages, case.first, case.last, case.inner(buffer).data_ptr(), unpack=False)
    torch.cuda.synchronize()
    assert torch.equal(copied_buffer.cpu(), buffer)
    on_host = inner.random_().cpu()
    copy_slices([copied_rows], page_list, case.first, case.last, inner.data_ptr(), device, unpack=True)
    reference.copy([rows], pages, case.first, case.last, on_host.data_ptr(), unpack=True)
    torch.cuda.synchronize()
    for store, copied in zip(stores, copied_stores, strict=True):
        assert torch.equal(all_bytes(copied).cpu(), all_bytes(store))


@pytest.mark.gpu
def test_on_a_gpu_offsets_beyond_8_gib_are_exact_defect_7() -> None:
    """Offsets in the store and in the buffer exceed int32 even if they count words of 4 bytes."""
    store = torch.empty(72 * 1024, 64, 2048, dtype=torch.uint8, device="cuda")  # 9 GiB
    pages = [72 * 1024 - 1, *range(512), 72 * 1024 - 2]
    store[pages] = torch.randint(0, 256, (len(pages), 64, 2048), dtype=torch.uint8, device="cuda")
    rows, units = len(pages) * 64, 144
    packed = torch.full((units * rows * 2048,), POISON, dtype=torch.uint8, device="cuda")
    whole, device = RowSlices(((0, 2048),)), torch.device("cuda")
    copy_slices([rows_of([store] * units, whole)], pages, 0, rows, packed.data_ptr(), device, unpack=False)
    expected = store[pages].flatten()
    for unit in packed.view(units, -1):
        assert torch.equal(unit, expected)
    packed.view(units, rows, 2048)[-1].random_()
    last_unit = packed.view(units, -1)[-1].data_ptr()
    copy_slices([rows_of([store], whole)], pages, 0, rows, last_unit, device, unpack=True)
    assert torch.equal(store[pages].flatten(), packed.view(units, -1)[-1])
