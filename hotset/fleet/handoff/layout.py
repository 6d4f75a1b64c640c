"""Computes how rows are sharded on both sides, their addresses, and the writes that transfer a context.

This file only computes addresses. `source` is the prefill worker's memory, and `target` is the decode worker's memory.
In a span of index keys, *row* stands for an index key and *layer* for an index group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from hotset.base.errors import InternalError
from hotset.base.paged_span import PagedSpan
from hotset.fleet.handoff.messages import HandoffRequest, Hello, ModelIdentity, RowSlices, Shard, Store
from hotset.fleet.transfer.api import Writes
from hotset.schedule.handoffs import ContextPages

Numbers = NDArray[np.int64]
LayerPairs = Sequence[tuple[int, int]]  # (layer of the source, layer of the target)
# (offset in the row of the source shard, offset in the row of the target shard, length)
ByteRanges = tuple[tuple[int, int, int], ...]
MUST_AGREE = [field for field in fields(ModelIdentity) if field.name != "name"]
MAX_SHARDS = 1024  # per store
MAX_SLICES = 64  # per shard


@dataclass(frozen=True, slots=True)
class Overlap:
    """The bytes of a row that one shard of the target receives from one shard of the source."""

    source: int  # number of the shard
    target: int  # number of the shard
    byte_ranges: ByteRanges

    @property
    def row_bytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.byte_ranges)


def whole_rows(span: PagedSpan) -> tuple[Shard, ...]:
    """Returns the single shard of rows that are not divided."""
    return (Shard(span, ((0, span.row_bytes),)),)


def head_shards(spans: Sequence[PagedSpan], heads: int, head_bytes: int) -> tuple[Shard, ...]:
    """Divides rows by heads over ranks, with one span for each rank. A row contains K of all heads and then V of all
    heads, `head_bytes` for each head. With more ranks than heads, adjacent ranks hold the same head."""
    ranks, per_rank = len(spans), max(1, heads // len(spans))
    if not (heads % ranks == 0 or ranks % heads == 0):
        raise InternalError(f"{heads} heads cannot be divided over {ranks} ranks")
    firsts = [rank * heads // ranks * head_bytes for rank in range(ranks)]
    nbytes = per_rank * head_bytes
    return tuple(
        Shard(span, ((first, nbytes), (heads * head_bytes + first, nbytes)))
        for span, first in zip(spans, firsts, strict=True)
    )


def stored_bytes(shard: Shard) -> int:
    """Returns how many bytes of each row of the shard are used."""
    return sum(nbytes for _, nbytes in shard.slices)


def row_bytes(store: Store) -> int:
    """Returns the bytes of the whole model's row."""
    return max((first + nbytes for shard in store.shards for first, nbytes in shard.slices), default=0)


def first_gap(store: Store) -> int | None:
    """Returns the first byte of the whole model's row that no shard holds, or None if there is none."""
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
    """Does the same as `store_overlaps`, for shards given by their slices. The result is in the order of the targets.
    If several sources hold the same bytes, the targets use different sources where possible, to spread the load."""
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
                result.append(Overlap(source_index, target_index, merged(ranges)))
    return tuple(result)


_Missing = list[tuple[int, int, int]]  # (offset in the whole model's row, offset in the target shard's row, length)


def _provided(source: RowSlices, missing: _Missing) -> tuple[list[tuple[int, int, int]], _Missing]:
    """Returns the byte ranges of `missing` that a source provides, and the ranges that are still missing."""
    ranges, source_offset = [], 0
    for first, nbytes in source:
        remaining: _Missing = []
        for start, target_offset, length in missing:
            begin, end = max(first, start), min(first + nbytes, start + length)
            if begin >= end:
                remaining.append((start, target_offset, length))
                continue
            ranges.append((source_offset + begin - first, target_offset + begin - start, end - begin))
            if start < begin:
                remaining.append((start, target_offset, begin - start))
            if end < start + length:
                remaining.append((end, target_offset + end - start, start + length - end))
        missing, source_offset = remaining, source_offset + nbytes
    return sorted(ranges, key=lambda entry: entry[1]), missing


def merged(ranges: Sequence[tuple[int, int, int]]) -> ByteRanges:
    """Merges consecutive ranges (source, target, length) that are adjacent on both sides."""
    result = list(ranges[:1])
    for source, target, nbytes in ranges[1:]:
        last_source, last_target, last_nbytes = result[-1]
        if (last_source + last_nbytes, last_target + last_nbytes) == (source, target):
            result[-1] = (last_source, last_target, last_nbytes + nbytes)
        else:
            result.append((source, target, nbytes))
    return tuple(result)


def landing_pages(request: HandoffRequest, target: Store) -> ContextPages:
    """Returns the pages in which a context lands, for a request that `refusal` accepts. The request does not list
    pages that hold only rows before `request.first`. The first listed page stands in their place, so even a wrong range
    of rows is never written to a page that is not listed."""

    def from_first(span: PagedSpan | None, pages: tuple[int, ...]) -> tuple[int, ...]:
        return pages if span is None else pages[:1] * span.pages_before(request.first) + pages

    return ContextPages(
        rows=from_first(target.shards[0].span, request.row_pages), keys=from_first(target.keys, request.key_pages)
    )


def plan_writes(
    source: PagedSpan,
    source_pages: Sequence[int],
    target: PagedSpan,
    target_pages: Sequence[int],
    first: int,
    last: int,
    layers: LayerPairs | None = None,
) -> Writes:
    """Plans the writes of positions [first, last) of a context from its pages of `source` to its pages of `target`.

    `source_pages` and `target_pages` are the context's pages, from its first. The page sizes of the two sides may
    differ. Rows that are adjacent on both sides share a write, but never across two bases, because the memory at each
    base may be registered separately. Unused bytes between the rows of consecutive pages are written too if both
    sides have the same number of them. `layers` selects the layers to transfer; the default is all.
    """
    if source.row_bytes != target.row_bytes:
        raise InternalError(f"rows have {source.row_bytes} bytes, their targets {target.row_bytes}")
    for span, pages in ((source, source_pages), (target, target_pages)):
        _check_pages(span, pages, last)
    if layers is None:
        if len(source.bases) != len(target.bases):
            raise InternalError(f"{len(source.bases)} layers cannot land in {len(target.bases)}")
        layers = [(layer, layer) for layer in range(len(source.bases))]
    if first >= last or not layers:
        return np.empty((0, 3), np.int64)
    return np.concatenate(
        [
            _plan_alike(source, source_pages, target, target_pages, first, last, alike)
            for alike in _layers_alike(source, target, layers)
        ]
    )


def _layers_alike(source: PagedSpan, target: PagedSpan, layers: LayerPairs) -> list[LayerPairs]:
    """Groups the layers whose rows are in the same pages and parts on both sides. The writes of a group differ only in
    bases."""
    alike: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for pair in layers:
        alike.setdefault((source.first_part(pair[0]), target.first_part(pair[1])), []).append(pair)
    return list(alike.values())


def _plan_alike(
    source: PagedSpan,
    source_pages: Sequence[int],
    target: PagedSpan,
    target_pages: Sequence[int],
    first: int,
    last: int,
    layers: LayerPairs,
) -> Writes:
    """Plans the writes of layers that `_layers_alike` put into one group."""
    # `first`, and the positions at which a page, or a part of a page, begins on either side. Each one starts a stretch
    # of rows that is contiguous on both sides.
    starts = np.union1d(_edges(source, first, last), _edges(target, first, last))
    nbytes = np.diff(starts, append=last) * source.row_bytes
    source_part, source_offset = _offsets(source, source.first_part(layers[0][0]), source_pages, starts)
    target_part, target_offset = _offsets(target, target.first_part(layers[0][1]), target_pages, starts)
    gap = source_offset[1:] - source_offset[:-1] - nbytes[:-1]  # bytes between one stretch and the next, at the source
    continues = (gap >= 0) & (gap < min(source.page_bytes, target.page_bytes))
    continues &= gap == target_offset[1:] - target_offset[:-1] - nbytes[:-1]
    continues &= (source_part[1:] == source_part[:-1]) & (target_part[1:] == target_part[:-1])
    nbytes[:-1] += np.where(continues, gap, 0)
    write = np.flatnonzero(np.concatenate(([True], ~continues)))  # the first stretch of each write
    source_bases = np.array([source.bases[layer] for layer, _ in layers], np.int64)  # [layers, parts]
    target_bases = np.array([target.bases[layer] for _, layer in layers], np.int64)
    result = np.empty((len(layers), len(write), 3), np.int64)
    result[..., 0] = source_bases[:, source_part[write]] + source_offset[write]
    result[..., 1] = target_bases[:, target_part[write]] + target_offset[write]
    result[..., 2] = np.add.reduceat(nbytes, write)
    return result.reshape(-1, 3)


def plan_context_writes(
    source: Store, source_pages: ContextPages, target: Store, target_pages: ContextPages, first: int, last: int
) -> Writes:
    """Plans the direct writes of rows and index keys [first, last) of a context from its pages of `source` to its pages
    of `target`. The two sides may be sharded differently."""
    plans = []
    for overlap in store_overlaps(source, target):
        source_shard, target_shard = source.shards[overlap.source], target.shards[overlap.target]
        same = _same_bytes(overlap, source_shard, target_shard)
        plan = plan_writes if same else partial(_plan_slice_writes, overlap)
        plans.append(plan(source_shard.span, source_pages.rows, target_shard.span, target_pages.rows, first, last))
    copies, targets = source.all_keys, target.all_keys if source.keys is not None else ()
    for number, keys in enumerate(targets):
        copy = copies[number * len(copies) // len(targets)]
        plans.append(plan_writes(copy, source_pages.keys, keys, target_pages.keys, first, last))
    return np.concatenate(plans)


def count_writes(
    source: Store, source_pages: ContextPages, target: Store, target_pages: ContextPages, first: int, last: int
) -> int:
    """Returns how many writes `plan_context_writes` plans. Plans only one layer of each group of alike layers."""
    count = 0

    def whole_row_writes(
        source_span: PagedSpan, source_pages: Sequence[int], target_span: PagedSpan, target_pages: Sequence[int]
    ) -> int:
        layers = [(layer, layer) for layer in range(len(source_span.bases))]
        return sum(
            len(alike) * len(plan_writes(source_span, source_pages, target_span, target_pages, first, last, alike[:1]))
            for alike in _layers_alike(source_span, target_span, layers)
        )

    for overlap in store_overlaps(source, target):
        source_shard, target_shard = source.shards[overlap.source], target.shards[overlap.target]
        if _same_bytes(overlap, source_shard, target_shard):
            count += whole_row_writes(source_shard.span, source_pages.rows, target_shard.span, target_pages.rows)
        else:
            count += len(source_shard.span.bases) * (last - first) * len(overlap.byte_ranges)
    if source.keys is not None:
        for keys in target.all_keys:
            count += whole_row_writes(source.keys, source_pages.keys, keys, target_pages.keys)
    return count


def _same_bytes(overlap: Overlap, source: Shard, target: Shard) -> bool:
    """Returns whether both shards hold the same bytes of a row in the same order, at the same distance between
    rows, so that adjacent rows can share a write."""
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
    """Plans one write for each layer, row and byte range. With shards of `head_shards`, no two of these writes
    are adjacent on both sides."""
    positions = np.arange(first, last, dtype=np.int64)
    ranges = np.array(overlap.byte_ranges, np.int64).T
    columns = []
    for span, pages, range_offsets in ((source, source_pages, ranges[0]), (target, target_pages, ranges[1])):
        _check_pages(span, pages, last)
        part, offset = _offsets(span, 0, pages, positions)  # rows have a step of 1
        bases = np.array(span.bases, np.int64)  # [layers, parts]
        columns.append(bases[:, part, None] + offset[:, None] + range_offsets)  # [layers, rows, ranges]
    columns.append(np.broadcast_to(ranges[2], columns[0].shape))
    return np.stack(columns, axis=-1).reshape(-1, 3)


def _edges(span: PagedSpan, first: int, last: int) -> Numbers:
    """Returns `first`, and every position in (first, last) at which a part of a page begins."""
    edges = np.arange((first // span.part_rows + 1) * span.part_rows, last, span.part_rows, dtype=np.int64)
    return np.concatenate((np.array([first], np.int64), edges))


def _offsets(span: PagedSpan, first_part: int, pages: Sequence[int], positions: Numbers) -> tuple[Numbers, Numbers]:
    """Returns, for each position, the part of the page that holds it, and its byte offset from the part's base."""
    block, row = np.divmod(positions, span.part_rows)
    page, part = np.divmod(block * span.step + first_part, len(span.bases[0]))
    numbers = np.asarray(pages, np.int64)[page]
    return part, numbers * span.page_bytes + row * span.row_bytes


def _check_pages(span: PagedSpan, pages: Sequence[int], rows: int) -> None:
    needed = span.pages_for(rows)
    if needed > len(pages):
        raise InternalError(f"{rows} rows, {span.part_rows} in a part, need {needed} pages, not {len(pages)}")


def check_peers(ours: Hello, theirs: Hello) -> str | None:
    """Returns why two workers are incompatible, with the values of both sides, or None if they are compatible. Page
    sizes may differ."""
    compared = [
        (f"model's {field.name}", getattr(ours.model, field.name), getattr(theirs.model, field.name))
        for field in MUST_AGREE
    ]
    for what, our_value, their_value in [*compared, ("transfer engine", ours.transfer, theirs.transfer)]:
        if our_value != their_value:
            return f"the {what} differs: {our_value!r} here, {their_value!r} there"
    staging_sizes = {memory.nbytes for store in theirs.stores.values() for memory in store.staging}
    if len(staging_sizes) > 1 or 0 in staging_sizes:
        return f"the staging memories there have {sorted(staging_sizes)} bytes, not all the same"
    for name, store in theirs.stores.items():
        if flaw := _flaw_of_store(store, theirs.model):
            return f"the {name} store there is invalid: {flaw}"
        for own_name, own in ours.stores.items():
            if _shape(own) != _shape(store):
                return f"the {own_name} store here has {_shape(own)}, the {name} store there has {_shape(store)}"
    return None


def _shape(store: Store) -> str:
    rows = f"rows of {row_bytes(store)} bytes"
    return rows if store.keys is None else f"{rows} and index keys of {store.keys.row_bytes} bytes"


def _flaw_of_store(store: Store, model: ModelIdentity) -> str | None:
    """Returns why addresses computed from this store would be wrong, or None if they would be right."""
    if (store.keys is None) != (model.key is None):
        has = "no" if store.keys is None else "a"
        return f"the model's index keys are {model.key!r}, but the store has {has} span for them"
    if flaw := _flaw_of_shards(store.shards):
        return flaw
    if (missing := first_gap(store)) is not None:
        return f"none of its {len(store.shards)} shards holds byte {missing} of rows of {row_bytes(store)} bytes"
    spans = [("rows", shard.span, model.layers) for shard in store.shards]
    for what, span, layers in [*spans, *(("index keys", span, model.groups) for span in store.all_keys)]:
        if flaw := _flaw_of_span(what, span, layers):
            return flaw
    if len(store.staging) not in (0, len(store.shards)):
        return f"its {len(store.shards)} shards have {len(store.staging)} staging memories"
    if store.staging and len(store.all_keys) > len(store.staging):
        return f"{len(store.all_keys)} copies of its index keys have {len(store.staging)} staging memories"
    keys = store.keys
    for copy in store.key_copies:
        if keys is None or (copy.part_rows, copy.row_bytes, copy.step) != (keys.part_rows, keys.row_bytes, keys.step):
            return "copies of its index keys have different layouts"
    return None


def _flaw_of_shards(shards: Sequence[Shard]) -> str | None:
    if not 1 <= len(shards) <= MAX_SHARDS:
        return f"it has {len(shards)} shards, but 1 to {MAX_SHARDS} are allowed"
    if len({shard.span.part_rows for shard in shards}) > 1:
        sizes = sorted({shard.span.part_rows for shard in shards})
        return f"its shards have pages of {sizes} rows, but all must have the same size"
    for shard in shards:
        if shard.span.step != 1:
            return f"its rows have a step of {shard.span.step}, but only index keys may take turns"
        if not 1 <= len(shard.slices) <= MAX_SLICES or min(nbytes for _, nbytes in shard.slices) < 1:
            return f"a shard has {len(shard.slices)} slices, or an empty slice; 1 to {MAX_SLICES} are allowed"
        ends = [0, *(first + nbytes for first, nbytes in sorted(shard.slices))]
        if any(first < end for (first, _), end in zip(sorted(shard.slices), ends, strict=False)):
            return f"a shard holds bytes of a row twice: {shard.slices}"
        if stored_bytes(shard) > shard.span.row_bytes:
            return f"the slices of a shard have {stored_bytes(shard)} bytes, but its rows only {shard.span.row_bytes}"
    return None


def _flaw_of_span(what: str, span: PagedSpan, layers: int) -> str | None:
    if len(span.bases) != layers:
        return f"its {what} have {len(span.bases)} layers or groups, not {layers}"
    if min(span.part_rows, span.row_bytes) < 1 or span.page_bytes < span.part_rows * span.row_bytes:
        return f"{span.part_rows} {what} of {span.row_bytes} bytes do not fit in parts of {span.page_bytes} bytes"
    numbers = {len(parts) for parts in span.bases}
    if len(numbers) != 1 or not 1 <= span.step <= min(numbers):
        return f"its {what} have a step of {span.step} in pages of {sorted(numbers)} parts"
    if min(min(parts) for parts in span.bases) < 0:
        return f"its {what} are at a negative address"
    return None
