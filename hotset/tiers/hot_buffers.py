"""The hot buffers of tiered requests: slots, tail, and the residency maps that record which slot holds which position.

The map pages of a tiered seat hold, for each index group, `position_of[slot]`, `last_used[slot]` and
`slot_of[position]`. Stamps are positions: a step that begins at position p sets `last_used` of the slots that it uses
to p. All tokens before p are final, and every step adds at least one, so stamps grow without a counter, even if a step
rejects the drafted tokens that it verifies. If earlier steps may still accept drafts, p is the first position at which
the step could begin. Parking discards the maps; `open` writes new ones, whose stamps are lower than those of all later
steps. When a request is demoted, the stamp of a row in a slot is the row's own position, unless the row is in the last
selection.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels import EMPTY
from hotset.kernels.device_copies import list_to_device, to_host_async
from hotset.kernels.save_last_topk import save_last_topk
from hotset.kernels.swap_in import MAX_SLOTS, RowCopies, SeatTables, SwapPlan, copy, plan
from hotset.memory.device_pool import DevicePool
from hotset.memory.host_store import HostStore
from hotset.memory.tables import PageTables
from hotset.tiers.commands import Demote

NEVER = -1  # last_used of a slot that has not been used


class LeavingTail(NamedTuple):
    """Rows [first, last) of a tiered context, which leave the tail before the step that begins at `start`."""

    seat: int
    first: int
    last: int
    start: int


class HotBuffers:
    """The hot buffers of all tiered seats.

    `last_selected` keeps the last selection on every seat. When a request becomes tiered on a seat, these rows are
    copied into its slots, or all rows outside the tail if the slots suffice.
    """

    def __init__(self, pool: DevicePool, host: HostStore, tables: PageTables, seats: int) -> None:
        geometry = pool.geometry
        if not geometry.slots_per_step <= geometry.slots <= MAX_SLOTS:
            raise InternalError(
                f"a hot buffer has {geometry.slots} slots, but must have {geometry.slots_per_step} to {MAX_SLOTS}"
            )
        self._pool, self._host, self._tables, self._geometry = pool, host, tables, geometry
        self._seat_tables = SeatTables(
            tables.rows, tables.host, tables.slots, tables.tail, tables.maps, tables.tiered,
            geometry.page_rows, geometry.slots,
        )  # fmt: skip
        size = (seats, pool.shape.groups, pool.shape.topk)
        self.last_selected = torch.full(size, EMPTY, dtype=torch.int32, device=pool.device)
        self._tail_first = [0] * seats  # of tiered seats: the first position that is read from the tail
        self._prefetch_stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None
        self.counts = torch.zeros(pool.shape.groups, 2, dtype=torch.int64, device=pool.device)  # lookups, misses
        self._uncounted = torch.zeros(2, dtype=torch.int64, device=pool.device)  # for plans outside steps; never read
        # EMPTY as a tensor: assigning a Python number would make the host wait for the device.
        self._empty = torch.full((), EMPTY, dtype=torch.int16, device=pool.device)
        self._key_layers = torch.tensor(pool.shape.key_layers, device=pool.device)

    def warm_up(self) -> None:
        """Compiles the kernels used between steps by calling them with nothing to do."""
        padding = torch.full((1,), EMPTY, device=self._pool.device)
        for k in {min(self._geometry.page_rows, self._geometry.slots), self._geometry.topk}:
            swap = self._plan_outside_tail(0, padding, torch.full((1, k), EMPTY, device=self._pool.device), padding)
            self._copy_on_device(0, swap.copies)

    def copy_counts(self) -> tuple[Tensor, Callable[[], None]]:
        """Starts a copy of `counts` to the host. Returns the copy, and a function that waits for it but not for later
        steps."""
        on_gpu = self.counts.device.type == "cuda"
        return to_host_async(self.counts if on_gpu else self.counts.clone())

    def save_last_topk(self, group: int, seats: Tensor, positions: Tensor) -> None:
        """Keeps `positions` [seats, k] as the last selection of `seats`."""
        save_last_topk(self.last_selected[:, group], seats, positions)

    def plan(self, group: int, seats: Tensor, positions: Tensor, stamps: Tensor) -> SwapPlan:
        """Finds the rows at `positions` [tokens, k], and writes `stamps` to `last_used` of the slots that hold them.

        A tiered seat occurs at most once. Missing rows are copied into slots in the group's first layer. The caller
        copies them in the other layers.
        """
        words, per_page = self._pool.words_of(group), self._geometry.words_per_page
        first = self._pool.shape.layers_of(group)[0]
        return plan(
            positions,
            seats,
            stamps,
            self._seat_tables,
            words,
            per_page,
            self.counts[group],
            host_rows=self._host.rows[first],
            device_rows=self._pool.rows[first],
        )

    def release_used(self, group: int, seats: Tensor, stamps: Tensor) -> None:
        """Lets later plans with the same `stamps` evict the slots with these stamps, by lowering their `last_used`.
        The rows in these slots are not read any more. Seats that are EMPTY or not tiered are left out."""
        words, per_page, slots = self._pool.words_of(group), self._geometry.words_per_page, self._geometry.slots
        number = slots + torch.arange(slots, device=words.device)  # where last_used of each slot is among the maps
        tiered = ((seats != EMPTY) & self._tables.tiered[seats.clamp_min(0)])[:, None]
        index = self._tables.maps[seats.clamp_min(0)][:, number // per_page] * per_page + number % per_page
        index = torch.where(tiered, index, 0)
        released = tiered & (words[index] == stamps[:, None])
        words.scatter_add_(0, index.flatten(), -released.flatten().int())

    def copy(self, layer: int, swap: SwapPlan) -> None:
        """Copies the missing rows of `swap` from the host into this layer's slots."""
        copy(swap.copies, self._host.rows[layer], self._pool.rows[layer])

    def prefetch(self, layer: int, swap: SwapPlan) -> torch.cuda.Event | None:
        """Copies the missing rows in this layer. On a GPU, the copy runs on a side stream after earlier prefetches, and
        the event of its end is returned. The caller keeps `swap` until the main stream waits for this event, because
        the copy reads lists that belong to the main stream."""
        if self._prefetch_stream is None:
            self.copy(layer, swap)
            return None
        self._prefetch_stream.wait_stream(torch.cuda.current_stream(self._pool.device))
        with torch.cuda.stream(self._prefetch_stream):
            self.copy(layer, swap)
            copied: torch.cuda.Event = self._prefetch_stream.record_event()
        return copied

    def advance_tails(self, seats: Sequence[int], starts: Sequence[int]) -> list[LeavingTail]:
        """Returns the rows that leave the tails of tiered seats because their next step begins at `starts`. All tokens
        before `starts` are final, so no later step reads these rows from the tail."""
        leaving = []
        for seat, start in zip(seats, starts, strict=True):
            if seat in self._tables.tiered_seats:
                first, last = self._tail_first[seat], self._geometry.tail_first(start)
                if first < last:
                    leaving.append(LeavingTail(seat, first, last, start))
                    self._tail_first[seat] = last
        return leaving

    def move_tail_to_slots(self, leaving: Sequence[LeavingTail]) -> None:
        """Moves rows that leave tails into slots of every group. The next step may overwrite them.

        The rows are on the host already. They are stamped as used just before the next step, and replace rows in slots
        that were not used in the step before. If there may be fewer such slots than rows, only the newest rows get one.
        While all rows outside the tail fit into the slots, there are empty slots for all rows.
        """
        slots, device = self._geometry.slots, self._pool.device
        seats, first, last, starts = list_to_device(leaving, torch.int64, device).unbind(1)
        evictable = (last - first).clamp_max(slots - self._geometry.slots_per_step)
        count = torch.where(last <= slots, last - first, evictable)
        longest = max(rows.last - rows.first for rows in leaving)
        number = torch.arange(min(longest, slots), device=device)  # at most `slots` positions can be planned for
        entering = torch.where(number < count[:, None], (last - count)[:, None] + number, EMPTY)
        tail_rows = self._tables.tail_at(seats[:, None], entering.clamp_min(0))
        positions = torch.minimum(first[:, None] + torch.arange(longest, device=device), last[:, None] - 1)
        slot_of = self._slot_of_index(seats[:, None], positions)
        self._pool.words.view(torch.int16)[self._key_layers[:, None, None], slot_of] = self._empty
        count = count.int()
        for group in range(self._pool.shape.groups):
            swap = self._plan_outside_tail(group, seats, entering, starts - 1)
            self._copy_on_device(group, RowCopies(tail_rows, swap.rows, count))

    def open(self, seat: int, length: int) -> None:
        """Makes a seat tiered. Its context of `length` rows is on the host. The caller loads the rows of the tail.

        If all other rows fit into the slots, they are loaded, so that no row is missing. Otherwise the positions in
        `last_selected` are loaded. After a streamed prefill, the request itself selected them. After parking or a
        landing, they may come from the seat's previous request.
        """
        self._tables.set_tiered(seat, True)
        tail_first, device = self._geometry.tail_first(length), self._pool.device
        self._tail_first[seat] = tail_first
        if tail_first <= self._geometry.slots:
            self._open_whole(seat, torch.arange(tail_first, device=device), length)
            return
        empty = torch.full((self._geometry.slots,), EMPTY, dtype=torch.int64, device=device)
        self._write_maps(seat, self._key_layers, empty, torch.full_like(empty, NEVER), 0, length)
        selected = self.last_selected[seat].long()
        selected = torch.where(selected < tail_first, selected, EMPTY)
        seats, stamps = (torch.full((1,), number, device=device) for number in (seat, length - 1))
        for group in range(self._pool.shape.groups):
            first, *others = self._pool.shape.layers_of(group)
            swap = self._plan_outside_tail(group, seats, selected[group : group + 1], stamps, copied_layer=first)
            for layer in others:
                self.copy(layer, swap)

    def demote(self, command: Demote) -> None:
        """Makes a resident seat tiered. Its own pages become slots, tail and maps; no free page is needed."""
        seat, length, tables = command.seat, command.length, self._tables
        tables.put(tables.slots, seat, 0, command.slots)
        tables.set_tail(seat, command.tail)
        tables.put(tables.maps, seat, 0, command.maps)
        for group in range(self._pool.shape.groups):
            # A group's rows are copied before its maps are written: the pages of the maps can hold selected rows.
            position_of, last_used = self._seed_slots(group, seat, command.first * self._geometry.page_rows, length)
            layer = self._key_layers[group : group + 1]
            self._write_maps(seat, layer, position_of, last_used, self._geometry.slots, length)
        tables.set_tiered(seat, True)
        self._tail_first[seat] = self._geometry.tail_first(length)
        tables.drop_rows(seat)

    def audit(self, seat: int) -> None:
        """Proves that slot_of and position_of of a tiered context are inverse to each other."""
        outside_tail = range(self._tail_first[seat])
        for group in range(self._pool.shape.groups):
            position_of, _last_used, slot_of = self.maps(seat, group)
            by_slot = {(slot, position) for slot, position in enumerate(position_of) if position != EMPTY}
            by_position = {(slot_of[position], position) for position in outside_tail if slot_of[position] != EMPTY}
            assert by_slot == by_position, f"seat {seat}, group {group}: slots and positions disagree"

    def maps(self, seat: int, group: int) -> tuple[list[int], list[int], list[int]]:
        """Returns position_of, last_used and slot_of of one hot buffer as lists, for audits and tests."""
        slots = self._geometry.slots
        pages = self._tables.maps[seat]
        words = self._pool.words_of(group).view(-1, self._geometry.words_per_page)[pages[pages != EMPTY]].flatten()
        slot_of = words.view(torch.int16)[4 * slots :]
        return words[:slots].tolist(), words[slots : 2 * slots].tolist(), slot_of.tolist()

    def _open_whole(self, seat: int, positions: Tensor, length: int) -> None:
        """Loads every position outside the tail into the slot of the same number."""
        slots = torch.arange(self._geometry.slots, device=self._pool.device)
        filled = slots < positions.shape[0]
        position_of, last_used = torch.where(filled, slots, EMPTY), torch.where(filled, length - 1, NEVER)
        self._write_maps(seat, self._key_layers, position_of, last_used, positions.shape[0], length)
        count = torch.full((1,), positions.shape[0], dtype=torch.int32, device=self._pool.device)
        host_rows, device_rows = self._tables.host_at(seat, positions), self._slot_rows(seat, positions)
        copies = RowCopies(host_rows[None], device_rows[None], count)
        for layer in range(self._pool.shape.layers):
            copy(copies, self._host.rows[layer], self._pool.rows[layer])

    def _copy_on_device(self, group: int, copies: RowCopies) -> None:
        """Copies rows within the device, in every layer of a group."""
        for layer in self._pool.shape.layers_of(group):
            copy(copies, self._pool.rows[layer], self._pool.rows[layer])

    def _seed_slots(self, group: int, seat: int, first: int, length: int) -> tuple[Tensor, Tensor]:
        """Copies the rows that were selected last over slots that hold other rows, in every layer of the group.

        Before this, slot n holds position `first + n`. Returns position_of and last_used [slots].
        """
        device, slots = self._pool.device, self._geometry.slots
        selected = self.last_selected[seat, group].long()
        outside_tail = (selected >= 0) & (selected < self._geometry.tail_first(length))
        in_place = outside_tail & (selected >= first) & (selected < first + slots)
        moves = outside_tail & ~in_place
        # An extra slot at the end receives the writes of entries that need no slot.
        kept = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        kept.scatter_(0, torch.where(in_place, selected - first, slots), True)
        # Slots to overwrite, the oldest rows first; slots whose rows were selected come last.
        oldest_first = torch.argsort(kept[:slots].int(), stable=True)
        target = torch.where(moves, oldest_first[(torch.cumsum(moves, 0) - 1).clamp_min(0)], slots)
        packed = torch.argsort(moves.int(), descending=True, stable=True)
        sources = self._tables.rows_at(seat, selected.clamp_min(0))[packed]
        targets = self._slot_rows(seat, target.clamp_max(slots - 1))[packed]
        self._copy_on_device(group, RowCopies(sources[None], targets[None], moves.sum(0, keepdim=True).int()))
        held = torch.arange(first, first + slots + 1, device=device)
        used = kept.scatter(0, target, True)
        return held.scatter(0, target, selected)[:slots], torch.where(used, length - 1, held)[:slots]

    def _plan_outside_tail(
        self, group: int, seats: Tensor, positions: Tensor, stamps: Tensor, copied_layer: int | None = None
    ) -> SwapPlan:
        """Plans as if no position were in the tail. Lookups are not counted, because no step selected the positions.

        Missing rows are copied from the host in `copied_layer` only.
        """
        return plan(
            positions,
            seats,
            stamps,
            self._seat_tables,
            self._pool.words_of(group),
            self._geometry.words_per_page,
            self._uncounted,
            ignore_tail=True,
            host_rows=None if copied_layer is None else self._host.rows[copied_layer],
            device_rows=None if copied_layer is None else self._pool.rows[copied_layer],
        )

    def _write_maps(
        self, seat: int, layers: Tensor, position_of: Tensor, last_used: Tensor, occupied: int, length: int
    ) -> None:
        """Writes the maps that are in `layers` of the map pages. The first `occupied` slots hold rows.

        slot_of is written up to `length`. Later positions are written when their page leaves the tail.
        """
        words, device = self._pool.words, self._pool.device
        per_page = self._geometry.words_per_page
        number = torch.arange(2 * self._geometry.slots, device=device)
        index = self._tables.maps[seat, number // per_page] * per_page + number % per_page
        words[layers[:, None], index] = torch.cat((position_of, last_used)).int()
        halves = words.view(torch.int16)
        halves[layers[:, None], self._slot_of_index(seat, torch.arange(length, device=device))] = self._empty
        in_slots = torch.arange(occupied, dtype=torch.int16, device=device)
        halves[layers[:, None], self._slot_of_index(seat, position_of[:occupied])] = in_slots

    def _slot_of_index(self, seats: Tensor | int, positions: Tensor) -> Tensor:
        """Returns where slot_of of each position is stored: an index into a group's map words, viewed as int16."""
        per_page, half = 2 * self._geometry.words_per_page, 4 * self._geometry.slots + positions
        return self._tables.maps[seats, half // per_page] * per_page + half % per_page

    def _slot_rows(self, seat: int, slots: Tensor) -> Tensor:
        page_rows = self._geometry.page_rows
        return self._tables.slots[seat][slots // page_rows] * page_rows + slots % page_rows
