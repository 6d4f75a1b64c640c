"""The specification of swap_in."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.swap_in.tables import Copies, SeatTables, Swap


def plan(
    positions: Tensor,
    seats: Tensor,
    stamps: Tensor,
    tables: SeatTables,
    words: Tensor,
    words_per_page: int,
    counts: Tensor,
    *,
    ignore_tail: bool = False,
    host_rows: Tensor | None = None,
    device_rows: Tensor | None = None,
) -> Swap:
    swap = _plan(positions, seats, stamps, tables, words, words_per_page, counts, ignore_tail)
    if host_rows is not None and device_rows is not None:
        copy(swap.copies, host_rows, device_rows)
    return swap


def _plan(
    positions: Tensor,
    seats: Tensor,
    stamps: Tensor,
    tables: SeatTables,
    words: Tensor,
    words_per_page: int,
    counts: Tensor,
    ignore_tail: bool,
) -> Swap:
    seat = seats.clamp_min(0)[:, None]
    there = (positions != EMPTY) & (seats != EMPTY)[:, None]
    tiered = tables.tiered[seat] & (seats != EMPTY)[:, None]  # [batch, 1]
    resident = there & ~tiered
    rows = torch.where(resident, _rows_in(tables.row_pages, seat, positions, resident, tables.page_rows), EMPTY)
    nothing = torch.zeros_like(seats, dtype=torch.int32)
    copies = Copies(torch.full_like(rows, EMPTY), torch.full_like(rows, EMPTY), nothing)
    at = tiered[:, 0].nonzero()[:, 0]  # the batch rows of tiered seats
    if at.shape[0] > 0:
        maps = _Maps(tables.map_pages[seats[at]], tables.slots, words, words_per_page)
        tail_first = (stamps[at, None] // tables.page_rows - 1).clamp_min(0) * tables.page_rows
        if ignore_tail:
            tail_first = torch.full_like(tail_first, torch.iinfo(torch.int64).max)
        topk = _TieredTopk(positions[at], seat[at], stamps[at, None], tail_first)
        swap = _plan_tiered(topk, tables, maps, counts)
        rows[at] = swap.rows
        copies.host_rows[at], copies.device_rows[at] = swap.copies.host_rows, swap.copies.device_rows
        copies.counts[at] = swap.copies.counts
    return Swap(rows, copies)


def copy(copies: Copies, host_rows: Tensor, device_rows: Tensor) -> None:
    entry = torch.arange(copies.host_rows.shape[1], device=copies.counts.device)
    wanted = entry < copies.counts[:, None]
    dtype = _widest_word(host_rows, device_rows)
    missing = host_rows.view(dtype).index_select(0, copies.host_rows[wanted])
    device_rows.view(dtype).index_copy_(0, copies.device_rows[wanted], missing)


@dataclass(frozen=True, slots=True)
class _TieredTopk:
    """What the tiered seats of a batch chose, one seat to a row; all four broadcast to [seats, k]."""

    positions: Tensor
    seat: Tensor
    stamp: Tensor
    tail_first: Tensor


@dataclass(frozen=True, slots=True)
class _Maps:
    """Addresses in the paged maps of some tiered seats."""

    pages: Tensor  # [seats, j] int64
    slots: int
    words: Tensor
    words_per_page: int

    @property
    def halves(self) -> Tensor:
        return self.words.view(torch.int16)

    def position_of(self, slot: Tensor) -> Tensor:
        """Addresses in `words`, for slots [seats, ...]."""
        return self._paged(slot, self.words_per_page)

    def last_used(self, slot: Tensor) -> Tensor:
        """Addresses in `words`, for slots [seats, ...]."""
        return self._paged(self.slots + slot, self.words_per_page)

    def slot_of(self, position: Tensor) -> Tensor:
        """Addresses in `halves`, for positions [seats, ...]."""
        return self._paged(4 * self.slots + position, 2 * self.words_per_page)

    def _paged(self, index: Tensor, per_page: int) -> Tensor:
        return self.pages.gather(1, index // per_page) * per_page + index % per_page


def _plan_tiered(topk: _TieredTopk, tables: SeatTables, maps: _Maps, counts: Tensor) -> Swap:
    """Rows and copies for tiered seats only, [seats, k] each; updates their maps."""
    there = topk.positions != EMPTY
    in_tail = there & (topk.positions >= topk.tail_first)
    looked_up = there & ~in_tail
    slot_of = maps.slot_of(torch.where(looked_up, topk.positions, 0))
    slot = maps.halves[slot_of].long()
    hit = looked_up & (slot != EMPTY)
    maps.words[maps.last_used(slot.clamp_min(0))[hit]] = topk.stamp.expand_as(hit)[hit].int()
    first = looked_up & ~hit
    if first.any():
        first = _first_occurrences(topk.positions, first)
        _bring_in(first, topk, maps)
        slot = maps.halves[slot_of].long()
    counts += torch.stack([looked_up.sum(), first.sum()])

    in_slots = _rows_in(tables.slot_pages, topk.seat, slot, looked_up, tables.page_rows)
    tail_page = tables.tail_pages[topk.seat, topk.positions // tables.page_rows % 2]
    tail_rows = tail_page * tables.page_rows + topk.positions % tables.page_rows
    rows = torch.where(looked_up, in_slots, torch.where(in_tail, tail_rows, EMPTY))
    host_rows = _rows_in(tables.host_pages, topk.seat, topk.positions, first, tables.page_rows)
    return Swap(rows, _listed(first, host_rows, rows))


def _listed(first: Tensor, host_rows: Tensor, device_rows: Tensor) -> Copies:
    """The rows at `first` [seats, k], in order; EMPTY after them."""
    order = (~first).byte().argsort(dim=1, stable=True)
    on_host, on_device = (torch.where(first, rows, EMPTY).gather(1, order) for rows in (host_rows, device_rows))
    return Copies(on_host, on_device, first.sum(1, dtype=torch.int32))


def _bring_in(first: Tensor, topk: _TieredTopk, maps: _Maps) -> None:
    """The maps after the positions at `first` [seats, k] have taken the least recently used slots of their seats."""
    at_seat, victim = _least_recently_used(first.sum(1, keepdim=True), topk.stamp, maps).nonzero(as_tuple=True)
    # Both are walked seat by seat, misses in list order and victims in ascending order: they match one to one.
    position = topk.positions[first]
    assert victim.shape == position.shape, f"{position.shape[0]} misses, but {victim.shape[0]} slots may give way"
    mine = _Maps(maps.pages[at_seat], maps.slots, maps.words, maps.words_per_page)
    victim, position = victim[:, None], position[:, None]
    before = mine.words[mine.position_of(victim)].long()
    mine.halves[mine.slot_of(before.clamp_min(0))[before != EMPTY]] = EMPTY
    mine.halves[mine.slot_of(position)] = victim.short()
    mine.words[mine.position_of(victim)] = position.int()
    mine.words[mine.last_used(victim)] = topk.stamp[at_seat].int()


def _first_occurrences(positions: Tensor, among: Tensor) -> Tensor:
    """Which entries are `among` and hold a position that no earlier such entry of their row holds."""
    # The sort is stable: in a run of equals the first is the one that stands first in the list.
    values, order = torch.where(among, positions, EMPTY).sort(dim=1, stable=True)
    begins = torch.ones_like(among)
    begins[:, 1:] = values[:, 1:] != values[:, :-1]
    return among & torch.zeros_like(among).scatter(1, order, begins)


def _least_recently_used(count: Tensor, stamp: Tensor, maps: _Maps) -> Tensor:
    """[seats, slots] bool: the `count` slots of each seat that were used longest ago; of equals, the lower slots."""
    slots = torch.arange(maps.slots, device=count.device).expand(count.shape[0], -1)
    last_used = maps.words[maps.last_used(slots)].long()
    used_now = last_used == stamp
    oldest_first = last_used.masked_fill(used_now, torch.iinfo(torch.int64).max).argsort(dim=1, stable=True)
    return torch.zeros_like(used_now).scatter(1, oldest_first, slots < count) & ~used_now


def _rows_in(pages: Tensor, seat: Tensor, index: Tensor, where: Tensor, page_rows: int) -> Tensor:
    """Row of each `index` in its seat's `pages`; meaningless where not `where`."""
    index = torch.where(where, index, 0)
    return pages[seat, index // page_rows] * page_rows + index % page_rows


def _widest_word(*tensors: Tensor) -> torch.dtype:
    """The widest integer that all rows consist of: torch copies word by word, and not every dtype of rows at all."""
    for word in (torch.int64, torch.int32, torch.int16):
        lengths = [length for rows in tensors for length in (rows.shape[1], rows.stride(0), rows.storage_offset())]
        if all(length * tensors[0].itemsize % word.itemsize == 0 for length in lengths):
            return word
    return torch.uint8
