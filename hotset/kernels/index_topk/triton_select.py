"""Selects the k best scores of each query in Triton, exactly, with three launches and little more than two passes.

1. `_count_kernel` counts the scores of a query in bins, evenly spaced over the interval that must contain the k-th
   largest score.
2. `_gather_kernel` finds the bin of the k-th score and lists the scores of this bin and of all higher bins, in order of
   position: usually little more than k scores. If they do not fit into the list (many equal scores), it lists none.
3. `_finish_kernel` finds the k-th score by bisection. It counts over the list, or over all scores of the query if
   there is no list. Then it writes the positions of all higher scores, and fills up to k with the first positions whose
   score equals the k-th.

The bins affect only speed. The selection is exact for any moments, because a higher score never has a lower bin.
If the batch is small, several programs of the first two kernels share a query.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.fast_path import multiprocessors
from hotset.kernels.index_topk.scores import MAX_SPLITS, Scores


@dataclass(frozen=True, slots=True)
class SelectTuning:
    """Parameters of the selection kernels that affect only speed."""

    block: int = 2048  # scores that a program of the first two kernels processes at a time
    warps: int = 4
    bins: int = 128
    programs_per_sm: int = 8  # resident programs per multiprocessor
    finish_warps: int = 8


TUNED = SelectTuning()
SPLITS = (1, 8, 64)  # variants of `_gather_kernel`, by the maximum number of programs that share a query
MIN_HELD = 1024  # scores that a `_finish_kernel` program holds in registers; if k >= 1024, the power of two above k
LIST_ROOM = 2  # capacity of the list, in multiples of the scores that a `_finish_kernel` program holds
OPTIONS = {"enable_fp_fusion": False}  # two kernels must compute the same bin for a score

_EMPTY = tl.constexpr(EMPTY)
_UNSELECTABLE = tl.constexpr(-(2**31))  # the order key of a score that cannot be selected: -inf or NaN
_MAX_SCORE_SPLITS = tl.constexpr(MAX_SPLITS)
_MIN_SPAN = tl.constexpr(1e-30)
_MAX_MAGNITUDE = tl.constexpr(1e30)


def select(
    scores: Scores,
    seats: Tensor,  # [queries] int64; EMPTY: a padding query, which selects nothing
    positions: Tensor,  # [queries] int64: a query has scores for the positions up to and including this one
    k: int,
    out: Tensor,  # [queries, k] int64, written: positions in ascending order, then EMPTY
    tuning: SelectTuning = TUNED,
) -> None:
    """Selects the k largest scores of each query. Ties are broken as in `stable_topk`.

    A query with at most k positions selects them all. A query with more positions never selects a score of -inf or
    NaN, so it may select fewer than k.
    """
    values = scores.values
    queries, context = values.shape
    scores.check_selection(out)
    held = max(MIN_HELD, triton.next_power_of_2(k + 1))
    room = LIST_ROOM * held
    listed, listed_positions = (
        torch.empty(queries, room, dtype=dtype, device=values.device) for dtype in (torch.float32, torch.int32)
    )
    totals = torch.empty(queries, dtype=torch.int32, device=values.device)
    seats, positions = seats.contiguous(), positions.contiguous()
    if context > k:  # otherwise no query has more than k positions
        splits = multiprocessors(values.device) * tuning.programs_per_sm // queries
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
            shares=scores.shares,
            moment_stride=2 * scores.moments.shape[1],
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
            max_splits=next(max_splits for max_splits in SPLITS if splits <= max_splits),
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


@triton.jit(do_not_specialize=["k"])  # type: ignore[untyped-decorator]
def _count_kernel(
    values: tl.tensor,
    seat_of: tl.tensor,
    positions: tl.tensor,
    moments: tl.tensor,
    counts: tl.tensor,  # [queries, splits, bins] int32, written
    bins_at: tl.tensor,  # [queries, 2] float32, written: (a, b); score x has bin a * x + b, clamped to the bins
    value_stride: tl.tensor,
    k: tl.tensor,
    shares: tl.tensor,
    moment_stride: tl.tensor,
    block: tl.constexpr,
    bins: tl.constexpr,
) -> None:
    query = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    length = _length(seat_of, positions, query)
    if length > k:
        per_score, offset = _bins(moments + query * moment_stride, tl.load(shares + query), length, k, bins)
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
    listed: tl.tensor,  # [queries, room] float32, written
    listed_positions: tl.tensor,  # [queries, room] int32, written
    totals: tl.tensor,  # [queries] int32, written: number of scores to list; if it exceeds `room`, none is listed
    value_stride: tl.tensor,
    k: tl.tensor,
    room: tl.tensor,
    block: tl.constexpr,
    bins: tl.constexpr,
    max_splits: tl.constexpr,
) -> None:
    query = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    length = _length(seat_of, positions, query)
    if length > k:
        per_score = tl.load(bins_at + query * 2)
        offset = tl.load(bins_at + query * 2 + 1)
        split_number = tl.arange(0, max_splits)
        bin_number = tl.arange(0, bins)
        count_at = counts + (query * splits + split_number[:, None]) * bins + bin_number[None, :]
        count = tl.load(count_at, mask=(split_number < splits)[:, None], other=0)
        from_bin_on = tl.cumsum(tl.sum(count, 0), 0, reverse=True)
        threshold_bin = tl.sum((from_bin_on >= k).to(tl.int32), 0) - 1  # -1: all selectable scores are listed
        split_total = tl.sum(tl.where(bin_number[None, :] >= threshold_bin, count, 0), 1)
        total = tl.sum(split_total, 0)
        if split == 0:
            tl.store(totals + query, total)
        if total <= room:
            # The number of scores listed before the current block. It begins with those of the earlier splits.
            entries = tl.sum(tl.where(split_number < split, split_total, 0), 0)
            share = tl.cdiv(tl.cdiv(length, block), splits) * block
            last = tl.minimum(split * share + share, length)
            for start in range(split * share, last, block):
                score = _scores(values + query * value_stride, start, last, block)
                taken = (_bin(score, per_score, offset, bins) >= threshold_bin) & (score > float("-inf"))
                cumulative = tl.cumsum(taken.to(tl.int32), 0)
                entry = query * room + entries + cumulative - 1
                tl.store(listed + entry, score, mask=taken)
                tl.store(listed_positions + entry, start + tl.arange(0, block), mask=taken)
                entries += tl.max(cumulative, 0)


@triton.jit(do_not_specialize=["k"])  # type: ignore[untyped-decorator]
def _finish_kernel(
    values: tl.tensor,
    seat_of: tl.tensor,
    positions: tl.tensor,
    listed: tl.tensor,
    listed_positions: tl.tensor,
    totals: tl.tensor,
    out: tl.tensor,  # [queries, k] int64, written
    value_stride: tl.tensor,
    k: tl.tensor,
    room: tl.tensor,
    block: tl.constexpr,
) -> None:
    query = tl.program_id(0).to(tl.int64)
    length = _length(seat_of, positions, query)
    index = tl.arange(0, block)
    select_all = length  # number of positions if the query selects them all; 0 for any other query
    written = tl.full([], 0, tl.int32)
    if length > k:
        select_all = tl.full([], 0, tl.int32)
        total = tl.load(totals + query)
        from_list = total <= room
        source = values + query * value_stride
        entries = length
        if from_list:
            source = listed + query * room
            entries = total
        threshold = tl.full([], _UNSELECTABLE, tl.int32)
        room_for_ties = tl.full([], 0, tl.int32)  # number of scores equal to the threshold that are selected
        if total > k:
            threshold = _kth_largest(source, entries, k, block)
            first = _order(source, 0, entries, block)
            room_for_ties = k - _count_at_least(first, source, threshold + 1, entries, block)
        above_before = tl.full([], 0, tl.int32)
        equal_before = tl.full([], 0, tl.int32)
        for start in range(0, entries, block):
            order = _order(source, start, entries, block)
            cumulative = tl.cumsum((order > threshold).to(tl.int32) + ((order == threshold).to(tl.int32) << 16), 0)
            equal = equal_before + (cumulative >> 16)
            taken = (order > threshold) | ((order == threshold) & (equal <= room_for_ties))
            column = above_before + (cumulative & 0xFFFF) + tl.minimum(equal, room_for_ties) - 1
            position = start + index
            if from_list:
                position = tl.load(listed_positions + query * room + position, mask=taken, other=0)
            tl.store(out + query * k + column, position.to(tl.int64), mask=taken)
            ends = tl.max(cumulative, 0)
            above_before += ends & 0xFFFF
            equal_before += ends >> 16
        written = above_before + tl.minimum(equal_before, room_for_ties)
    for start in range(0, k, block):
        column = start + index
        rest = tl.where(column < select_all, column, _EMPTY)
        tl.store(out + query * k + column, rest.to(tl.int64), mask=(column >= written) & (column < k))


@triton.jit  # type: ignore[untyped-decorator]
def _length(seat_of: tl.tensor, positions: tl.tensor, query: tl.tensor) -> tl.tensor:
    """Returns the number of positions that a query has scores for; 0 for a padding query."""
    length = tl.load(positions + query).to(tl.int32) + 1
    return tl.where(tl.load(seat_of + query) == _EMPTY, 0, length)


@triton.jit  # type: ignore[untyped-decorator]
def _bins(
    moments: tl.tensor, score_splits: tl.tensor, length: tl.tensor, k: tl.tensor, bins: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns (bins per unit of score, bin of score 0) for the interval that must hold the k-th of `length` scores.

    By Cantelli's inequality, at most n / (1 + c^2) of n values are c or more standard deviations above their mean, and
    at most as many are c or more below it. The k-th largest value is therefore at most sqrt((n - k) / k) deviations
    above the mean and at most sqrt(k / (n - k)) below it. Scores outside of these bounds get the first or the last bin.
    """
    score_split = tl.arange(0, _MAX_SCORE_SPLITS)
    sums = tl.sum(tl.load(moments + score_split * 2, mask=score_split < score_splits, other=0.0), 0)
    squares = tl.sum(tl.load(moments + score_split * 2 + 1, mask=score_split < score_splits, other=0.0), 0)
    count = length.to(tl.float32)
    mean = sums / count
    # If the mean is far larger than the deviation, this difference is a rounding error. Hence the lower bound.
    deviation = tl.sqrt(tl.maximum(squares / count - mean * mean, 1e-6 * mean * mean))
    odds = tl.sqrt((count - k) / k)
    low = mean - deviation / odds
    span = deviation / odds + deviation * odds
    usable = (tl.abs(low) < _MAX_MAGNITUDE) & (span > _MIN_SPAN) & (span < _MAX_MAGNITUDE)
    per_score = tl.where(usable, bins / span, 0.0)
    return per_score, tl.where(usable, -low * per_score, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _bin(score: tl.tensor, per_score: tl.tensor, offset: tl.tensor, bins: tl.constexpr) -> tl.tensor:
    """Returns the bin of a score. A higher score never has a lower bin. Infinite scores count as +-3.0e38."""
    finite = tl.minimum(tl.maximum(score, -3.0e38), 3.0e38)
    return tl.minimum(tl.maximum(tl.fma(finite, per_score, offset), 0.0), bins - 1.0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(values: tl.tensor, start: tl.tensor, last: tl.tensor, block: tl.constexpr) -> tl.tensor:
    """Returns [block] scores from `start` on, with -inf from `last` on.

    The load needs no mask, because every query has room for whole blocks of scores.
    """
    index = start + tl.arange(0, block)
    return tl.where(index < last, tl.load(values + index), float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _order(source: tl.tensor, start: tl.tensor, entries: tl.tensor, block: tl.constexpr) -> tl.tensor:
    """Returns [block] int32 order keys, which sort like the scores from `start` on. 0.0 and -0.0 get the same key.

    Entries from `entries` on, and scores that cannot be selected, get the key _UNSELECTABLE.
    """
    index = start + tl.arange(0, block)
    score = tl.load(source + index, mask=index < entries, other=float("-inf"))
    bits = tl.where(score == 0.0, 0, score.to(tl.int32, bitcast=True))
    return tl.where(score > float("-inf"), bits ^ ((bits >> 31) & 0x7FFFFFFF), _UNSELECTABLE)


@triton.jit  # type: ignore[untyped-decorator]
def _kth_largest(source: tl.tensor, entries: tl.tensor, k: tl.tensor, block: tl.constexpr) -> tl.tensor:
    """Returns the order key of the k-th largest of `entries` scores. More than k of them must be selectable."""
    first = _order(source, 0, entries, block)
    lowest = tl.min(tl.where(first == _UNSELECTABLE, 0x7FFFFFFF, first), 0)
    highest = tl.max(first, 0)
    for start in range(block, entries, block):
        order = _order(source, start, entries, block)
        lowest = tl.minimum(lowest, tl.min(tl.where(order == _UNSELECTABLE, 0x7FFFFFFF, order), 0))
        highest = tl.maximum(highest, tl.max(order, 0))
    low = lowest.to(tl.int64)
    high = highest.to(tl.int64)
    while low < high:  # at least k scores are >= low, and fewer than k are > high
        middle = low + (high - low + 1) // 2
        if _count_at_least(first, source, middle.to(tl.int32), entries, block) >= k:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _count_at_least(
    first: tl.tensor, source: tl.tensor, threshold: tl.tensor, entries: tl.tensor, block: tl.constexpr
) -> tl.tensor:
    """Counts those of `entries` scores whose order key is at least `threshold`. `first`: the order keys of block 0."""
    count = tl.sum((first >= threshold).to(tl.int32), 0)
    for start in range(block, entries, block):
        count += tl.sum((_order(source, start, entries, block) >= threshold).to(tl.int32), 0)
    return count
