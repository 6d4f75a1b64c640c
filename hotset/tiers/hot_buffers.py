"""The hot buffers of tiered requests: slots, tail, and the residency maps that say what is where.

Per index group of a tiered seat, in its map pages: `position_of[slot]`, `last_used[slot]`, `slot_of[position]`. Stamps
are positions: the step that computes the row at position p stamps what it uses with p. So they grow by themselves,
survive parking, and a row that was only written, never selected, counts as used when it was written.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.device_copies import list_to_device
from hotset.kernels.save_last_topk import save_last_topk
from hotset.kernels.swap_in import MOST_SLOTS, Copies, SeatTables, Swap, copy, plan
from hotset.memory.device_pool import DevicePool
from hotset.memory.geometry import TAIL_PAGES
from hotset.memory.host_store import HostStore
from hotset.memory.tables import PageTables
from hotset.tiers.commands import Demote

NEVER = -1  # last_used of a slot that was not used yet


class HotBuffers:
    """Every tiered seat's hot buffer. Selection of the last step is kept for all seats, so that demotion can seed."""

    def __init__(self, pool: DevicePool, host: HostStore, tables: PageTables, seats: int) -> None:
        geometry = pool.geometry
        assert pool.shape.topk <= geometry.slots <= MOST_SLOTS, f"{geometry.slots} slots for top-{pool.shape.topk}"
        self._pool, self._host, self._tables, self._geometry = pool, host, tables, geometry
        self._seat_tables = SeatTables(
            tables.rows, tables.host, tables.slots, tables.tail, tables.maps, tables.tiered,
            geometry.page_rows, geometry.slots,
        )  # fmt: skip
        size = (seats, pool.shape.groups, pool.shape.topk)
        self.last_selected = torch.full(size, EMPTY, dtype=torch.int32, device=pool.device)
        self._opened_at = [0] * seats  # rows of the context when it became tiered: its tail was made for the next one
        self._ahead = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None
        self._arrived: dict[int, torch.cuda.Event] = {}  # by layer: its rows were copied ahead
        self.counts = torch.zeros(pool.shape.groups, 2, dtype=torch.int64, device=pool.device)
        self._uncounted = torch.zeros(2, dtype=torch.int64, device=pool.device)  # counts that nobody reads
        # A number given by the host would make it wait for the device.
        self._empty = torch.full((), EMPTY, dtype=torch.int16, device=pool.device)
        self._key_layers = torch.tensor(pool.shape.key_layers, device=pool.device)

    def warm_up(self) -> None:
        """Compiles what is needed between steps, by plans and copies of nothing."""
        nobody = torch.full((1,), EMPTY, device=self._pool.device)
        for k in {min(self._geometry.page_rows, self._geometry.slots), self._geometry.topk}:
            swap = self._plan_outside_tail(0, nobody, torch.full((1, k), EMPTY, device=self._pool.device), nobody)
            self._move(0, swap.copies)

    def save_last_topk(self, group: int, seats: Tensor, positions: Tensor) -> None:
        """Keeps the newest selection of each seat, with which its slots would be seeded."""
        save_last_topk(self.last_selected[:, group], seats, positions)

    def plan(self, group: int, seats: Tensor, positions: Tensor, stamps: Tensor) -> Swap:
        """Finds the rows at `positions` [rows, k] of tiered seats, one query row each, at the step `stamps` [rows].

        What is missing is brought into the slots of the group's first layer; the caller owes it to the others.
        """
        words, per_page = self._pool.words_of(group), self._geometry.words_per_page
        first = self._pool.shape.layers_of(group)[0]
        return plan(
            *(positions, seats, stamps, self._seat_tables, words, per_page, self.counts[group]),
            host_rows=self._host.rows[first],
            device_rows=self._pool.rows[first],
        )

    def copy(self, layer: int, swap: Swap) -> None:
        """Brings what `swap` misses from the host into this layer's slots."""
        copy(swap.copies, self._host.rows[layer], self._pool.rows[layer])

    def copy_ahead(self, layers: Sequence[int], swap: Swap) -> None:
        """Does so for layers that come later, beside what the main stream computes meanwhile."""
        if self._ahead is not None:
            self._ahead.wait_stream(torch.cuda.current_stream(self._pool.device))
        with torch.cuda.stream(self._ahead):
            for layer in layers:
                self.copy(layer, swap)
                if self._ahead is not None:
                    self._arrived[layer] = self._ahead.record_event()

    def wait_for(self, layer: int) -> None:
        """The main stream goes on when this layer's rows, copied ahead, are there."""
        if self._ahead is not None:
            torch.cuda.current_stream(self._pool.device).wait_event(self._arrived.pop(layer))

    def leaving(self, seats: Sequence[int], starts: Sequence[int]) -> list[tuple[int, int]]:
        """(seat, start) of those whose row at `start` begins a page, where older rows lie in the tail."""
        page_rows, tiered = self._geometry.page_rows, self._tables.tiered_seats
        return [
            (seat, start)
            for seat, start in zip(seats, starts, strict=True)
            if start % page_rows == 0 and seat in tiered and start > max(self._opened_at[seat], page_rows)
        ]

    def make_way(self, leaving: Sequence[tuple[int, int]]) -> None:
        """Before tail pages are written anew, the rows in them, on the host by now, enter slots of every group, as used
        one step ago.

        They take the place of slots not used in that step; where those are fewer than a page, the newest rows go in.
        While a whole context fits the slots there are empty ones for all of its rows.
        """
        page_rows, slots, device = self._geometry.page_rows, self._geometry.slots, self._pool.device
        seats = list_to_device([seat for seat, _start in leaving], torch.int64, device)
        starts = list_to_device([start for _seat, start in leaving], torch.int64, device)
        first = starts - TAIL_PAGES * page_rows
        room = min(page_rows, slots - self._geometry.topk)
        count = torch.where(first + page_rows <= slots, page_rows, room)
        number = torch.arange(min(page_rows, slots), device=device)  # no more than the slots can be planned for
        entering = (first + page_rows - count)[:, None] + number
        entering = torch.where(number < count[:, None], entering, EMPTY)
        tail_rows = self._tables.tail_at(seats[:, None], entering.clamp_min(0))
        slot_of = self._half_places(seats[:, None], first[:, None] + torch.arange(page_rows, device=device))
        self._pool.words.view(torch.int16)[self._key_layers[:, None, None], slot_of] = self._empty
        count = count.int()
        for group in range(self._pool.shape.groups):
            swap = self._plan_outside_tail(group, seats, entering, starts - 1)
            self._move(group, Copies(tail_rows, swap.rows, count))

    def open(self, seat: int, length: int) -> None:
        """A context of `length` rows, all of them on the host, becomes tiered: empty maps, its newest rows in the tail.

        A context whose rows all fit is loaded whole, so that it never misses. Otherwise the rows last selected from the
        host are: after a streamed prefill these are known, after a park they are not.
        """
        self._tables.set_tiered(seat, True)
        self._opened_at[seat] = length
        tail_first = self._geometry.tail_first(length)
        positions = torch.arange(length, device=self._pool.device)
        newest = positions[tail_first:]
        self._bring(seat, newest, self._tables.tail_at(seat, newest))
        if tail_first <= self._geometry.slots:
            self._open_whole(seat, positions[:tail_first], length)
            return
        for group in range(self._pool.shape.groups):
            self._clear_maps(seat, group, length)
            wanted = self.last_selected[seat, group].long()
            wanted = torch.where(wanted < tail_first, wanted, EMPTY)
            at, stamp = (torch.full((1,), number, device=self._pool.device) for number in (seat, length - 1))
            swap = self._plan_outside_tail(group, at, wanted[None], stamp)
            for layer in self._pool.shape.layers_of(group):
                self.copy(layer, swap)

    def demote(self, command: Demote) -> None:
        """Makes a resident seat tiered on its own pages, without needing room."""
        seat, length, tables = command.seat, command.length, self._tables
        tables.put(tables.slots, seat, 0, command.slots)
        tables.set_tail(seat, command.tail)
        tables.put(tables.maps, seat, 0, command.maps)
        for group in range(self._pool.shape.groups):
            # A group's rows are copied before its maps are written: the map pages still hold rows that are wanted.
            position_of, last_used = self._seed(group, seat, command.first * self._geometry.page_rows, length)
            self._write_maps(seat, group, position_of, last_used, self._geometry.slots, length)
        tables.set_tiered(seat, True)
        self._opened_at[seat] = length
        tables.drop_rows(seat)

    def audit(self, seat: int, length: int) -> None:
        """Proves of a tiered context of `length` rows that slot_of and position_of are each other's inverse."""
        newest = length if length == self._opened_at[seat] else length - 1
        outside_tail = range(self._geometry.tail_first(newest))
        for group in range(self._pool.shape.groups):
            position_of, _last_used, slot_of = self.maps(seat, group)
            by_slot = {(slot, position) for slot, position in enumerate(position_of) if position != EMPTY}
            by_position = {(slot_of[position], position) for position in outside_tail if slot_of[position] != EMPTY}
            assert by_slot == by_position, f"seat {seat}, group {group}: slots and positions disagree"

    def maps(self, seat: int, group: int) -> tuple[list[int], list[int], list[int]]:
        """position_of, last_used and slot_of of one hot buffer, as lists: for audits and tests."""
        slots = self._geometry.slots
        pages = self._tables.maps[seat]
        words = self._pool.words_of(group).view(-1, self._geometry.words_per_page)[pages[pages != EMPTY]].flatten()
        slot_of = words.view(torch.int16)[4 * slots :]
        return words[:slots].tolist(), words[slots : 2 * slots].tolist(), slot_of.tolist()

    def _open_whole(self, seat: int, positions: Tensor, length: int) -> None:
        """Every position outside the tail takes the slot of the same number."""
        slots = torch.arange(self._geometry.slots, device=self._pool.device)
        taken = slots < positions.shape[0]
        position_of, last_used = torch.where(taken, slots, EMPTY), torch.where(taken, length - 1, NEVER)
        for group in range(self._pool.shape.groups):
            self._write_maps(seat, group, position_of, last_used, positions.shape[0], length)
        self._bring(seat, positions, self._slot_rows(seat, positions))

    def _bring(self, seat: int, positions: Tensor, device_rows: Tensor) -> None:
        """Copies the rows at `positions` from the host, in every layer."""
        host_rows = self._tables.host_at(seat, positions)
        count = torch.full((1,), positions.shape[0], dtype=torch.int32, device=self._pool.device)
        copies = Copies(host_rows[None], device_rows[None], count)
        for layer in range(self._pool.shape.layers):
            copy(copies, self._host.rows[layer], self._pool.rows[layer])

    def _move(self, group: int, copies: Copies) -> None:
        """Copies rows from device rows to device rows, in every layer of a group."""
        for layer in self._pool.shape.layers_of(group):
            copy(copies, self._pool.rows[layer], self._pool.rows[layer])

    def _seed(self, group: int, seat: int, first: int, length: int) -> tuple[Tensor, Tensor]:
        """Copies the rows last selected over slots that hold others, in every layer of the group.

        Slot n holds position `first + n` in place. Returns position_of and last_used [slots].
        """
        device, slots = self._pool.device, self._geometry.slots
        chosen = self.last_selected[seat, group].long()
        there = (chosen >= 0) & (chosen < self._geometry.tail_first(length))
        in_place = there & (chosen >= first) & (chosen < first + slots)
        moves = there & ~in_place
        # One slot more than there are takes what is written for entries that stay out.
        kept = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        kept.scatter_(0, torch.where(in_place, chosen - first, slots), True)
        oldest_first = torch.argsort(kept[:slots].int(), stable=True)  # of those held in place, which give way
        target = torch.where(moves, oldest_first[(torch.cumsum(moves, 0) - 1).clamp_min(0)], slots)
        packed = torch.argsort(moves.int(), descending=True, stable=True)
        sources = self._tables.rows_at(seat, chosen.clamp_min(0))[packed]
        targets = self._slot_rows(seat, target.clamp_max(slots - 1))[packed]
        self._move(group, Copies(sources[None], targets[None], moves.sum(0, keepdim=True).int()))
        held = torch.arange(first, first + slots + 1, device=device)
        used = kept.scatter(0, target, True)
        return held.scatter(0, target, chosen)[:slots], torch.where(used, length - 1, held)[:slots]

    def _plan_outside_tail(self, group: int, seats: Tensor, wanted: Tensor, stamps: Tensor) -> Swap:
        """Plans for positions as if none were in the tail. What it misses is not counted: nobody asked for it yet."""
        words, per_page = self._pool.words_of(group), self._geometry.words_per_page
        return plan(wanted, seats, stamps, self._seat_tables, words, per_page, self._uncounted, ignore_tail=True)

    def _clear_maps(self, seat: int, group: int, length: int) -> None:
        slots = torch.full((self._geometry.slots,), EMPTY, dtype=torch.int64, device=self._pool.device)
        self._write_maps(seat, group, slots, torch.full_like(slots, NEVER), 0, length)

    def _write_maps(
        self, seat: int, group: int, position_of: Tensor, last_used: Tensor, occupied: int, length: int
    ) -> None:
        """Sets the maps of one hot buffer, whose first `occupied` slots hold rows. slot_of is written up to `length`;
        later positions enter with their page."""
        words, device = self._pool.words_of(group), self._pool.device
        per_page = self._geometry.words_per_page
        number = torch.arange(2 * self._geometry.slots, device=device)
        place = self._tables.maps[seat, number // per_page] * per_page + number % per_page
        words[place] = torch.cat((position_of, last_used)).int()
        halves = words.view(torch.int16)
        halves[self._half_places(seat, torch.arange(length, device=device))] = self._empty
        in_slots = torch.arange(occupied, dtype=torch.int16, device=device)
        halves[self._half_places(seat, position_of[:occupied])] = in_slots

    def _half_places(self, seats: Tensor | int, positions: Tensor) -> Tensor:
        """Where slot_of of each position is, in halves of words."""
        per_page, half = 2 * self._geometry.words_per_page, 4 * self._geometry.slots + positions
        return self._tables.maps[seats, half // per_page] * per_page + half % per_page

    def _slot_rows(self, seat: int, slots: Tensor) -> Tensor:
        page_rows = self._geometry.page_rows
        return self._tables.slots[seat][slots // page_rows] * page_rows + slots % page_rows
