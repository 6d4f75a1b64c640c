"""swap_in in plain Python: lists, dictionaries and one sort; and a world of seats over poisoned memory to run it in."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.swap_in import SeatTables, Swap

NOWHERE = 10**15  # a page that no pool has: whoever follows it is caught
POISON = 0xAB


@dataclass(frozen=True)
class Shape:
    """The sizes of a world."""

    k: int
    slots: int
    page_rows: int
    words_per_page: int
    context_pages: int
    tiered: int = 2  # seats of each kind
    resident: int = 1
    width: int = 5  # bytes of a row

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


@dataclass
class SeatMaps:
    """The residency of one tiered seat. Which slot holds a position is searched for, never stored twice."""

    slots: int
    position_of: list[int] = field(init=False)
    last_used: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.position_of = [EMPTY] * self.slots
        self.last_used = [-1] * self.slots

    def slot_of(self, position: int) -> int:
        return self.position_of.index(position) if position in self.position_of else EMPTY

    def look_up(self, positions: Sequence[int], stamp: int) -> list[int]:
        """Brings `positions` into slots; returns those that were missing, once each, in list order."""
        for position in positions:
            if position in self.position_of:
                self.last_used[self.slot_of(position)] = stamp
        missing = list(dict.fromkeys(position for position in positions if position not in self.position_of))
        oldest_first = sorted((used, slot) for slot, used in enumerate(self.last_used) if used != stamp)
        victims = sorted(slot for _, slot in oldest_first[: len(missing)])
        for position, slot in zip(missing, victims, strict=True):
            self.position_of[slot] = position
            self.last_used[slot] = stamp
        return missing


@dataclass(frozen=True)
class Batch:
    """The inputs of one plan, as lists."""

    positions: list[list[int]]
    seats: list[int]
    stamps: list[int]
    tail_first: list[int]


class World:
    """Seats, their pages in shuffled order, poisoned pools, and the model that says what every word must be.

    Host and device pages are numbered over different ranges, and every table entry that must not be read is NOWHERE.
    `full` slots hold positions from the beginning; the stamp of a step must then be `stamp` at least.
    """

    def __init__(self, shape: Shape, seed: int, *, full: bool = False) -> None:
        self.shape = shape
        self.random = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        each = 2 + shape.slot_page_count + shape.map_page_count
        device_pages = shape.tiered * each + shape.resident * shape.context_pages + 3
        host_pages = shape.tiered * shape.context_pages + device_pages
        self.free_device = self.random.sample(range(device_pages), device_pages)
        self.free_host = self.random.sample(range(host_pages), host_pages)
        self.tables = self._make_tables()
        self.stamp = 6
        self.maps = [SeatMaps(shape.slots) for _ in range(shape.tiered)]
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
            for position in set(maps.position_of) - {EMPTY}:
                row = self.device_row(seat, position, shape.context)
                self.device_rows[row] = self.host_rows[self.host_row(seat, position)]
        self.counts = torch.zeros(2, dtype=torch.int64)
        self.counted = [0, 0]  # what `counts` must hold

    def _make_tables(self) -> SeatTables:
        shape = self.shape
        tiered = range(shape.tiered)
        tables = {
            "row_pages": torch.full((shape.seats, shape.context_pages), NOWHERE),
            "host_pages": torch.full((shape.seats, shape.context_pages), NOWHERE),
            "slot_pages": torch.full((shape.seats, shape.slot_page_count), NOWHERE),
            "tail_pages": torch.full((shape.seats, 2), NOWHERE),
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
        """As after a long run: slots hold positions in any order, and only few stamps tell them apart."""
        for maps in self.maps:
            held = min(self.shape.slots, self.shape.context)
            for slot, position in enumerate(self.random.sample(range(self.shape.context), held)):
                maps.position_of[slot] = position
                maps.last_used[slot] = self.random.randrange(self.stamp)

    def write_maps(self, words: Tensor) -> None:
        """Writes every entry of every seat's maps, and nothing else, where the documented layout puts it."""
        slots, halves = self.shape.slots, words.view(torch.int16)
        for seat, maps in enumerate(self.maps):
            slot_of = {position: slot for slot, position in enumerate(maps.position_of)}
            entries = [slot_of.get(position, EMPTY) for position in range(self.shape.context)]
            self._write(words, seat, 0, [*maps.position_of, *maps.last_used], self.shape.words_per_page)
            self._write(halves, seat, 4 * slots, entries, 2 * self.shape.words_per_page)

    def _write(self, memory: Tensor, seat: int, first: int, values: list[int], per_page: int) -> None:
        pages = self.tables.map_pages[seat].tolist()
        at = [pages[i // per_page] * per_page + i % per_page for i in range(first, first + len(values))]
        memory[torch.tensor(at)] = torch.tensor(values, dtype=memory.dtype)

    def draw_batch(self) -> Batch:
        """Tiered seats once at most, resident ones any number of times, padded rows with garbage, all shuffled."""
        shape, draw = self.shape, self.random
        seats = draw.sample(range(shape.tiered), draw.randint(0, shape.tiered))
        seats += [draw.randrange(shape.tiered, shape.seats) for _ in range(draw.randint(0, 2)) if shape.resident]
        seats += [EMPTY] * draw.randint(0 if seats else 1, 1)
        draw.shuffle(seats)
        self.stamp += draw.randint(1, 3)
        length = draw.randint(1, shape.context)
        tail_first = max(0, length - draw.randint(0, 2 * shape.page_rows)) if draw.random() < 0.7 else shape.context
        positions = [self._draw_positions(length if seat != EMPTY else 2**40) for seat in seats]
        return Batch(positions, seats, [self.stamp] * len(seats), [tail_first] * len(seats))

    def _draw_positions(self, length: int) -> list[int]:
        """k positions: some EMPTY, some twice, many from a range that is asked for again and again."""
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

    def run(self, op: ModuleType, batch: Batch) -> Swap:
        """Plans `batch` with `op`, on this world's tensors."""
        columns = [torch.tensor(column) for column in (batch.seats, batch.stamps, batch.tail_first)]
        positions = torch.tensor(batch.positions)
        swap = op.plan(positions, *columns, self.tables, self.words, self.shape.words_per_page, self.counts)
        assert isinstance(swap, Swap)
        return swap

    def expect(self, batch: Batch) -> "Expected":
        """What `run` must do, by the model; moves the model on."""
        expected = Expected()
        rows_of = zip(batch.positions, batch.seats, batch.stamps, batch.tail_first, strict=True)
        for positions, seat, stamp, tail_first in rows_of:
            if seat == EMPTY:
                positions = [EMPTY] * len(positions)
            there = [position for position in positions if position != EMPTY]
            looked_up = [position for position in there if position < tail_first] if seat in self.tiered_seats else []
            missing = self.maps[seat].look_up(looked_up, stamp) if looked_up else []
            self.counted[0] += len(looked_up)
            self.counted[1] += len(missing)
            expected.rows.append([self.device_row(seat, position, tail_first) for position in positions])
            first = {positions.index(position): position for position in missing}
            expected.missing_host.append(
                [self.host_row(seat, first[i]) if i in first else EMPTY for i in range(len(positions))]
            )
        return expected

    @property
    def tiered_seats(self) -> range:
        return range(self.shape.tiered)

    def device_row(self, seat: int, position: int, tail_first: int) -> int:
        if position == EMPTY:
            return EMPTY
        page, offset = divmod(position, self.shape.page_rows)
        if seat not in self.tiered_seats:
            return int(self.tables.row_pages[seat, page]) * self.shape.page_rows + offset
        if position >= tail_first:
            return int(self.tables.tail_pages[seat, page % 2]) * self.shape.page_rows + offset
        page, offset = divmod(self.maps[seat].slot_of(position), self.shape.page_rows)
        return int(self.tables.slot_pages[seat, page]) * self.shape.page_rows + offset

    def host_row(self, seat: int, position: int) -> int:
        page, offset = divmod(position, self.shape.page_rows)
        return int(self.tables.host_pages[seat, page]) * self.shape.page_rows + offset

    def check_step(self, op: ModuleType, batch: Batch) -> Swap:
        """One step of `op` equals the model in rows, copies, counts, every word of memory and every byte of rows."""
        words, rows = self.words.clone(), self.device_rows.clone()
        swap = self.run(op, batch)
        expected = self.expect(batch)
        assert swap.rows.tolist() == expected.rows
        assert swap.missing_host.tolist() == expected.missing_host
        assert self.counts.tolist() == self.counted
        self.write_maps(words)
        assert torch.equal(self.words, words), "words of maps, or words beside them"
        op.copy(swap, self.host_rows, self.device_rows)
        for device_row, host_row in expected.copies:
            rows[device_row] = self.host_rows[host_row]
        assert torch.equal(self.device_rows, rows), "rows that were missing, or rows beside them"
        self._check_rows_read(batch, swap)
        return swap

    def _check_rows_read(self, batch: Batch, swap: Swap) -> None:
        """What attention reads from slots is what the host store holds for those positions."""
        for row, (seat, tail_first) in enumerate(zip(batch.seats, batch.tail_first, strict=True)):
            for i, position in enumerate(batch.positions[row]):
                if seat in self.tiered_seats and position != EMPTY and position < tail_first:
                    read = self.device_rows[swap.rows[row, i]]
                    assert torch.equal(read, self.host_rows[self.host_row(seat, position)])


@dataclass
class Expected:
    """The outputs of one plan, by the model."""

    rows: list[list[int]] = field(default_factory=list)
    missing_host: list[list[int]] = field(default_factory=list)

    @property
    def copies(self) -> list[tuple[int, int]]:
        """(device row, host row) of each miss."""
        return [
            (device_row, host_row)
            for device, host in zip(self.rows, self.missing_host, strict=True)
            for device_row, host_row in zip(device, host, strict=True)
            if host_row != EMPTY
        ]
