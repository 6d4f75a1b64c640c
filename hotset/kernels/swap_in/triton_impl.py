"""swap_in in Triton: `plan` with one program per batch row, `copy` with one program per entry of the plan.

Threads of a program read what other threads of it wrote (stamps of hits, list indices, victims). Each such passage is
separated by `tl.debug_barrier()`, which orders global memory within a program. No order is needed between programs: a
tiered seat occurs once in a batch and no map page has two owners.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.swap_in.tables import SeatTables, Swap

MOST_SLOTS_AT_ONCE = 2048  # the slots are walked in blocks of this size
MOST_WORDS_AT_ONCE = 512  # and a long row in blocks of so many words
WORDS = {16: (tl.int64, 2), 8: (tl.int64, 1), 4: (tl.int32, 1), 2: (tl.int16, 1), 1: (tl.int8, 1)}  # (word, in a unit)
OPTIONS = {"enable_fp_fusion": False}  # nothing here is a float; Triton 3.9 warns where this is left open

_EMPTY = tl.constexpr(EMPTY)


def plan(
    positions: Tensor,
    seats: Tensor,
    stamps: Tensor,
    tail_first: Tensor,
    tables: SeatTables,
    words: Tensor,
    words_per_page: int,
    counts: Tensor,
) -> Swap:
    batch, k = positions.shape
    rows, missing_host = (torch.empty(batch, k, dtype=torch.int64, device=positions.device) for _ in range(2))
    victims = torch.empty(batch, k, dtype=torch.int32, device=positions.device)
    pages = (tables.row_pages, tables.host_pages, tables.slot_pages, tables.tail_pages, tables.map_pages)
    block_k = triton.next_power_of_2(k)
    _plan_kernel[(batch,)](
        *(each.contiguous() for each in (positions, seats, stamps, tail_first, tables.tiered)),
        *pages,
        *(words, words.view(torch.int16), counts, rows, missing_host, victims),
        *(table.stride(0) for table in pages),
        k=k,
        slots=tables.slots,
        page_rows=tables.page_rows,
        words_per_page=words_per_page,
        block_k=block_k,
        block_s=min(triton.next_power_of_2(tables.slots), MOST_SLOTS_AT_ONCE),
        num_warps=min(16, max(4, block_k // 256)),
        **OPTIONS,
    )
    return Swap(rows, missing_host)


def copy(swap: Swap, host_rows: Tensor, device_rows: Tensor) -> None:
    host, device = host_rows.view(torch.uint8), device_rows.view(torch.uint8)
    row_bytes = host.shape[1]
    unit = _widest_unit(host.data_ptr(), host.stride(0), device.data_ptr(), device.stride(0))
    word, words_in_unit = WORDS[unit]
    units = row_bytes // unit
    _copy_kernel[(swap.rows.numel(),)](
        *(swap.rows.contiguous(), swap.missing_host.contiguous(), host, device, host.stride(0), device.stride(0)),
        *(units, row_bytes - units * unit),
        word=word,
        words_in_unit=words_in_unit,
        block=min(triton.next_power_of_2(max(1, units * words_in_unit)), MOST_WORDS_AT_ONCE),
        num_warps=1,
        **OPTIONS,
    )


def _widest_unit(*addresses: int) -> int:
    """Bytes that one access may span, at most 16: every row of both tiers begins at a multiple of it."""
    return next(unit for unit in WORDS if all(address % unit == 0 for address in addresses))


@triton.jit  # type: ignore[untyped-decorator]
def _plan_kernel(
    positions: tl.tensor,
    seats: tl.tensor,
    stamps: tl.tensor,
    tail_first: tl.tensor,
    tiered: tl.tensor,
    row_pages: tl.tensor,
    host_pages: tl.tensor,
    slot_pages: tl.tensor,
    tail_pages: tl.tensor,
    map_pages: tl.tensor,
    words: tl.tensor,
    halves: tl.tensor,  # the same memory as `words`, seen as int16
    counts: tl.tensor,
    rows: tl.tensor,
    missing_host: tl.tensor,
    victims: tl.tensor,  # [batch, k] int32, scratch
    row_pages_stride: tl.tensor,
    host_pages_stride: tl.tensor,
    slot_pages_stride: tl.tensor,
    tail_pages_stride: tl.tensor,
    map_pages_stride: tl.tensor,
    k: tl.constexpr,
    slots: tl.constexpr,
    page_rows: tl.constexpr,
    words_per_page: tl.constexpr,
    block_k: tl.constexpr,
    block_s: tl.constexpr,
) -> None:
    batch_row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, block_k)
    entry = batch_row * k + index
    seat = tl.load(seats + batch_row)
    # A padded batch row has no positions: it reads the flag of seat 0 and nothing else.
    position = tl.load(positions + entry, mask=index < tl.where(seat == _EMPTY, 0, k), other=_EMPTY)
    there = position != _EMPTY
    seat = tl.maximum(seat, 0)
    missing = tl.full([block_k], _EMPTY, tl.int64)
    if tl.load(tiered + seat) == 0:
        row = _row_in(row_pages + seat * row_pages_stride, position, there, page_rows)
    else:
        my_maps = map_pages + seat * map_pages_stride
        stamp = tl.load(stamps + batch_row).to(tl.int32)
        first_of_tail = tl.load(tail_first + batch_row)
        looked_up = there & (position < first_of_tail)
        half = _address(my_maps, 4 * slots + position, looked_up, 2 * words_per_page)
        slot = tl.load(halves + half, mask=looked_up, other=_EMPTY)
        hit = looked_up & (slot != _EMPTY)
        last_used = _address(my_maps, slots + slot.to(tl.int64), hit, words_per_page)
        tl.store(words + last_used, tl.zeros_like(index) + stamp, mask=hit)
        missed = looked_up & (slot == _EMPTY)
        if tl.max(missed.to(tl.int32), 0) > 0:
            first = missed & (_first_index(half, missed, index, words, halves) == index)
            my_victims = victims + batch_row * k
            misses = tl.sum(first.to(tl.int32), 0)
            _evict(misses, stamp, my_maps, words, halves, my_victims, slots, words_per_page, block_s)
            tl.debug_barrier()  # victims and their old entries, before victims are read and written
            nth = tl.cumsum(first.to(tl.int32), 0) - 1
            victim = tl.load(my_victims + nth, mask=first, other=0)
            tl.store(halves + half, victim.to(tl.int16), mask=first)
            at = _address(my_maps, victim.to(tl.int64), first, words_per_page)
            tl.store(words + at, position.to(tl.int32), mask=first)
            at = _address(my_maps, slots + victim.to(tl.int64), first, words_per_page)
            tl.store(words + at, tl.zeros_like(index) + stamp, mask=first)
            missing = _row_in(host_pages + seat * host_pages_stride, position, first, page_rows)
            tl.debug_barrier()  # slot_of of every miss, before later occurrences of it look it up
            slot = tl.load(halves + half, mask=looked_up, other=_EMPTY)
            tl.atomic_add(counts + 1, misses.to(tl.int64), sem="relaxed")
        in_slots = _row_in(slot_pages + seat * slot_pages_stride, slot.to(tl.int64), looked_up, page_rows)
        in_tail = there & (position >= first_of_tail)
        tail_page = tl.load(
            tail_pages + seat * tail_pages_stride + position // page_rows % 2, mask=in_tail, other=_EMPTY
        )
        row = tl.where(in_tail, tail_page * page_rows + position % page_rows, in_slots)
        tl.atomic_add(counts, tl.sum(looked_up.to(tl.int64), 0), sem="relaxed")
    tl.store(rows + entry, row, mask=index < k)
    tl.store(missing_host + entry, missing, mask=index < k)


@triton.jit  # type: ignore[untyped-decorator]
def _row_in(pages: tl.tensor, index: tl.tensor, where: tl.tensor, page_rows: tl.constexpr) -> tl.tensor:
    """Row of each `index` (int64) in `pages`; EMPTY where not `where`."""
    page = tl.load(pages + index // page_rows, mask=where, other=0)
    return tl.where(where, page * page_rows + index % page_rows, _EMPTY)


@triton.jit  # type: ignore[untyped-decorator]
def _address(pages: tl.tensor, index: tl.tensor, where: tl.tensor, per_page: tl.constexpr) -> tl.tensor:
    """Address of each `index` (int64) in memory that is cut into `pages`; meaningless where not `where`."""
    return tl.load(pages + index // per_page, mask=where, other=0) * per_page + index % per_page


@triton.jit  # type: ignore[untyped-decorator]
def _first_index(
    half: tl.tensor, missed: tl.tensor, index: tl.tensor, words: tl.tensor, halves: tl.tensor
) -> tl.tensor:
    """The list index at which the position of each missed entry occurs first.

    slot_of of a missing position holds EMPTY, 0xFFFF. Every occurrence bids 0x8000 + its index, which is less than
    that since index < k <= 32767, and the least bid stays: an atomic minimum on the word that holds the entry. The
    upper halves bid first, all with the lower half that is there; then the lower halves, all with the upper half that
    is there now: so the other half never decides and never changes, and it does not matter if `beside` was read before
    or after another thread's bid. Later stores of slots overwrite all bids.
    """
    word = words + half // 2
    upper = half % 2 == 1
    tl.debug_barrier()  # every occurrence has found EMPTY, before a bid replaces it; hits are stamped, before `_evict`
    beside = tl.load(word, mask=missed, other=0) & 0xFFFF
    tl.atomic_min(word, ((index - 0x8000) << 16) | beside, mask=missed & upper, sem="relaxed")
    tl.debug_barrier()  # upper halves are final, before they are bid again beside lower ones
    beside = tl.load(word, mask=missed, other=0) & -0x10000
    tl.atomic_min(word, (index + 0x8000) | beside, mask=missed & (half % 2 == 0), sem="relaxed")
    tl.debug_barrier()  # lower halves are final, before the least bids are read
    return tl.load(halves + half, mask=missed, other=0).to(tl.int32) + 0x8000


@triton.jit  # type: ignore[untyped-decorator]
def _evict(
    count: tl.tensor,
    stamp: tl.tensor,
    map_pages: tl.tensor,
    words: tl.tensor,
    halves: tl.tensor,
    victims: tl.tensor,
    slots: tl.constexpr,
    words_per_page: tl.constexpr,
    block_s: tl.constexpr,
) -> None:
    """Writes the `count` least recently used slots to `victims`, ascending, and takes their positions out of slot_of.

    `cut` is the smallest stamp such that `count` slots are no newer: all slots older than it go, and of those that are
    exactly as old the lower ones. A slot with this step's stamp is newer than every cut that is tried.
    """
    low = tl.full([], -1, tl.int32)
    high = stamp - 1
    while low < high:  # the cut is in [low, high]
        middle = low + (high - low) // 2
        if _no_newer(middle, map_pages, words, slots, words_per_page, block_s) >= count:
            high = middle
        else:
            low = middle + 1
    cut = low
    ties_left = count - _no_newer(cut - 1, map_pages, words, slots, words_per_page, block_s)
    found = tl.full([], 0, tl.int32)
    for start in range(0, slots, block_s):
        slot = start + tl.arange(0, block_s).to(tl.int64)
        last_used = _last_used(slot, map_pages, words, slots, words_per_page)
        tie = (last_used == cut) & (slot < slots)
        taken = (last_used < cut) & (slot < slots) | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= ties_left))
        nth = found + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(victims + nth, slot.to(tl.int32), mask=taken)
        at = _address(map_pages, slot, taken, words_per_page)
        position = tl.load(words + at, mask=taken, other=_EMPTY).to(tl.int64)
        held = position != _EMPTY
        half = _address(map_pages, 4 * slots + position, held, 2 * words_per_page)
        tl.store(halves + half, tl.full([block_s], _EMPTY, tl.int16), mask=held)
        ties_left -= tl.sum(tie.to(tl.int32), 0)
        found += tl.sum(taken.to(tl.int32), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _no_newer(
    stamp: tl.tensor,
    map_pages: tl.tensor,
    words: tl.tensor,
    slots: tl.constexpr,
    words_per_page: tl.constexpr,
    block_s: tl.constexpr,
) -> tl.tensor:
    """How many slots were last used at `stamp` or before."""
    count = tl.zeros([block_s], tl.int32)
    for start in range(0, slots, block_s):
        slot = start + tl.arange(0, block_s).to(tl.int64)
        last_used = _last_used(slot, map_pages, words, slots, words_per_page)
        count += ((last_used <= stamp) & (slot < slots)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _last_used(
    slot: tl.tensor, map_pages: tl.tensor, words: tl.tensor, slots: tl.constexpr, words_per_page: tl.constexpr
) -> tl.tensor:
    at = _address(map_pages, slots + slot, slot < slots, words_per_page)
    return tl.load(words + at, mask=slot < slots, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_kernel(
    rows: tl.tensor,
    missing_host: tl.tensor,
    host: tl.tensor,
    device: tl.tensor,
    host_stride: tl.tensor,  # in bytes, as the next three
    device_stride: tl.tensor,
    units: tl.tensor,
    tail_bytes: tl.tensor,
    word: tl.constexpr,
    words_in_unit: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Copies one row: `units` of words, then the bytes that are left (fewer than a unit, so at most 15) one by one."""
    entry = tl.program_id(0).to(tl.int64)
    host_row = tl.load(missing_host + entry)
    if host_row != _EMPTY:
        source = host + host_row * host_stride
        target = device + tl.load(rows + entry) * device_stride
        source_words = source.to(tl.pointer_type(word))
        target_words = target.to(tl.pointer_type(word))
        # A product with `words_in_unit` is all that the compiler needs to see that no unit is half inside the mask.
        count = units * words_in_unit
        for start in range(0, count, block):
            index = start + tl.arange(0, block)
            tl.store(target_words + index, tl.load(source_words + index, mask=index < count), mask=index < count)
        tail = count * (word.primitive_bitwidth // 8) + tl.arange(0, 16)
        inside = tl.arange(0, 16) < tail_bytes
        tl.store(target + tail, tl.load(source + tail, mask=inside), mask=inside)
