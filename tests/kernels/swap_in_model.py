"""Models swap_in in plain Python, and compares implementations with the model."""

import random
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from lru_slots import LruSlots
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.swap_in import RowCopies, SeatTables, SwapPlan

NOWHERE = 10**15  # a page or row number that no pool has
POISON = 0xAB
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """The sizes of a `SwapInModel`."""

    k: int
    slots: int
    page_rows: int
    words_per_page: int
    context_pages: int
    tiered: int = 2  # number of tiered seats
    resident: int = 1  # number of resident seats
    width: int = 5  # bytes per row
    tail_pages: int = 2

    @property
    def seats(self) -> int:
        return self.tiered + self.resident

    @property
    def context(self) -> int:
        return self.context_pages * self.page_rows

    @property
    def slot_page_count(self) -> int:
        return -(-self.slots // self.page_rows)

    @property
    def map_page_count(self) -> int:
        return -(-(2 * self.slots + -(-self.context // 2)) // self.words_per_page)


# k and slots are not powers of two, the last page of slots is not full, and pages have 5 rows.
ODD = Shape(k=6, slots=11, page_rows=5, words_per_page=7, context_pages=9)


@dataclass(frozen=True)
class Batch:
    """The inputs of one plan, as lists."""

    positions: list[list[int]]
    seats: list[int]
    stamps: list[int]
    ignore_tail: bool = False


class Op(Protocol):
    """The two functions of an implementation of swap_in."""

    def plan(self, **arguments: Any) -> SwapPlan: ...

    def copy(self, copies: RowCopies, host_rows: Tensor, device_rows: Tensor) -> None: ...


class SwapInModel:
    """Seats with shuffled pages in poisoned pools, and the expected contents of every word and row.

    There are more host pages than device pages, and every table entry that must not be used is NOWHERE. Without `full`,
    all slots are empty at first. With `full`, they hold positions that were last used before `stamp`; the stamps of all
    steps must then be at least `stamp`.
    """

    def __init__(self, shape: Shape, seed: int, *, full: bool = False, stamp: int = 6) -> None:
        self.shape = shape
        self.random = random.Random(seed)
        self.stamp = stamp
        generator = torch.Generator().manual_seed(seed)
        tiered_pages = shape.tail_pages + shape.slot_page_count + shape.map_page_count  # per seat
        device_pages = shape.tiered * tiered_pages + shape.resident * shape.context_pages + 3
        host_pages = shape.tiered * shape.context_pages + device_pages
        self.free_device = self.random.sample(range(device_pages), device_pages)
        self.free_host = self.random.sample(range(host_pages), host_pages)
        self.tables = self._make_tables()
        self.maps = [LruSlots.empty(shape.slots) for _ in range(shape.tiered)]
        if full:
            self._fill_slots()
        self.words = torch.randint(
            -(2**31), 2**31, (device_pages * shape.words_per_page,), dtype=torch.int32, generator=generator
        )
        self.write_maps(self.words)
        host_rows = host_pages * shape.page_rows
        self.host_rows = torch.randint(0, 256, (host_rows, shape.width), dtype=torch.uint8, generator=generator)
        self.device_rows = torch.full((device_pages * shape.page_rows, shape.width), POISON, dtype=torch.uint8)
        for seat, maps in enumerate(self.maps):
            for slot, position in enumerate(maps.position_of):
                if position != EMPTY:
                    self.device_rows[self.slot_row(seat, slot)] = self.host_rows[self.host_row(seat, position)]
        self.counts = torch.zeros(2, dtype=torch.int64)
        self.expected_counts = [0, 0]

    def _make_tables(self) -> SeatTables:
        shape = self.shape
        tiered = range(shape.tiered)
        tables = {
            "row_pages": torch.full((shape.seats, shape.context_pages), NOWHERE),
            "host_pages": torch.full((shape.seats, shape.context_pages), NOWHERE),
            "slot_pages": torch.full((shape.seats, shape.slot_page_count), NOWHERE),
            "tail_pages": torch.full((shape.seats, shape.tail_pages), NOWHERE),
            "map_pages": torch.full((shape.seats, shape.map_page_count), NOWHERE),
        }
        for name, table in tables.items():
            free = self.free_host if name == "host_pages" else self.free_device
            for seat in range(shape.seats):
                if (seat in tiered) != (name == "row_pages"):
                    table[seat] = torch.tensor([free.pop() for _ in range(table.shape[1])])
        is_tiered = torch.tensor([seat in tiered for seat in range(shape.seats)])
        return SeatTables(**tables, tiered=is_tiered, page_rows=shape.page_rows, slots=shape.slots)

    def _fill_slots(self) -> None:
        """Fills the slots as many steps would: positions in any order, some used long ago, many in the same step."""
        for maps in self.maps:
            count = min(self.shape.slots, self.shape.context)
            for slot, position in enumerate(self.random.sample(range(self.shape.context), count)):
                maps.position_of[slot] = position
                ages = [self.random.randrange(6), 2 ** self.random.uniform(0, 31), 2 ** self.random.randrange(32)]
                age = int(self.random.choice(ages))
                maps.last_used[slot] = max(-1, self.stamp - 1 - age)

    def write_maps(self, words: Tensor) -> None:
        """Writes every entry of every seat's maps to `words`, in the layout of `SeatTables`, and nothing else."""
        slots, halves = self.shape.slots, words.view(torch.int16)
        for seat, maps in enumerate(self.maps):
            slot_of = {position: slot for slot, position in enumerate(maps.position_of)}
            entries = [slot_of.get(position, EMPTY) for position in range(self.shape.context)]
            self._write(words, seat, 0, [*maps.position_of, *maps.last_used], self.shape.words_per_page)
            self._write(halves, seat, 4 * slots, entries, 2 * self.shape.words_per_page)

    def _write(self, memory: Tensor, seat: int, first: int, values: list[int], per_page: int) -> None:
        pages = self.tables.map_pages[seat].tolist()
        indices = [pages[i // per_page] * per_page + i % per_page for i in range(first, first + len(values))]
        memory[torch.tensor(indices)] = torch.tensor(values, dtype=memory.dtype)

    def draw_batch(self, min_queries: int = 1) -> Batch:
        """Draws at least `min_queries` queries in random order.

        Each tiered seat has at most one query. All resident seats together have at most two. The others are padding.
        """
        shape, draw = self.shape, self.random
        seats = draw.sample(range(shape.tiered), draw.randint(0, shape.tiered))
        seats += [draw.randrange(shape.tiered, shape.seats) for _ in range(draw.randint(0, 2)) if shape.resident]
        seats += [EMPTY] * max(draw.randint(0, 1), min_queries - len(seats))
        draw.shuffle(seats)
        self.stamp += draw.randint(3, 5)
        length = draw.randint(1, shape.context)
        positions = [self.draw_positions(length if seat != EMPTY else 2**40) for seat in seats]
        return Batch(positions, seats, [self.stamp + draw.randrange(3) for _ in seats], draw.random() < 0.3)

    def draw_positions(self, length: int) -> list[int]:
        """Draws k positions below `length`: some EMPTY, some duplicates, many from a range that is often drawn."""
        draw = self.random
        popular = min(length, self.shape.slots)
        empties, repeats = draw.choice([0.0, 0.2, 0.9]), draw.choice([0.0, 0.3])
        chosen: list[int] = []
        for _ in range(self.shape.k):
            if draw.random() < empties:
                chosen.append(EMPTY)
            elif chosen and draw.random() < repeats:
                chosen.append(draw.choice(chosen))
            else:
                chosen.append(draw.randrange(popular if draw.random() < 0.6 else length))
        return chosen

    def run(self, op: Op, batch: Batch, **rows: Tensor) -> SwapPlan:
        """Plans `batch` with `op` on this model's tensors. With host_rows and device_rows, `op` also copies rows."""
        return op.plan(
            positions=torch.tensor(batch.positions),
            seats=torch.tensor(batch.seats),
            stamps=torch.tensor(batch.stamps),
            tables=self.tables,
            words=self.words,
            words_per_page=self.shape.words_per_page,
            counts=self.counts,
            ignore_tail=batch.ignore_tail,
            **rows,
        )

    def expect(self, batch: Batch) -> "Expected":
        """Returns the expected results of `run`, and applies the step to the model."""
        expected = Expected()
        for positions, seat, stamp in zip(batch.positions, batch.seats, batch.stamps, strict=True):
            if seat == EMPTY:
                positions = [EMPTY] * len(positions)
            looked_up = [position for position in positions if self.is_looked_up(batch, seat, stamp, position)]
            missing = self.maps[seat].use(looked_up, stamp) if looked_up else []
            self.expected_counts[0] += len(looked_up)
            self.expected_counts[1] += len(missing)
            tail_stamp = None if batch.ignore_tail else stamp
            expected.rows.append([self.device_row(seat, position, tail_stamp) for position in positions])
            copies = [(self.device_row(seat, position, None), self.host_row(seat, position)) for position in missing]
            expected.copies.append(copies)
        return expected

    def is_looked_up(self, batch: Batch, seat: int, stamp: int, position: int) -> bool:
        """Returns whether the step looks the position up in the maps."""
        if seat not in self.tiered_seats or position == EMPTY:
            return False
        return batch.ignore_tail or position < self.tail_first(stamp)

    def tail_first(self, stamp: int) -> int:
        """Returns the first position of the tail.

        The tail is the page of position `stamp`, the page before it, and all later pages.
        """
        return max(0, stamp // self.shape.page_rows - 1) * self.shape.page_rows

    @property
    def tiered_seats(self) -> range:
        return range(self.shape.tiered)

    def device_row(self, seat: int, position: int, stamp: int | None) -> int:
        """Returns the device row of a position. If `stamp` is None, the tail is ignored."""
        if position == EMPTY:
            return EMPTY
        page, offset = divmod(position, self.shape.page_rows)
        if seat not in self.tiered_seats:
            return int(self.tables.row_pages[seat, page]) * self.shape.page_rows + offset
        if stamp is not None and position >= self.tail_first(stamp):
            return int(self.tables.tail_pages[seat, page % self.shape.tail_pages]) * self.shape.page_rows + offset
        return self.slot_row(seat, self.maps[seat].slot_of(position))

    def slot_row(self, seat: int, slot: int) -> int:
        page, offset = divmod(slot, self.shape.page_rows)
        return int(self.tables.slot_pages[seat, page]) * self.shape.page_rows + offset

    def host_row(self, seat: int, position: int) -> int:
        page, offset = divmod(position, self.shape.page_rows)
        return int(self.tables.host_pages[seat, page]) * self.shape.page_rows + offset

    def check_step(self, op: Op, batch: Batch) -> SwapPlan:
        """Runs one step and compares rows, copies, counts, every word and every byte of the device rows."""
        words, rows = self.words.clone(), self.device_rows.clone()
        swap = self.run(op, batch, host_rows=self.host_rows, device_rows=self.device_rows)
        expected = self.expect(batch)
        assert swap.rows.tolist() == expected.rows
        assert pairs_by_query(swap.copies) == expected.copies
        assert self.counts.tolist() == self.expected_counts
        self.write_maps(words)
        assert torch.equal(self.words, words), "the maps are wrong, or words outside the maps changed"
        for device_row, host_row in (pair for pairs in expected.copies for pair in pairs):
            rows[device_row] = self.host_rows[host_row]
        assert torch.equal(self.device_rows, rows), "a missing row was not copied, or another row changed"
        self._check_rows_read(batch, swap)
        return swap

    def _check_rows_read(self, batch: Batch, swap: SwapPlan) -> None:
        """Checks that the row of every position that was looked up has the same bytes as on the host."""
        for query, (seat, stamp) in enumerate(zip(batch.seats, batch.stamps, strict=True)):
            for i, position in enumerate(batch.positions[query]):
                if self.is_looked_up(batch, seat, stamp, position):
                    read = self.device_rows[swap.rows[query, i]]
                    assert torch.equal(read, self.host_rows[self.host_row(seat, position)])


def pairs_by_query(copies: RowCopies) -> list[list[tuple[int, int]]]:
    """Returns a list of (device row, host row) per query."""
    rows = zip(copies.device_rows.tolist(), copies.host_rows.tolist(), copies.counts.tolist(), strict=True)
    return [list(zip(device[:count], host[:count], strict=True)) for device, host, count in rows]


def make_copies(*lists: list[tuple[int, int]], device: torch.device = CPU) -> RowCopies:
    """Makes `RowCopies` from lists of (host row, device row). The padding after each list must not be used."""
    width = max(map(len, lists)) + 1
    padded = torch.tensor([pairs + [(NOWHERE, NOWHERE)] * (width - len(pairs)) for pairs in lists], device=device)
    counts = torch.tensor([len(pairs) for pairs in lists], dtype=torch.int32, device=device)
    return RowCopies(padded[:, :, 0], padded[:, :, 1], counts)


def check_copied_bytes(op: Op, width: int, device: torch.device) -> None:
    """Checks that `op` copies two rows of `width` bytes and no other byte, for several strides and alignments."""
    copies = make_copies([(1, 5)], [], [(6, 2)], device=device)
    aligned = -(-width // 16) * 16
    for stride, offset in ((width, 0), (aligned, 0), (aligned, 8), (width + 4, 4), (width + 1, 1)):
        host = torch.arange(7 * stride + offset).mul(37).remainder(251).to(torch.uint8)
        expected = torch.full((7 * stride + offset,), POISON, dtype=torch.uint8)
        written = expected.to(device, copy=True)
        for device_row, host_row in ((5, 1), (2, 6)):
            source = host[offset + host_row * stride :][:width]
            expected[offset + device_row * stride :][:width] = source
        readable = host if device == CPU else host.pin_memory()
        host_rows, device_rows = (flat.as_strided((7, width), (stride, 1), offset) for flat in (readable, written))
        op.copy(copies, host_rows, device_rows)
        assert torch.equal(written.to(CPU), expected), f"rows of {width} bytes, stride {stride}, offset {offset}"


@dataclass
class Expected:
    """The expected outputs of one plan."""

    rows: list[list[int]] = field(default_factory=list)
    copies: list[list[tuple[int, int]]] = field(default_factory=list)  # in the form of `pairs_by_query`
