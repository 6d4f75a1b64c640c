"""Tests of planned writes and of the checks of peers. The writes are performed on poisoned memory, and the result is
compared with a copy row by row."""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from sharded_memory import POISON, Pool, computed_bytes

from hotset.base.paged_span import PagedSpan
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.fleet.handoff.layout import check_peers, landing_pages, plan_context_writes, plan_writes, whole_rows
from hotset.fleet.handoff.messages import HandoffRequest, Hello, ModelIdentity, Store
from hotset.memory.geometry import Geometry
from hotset.schedule.handoffs import ContextPages, HandoffKey


def make_span(layers: int, part_rows: int, row_bytes: int, parts: int = 1, spare: int = 0, step: int = 1) -> PagedSpan:
    return PagedSpan(((0,) * parts,) * layers, part_rows * row_bytes + spare, part_rows, row_bytes, step)


def make_pool(span: PagedSpan, pages: int, seed: int = 0) -> Pool:
    """Returns poisoned memory of this shape. The layers are in random order."""
    memory = np.full((len(span.bases), len(span.bases[0]), pages, span.page_bytes), POISON, np.uint8)
    units = [memory[index] for index in np.random.default_rng(seed).permutation(len(memory))]
    return Pool(units, span.part_rows, span.row_bytes, span.row_bytes, span.step)


def is_inside(pool: Pool, address: int, nbytes: int) -> bool:
    parts = [part for unit in pool.units for part in unit]
    return any(part.ctypes.data <= address <= part.ctypes.data + part.nbytes - nbytes for part in parts)


def check_writes(
    spans: tuple[PagedSpan, PagedSpan], pages: Sequence[Sequence[int]], first: int, last: int, rows: int
) -> int:
    """Performs the planned writes of rows [first, last) of a context of `rows` rows between poisoned memories, and
    asserts that they copy exactly these rows. Returns the number of writes."""
    source, target = (make_pool(spans[side], 1 + max(pages[side]), seed=side) for side in (0, 1))
    source.write(pages[0], 0, computed_bytes(range(rows), 0, rows, len(source.units), spans[0].row_bytes))
    planned = plan_writes(source.span, pages[0], target.span, pages[1], first, last)
    assert planned.dtype == np.int64 and planned.shape[1:] == (3,)
    for local, remote, nbytes in planned.tolist():
        assert is_inside(source, local, nbytes) and is_inside(target, remote, nbytes)
        ctypes.memmove(remote, local, nbytes)
    np.testing.assert_array_equal(target.read(pages[1], first, last), source.read(pages[0], first, last))
    assert target.holds_nothing_but(pages[1], first, last)
    return len(planned)


def consecutive(spans: tuple[PagedSpan, PagedSpan], rows: int) -> list[range]:
    return [range(1, 1 + span.pages_for(rows)) for span in spans]


@st.composite
def geometries(draw: st.DrawFn, row_bytes: int, layers: int) -> PagedSpan:
    part_rows, parts = draw(st.integers(1, 9) | st.sampled_from([16, 64])), draw(st.integers(1, 4))
    return make_span(layers, part_rows, row_bytes, parts, draw(st.sampled_from([0, 5])), draw(st.integers(1, parts)))


@examples(100)
@given(st.data())
def test_planned_writes_equal_a_copy_row_by_row(data: st.DataObject) -> None:
    row_bytes, layers = data.draw(st.sampled_from([1, 3, 8, 20])), data.draw(st.integers(1, 5))
    rows = data.draw(st.integers(1, 150))
    first = data.draw(st.integers(0, rows))
    last = data.draw(st.integers(first, rows))
    spans = data.draw(geometries(row_bytes, layers)), data.draw(geometries(row_bytes, layers))
    pages: list[Sequence[int]] = [*consecutive(spans, rows)]
    if data.draw(st.booleans()):
        random = np.random.default_rng(data.draw(st.integers(0, 99)))
        pages = [random.permutation(len(in_order) + 3)[: len(in_order)].tolist() for in_order in pages]
    check_writes(spans, pages, first, last, rows)


@pytest.mark.parametrize(("source_page_rows", "target_page_rows"), [(64, 64), (64, 16), (16, 64)])
def test_consecutive_pages_need_one_write_for_each_layer(source_page_rows: int, target_page_rows: int) -> None:
    spans = make_span(4, source_page_rows, 12), make_span(4, target_page_rows, 12)
    assert check_writes(spans, consecutive(spans, 1000), 0, 1000, 1000) == 4


@pytest.mark.parametrize(("target_spare", "count"), [(6, 4), (5, 4 * 16)])
def test_writes_span_pages_if_both_sides_have_equally_many_unused_bytes(target_spare: int, count: int) -> None:
    spans = make_span(4, 64, 12, spare=6), make_span(4, 64, 12, spare=target_spare)
    assert check_writes(spans, consecutive(spans, 1000), 0, 1000, 1000) == count


def test_a_write_ends_where_pages_of_either_side_are_not_consecutive() -> None:
    spans, pages = (make_span(1, 4, 8),) * 2, ([0, 1, 2, 5, 6, 7], [0, 1, 3, 4, 5, 6])
    assert check_writes(spans, pages, 0, 24, 24) == 3  # the pages at indices 0-1, 2 and 3-5 of the lists


def test_no_writes_are_planned_for_no_rows() -> None:
    spans = make_span(2, 16, 8), make_span(2, 16, 8)
    assert check_writes(spans, consecutive(spans, 16), 7, 7, 16) == 0


def test_adjacent_rows_of_different_bases_are_not_merged() -> None:
    """Each base may be the start of a separate registered region. A write across two regions would be refused."""
    span = PagedSpan(((0,), (32,)), page_bytes=32, part_rows=4, row_bytes=8)  # layer 1 follows layer 0
    parts = PagedSpan(((1000, 1016), (1032, 1048)), page_bytes=16, part_rows=2, row_bytes=8)
    assert plan_writes(span, [0], parts, [0], 0, 4).tolist() == [
        [0, 1000, 16],
        [16, 1016, 16],
        [32, 1032, 16],
        [48, 1048, 16],
    ]


def test_addresses_beyond_32_bits_are_exact() -> None:
    base, page_bytes = (1 << 46) + 8, 64 * 1152
    source = PagedSpan(((base,), (base + (1 << 40),)), page_bytes, 64, 1152)
    page = (1 << 33) // page_bytes
    target = PagedSpan(((512,), (1 << 35,)), page_bytes, 64, 1152)
    planned = plan_writes(source, [page], target, [0], 63, 64).tolist()
    assert planned == [
        [base + page * page_bytes + 63 * 1152, 512 + 63 * 1152, 1152],
        [base + (1 << 40) + page * page_bytes + 63 * 1152, (1 << 35) + 63 * 1152, 1152],
    ]


@pytest.mark.parametrize("target_page_rows", [64, 16])
def test_a_context_of_65536_rows_is_planned_within_50_ms(target_page_rows: int) -> None:
    source, target = make_span(61, 64, 1152), make_span(61, target_page_rows, 1152)
    pages = [range(7, 7 + span.pages_for(65536)) for span in (source, target)]

    def measure() -> float:
        start = time.perf_counter()
        assert len(plan_writes(source, pages[0], target, pages[1], 0, 65536)) == 61
        return time.perf_counter() - start

    assert min(measure() for _ in range(5)) < 0.05


MODEL = ModelIdentity(
    "demo", layers=2, row="576 x bfloat16, 1152 bytes", key="128 x bfloat16", groups=1, weights="a1b2"
)
ROWS = PagedSpan(((1 << 20,), (1 << 21,)), 64 * 1152, 64, 1152)
STORE = Store(whole_rows(ROWS), PagedSpan(((1 << 22,),), 64 * 256, 64, 256))
HELLO = Hello("127.0.0.1:1", MODEL, {"host": STORE}, "loopback", b"")


def test_peers_may_have_other_names_of_the_model_and_other_page_sizes() -> None:
    assert check_peers(HELLO, replace(HELLO, model=replace(MODEL, name="other"))) is None
    small_pages = Store(whole_rows(replace(ROWS, part_rows=16, page_bytes=16 * 1152)), STORE.keys)
    assert check_peers(HELLO, replace(HELLO, stores={"device": small_pages})) is None
    assert check_peers(HELLO, replace(HELLO, stores={})) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", 3), ("row", "656 bytes of fp8"), ("key", None), ("groups", 2), ("weights", "ffff")],
)
def test_peers_with_another_model_are_refused_with_both_values(field: str, value: object) -> None:
    reason = check_peers(HELLO, replace(HELLO, model=replace(MODEL, **{field: value})))
    assert reason is not None and f"the model's {field} differs" in reason
    assert repr(getattr(MODEL, field)) in reason and repr(value) in reason


def test_peers_with_another_transfer_engine_are_refused() -> None:
    reason = check_peers(HELLO, replace(HELLO, transfer="nixl"))
    assert reason == "the transfer engine differs: 'loopback' here, 'nixl' there"


@pytest.mark.parametrize(
    ("store", "error"),
    [
        (Store(whole_rows(ROWS), None), "no span for them"),
        (Store(whole_rows(replace(ROWS, bases=((8,),))), STORE.keys), "its rows have 1 layers or groups, not 2"),
        (Store(whole_rows(replace(ROWS, part_rows=0)), STORE.keys), "0 rows of 1152 bytes do not fit"),
        (Store(whole_rows(replace(ROWS, page_bytes=100)), STORE.keys), "do not fit in parts of 100 bytes"),
        (Store(whole_rows(replace(ROWS, bases=((8,), (8, 16)))), STORE.keys), "a step of 1 in pages of [1, 2] parts"),
        (Store(whole_rows(replace(ROWS, step=2)), STORE.keys), "its rows have a step of 2"),
        (Store(whole_rows(ROWS), replace(STORE.keys, step=0)), "index keys have a step of 0 in pages of [1] parts"),
        (Store(whole_rows(ROWS), replace(STORE.keys, step=2)), "index keys have a step of 2 in pages of [1] parts"),
        (Store(whole_rows(replace(ROWS, bases=((-8,), (8,)))), STORE.keys), "negative address"),
    ],
)
def test_an_invalid_store_is_refused(store: Store, error: str) -> None:
    reason = check_peers(HELLO, replace(HELLO, stores={"host": store}))
    assert reason is not None and error in reason


@examples(30)
@given(
    st.integers(1, 5), st.integers(1, 6), st.integers(1, 7), st.integers(1, 9), st.integers(1, 60), st.integers(0, 99)
)
def test_rows_from_a_page_boundary_on_are_written_only_to_the_pages_that_the_request_lists(
    layers: int, groups: int, part_rows: int, page_rows: int, rows: int, seed: int
) -> None:
    """Several requests share the pages of the first rows. No write can reach pages that are not in the list."""
    divisor = int(np.gcd(groups, layers))
    keys = make_span(groups, part_rows, 3, parts=layers // divisor, step=groups // divisor)
    target = Store(whole_rows(make_span(layers, page_rows, 5)), keys)
    source = Store(whole_rows(make_span(layers, 4, 5)), make_span(groups, 4, 3))
    random = np.random.default_rng(seed)
    first = int(random.integers((rows - 1) // page_rows + 1)) * page_rows
    row_span = target.shards[0].span
    all_rows, all_keys = (random.permutation(span.pages_for(rows) + 3)[:-3].tolist() for span in (row_span, keys))
    row_pages, key_pages = all_rows[row_span.pages_before(first) :], all_keys[keys.pages_before(first) :]
    prompt = PromptSpec((1,) * rows, SamplingParams())
    request = HandoffRequest(HandoffKey("r", 1), prompt, "host", tuple(row_pages), tuple(key_pages), first)
    pages = landing_pages(request, target)
    consecutive = tuple(range(source.shards[0].span.pages_for(rows)))
    at_source, all_pages = ContextPages(consecutive, consecutive), ContextPages(tuple(all_rows), tuple(all_keys))
    planned = plan_context_writes(source, at_source, target, pages, first, rows)
    expected = plan_context_writes(source, at_source, target, all_pages, first, rows)
    assert planned.tolist() == expected.tolist()
    assert {*pages.rows} == {*row_pages} and {*pages.keys} == {*key_pages}


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 400))
def test_both_sides_agree_on_the_first_key_page_that_is_listed(
    layers: int, groups: int, per_block: int, token: int
) -> None:
    """The scheduler lists the pages, by the geometry of the device pool. The sender counts by the described store."""
    blocks = Fraction(layers, groups)
    geometry = Geometry(4, layers, 64, per_block, key_groups=groups, blocks_per_page=layers, max_blocks_of_group=blocks)
    divisor = int(np.gcd(groups, layers))
    span = make_span(groups, per_block, 3, parts=layers // divisor, step=groups // divisor)
    assert geometry.key_pages_before(token) == span.pages_before(token)
    assert geometry.key_pages(token + 1) - geometry.key_pages_before(token) >= 1
