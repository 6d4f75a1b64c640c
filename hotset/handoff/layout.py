"""Where the bytes of a context lie on both sides, and so which writes carry them over. Pure arithmetic on addresses."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from hotset.base.units import ceil_div
from hotset.handoff.messages import Hello, Model, Span, Store
from hotset.transfer.api import Writes

Numbers = NDArray[np.int64]
FIELDS = [each for each in fields(Model) if each.name != "name"]  # which must agree
Units = Sequence[tuple[int, int]]  # (unit of the source, unit of the target)


def pages_for(span: Span, rows: int) -> int:
    """How many pages hold the first `rows` rows of a context."""
    return ceil_div(rows, span.page_rows)


def writes(
    source: Span,
    source_pages: Sequence[int],
    target: Span,
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


def _edges(span: Span, first: int, last: int) -> Numbers:
    """`first`, and every position in (first, last) at which a page, or a part of one, begins."""
    pages = np.arange(first // span.page_rows, pages_for(span, last), dtype=np.int64) * span.page_rows
    edges = (pages[:, None] + np.arange(0, span.page_rows, span.part_rows, dtype=np.int64)).ravel()
    return np.concatenate((np.array([first], np.int64), edges[(edges > first) & (edges < last)]))


def _places(span: Span, pages: Sequence[int], positions: Numbers) -> tuple[Numbers, Numbers]:
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
    for landing, store in theirs.stores.items():
        if flaw := _flaw(store, theirs.model):
            return f"the {landing} store there is unsound: {flaw}"
        for here, own in ours.stores.items():
            if _shape(own) != _shape(store):
                return f"{_shape(own)} in the {here} store here, {_shape(store)} in the {landing} store there"
    return None


def _shape(store: Store) -> str:
    rows = f"rows of {store.rows.row_bytes} bytes"
    return rows if store.keys is None else f"{rows} and index keys of {store.keys.row_bytes}"


def _flaw(store: Store, model: Model) -> str | None:
    """What would lead writes astray."""
    if (store.keys is None) != (model.key is None):
        return f"index keys are {model.key!r}, and it has {'no' if store.keys is None else 'a'} place for them"
    for what, span, units in (("rows", store.rows, model.layers), ("index keys", store.keys, model.groups)):
        if span is None:
            continue
        if len(span.bases) != units:
            return f"{what} of {len(span.bases)} units, not {units}"
        if min(span.page_rows, span.part_rows, span.row_bytes) < 1 or span.page_bytes < span.part_rows * span.row_bytes:
            return f"{what} of {span.row_bytes} bytes, {span.part_rows} to a part of {span.page_bytes} bytes"
        if {len(parts) for parts in span.bases} != {ceil_div(span.page_rows, span.part_rows)}:
            return f"pages of {span.page_rows} {what}, {span.part_rows} to a part, in a wrong number of parts"
        if min(min(parts) for parts in span.bases) < 0:
            return f"{what} at a negative address"
    return None
