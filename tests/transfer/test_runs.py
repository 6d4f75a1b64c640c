"""Merging writes and locating their regions, compared with plain loops over bytes."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotset.base.errors import StartupError
from hotset.transfer.api import Region
from hotset.transfer.regions import OUTSIDE, Regions, merge_registered, merge_writes, split_writes

Spans = list[tuple[int, int, int]]


@st.composite
def span_lists(draw: st.DrawFn) -> Spans:
    """Draws targets that do not overlap, many of them adjacent, and sources that often continue the previous one."""
    spans, here, there = [], 0, 0
    for nbytes in draw(st.lists(st.integers(0, 6), max_size=24)):
        here = draw(st.sampled_from([here, here, here + 1, draw(st.integers(0, 60))]))
        there += draw(st.sampled_from([0, 0, 0, 1, 5]))
        spans.append((here, there, nbytes))
        here, there = here + nbytes, there + nbytes
    return draw(st.permutations(spans))


def as_writes(spans: Spans) -> np.ndarray:
    return np.array(spans, np.int64).reshape(-1, 3)


def bytes_of(writes: np.ndarray) -> dict[int, int]:
    """Returns a map from the target of every byte to its source."""
    found: dict[int, int] = {}
    for here, there, nbytes in writes.tolist():
        for i in range(nbytes):
            assert there + i not in found, "a byte is written twice"
            found[there + i] = here + i
    return found


def fewest(spans: Spans, edges_here: set[int], edges_there: set[int]) -> int:
    """Counts runs byte by byte: a run begins where a byte does not continue the previous one, or is at an edge."""
    of = bytes_of(as_writes(spans))
    starts = edges_there | {there for there, here in of.items() if here in edges_here}
    return sum(there in starts or of.get(there - 1) != here - 1 for there, here in of.items())


@given(span_lists(), st.sets(st.integers(0, 80), max_size=3), st.sets(st.integers(0, 80), max_size=3))
def test_merging_moves_the_same_bytes_and_crosses_no_edge(spans: Spans, here: set[int], there: set[int]) -> None:
    """Edges are the starts of regions. A submitted write crosses none, so the spans are split there first."""
    edges_here, edges_there = np.array(sorted(here | {-1}), np.int64), np.array(sorted(there | {-1}), np.int64)
    whole = [(a, b, 1) for b, a in bytes_of(as_writes(spans)).items()]
    found = merge_writes(as_writes(whole), edges_here, edges_there)
    assert bytes_of(found) == bytes_of(as_writes(spans))
    assert len(found) == fewest(whole, here, there)


@given(span_lists())
@example([])
@example([(0, 0, 0)])
def test_merging_leaves_as_few_writes_as_there_are_runs(spans: Spans) -> None:
    found = merge_writes(as_writes(spans))
    assert bytes_of(found) == bytes_of(as_writes(spans))
    assert len(found) == fewest(spans, set(), set())
    assert found[:, 1].tolist() == sorted(found[:, 1].tolist())


@given(span_lists(), st.integers(1, 7))
def test_splitting_moves_the_same_bytes_in_short_writes(spans: Spans, longest: int) -> None:
    writes = merge_writes(as_writes(spans))
    found = split_writes(writes, longest)
    assert bytes_of(found) == bytes_of(writes)
    assert len(found) == sum(-(-nbytes // longest) for _, _, nbytes in writes.tolist())
    assert (found[:, 2] <= longest).all() and (found[:, 2] > 0).all()


def test_offsets_beyond_32_bits_survive() -> None:
    base = 7 << 40
    spans = np.array([[base + (i << 33), base + (i << 34), 1 << 33] for i in range(5)], np.int64)
    assert merge_writes(spans).tolist() == spans.tolist()
    joined = np.array([[base + (i << 33), base + (i << 33), 1 << 33] for i in range(5)], np.int64)
    assert merge_writes(joined).tolist() == [[base, base, 5 << 33]]
    assert split_writes(merge_writes(joined), 1 << 33).tolist() == joined.tolist()


def test_neighbouring_regions_are_not_written_across() -> None:
    here, there = Regions([Region(100, 100)]), Regions([Region(1000, 50), Region(1050, 50)])
    writes = np.array([[100, 1000, 50], [150, 1050, 50]], np.int64)
    found = merge_registered(writes, here, there)
    assert found is not None and found.tolist() == writes.tolist()
    across = merge_registered(np.array([[100, 1000, 100]], np.int64), here, there)
    assert across is None


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=4),
    st.lists(st.tuples(st.integers(-3, 60), st.integers(0, 12)), min_size=1, max_size=8),
)
def test_a_span_is_found_in_the_one_region_that_holds_all_of_it(
    layout: list[tuple[int, int]], spans: list[tuple[int, int]]
) -> None:
    regions, address = [], 1
    for gap, nbytes in layout:
        regions.append(Region(address + gap, nbytes))
        address += gap + nbytes
    found = Regions(reversed(regions)).locate(*np.array(spans, np.int64).T)
    for (start, nbytes), at in zip(spans, found.tolist(), strict=True):
        holds = [i for i, r in enumerate(regions) if r.address <= start and start + nbytes <= r.address + r.nbytes]
        assert at in holds if holds else at == OUTSIDE


def test_invalid_addresses_are_outside() -> None:
    regions = Regions([Region(4096, 4096)])
    top = np.iinfo(np.int64).max
    spans = np.array([[4096, top], [top, top], [-top, top], [4097, -1], [0, 0]], np.int64)
    assert (regions.locate(spans[:, 0], spans[:, 1]) == OUTSIDE).all()


@pytest.mark.parametrize("region", [Region(150, 10), Region(50, 60), Region(199, 5), Region(90, 300), Region(300, 0)])
def test_regions_that_overlap_or_are_empty_are_refused(region: Region) -> None:
    regions = Regions([Region(100, 100)])
    with pytest.raises(StartupError):
        regions.add(region)
    assert list(regions) == [Region(100, 100)]
