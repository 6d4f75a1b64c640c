"""How rows are divided: which bytes of the whole model's row lie where, and which of two sides' shards share bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from hotset.base.units import ceil_div
from hotset.handoff.messages import Hello, ModelIdentity, PagedSpan, RowSlices, Shard, Store
from hotset.transfer.api import Writes


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a shard of the target takes from a shard of the source."""

    source: int
    target: int
    pieces: tuple[tuple[int, int, int], ...]  # (first byte in the source's stored row, in the target's, bytes)

    @property
    def row_bytes(self) -> int:
        """Of each row."""
        return sum(nbytes for _, _, nbytes in self.pieces)


def whole_rows(span: PagedSpan) -> tuple[Shard, ...]:
    """Rows that lie in one piece."""
    return (Shard(span, ((0, span.row_bytes),)),)


def head_shards(spans: Sequence[PagedSpan], heads: int, head_bytes: int) -> tuple[Shard, ...]:
    """K and then V of `heads` heads, `head_bytes` each, divided over ranks of which each has a span. With more ranks
    than heads neighbours hold the same one."""
    ranks, per_rank = len(spans), max(1, heads // len(spans))
    assert heads % ranks == 0 or ranks % heads == 0, f"{heads} heads over {ranks} ranks"
    firsts = [rank * heads // ranks * head_bytes for rank in range(ranks)]
    nbytes = per_rank * head_bytes
    return tuple(
        Shard(span, ((first, nbytes), (heads * head_bytes + first, nbytes)))
        for span, first in zip(spans, firsts, strict=True)
    )


def stored_bytes(shard: Shard) -> int:
    """Of each stored row, without what is left free at its end."""
    return sum(nbytes for _, nbytes in shard.slices)


def row_bytes(store: Store) -> int:
    """Of the whole model's row."""
    return max((first + nbytes for shard in store.shards for first, nbytes in shard.slices), default=0)


def gap(store: Store) -> int | None:
    """The first byte of the whole row that no shard holds."""
    end = 0
    for first, nbytes in sorted(each for shard in store.shards for each in shard.slices):
        if first > end:
            return end
        end = max(end, first + nbytes)
    return None


def store_overlaps(source: Store, target: Store) -> tuple[Overlap, ...]:
    """Who gives what to whom, so that every byte of every target's row is written once."""
    return overlaps(tuple(each.slices for each in source.shards), tuple(each.slices for each in target.shards))


@lru_cache(maxsize=1024)
def overlaps(source: tuple[RowSlices, ...], target: tuple[RowSlices, ...]) -> tuple[Overlap, ...]:
    """The same, by their slices: in the order of targets. Of several sources with the same bytes one gives them; which
    one differs from target to target, so that none has to serve all."""
    found = []
    for number, slices in enumerate(target):
        missing, at = [], 0
        for first, nbytes in slices:
            missing.append((first, at, nbytes))
            at += nbytes
        start = number * len(source) // len(target)
        for step in range(len(source)):
            giver = (start + step) % len(source)
            pieces, missing = _taken(source[giver], missing)
            if pieces:
                found.append(Overlap(giver, number, _merged(pieces)))
    return tuple(found)


_Missing = list[tuple[int, int, int]]  # (first byte in the whole row, in the target's stored row, bytes)


def _taken(source: RowSlices, missing: _Missing) -> tuple[list[tuple[int, int, int]], _Missing]:
    """What of `missing` a source has, as pieces, and what is missing then."""
    pieces, at = [], 0
    for first, nbytes in source:
        rest: _Missing = []
        for wanted, there, length in missing:
            begin, end = max(first, wanted), min(first + nbytes, wanted + length)
            if begin >= end:
                rest.append((wanted, there, length))
                continue
            pieces.append((at + begin - first, there + begin - wanted, end - begin))
            if wanted < begin:
                rest.append((wanted, there, begin - wanted))
            if end < wanted + length:
                rest.append((end, there + end - wanted, wanted + length - end))
        missing, at = rest, at + nbytes
    return sorted(pieces, key=lambda piece: piece[1]), missing


def _merged(pieces: list[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    merged = pieces[:1]
    for here, there, nbytes in pieces[1:]:
        before_here, before_there, before = merged[-1]
        if (before_here + before, before_there + before) == (here, there):
            merged[-1] = (before_here, before_there, before + nbytes)
        else:
            merged.append((here, there, nbytes))
    return tuple(merged)


Numbers = NDArray[np.int64]
FIELDS = [each for each in fields(ModelIdentity) if each.name != "name"]  # which must agree
Units = Sequence[tuple[int, int]]  # (unit of the source, unit of the target)
MAX_SHARDS, MAX_SLICES = 1024, 64  # of one store, and of one shard


def pages_for(span: PagedSpan, rows: int) -> int:
    """How many pages hold the first `rows` rows of a context."""
    return ceil_div(rows, span.page_rows)


def writes(
    source: PagedSpan,
    source_pages: Sequence[int],
    target: PagedSpan,
    target_pages: Sequence[int],
    first: int,
    last: int,
    units: Units | None = None,
) -> Writes:
    """Carries positions [first, last) of a context from its pages of `source` to its pages of `target`.

    The pages are those of the context from its first. Pages of the two sides may hold different numbers of rows.
    Neighbours are merged where they are neighbours on both sides, but never beyond one base: each may be the start of
    memory registered on its own. What both sides leave free at the end of a page, and is as long, travels along.
    `units` is for a context of which some layers travel; without it all do.
    """
    assert source.row_bytes == target.row_bytes, f"rows of {source.row_bytes} bytes into rows of {target.row_bytes}"
    for span, pages in ((source, source_pages), (target, target_pages)):
        assert last <= len(pages) * span.page_rows, f"{last} rows in {len(pages)} pages of {span.page_rows}"
    if units is None:
        assert len(source.bases) == len(target.bases), f"{len(source.bases)} units into {len(target.bases)}"
        units = [(unit, unit) for unit in range(len(source.bases))]
    if first >= last or not units:
        return np.empty((0, 3), np.int64)
    # Between two of these positions neither side leaves the part of the page that it is in.
    starts = np.union1d(_edges(source, first, last), _edges(target, first, last))
    nbytes = np.diff(starts, append=last) * source.row_bytes
    here_part, here = _places(source, source_pages, starts)
    there_part, there = _places(target, target_pages, starts)
    free = here[1:] - here[:-1] - nbytes[:-1]  # between one piece and the next, which is on the same or the next page
    goes_on = (free >= 0) & (free < min(source.page_bytes, target.page_bytes))
    goes_on &= free == there[1:] - there[:-1] - nbytes[:-1]
    goes_on &= (here_part[1:] == here_part[:-1]) & (there_part[1:] == there_part[:-1])
    nbytes[:-1] += np.where(goes_on, free, 0)
    run = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    source_bases = np.array([source.bases[unit] for unit, _ in units], np.int64)  # [units, parts]
    target_bases = np.array([target.bases[unit] for _, unit in units], np.int64)
    result = np.empty((len(units), len(run), 3), np.int64)
    result[..., 0] = source_bases[:, here_part[run]] + here[run]
    result[..., 1] = target_bases[:, there_part[run]] + there[run]
    result[..., 2] = np.add.reduceat(nbytes, run)
    return result.reshape(-1, 3)


def context_writes(
    source: Store,
    source_pages: Sequence[int],
    target: Store,
    row_pages: Sequence[int],
    key_pages: Sequence[int],
    first: int,
    last: int,
) -> Writes:
    """Carries rows and index keys [first, last) of a context straight from its pages of `source`, which has both in one
    page, to its pages of `target`, however the rows of either are divided."""
    parts = []
    for overlap in store_overlaps(source, target):
        here, there = source.shards[overlap.source], target.shards[overlap.target]
        carry = writes if _whole(overlap, here, there) else partial(_slice_writes, overlap)
        parts.append(carry(here.span, source_pages, there.span, row_pages, first, last))
    if source.keys is not None and target.keys is not None:
        parts.append(writes(source.keys, source_pages, target.keys, key_pages, first, last))
    return np.concatenate(parts)


def count_writes(source: Store, target: Store, row_pages: Sequence[int], key_pages: Sequence[int], rows: int) -> int:
    """How many writes it takes to carry a context of so many rows straight to these pages, if its pages of `source`
    follow each other: no fewer will do."""
    count, in_order = 0, range(pages_for(source.shards[0].span, rows))

    def runs(here: PagedSpan, there: PagedSpan, pages: Sequence[int]) -> int:
        return len(here.bases) * len(writes(here, in_order, there, pages, 0, rows, [(0, 0)]))

    for overlap in store_overlaps(source, target):
        here, there = source.shards[overlap.source], target.shards[overlap.target]
        if _whole(overlap, here, there):
            count += runs(here.span, there.span, row_pages)
        else:
            count += len(here.span.bases) * rows * len(overlap.pieces)
    if source.keys is not None and target.keys is not None:
        count += runs(source.keys, target.keys, key_pages)
    return count


def _whole(overlap: Overlap, source: Shard, target: Shard) -> bool:
    """Both store the same bytes of a row, alike: rows that are neighbours on both sides travel together."""
    nbytes = stored_bytes(source)
    same = source.span.row_bytes == target.span.row_bytes and stored_bytes(target) == nbytes
    return same and overlap.pieces == ((0, 0, nbytes),)


def _slice_writes(
    overlap: Overlap,
    source: PagedSpan,
    source_pages: Sequence[int],
    target: PagedSpan,
    target_pages: Sequence[int],
    first: int,
    last: int,
) -> Writes:
    """One write for each unit, row and piece: no two of them are neighbours on both sides."""
    positions = np.arange(first, last, dtype=np.int64)
    pieces = np.array(overlap.pieces, np.int64).T
    columns = []
    for span, pages, offsets in ((source, source_pages, pieces[0]), (target, target_pages, pieces[1])):
        assert last <= len(pages) * span.page_rows, f"{last} rows in {len(pages)} pages of {span.page_rows}"
        part, place = _places(span, pages, positions)
        bases = np.array(span.bases, np.int64)  # [units, parts]
        columns.append(bases[:, part, None] + place[:, None] + offsets)  # [units, rows, pieces]
    columns.append(np.broadcast_to(pieces[2], columns[0].shape))
    return np.stack(columns, axis=-1).reshape(-1, 3)


def _edges(span: PagedSpan, first: int, last: int) -> Numbers:
    """`first`, and every position in (first, last) at which a page, or a part of one, begins."""
    pages = np.arange(first // span.page_rows, pages_for(span, last), dtype=np.int64) * span.page_rows
    edges = (pages[:, None] + np.arange(0, span.page_rows, span.part_rows, dtype=np.int64)).ravel()
    return np.concatenate((np.array([first], np.int64), edges[(edges > first) & (edges < last)]))


def _places(span: PagedSpan, pages: Sequence[int], positions: Numbers) -> tuple[Numbers, Numbers]:
    """For each position the part in which it lies, and how many bytes after the part's base."""
    page, row = np.divmod(positions, span.page_rows)
    part, row_of_part = np.divmod(row, span.part_rows)
    numbers = np.asarray(pages, np.int64)[page]
    return part, numbers * span.page_bytes + row_of_part * span.row_bytes


def check_peers(ours: Hello, theirs: Hello) -> str | None:
    """Why two workers cannot hand requests over, with both sides' values; None if they can. Page sizes may differ."""
    pairs = [
        (f"model's {each.name}", getattr(ours.model, each.name), getattr(theirs.model, each.name)) for each in FIELDS
    ]
    for what, mine, yours in [*pairs, ("transfer engine", ours.transfer, theirs.transfer)]:
        if mine != yours:
            return f"the {what} differs: {mine!r} here, {yours!r} there"
    if theirs.ring is not None and theirs.ring.nbytes < 1:
        return f"the ring there has {theirs.ring.nbytes} bytes"
    for landing, store in theirs.stores.items():
        if flaw := _flaw(store, theirs.model):
            return f"the {landing} store there is unsound: {flaw}"
        for here, own in ours.stores.items():
            if _shape(own) != _shape(store):
                return f"{_shape(own)} in the {here} store here, {_shape(store)} in the {landing} store there"
    return None


def _shape(store: Store) -> str:
    rows = f"rows of {row_bytes(store)} bytes"
    return rows if store.keys is None else f"{rows} and index keys of {store.keys.row_bytes}"


def _flaw(store: Store, model: ModelIdentity) -> str | None:
    """What would lead writes astray."""
    if (store.keys is None) != (model.key is None):
        return f"index keys are {model.key!r}, and it has {'no' if store.keys is None else 'a'} place for them"
    if flaw := _flaw_of_shards(store.shards):
        return flaw
    if (missing := gap(store)) is not None:
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
