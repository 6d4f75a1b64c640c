"""How rows are sharded and where their bytes lie on both sides, and so which writes transfer a context.

Pure arithmetic on addresses. `source` is the prefill worker's memory, `target` the decode worker's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from hotset.base.units import ceil_div
from hotset.handoff.messages import Hello, ModelIdentity, PagedSpan, RowSlices, Shard, Store
from hotset.transfer.api import Writes

Numbers = NDArray[np.int64]
Units = Sequence[tuple[int, int]]  # (unit of the source, unit of the target)
ByteRanges = tuple[tuple[int, int, int], ...]  # (first byte in the source's stored row, in the target's, bytes)
MUST_AGREE = [field for field in fields(ModelIdentity) if field.name != "name"]
MAX_SHARDS, MAX_SLICES = 1024, 64  # of one store, and of one shard


@dataclass(frozen=True, slots=True)
class Overlap:
    """The bytes that a shard of the target receives from a shard of the source."""

    source: int
    target: int
    byte_ranges: ByteRanges

    @property
    def row_bytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.byte_ranges)


def whole_rows(span: PagedSpan) -> tuple[Shard, ...]:
    """Returns the one shard of rows that are not divided."""
    return (Shard(span, ((0, span.row_bytes),)),)


def head_shards(spans: Sequence[PagedSpan], heads: int, head_bytes: int) -> tuple[Shard, ...]:
    """Divides rows of K and then V of `heads` heads, `head_bytes` each, over ranks with one span each. With more ranks
    than heads, adjacent ranks hold the same head."""
    ranks, per_rank = len(spans), max(1, heads // len(spans))
    assert heads % ranks == 0 or ranks % heads == 0, f"{heads} heads over {ranks} ranks"
    firsts = [rank * heads // ranks * head_bytes for rank in range(ranks)]
    nbytes = per_rank * head_bytes
    return tuple(
        Shard(span, ((first, nbytes), (heads * head_bytes + first, nbytes)))
        for span, first in zip(spans, firsts, strict=True)
    )


def stored_bytes(shard: Shard) -> int:
    """Returns the used bytes of each stored row."""
    return sum(nbytes for _, nbytes in shard.slices)


def row_bytes(store: Store) -> int:
    """Returns the bytes of the whole model's row."""
    return max((first + nbytes for shard in store.shards for first, nbytes in shard.slices), default=0)


def first_gap(store: Store) -> int | None:
    """Returns the first byte of the whole row that no shard holds."""
    end = 0
    for first, nbytes in sorted(row_slice for shard in store.shards for row_slice in shard.slices):
        if first > end:
            return end
        end = max(end, first + nbytes)
    return None


def store_overlaps(source: Store, target: Store) -> tuple[Overlap, ...]:
    """Returns which source shard provides which bytes of each target shard. Every byte of a target is written once."""
    return overlaps(tuple(shard.slices for shard in source.shards), tuple(shard.slices for shard in target.shards))


@lru_cache(maxsize=1024)
def overlaps(source: tuple[RowSlices, ...], target: tuple[RowSlices, ...]) -> tuple[Overlap, ...]:
    """Does the same for shards given by their slices, in the order of the targets. If several sources hold the same
    bytes, targets take them from different ones, to spread the load."""
    result = []
    for target_index, slices in enumerate(target):
        missing, offset = [], 0
        for first, nbytes in slices:
            missing.append((first, offset, nbytes))
            offset += nbytes
        start = target_index * len(source) // len(target)
        for step in range(len(source)):
            source_index = (start + step) % len(source)
            ranges, missing = _provided(source[source_index], missing)
            if ranges:
                result.append(Overlap(source_index, target_index, _merged(ranges)))
    return tuple(result)


_Missing = list[tuple[int, int, int]]  # (first byte in the whole row, in the target's stored row, bytes)


def _provided(source: RowSlices, missing: _Missing) -> tuple[list[tuple[int, int, int]], _Missing]:
    """Returns the byte ranges of `missing` that a source provides, and what is still missing then."""
    ranges, source_offset = [], 0
    for first, nbytes in source:
        rest: _Missing = []
        for wanted, target_offset, length in missing:
            begin, end = max(first, wanted), min(first + nbytes, wanted + length)
            if begin >= end:
                rest.append((wanted, target_offset, length))
                continue
            ranges.append((source_offset + begin - first, target_offset + begin - wanted, end - begin))
            if wanted < begin:
                rest.append((wanted, target_offset, begin - wanted))
            if end < wanted + length:
                rest.append((end, target_offset + end - wanted, wanted + length - end))
        missing, source_offset = rest, source_offset + nbytes
    return sorted(ranges, key=lambda entry: entry[1]), missing


def _merged(ranges: list[tuple[int, int, int]]) -> ByteRanges:
    merged = ranges[:1]
    for source, target, nbytes in ranges[1:]:
        last_source, last_target, last_nbytes = merged[-1]
        if (last_source + last_nbytes, last_target + last_nbytes) == (source, target):
            merged[-1] = (last_source, last_target, last_nbytes + nbytes)
        else:
            merged.append((source, target, nbytes))
    return tuple(merged)


def pages_for(span: PagedSpan, rows: int) -> int:
    """Returns how many pages hold the first `rows` rows of a context."""
    return ceil_div(rows, span.page_rows)


def plan_writes(
    source: PagedSpan,
    source_pages: Sequence[int],
    target: PagedSpan,
    target_pages: Sequence[int],
    first: int,
    last: int,
    units: Units | None = None,
) -> Writes:
    """Plans the writes of positions [first, last) of a context from its pages of `source` to its pages of `target`.

    The pages are the context's, from its first. Pages of the two sides may hold different numbers of rows. Rows that
    are adjacent on both sides share a write, but never across two bases, because each base may be the start of memory
    that is registered separately. Unused bytes at the end of a page are written too if both sides have the same number
    of them. `units` selects the layers to transfer; by default all are.
    """
    assert source.row_bytes == target.row_bytes, f"rows of {source.row_bytes} bytes into rows of {target.row_bytes}"
    for span, pages in ((source, source_pages), (target, target_pages)):
        assert last <= len(pages) * span.page_rows, f"{last} rows in {len(pages)} pages of {span.page_rows}"
    if units is None:
        assert len(source.bases) == len(target.bases), f"{len(source.bases)} units into {len(target.bases)}"
        units = [(unit, unit) for unit in range(len(source.bases))]
    if first >= last or not units:
        return np.empty((0, 3), np.int64)
    # Between two of these positions both sides stay within one part of one page.
    starts = np.union1d(_edges(source, first, last), _edges(target, first, last))
    nbytes = np.diff(starts, append=last) * source.row_bytes
    source_part, source_offset = _offsets(source, source_pages, starts)
    target_part, target_offset = _offsets(target, target_pages, starts)
    gap = source_offset[1:] - source_offset[:-1] - nbytes[:-1]  # unused bytes between one stretch and the next
    continues = (gap >= 0) & (gap < min(source.page_bytes, target.page_bytes))
    continues &= gap == target_offset[1:] - target_offset[:-1] - nbytes[:-1]
    continues &= (source_part[1:] == source_part[:-1]) & (target_part[1:] == target_part[:-1])
    nbytes[:-1] += np.where(continues, gap, 0)
    run = np.flatnonzero(np.concatenate(([True], ~continues)))
    source_bases = np.array([source.bases[unit] for unit, _ in units], np.int64)  # [units, parts]
    target_bases = np.array([target.bases[unit] for _, unit in units], np.int64)
    result = np.empty((len(units), len(run), 3), np.int64)
    result[..., 0] = source_bases[:, source_part[run]] + source_offset[run]
    result[..., 1] = target_bases[:, target_part[run]] + target_offset[run]
    result[..., 2] = np.add.reduceat(nbytes, run)
    return result.reshape(-1, 3)


def plan_context_writes(
    source: Store,
    source_pages: Sequence[int],
    target: Store,
    row_pages: Sequence[int],
    key_pages: Sequence[int],
    first: int,
    last: int,
) -> Writes:
    """Plans the direct writes of rows and index keys [first, last) of a context from its pages of `source`, where both
    have the same page numbers, to its pages of `target`. The rows of either side may be sharded in any way."""
    parts = []
    for overlap in store_overlaps(source, target):
        source_shard, target_shard = source.shards[overlap.source], target.shards[overlap.target]
        same = _same_bytes(overlap, source_shard, target_shard)
        plan = plan_writes if same else partial(_plan_slice_writes, overlap)
        parts.append(plan(source_shard.span, source_pages, target_shard.span, row_pages, first, last))
    if source.keys is not None and target.keys is not None:
        parts.append(plan_writes(source.keys, source_pages, target.keys, key_pages, first, last))
    return np.concatenate(parts)


def count_writes(source: Store, target: Store, row_pages: Sequence[int], key_pages: Sequence[int], rows: int) -> int:
    """Returns the number of direct writes of a context of `rows` rows to these pages, if its pages of `source` are
    consecutive. This is a lower bound for any pages of `source`."""
    count, consecutive = 0, range(pages_for(source.shards[0].span, rows))

    def runs(source_span: PagedSpan, target_span: PagedSpan, pages: Sequence[int]) -> int:
        one_unit = plan_writes(source_span, consecutive, target_span, pages, 0, rows, [(0, 0)])
        return len(source_span.bases) * len(one_unit)

    for overlap in store_overlaps(source, target):
        source_shard, target_shard = source.shards[overlap.source], target.shards[overlap.target]
        if _same_bytes(overlap, source_shard, target_shard):
            count += runs(source_shard.span, target_shard.span, row_pages)
        else:
            count += len(source_shard.span.bases) * rows * len(overlap.byte_ranges)
    if source.keys is not None and target.keys is not None:
        count += runs(source.keys, target.keys, key_pages)
    return count


def _same_bytes(overlap: Overlap, source: Shard, target: Shard) -> bool:
    """Returns whether both shards store the same bytes of a row in the same order. Then adjacent rows share a write."""
    nbytes = stored_bytes(source)
    same = source.span.row_bytes == target.span.row_bytes and stored_bytes(target) == nbytes
    return same and overlap.byte_ranges == ((0, 0, nbytes),)


def _plan_slice_writes(
    overlap: Overlap,
    source: PagedSpan,
    source_pages: Sequence[int],
    target: PagedSpan,
    target_pages: Sequence[int],
    first: int,
    last: int,
) -> Writes:
    """Plans one write for each unit, row and byte range: no two of them are adjacent on both sides."""
    positions = np.arange(first, last, dtype=np.int64)
    ranges = np.array(overlap.byte_ranges, np.int64).T
    columns = []
    for span, pages, range_offsets in ((source, source_pages, ranges[0]), (target, target_pages, ranges[1])):
        assert last <= len(pages) * span.page_rows, f"{last} rows in {len(pages)} pages of {span.page_rows}"
        part, offset = _offsets(span, pages, positions)
        bases = np.array(span.bases, np.int64)  # [units, parts]
        columns.append(bases[:, part, None] + offset[:, None] + range_offsets)  # [units, rows, ranges]
    columns.append(np.broadcast_to(ranges[2], columns[0].shape))
    return np.stack(columns, axis=-1).reshape(-1, 3)


def _edges(span: PagedSpan, first: int, last: int) -> Numbers:
    """Returns `first`, and every position in (first, last) at which a page or a part of a page begins."""
    pages = np.arange(first // span.page_rows, pages_for(span, last), dtype=np.int64) * span.page_rows
    edges = (pages[:, None] + np.arange(0, span.page_rows, span.part_rows, dtype=np.int64)).ravel()
    return np.concatenate((np.array([first], np.int64), edges[(edges > first) & (edges < last)]))


def _offsets(span: PagedSpan, pages: Sequence[int], positions: Numbers) -> tuple[Numbers, Numbers]:
    """Returns, for each position, its part and its byte offset from the part's base."""
    page, row = np.divmod(positions, span.page_rows)
    part, row_of_part = np.divmod(row, span.part_rows)
    numbers = np.asarray(pages, np.int64)[page]
    return part, numbers * span.page_bytes + row_of_part * span.row_bytes


def check_peers(ours: Hello, theirs: Hello) -> str | None:
    """Returns why two workers cannot hand requests over, with both sides' values, or None. Page sizes may differ."""
    compared = [
        (f"model's {field.name}", getattr(ours.model, field.name), getattr(theirs.model, field.name))
        for field in MUST_AGREE
    ]
    for what, mine, yours in [*compared, ("transfer engine", ours.transfer, theirs.transfer)]:
        if mine != yours:
            return f"the {what} differs: {mine!r} here, {yours!r} there"
    if theirs.ring is not None and theirs.ring.nbytes < 1:
        return f"the ring there has {theirs.ring.nbytes} bytes"
    for landing, store in theirs.stores.items():
        if flaw := _flaw_of_store(store, theirs.model):
            return f"the {landing} store there is invalid: {flaw}"
        for own_landing, own in ours.stores.items():
            if _shape(own) != _shape(store):
                return f"{_shape(own)} in the {own_landing} store here, {_shape(store)} in the {landing} store there"
    return None


def _shape(store: Store) -> str:
    rows = f"rows of {row_bytes(store)} bytes"
    return rows if store.keys is None else f"{rows} and index keys of {store.keys.row_bytes}"


def _flaw_of_store(store: Store, model: ModelIdentity) -> str | None:
    """Returns what would make writes to this store go to wrong addresses, or None."""
    if (store.keys is None) != (model.key is None):
        return f"index keys are {model.key!r}, and it has {'no' if store.keys is None else 'a'} span for them"
    if flaw := _flaw_of_shards(store.shards):
        return flaw
    if (missing := first_gap(store)) is not None:
        return f"byte {missing} of rows of {row_bytes(store)} bytes is in none of its {len(store.shards)} shards"
    spans = [("rows", shard.span, model.layers) for shard in store.shards]
    for what, span, units in [*spans, ("index keys", store.keys, model.groups)]:
        if span is not None and (flaw := _flaw_of_span(what, span, units)):
            return flaw
    return None


def _flaw_of_shards(shards: Sequence[Shard]) -> str | None:
    if not 1 <= len(shards) <= MAX_SHARDS:
        return f"rows in {len(shards)} shards"
    if len({shard.span.page_rows for shard in shards}) > 1:
        return f"pages of {sorted({shard.span.page_rows for shard in shards})} rows in shards of one store"
    for shard in shards:
        if not 1 <= len(shard.slices) <= MAX_SLICES or min(nbytes for _, nbytes in shard.slices) < 1:
            return f"a shard that holds {len(shard.slices)} slices, or an empty one"
        ends = [0, *(first + nbytes for first, nbytes in sorted(shard.slices))]
        if any(first < end for (first, _), end in zip(sorted(shard.slices), ends, strict=False)):
            return f"a shard that holds bytes of a row twice: {shard.slices}"
        if stored_bytes(shard) > shard.span.row_bytes:
            return f"slices of {stored_bytes(shard)} bytes in rows of {shard.span.row_bytes}"
    return None


def _flaw_of_span(what: str, span: PagedSpan, units: int) -> str | None:
    if len(span.bases) != units:
        return f"{what} of {len(span.bases)} units, not {units}"
    if min(span.page_rows, span.part_rows, span.row_bytes) < 1 or span.page_bytes < span.part_rows * span.row_bytes:
        return f"{what} of {span.row_bytes} bytes, {span.part_rows} to a part of {span.page_bytes} bytes"
    if {len(parts) for parts in span.bases} != {ceil_div(span.page_rows, span.part_rows)}:
        return f"pages of {span.page_rows} {what}, {span.part_rows} to a part, in a wrong number of parts"
    if min(min(parts) for parts in span.bases) < 0:
        return f"{what} at a negative address"
    return None
