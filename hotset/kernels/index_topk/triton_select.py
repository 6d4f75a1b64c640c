"""The k best of each row of scores in Triton: exactly, in three launches and hardly more than two passes.

1. `_count_kernel` sorts the scores of a row into bins, evenly spaced over the interval that must hold the k-th score.
2. `_gather_kernel` finds the bin of the k-th score and lists, in order of position, the scores from that bin on: little
   more than k of them. Where the list has no room for them (many equal scores), none is listed.
3. `_finish_kernel` halves the interval of the k-th score until it is known to the last bit, by counting over the list
   (or over all scores of the row), and writes what is above it and the first of what equals it.

The bins are a matter of speed alone: any row is selected exactly whatever its moments say, since a bin never falls when
a score rises. The first two kernels share a row among several programs when the batch is small.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.index_topk.triton_score import MAX_SPLITS, Scores, processors


@dataclass(frozen=True, slots=True)
class SelectTuning:
    """How the scores of a row are looked through."""

    block: int = 2048  # scores that a program of the first two kernels holds at a time
    warps: int = 4
    bins: int = 128
    per_processor: int = 8  # programs that a multiprocessor holds at a time
    finish_warps: int = 8


TUNING = SelectTuning()
CONTEXT_MULTIPLE = 4096  # a row of scores is so many times as long: a multiple of every block
SPLITS = (1, 8, 64)  # programs that may share a row; `_gather_kernel` is compiled for each of these
MIN_HELD = 1024  # scores that `_finish_kernel` holds in registers, or the next power of two above k
LIST_ROOM = 2  # in multiples of what it holds
OPTIONS = {"enable_fp_fusion": False}  # two kernels must sort a score into the same bin

_EMPTY = tl.constexpr(EMPTY)
_NEVER = tl.constexpr(-(2**31))  # the order of a score that is not selected: -inf or NaN
_MOST_PARTS = tl.constexpr(MAX_SPLITS)
_SMALLEST_SPAN = tl.constexpr(1e-30)
_LARGEST = tl.constexpr(1e30)


def select(
    scores: Scores,
    seats: Tensor,  # [rows] int64; EMPTY: a padded row, which selects nothing
    positions: Tensor,  # [rows] int64: a row has scores for the positions up to this one
    k: int,
    out: Tensor,  # [rows, k] int64, written: positions in ascending order, then EMPTY
    tuning: SelectTuning = TUNING,
) -> None:
    """The k largest scores of each row as `stable_topk` chooses them; all positions of a row that has at most k.

    Scores of -inf or NaN are never selected in a row of more than k.
    """
    values = scores.values
    queries, context = values.shape
    assert context % CONTEXT_MULTIPLE == 0, f"rows of {context} scores are not a multiple of {CONTEXT_MULTIPLE} long"
    assert out.is_contiguous(), f"selected positions lie {out.stride()} apart"
    held = max(MIN_HELD, triton.next_power_of_2(k + 1))
    room = LIST_ROOM * held
    listed, listed_positions = (
        torch.empty(queries, room, dtype=dtype, device=values.device) for dtype in (torch.float32, torch.int32)
    )
    totals = torch.empty(queries, dtype=torch.int32, device=values.device)
    seats, positions = seats.contiguous(), positions.contiguous()
    if context > k:  # else no row has more than k positions
        splits = processors(values.device) * tuning.per_processor // queries
        splits = max(1, min(splits, context // tuning.block, SPLITS[-1]))
        counts = torch.empty(queries, splits, tuning.bins, dtype=torch.int32, device=values.device)
        bins = torch.empty(queries, 2, dtype=torch.float32, device=values.device)
        sizes = {"block": tuning.block, "bins": tuning.bins, "num_warps": tuning.warps}
        _count_kernel[(queries, splits)](
            values=values,
            seat_of=seats,
            positions=positions,
            moments=scores.moments,
            counts=counts,
            bins_at=bins,
            value_stride=context,
            k=k,
            parts=scores.moments.shape[1],
            **sizes,
            **OPTIONS,
        )
        _gather_kernel[(queries, splits)](
            values=values,
            seat_of=seats,
            positions=positions,
            counts=counts,
            bins_at=bins,
            listed=listed,
            listed_positions=listed_positions,
            totals=totals,
            value_stride=context,
            k=k,
            room=room,
            most_splits=next(most for most in SPLITS if splits <= most),
            **sizes,
            **OPTIONS,
        )
    _finish_kernel[(queries,)](
        values=values,
        seat_of=seats,
        positions=positions,
        listed=listed,
        listed_positions=listed_positions,
        totals=totals,
        out=out,
        value_stride=context,
        k=k,
        room=room,
        block=held,
        num_warps=tuning.finish_warps,
        **OPTIONS,
    )


@triton.jit(do_not_specialize=["k", "parts"])  # type: ignore[untyped-decorator]
def _count_kernel(
    values: tl.tensor,
    seat_of: tl.tensor,
    positions: tl.tensor,
    moments: tl.tensor,
    counts: tl.tensor,  # [rows, splits, bins] int32, written
    bins_at: tl.tensor,  # [rows, 2] float32, written: a score x is in bin x * [0] + [1], kept within the bins
    value_stride: tl.tensor,
    k: tl.tensor,
    parts: tl.tensor,
    block: tl.constexpr,
    bins: tl.constexpr,
) -> None:
    query = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    length = _length(seat_of, positions, query)
    if length > k:
        per_score, offset = _bins(moments + query * parts * 2, parts, length, k, bins)
        if split == 0:
            tl.store(bins_at + query * 2, per_score)
            tl.store(bins_at + query * 2 + 1, offset)
        share = tl.cdiv(tl.cdiv(length, block), splits) * block
        last = tl.minimum(split * share + share, length)
        count = tl.zeros([bins], tl.int32)
        for start in range(split * share, last, block):
            score = _scores(values + query * value_stride, start, last, block)
            count += tl.histogram(_bin(score, per_score, offset, bins), bins, mask=score > float("-inf"))
        tl.store(counts + (query * splits + split) * bins + tl.arange(0, bins), count)


@triton.jit(do_not_specialize=["k"])  # type: ignore[untyped-decorator]
def _gather_kernel(
    values: tl.tensor,
    seat_of: tl.tensor,
    positions: tl.tensor,
    counts: tl.tensor,
    bins_at: tl.tensor,
    listed: tl.tensor,  # [rows, room] float32, written
    listed_positions: tl.tensor,  # [rows, room] int32, written
    totals: tl.tensor,  # [rows] int32, written: how many there are to list; more than `room`: none was listed
    value_stride: tl.tensor,
    k: tl.tensor,
    room: tl.tensor,
    block: tl.constexpr,
    bins: tl.constexpr,
    most_splits: tl.constexpr,
) -> None:
    query = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    length = _length(seat_of, positions, query)
    if length > k:
        per_score = tl.load(bins_at + query * 2)
        offset = tl.load(bins_at + query * 2 + 1)
        each = tl.arange(0, most_splits)
        bin_number = tl.arange(0, bins)
        count_at = counts + (query * splits + each[:, None]) * bins + bin_number[None, :]
        count = tl.load(count_at, mask=(each < splits)[:, None], other=0)
        from_bin_on = tl.cumsum(tl.sum(count, 0), 0, reverse=True)
        cut_bin = tl.sum((from_bin_on >= k).to(tl.int32), 0) - 1  # EMPTY: fewer than k can be selected, all are listed
        chosen = tl.sum(tl.where(bin_number[None, :] >= cut_bin, count, 0), 1)
        total = tl.sum(chosen, 0)
        if split == 0:
            tl.store(totals + query, total)
        if total <= room:
            entries = tl.sum(tl.where(each < split, chosen, 0), 0)  # before the next one, of the row
            share = tl.cdiv(tl.cdiv(length, block), splits) * block
            last = tl.minimum(split * share + share, length)
            for start in range(split * share, last, block):
                score = _scores(values + query * value_stride, start, last, block)
                taken = (_bin(score, per_score, offset, bins) >= cut_bin) & (score > float("-inf"))
                upto = tl.cumsum(taken.to(tl.int32), 0)
                entry = query * room + entries + upto - 1
                tl.store(listed + entry, score, mask=taken)
                tl.store(listed_positions + entry, start + tl.arange(0, block), mask=taken)
                entries += tl.max(upto, 0)


@triton.jit(do_not_specialize=["k"])  # type: ignore[untyped-decorator]
def _finish_kernel(
    values: tl.tensor,
    seat_of: tl.tensor,
    positions: tl.tensor,
    listed: tl.tensor,
    listed_positions: tl.tensor,
    totals: tl.tensor,
    out: tl.tensor,  # [rows, k] int64, written
    value_stride: tl.tensor,
    k: tl.tensor,
    room: tl.tensor,
    block: tl.constexpr,
) -> None:
    query = tl.program_id(0).to(tl.int64)
    length = _length(seat_of, positions, query)
    index = tl.arange(0, block)
    everything = length  # a row of at most k positions selects this many, the first
    written = tl.full([], 0, tl.int32)
    if length > k:
        everything = tl.full([], 0, tl.int32)
        total = tl.load(totals + query)
        from_list = total <= room
        source = values + query * value_stride
        entries = length
        if from_list:
            source = listed + query * room
            entries = total
        cut = tl.full([], _NEVER, tl.int32)
        places_left = tl.full([], 0, tl.int32)  # for scores that equal the cut
        if total > k:
            cut = _cut(source, entries, k, block)
            places_left = k - _count_from(_order(source, 0, entries, block), source, cut + 1, entries, block)
        above_before = tl.full([], 0, tl.int32)
        equal_before = tl.full([], 0, tl.int32)
        for start in range(0, entries, block):
            order = _order(source, start, entries, block)
            upto = tl.cumsum((order > cut).to(tl.int32) + ((order == cut).to(tl.int32) << 16), 0)
            equal = equal_before + (upto >> 16)
            taken = (order > cut) | ((order == cut) & (equal <= places_left))
            column = above_before + (upto & 0xFFFF) + tl.minimum(equal, places_left) - 1
            position = start + index
            if from_list:
                position = tl.load(listed_positions + query * room + position, mask=taken, other=0)
            tl.store(out + query * k + column, position.to(tl.int64), mask=taken)
            ends = tl.max(upto, 0)
            above_before += ends & 0xFFFF
            equal_before += ends >> 16
        written = above_before + tl.minimum(equal_before, places_left)
    for start in range(0, k, block):
        column = start + index
        rest = tl.where(column < everything, column, _EMPTY)
        tl.store(out + query * k + column, rest.to(tl.int64), mask=(column >= written) & (column < k))


@triton.jit  # type: ignore[untyped-decorator]
def _length(seat_of: tl.tensor, positions: tl.tensor, query: tl.tensor) -> tl.tensor:
    """Positions that a row has scores for; none if it is padded."""
    length = tl.load(positions + query).to(tl.int32) + 1
    return tl.where(tl.load(seat_of + query) == _EMPTY, 0, length)


@triton.jit  # type: ignore[untyped-decorator]
def _bins(
    moments: tl.tensor, parts: tl.tensor, length: tl.tensor, k: tl.tensor, bins: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(bins per unit of score, bin of score 0): evenly over the interval that must hold the k-th of `length` scores.

    By Cantelli's inequality at most n / (1 + c^2) of n values lie c or more standard deviations above their mean, and
    as many below: the k-th is at most sqrt((n - k) / k) above and sqrt(k / (n - k)) below. What is finite but beyond
    these bounds falls into the first and the last bin.
    """
    part = tl.arange(0, _MOST_PARTS)
    sums = tl.sum(tl.load(moments + part * 2, mask=part < parts, other=0.0), 0)
    squares = tl.sum(tl.load(moments + part * 2 + 1, mask=part < parts, other=0.0), 0)
    count = length.to(tl.float32)
    mean = sums / count
    # Where the mean is far larger than the deviation, the difference is rounding error: it is given a floor.
    deviation = tl.sqrt(tl.maximum(squares / count - mean * mean, 1e-6 * mean * mean))
    odds = tl.sqrt((count - k) / k)
    low = mean - deviation / odds
    span = deviation / odds + deviation * odds
    usable = (tl.abs(low) < _LARGEST) & (span > _SMALLEST_SPAN) & (span < _LARGEST)
    per_score = tl.where(usable, bins / span, 0.0)
    return per_score, tl.where(usable, -low * per_score, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _bin(score: tl.tensor, per_score: tl.tensor, offset: tl.tensor, bins: tl.constexpr) -> tl.tensor:
    """Never falls when `score` rises. A score that is infinite is taken for the largest finite one."""
    finite = tl.minimum(tl.maximum(score, -3.0e38), 3.0e38)
    return tl.minimum(tl.maximum(tl.fma(finite, per_score, offset), 0.0), bins - 1.0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(values: tl.tensor, start: tl.tensor, last: tl.tensor, block: tl.constexpr) -> tl.tensor:
    """[block] scores from `start` on; -inf from `last` on. Rows have room for whole blocks, so nothing is masked."""
    index = start + tl.arange(0, block)
    return tl.where(index < last, tl.load(values + index), float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _order(source: tl.tensor, start: tl.tensor, entries: tl.tensor, block: tl.constexpr) -> tl.tensor:
    """[block] int32 that compare as the scores from `start` on do, NEVER from `entries` on; 0.0 and -0.0 are equal."""
    index = start + tl.arange(0, block)
    score = tl.load(source + index, mask=index < entries, other=float("-inf"))
    bits = tl.where(score == 0.0, 0, score.to(tl.int32, bitcast=True))
    return tl.where(score > float("-inf"), bits ^ ((bits >> 31) & 0x7FFFFFFF), _NEVER)


@triton.jit  # type: ignore[untyped-decorator]
def _cut(source: tl.tensor, entries: tl.tensor, k: tl.tensor, block: tl.constexpr) -> tl.tensor:
    """The order of the k-th largest of `entries` scores, of which more than k can be selected."""
    first = _order(source, 0, entries, block)
    lowest = tl.min(tl.where(first == _NEVER, 0x7FFFFFFF, first), 0)
    highest = tl.max(first, 0)
    for start in range(block, entries, block):
        order = _order(source, start, entries, block)
        lowest = tl.minimum(lowest, tl.min(tl.where(order == _NEVER, 0x7FFFFFFF, order), 0))
        highest = tl.maximum(highest, tl.max(order, 0))
    low = lowest.to(tl.int64)
    high = highest.to(tl.int64)
    while low < high:  # at least k are `low` or more, fewer than k are more than `high`
        middle = low + (high - low + 1) // 2
        if _count_from(first, source, middle.to(tl.int32), entries, block) >= k:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _count_from(
    first: tl.tensor, source: tl.tensor, least: tl.tensor, entries: tl.tensor, block: tl.constexpr
) -> tl.tensor:
    """How many of `entries` scores come at `least` or after it; the first block of their order is at hand."""
    count = tl.sum((first >= least).to(tl.int32), 0)
    for start in range(block, entries, block):
        count += tl.sum((_order(source, start, entries, block) >= least).to(tl.int32), 0)
    return count
