"""The hot buffers of tiered requests: slots, tail, and the residency maps that say what is where.

Per index group of a tiered seat, in its map pages: `position_of[slot]`, `last_used[slot]`, `slot_of[position]`. Stamps
are positions: the step that computes the row at position p stamps what it uses with p. So they grow by themselves,
survive parking, and a row that was only written, never selected, counts as used when it was written.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.swap_in import MOST_SLOTS, SeatTables, Swap, copy, plan
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
        self.counts = torch.zeros(pool.shape.groups, 2, dtype=torch.int64, device=pool.device)

    def plan(self, group: int, seats: Tensor, positions: Tensor, stamps: Tensor) -> Swap:
        """Finds the rows at `positions` [rows, k] of tiered seats, one query row each, at the step `stamps` [rows]."""
        newest_page = stamps // self._geometry.page_rows
        tail_first = (newest_page - 1).clamp_min(0) * self._geometry.page_rows
        words, per_page = self._pool.words_of(group), self._geometry.words_per_page
        return plan(positions, seats, stamps, tail_first, self._seat_tables, words, per_page, self.counts[group])

    def copy(self, layer: int, swap: Swap) -> None:
        """Brings what `swap` misses from the host into this layer's slots."""
        copy(swap, self._host.rows[layer], self._pool.rows[layer])

    def make_way(self, seats: Sequence[int], starts: Sequence[int]) -> None:
        """Before a tail page is written anew, the rows in it, which are on the host by now, are put into slots."""
        page_rows = self._geometry.page_rows
        for seat, start in zip(seats, starts, strict=True):
            leaving = start // page_rows - TAIL_PAGES
            tiered = self._tables.is_tiered[seat] and start > self._opened_at[seat]
            if start % page_rows == 0 and leaving >= 0 and tiered:
                self._enter_slots(seat, leaving * page_rows, start)

    def open(self, seat: int, length: int) -> None:
        """A context of `length` rows, all of them on the host, becomes tiered: empty maps, its newest rows in the tail.

        A context whose rows all fit is loaded whole, so that it never misses. Otherwise the rows last selected from the
        host are: after a streamed prefill these are known, after a park they are not.
        """
        self._tables.set_tiered(seat, True)
        self._opened_at[seat] = length
        for group in range(self._pool.shape.groups):
            self._clear_maps(seat, group, length)
        tail_first = self._geometry.tail_first(length)
        positions = torch.arange(tail_first, length, device=self._pool.device)
        at = torch.tensor(seat, device=self._pool.device)
        host, device = self._tables.host_at(at, positions), self._tables.tail_at(at, positions)
        for layer in range(self._pool.shape.layers):
            self._bring(layer, host, device)
        if tail_first == 0:
            return
        for group in range(self._pool.shape.groups):
            wanted = self.last_selected[seat, group].long()
            if tail_first <= self._geometry.slots:
                wanted = torch.arange(tail_first, device=self._pool.device)
            wanted = torch.where(wanted < tail_first, wanted, EMPTY)
            swap = self._plan_outside_tail(group, seat, wanted, length - 1)
            for layer in self._pool.shape.layers_of(group):
                self.copy(layer, swap)

    def demote(self, command: Demote) -> None:
        """Makes a resident seat tiered on its own pages, without needing room."""
        seat, length, tables = command.seat, command.length, self._tables
        held = torch.arange(self._geometry.slots, device=self._pool.device) + command.first * self._geometry.page_rows
        tables.put(tables.slots, seat, 0, command.slots)
        tables.set_tail(seat, command.tail)
        tables.put(tables.maps, seat, 0, command.maps)
        for group in range(self._pool.shape.groups):
            # A group's rows are copied before its maps are written: the map pages still hold rows that are wanted.
            position_of, last_used = self._seed(group, seat, held, length)
            self._write_maps(seat, group, position_of, last_used, length)
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

    def _enter_slots(self, seat: int, first: int, start: int) -> None:
        """Puts the rows [first, first + page_rows) of a tail page into slots of every group, as used one step ago.

        They take the place of slots not used in that step; where those are fewer than a page, the newest rows go in.
        While the whole context fits the slots there are empty ones for all of them.
        """
        geometry = self._geometry
        page_rows, slots = geometry.page_rows, geometry.slots
        count = page_rows if first + page_rows <= slots else min(page_rows, slots - geometry.topk)
        device = self._pool.device
        positions = torch.arange(first, first + page_rows, device=device)
        entering = positions[page_rows - count :]
        tail_rows = self._tables.tail_at(torch.tensor(seat, device=device), entering)
        for group in range(self._pool.shape.groups):
            self._set_slot_of(seat, group, positions, EMPTY)
            if count == 0:
                continue
            swap = self._plan_outside_tail(group, seat, entering, start - 1)
            for layer in self._pool.shape.layers_of(group):
                rows = self._pool.rows[layer]
                rows.index_copy_(0, swap.rows[0], rows[tail_rows])

    def _seed(self, group: int, seat: int, held: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Copies the rows last selected over slots that hold others, in every layer of the group.

        `held` [slots]: the position that each slot holds in place. Returns position_of and last_used [slots].
        """
        device, slots = self._pool.device, self._geometry.slots
        tail_first = self._geometry.tail_first(length)
        chosen = self.last_selected[seat, group].long()
        chosen = chosen[(chosen >= 0) & (chosen < tail_first)]
        first = int(held[0])
        in_place = (chosen >= first) & (chosen < first + slots)
        kept = torch.zeros(slots, dtype=torch.bool, device=device)
        kept[chosen[in_place] - first] = True
        moved = chosen[~in_place]
        targets = torch.nonzero(~kept)[:, 0][: moved.shape[0]]  # the oldest of those held in place give way
        at = torch.tensor(seat, device=device)
        sources, slot_rows = self._tables.rows_at(at, moved), self._slot_rows(seat, targets)
        for layer in self._pool.shape.layers_of(group):
            rows = self._pool.rows[layer]
            rows.index_copy_(0, slot_rows, rows[sources])
        position_of, last_used = held.clone(), held.clone()
        position_of[targets] = moved
        last_used[kept] = length - 1
        last_used[targets] = length - 1
        return position_of, last_used

    def _plan_outside_tail(self, group: int, seat: int, wanted: Tensor, stamp: int) -> Swap:
        """Plans for positions as if none were in the tail. What it misses is not counted: nobody asked for it yet."""
        device = self._pool.device
        everywhere = torch.tensor([torch.iinfo(torch.int64).max], device=device)
        seats, stamps = torch.tensor([seat], device=device), torch.tensor([stamp], device=device)
        words, per_page = self._pool.words_of(group), self._geometry.words_per_page
        counts = torch.zeros_like(self.counts[group])
        return plan(wanted[None], seats, stamps, everywhere, self._seat_tables, words, per_page, counts)

    def _clear_maps(self, seat: int, group: int, length: int) -> None:
        slots = torch.full((self._geometry.slots,), EMPTY, dtype=torch.int64, device=self._pool.device)
        self._write_maps(seat, group, slots, torch.full_like(slots, NEVER), length)

    def _write_maps(self, seat: int, group: int, position_of: Tensor, last_used: Tensor, length: int) -> None:
        """Sets the maps of one hot buffer. slot_of is written up to `length`; later positions enter with their page."""
        words = self._pool.words_of(group)
        slots, device = self._geometry.slots, self._pool.device
        words[self._word_places(seat, torch.arange(2 * slots, device=device))] = torch.cat(
            (position_of, last_used)
        ).int()
        self._set_slot_of(seat, group, torch.arange(length, device=device), EMPTY)
        occupied = position_of != EMPTY
        self._set_slot_of(seat, group, position_of[occupied], torch.nonzero(occupied)[:, 0].short())

    def _set_slot_of(self, seat: int, group: int, positions: Tensor, slots: Tensor | int) -> None:
        halves = self._pool.words_of(group).view(torch.int16)
        halves[self._word_places(seat, 4 * self._geometry.slots + positions, per_word=2)] = slots

    def _word_places(self, seat: int, words: Tensor, per_word: int = 1) -> Tensor:
        per_page = self._geometry.words_per_page * per_word
        return self._tables.maps[seat][words // per_page] * per_page + words % per_page

    def _slot_rows(self, seat: int, slots: Tensor) -> Tensor:
        page_rows = self._geometry.page_rows
        return self._tables.slots[seat][slots // page_rows] * page_rows + slots % page_rows

    def _bring(self, layer: int, host_rows: Tensor, device_rows: Tensor) -> None:
        copy(Swap(device_rows[None], host_rows[None]), self._host.rows[layer], self._pool.rows[layer])
