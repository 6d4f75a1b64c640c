"""Tests of merging and splitting writes and of locating their regions, against plain loops over bytes."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotset.base.errors import StartupError
from hotset.fleet.transfer.api import Region
from hotset.fleet.transfer.regions import OUTSIDE, Regions, merge_registered, merge_writes, split_writes

Spans = list[tuple[int, int, int]]


@st.composite
def span_lists(draw: st.DrawFn) -> Spans:
    """Draws (source, target, bytes) in random order. Targets do not overlap; many spans continue the previous one."""
    spans, source, target = [], 0, 0
    for nbytes in draw(st.lists(st.integers(0, 6), max_size=24)):
        source = draw(st.sampled_from([source, source, source + 1, draw(st.integers(0, 60))]))
        target += draw(st.sampled_from([0, 0, 0, 1, 5]))
        spans.append((source, target, nbytes))
        source, target = source + nbytes, target + nbytes
    return draw(st.permutations(spans))


def as_writes(spans: Spans) -> np.ndarray:
    return np.array(spans, np.int64).reshape(-1, 3)


def source_of_byte(writes: np.ndarray) -> dict[int, int]:
    """Returns the source address of every byte, by its target address."""
    sources: dict[int, int] = {}
    for source, target, nbytes in writes.tolist():
        for i in range(nbytes):
            assert target + i not in sources, f"byte {target + i} is written twice"
            sources[target + i] = source + i
    return sources


def count_runs(spans: Spans, local_edges: set[int], remote_edges: set[int]) -> int:
    """Counts runs byte by byte: a run begins at an edge, and where a byte does not continue the previous one."""
    sources = source_of_byte(as_writes(spans))
    starts = remote_edges | {target for target, source in sources.items() if source in local_edges}
    return sum(target in starts or sources.get(target - 1) != source - 1 for target, source in sources.items())


@given(span_lists(), st.sets(st.integers(0, 80), max_size=3), st.sets(st.integers(0, 80), max_size=3))
def test_merging_moves_the_same_bytes_and_crosses_no_edge(
    spans: Spans, local_edges: set[int], remote_edges: set[int]
) -> None:
    """Edges are the starts of regions. No submitted write crosses an edge, so this test splits the spans into bytes."""
    one_byte_writes = [(source, target, 1) for target, source in source_of_byte(as_writes(spans)).items()]
    merged = merge_writes(
        as_writes(one_byte_writes),
        np.array(sorted(local_edges | {-1}), np.int64),
        np.array(sorted(remote_edges | {-1}), np.int64),
    )
    assert source_of_byte(merged) == source_of_byte(as_writes(spans))
    assert len(merged) == count_runs(one_byte_writes, local_edges, remote_edges)


@given(span_lists())
@example([])
@example([(0, 0, 0)])
def test_merging_returns_one_write_per_run_in_the_order_of_targets(spans: Spans) -> None:
    found = merge_writes(as_writes(spans))
    assert source_of_byte(found) == source_of_byte(as_writes(spans))
    assert len(found) == count_runs(spans, set(), set())
    assert found[:, 1].tolist() == sorted(found[:, 1].tolist())


@given(span_lists(), st.integers(1, 7))
def test_splitting_moves_the_same_bytes_in_writes_of_limited_length(spans: Spans, longest: int) -> None:
    writes = merge_writes(as_writes(spans))
    found = split_writes(writes, longest)
    assert source_of_byte(found) == source_of_byte(writes)
    assert len(found) == sum(-(-nbytes // longest) for _, _, nbytes in writes.tolist())
    assert (found[:, 2] <= longest).all() and (found[:, 2] > 0).all()


def test_addresses_and_lengths_beyond_32_bits_are_merged_and_split_exactly() -> None:
    base = 7 << 40
    separate = np.array([[base + (i << 33), base + (i << 34), 1 << 33] for i in range(5)], np.int64)
    assert merge_writes(separate).tolist() == separate.tolist()
    adjacent = np.array([[base + (i << 33), base + (i << 33), 1 << 33] for i in range(5)], np.int64)
    assert merge_writes(adjacent).tolist() == [[base, base, 5 << 33]]
    assert split_writes(merge_writes(adjacent), 1 << 33).tolist() == adjacent.tolist()


def test_no_write_crosses_the_boundary_between_adjacent_regions() -> None:
    local, remote = Regions([Region(100, 100)]), Regions([Region(1000, 50), Region(1050, 50)])
    writes = np.array([[100, 1000, 50], [150, 1050, 50]], np.int64)
    found = merge_registered(writes, local, remote)
    assert found is not None and found.tolist() == writes.tolist()
    across = merge_registered(np.array([[100, 1000, 100]], np.int64), local, remote)
    assert across is None


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=4),
    st.lists(st.tuples(st.integers(-3, 60), st.integers(0, 12)), min_size=1, max_size=8),
)
def test_a_span_is_located_in_a_region_that_contains_all_of_it(
    layout: list[tuple[int, int]], spans: list[tuple[int, int]]
) -> None:
    regions, address = [], 1
    for gap, nbytes in layout:
        regions.append(Region(address + gap, nbytes))
        address += gap + nbytes
    found = Regions(reversed(regions)).locate(*np.array(spans, np.int64).T)
    for (start, nbytes), index in zip(spans, found.tolist(), strict=True):
        containing = [i for i, r in enumerate(regions) if r.address <= start and start + nbytes <= r.address + r.nbytes]
        assert index in containing if containing else index == OUTSIDE


def test_spans_with_invalid_addresses_or_lengths_are_outside_all_regions() -> None:
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


def test_another_thread_never_sees_a_region_without_its_address() -> None:
    """`locate` may run while a region is added, so `add` must replace everything in one step."""
    regions = Regions([Region(100, 100)])
    (before,) = vars(regions).values()
    regions.add(Region(10, 20))
    (after,) = vars(regions).values()
    assert before is not after and len(before.regions) == len(before.starts) == len(before.ends) == 1
    assert len(after.regions) == len(after.starts) == len(after.ends) == 2
