"""The specification of swap_in."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels import EMPTY
from hotset.kernels.swap_in.tables import RowCopies, SeatTables, SwapPlan


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
) -> SwapPlan:
    seat = seats.clamp_min(0)[:, None]
    valid = (positions != EMPTY) & (seats != EMPTY)[:, None]
    tiered = tables.tiered[seat] & (seats != EMPTY)[:, None]  # [batch, 1]
    resident = valid & ~tiered
    rows = torch.where(resident, _rows_in(tables.row_pages, seat, positions, resident, tables.page_rows), EMPTY)
    nothing = torch.zeros_like(seats, dtype=torch.int32)
    copies = RowCopies(torch.full_like(rows, EMPTY), torch.full_like(rows, EMPTY), nothing)
    tiered_queries = tiered[:, 0].nonzero()[:, 0]  # their indices in the batch
    if tiered_queries.shape[0] > 0:
        maps = _Maps(tables.map_pages[seats[tiered_queries]], tables.slots, words, words_per_page)
        tail_first = (stamps[tiered_queries, None] // tables.page_rows - 1).clamp_min(0) * tables.page_rows
        if ignore_tail:
            tail_first = torch.full_like(tail_first, torch.iinfo(torch.int64).max)
        topk = _TieredTopk(positions[tiered_queries], seat[tiered_queries], stamps[tiered_queries, None], tail_first)
        swap = _plan_tiered(topk, tables, maps, counts)
        rows[tiered_queries] = swap.rows
        copies.host_rows[tiered_queries] = swap.copies.host_rows
        copies.device_rows[tiered_queries] = swap.copies.device_rows
        copies.counts[tiered_queries] = swap.copies.counts
    if host_rows is not None and device_rows is not None:
        copy(copies, host_rows, device_rows)
    return SwapPlan(rows, copies)


def copy(copies: RowCopies, host_rows: Tensor, device_rows: Tensor) -> None:
    entry = torch.arange(copies.host_rows.shape[1], device=copies.counts.device)
    listed = entry < copies.counts[:, None]
    dtype = _widest_word(host_rows, device_rows)
    copied = host_rows.view(dtype).index_select(0, copies.host_rows[listed])
    device_rows.view(dtype).index_copy_(0, copies.device_rows[listed], copied)


@dataclass(frozen=True, slots=True)
class _TieredTopk:
    """The top-k of the tiered seats in a batch. All four tensors broadcast to [seats, k]."""

    positions: Tensor
    seat: Tensor
    stamp: Tensor
    tail_first: Tensor


@dataclass(frozen=True, slots=True)
class _Maps:
    """Computes addresses in the paged maps of some tiered seats."""

    pages: Tensor  # [seats, j] int64
    slots: int
    words: Tensor
    words_per_page: int

    @property
    def halves(self) -> Tensor:
        return self.words.view(torch.int16)

    def position_of(self, slot: Tensor) -> Tensor:
        """Returns addresses in `words` for slots [seats, ...]."""
        return self._paged(slot, self.words_per_page)

    def last_used(self, slot: Tensor) -> Tensor:
        """Returns addresses in `words` for slots [seats, ...]."""
        return self._paged(self.slots + slot, self.words_per_page)

    def slot_of(self, position: Tensor) -> Tensor:
        """Returns addresses in `halves` for positions [seats, ...]."""
        return self._paged(4 * self.slots + position, 2 * self.words_per_page)

    def _paged(self, index: Tensor, per_page: int) -> Tensor:
        return self.pages.gather(1, index // per_page) * per_page + index % per_page


def _plan_tiered(topk: _TieredTopk, tables: SeatTables, maps: _Maps, counts: Tensor) -> SwapPlan:
    """Returns the rows and copies of tiered seats, [seats, k] each. Updates their maps and adds to `counts`."""
    valid = topk.positions != EMPTY
    in_tail = valid & (topk.positions >= topk.tail_first)
    looked_up = valid & ~in_tail
    slot_of = maps.slot_of(torch.where(looked_up, topk.positions, 0))
    slot = maps.halves[slot_of].long()
    hit = looked_up & (slot != EMPTY)
    maps.words[maps.last_used(slot.clamp_min(0))[hit]] = topk.stamp.expand_as(hit)[hit].int()
    missing = looked_up & ~hit
    if missing.any():
        missing = _first_occurrences(topk.positions, missing)
        _assign_slots(missing, topk, maps)
        slot = maps.halves[slot_of].long()
    counts += torch.stack([looked_up.sum(), missing.sum()])

    in_slots = _rows_in(tables.slot_pages, topk.seat, slot, looked_up, tables.page_rows)
    tail_page = tables.tail_pages[topk.seat, topk.positions // tables.page_rows % tables.tail_pages.shape[1]]
    tail_rows = tail_page * tables.page_rows + topk.positions % tables.page_rows
    rows = torch.where(looked_up, in_slots, torch.where(in_tail, tail_rows, EMPTY))
    host_rows = _rows_in(tables.host_pages, topk.seat, topk.positions, missing, tables.page_rows)
    return SwapPlan(rows, _list_copies(missing, host_rows, rows))


def _list_copies(missing: Tensor, host_rows: Tensor, device_rows: Tensor) -> RowCopies:
    """Lists the rows at `missing` [seats, k] in order, followed by EMPTY."""
    order = (~missing).byte().argsort(dim=1, stable=True)
    on_host, on_device = (torch.where(missing, rows, EMPTY).gather(1, order) for rows in (host_rows, device_rows))
    return RowCopies(on_host, on_device, missing.sum(1, dtype=torch.int32))


def _assign_slots(missing: Tensor, topk: _TieredTopk, maps: _Maps) -> None:
    """Assigns the least recently used slots of each seat to its positions at `missing` [seats, k], in the maps."""
    at_seat, victim = _least_recently_used(missing.sum(1, keepdim=True), topk.stamp, maps).nonzero(as_tuple=True)
    # Both lists are ordered by seat. Within a seat, misses keep the order of the top-k, and victims ascend by slot
    # number, so the n-th miss gets the n-th victim.
    position = topk.positions[missing]
    if victim.shape != position.shape:
        raise InternalError(f"{position.shape[0]} misses, but {victim.shape[0]} evictable slots")
    victim_maps = _Maps(maps.pages[at_seat], maps.slots, maps.words, maps.words_per_page)
    victim, position = victim[:, None], position[:, None]
    evicted = victim_maps.words[victim_maps.position_of(victim)].long()
    victim_maps.halves[victim_maps.slot_of(evicted.clamp_min(0))[evicted != EMPTY]] = EMPTY
    victim_maps.halves[victim_maps.slot_of(position)] = victim.short()
    victim_maps.words[victim_maps.position_of(victim)] = position.int()
    victim_maps.words[victim_maps.last_used(victim)] = topk.stamp[at_seat].int()


def _first_occurrences(positions: Tensor, candidates: Tensor) -> Tensor:
    """Returns which candidates hold a position that no earlier candidate of the same list holds."""
    # The sort is stable, so the first of several equal positions is the first one in the list.
    values, order = torch.where(candidates, positions, EMPTY).sort(dim=1, stable=True)
    begins = torch.ones_like(candidates)
    begins[:, 1:] = values[:, 1:] != values[:, :-1]
    return candidates & torch.zeros_like(candidates).scatter(1, order, begins)


def _least_recently_used(count: Tensor, stamp: Tensor, maps: _Maps) -> Tensor:
    """Returns [seats, slots] bool: the `count` least recently used slots of each seat, without those used in this step.

    Of equally old slots, the lower ones are returned.
    """
    slots = torch.arange(maps.slots, device=count.device).expand(count.shape[0], -1)
    last_used = maps.words[maps.last_used(slots)].long()
    used_now = last_used == stamp
    oldest_first = last_used.masked_fill(used_now, torch.iinfo(torch.int64).max).argsort(dim=1, stable=True)
    return torch.zeros_like(used_now).scatter(1, oldest_first, slots < count) & ~used_now


def _rows_in(pages: Tensor, seat: Tensor, index: Tensor, where: Tensor, page_rows: int) -> Tensor:
    """Returns the row of each `index` in its seat's `pages`. The result is undefined outside of `where`."""
    index = torch.where(where, index, 0)
    return pages[seat, index // page_rows] * page_rows + index % page_rows


def _widest_word(*tensors: Tensor) -> torch.dtype:
    """Returns the widest integer dtype whose size divides all rows, strides and offsets.

    Rows are copied as integers, because torch cannot index tensors of every dtype.
    """
    for word in (torch.int64, torch.int32, torch.int16):
        lengths = [length for rows in tensors for length in (rows.shape[1], rows.stride(0), rows.storage_offset())]
        if all(length * tensors[0].itemsize % word.itemsize == 0 for length in lengths):
            return word
    return torch.uint8
