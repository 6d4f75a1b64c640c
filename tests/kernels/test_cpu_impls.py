"""Compares the CPU implementations of index_topk and sparse_attention with their references, over poisoned memory."""

from types import ModuleType

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.index_topk import cpu_impl as index_cpu
from hotset.kernels.index_topk import reference as index_reference
from hotset.kernels.rows import PagedRows, RowLayout, index_key_row, mla_row
from hotset.kernels.segments import make_segments
from hotset.kernels.sparse_attention import cpu_impl as attention_cpu
from hotset.kernels.sparse_attention import reference as attention_reference
from hotset.kernels.stable_topk import stable_topk
from hotset.memory.pages import extend_runs

CPU = torch.device("cpu")
EXAMPLES = examples(40)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


def poisoned(rows: int, layout: RowLayout) -> Tensor:
    """Returns rows that decode to NaN."""
    return torch.full((rows, layout.stride_bytes), 0xFF, dtype=torch.uint8).view(layout.stored_dtype)


def paged_keys(lengths: list[int], counts: list[int], page_rows: int, layout: RowLayout) -> PagedRows:
    """Makes index keys of small integers on scattered pages of poisoned memory. Segment i has seat i."""
    page_counts = [-(-length // page_rows) for length in lengths]
    order = torch.randperm(sum(page_counts) + 2).tolist()
    memory = poisoned(len(order) * page_rows, layout).view(1, len(order), page_rows, layout.stored_width)
    table = torch.full((len(lengths), max(page_counts)), EMPTY)
    runs: list[list[tuple[int, int]]] = []
    for seat, (length, count) in enumerate(zip(lengths, page_counts, strict=True)):
        pages = [order.pop() for _ in range(count)]
        table[seat, :count] = torch.tensor(pages)
        positions = torch.arange(length)
        values = torch.randn(length, layout.width).mul(2).round().clamp(-7, 7)
        values[:, 0] = 7  # the scale of an fp8 key becomes 7 / 448, a power of two, and every value is stored exactly
        values = values.to(layout.dtype)
        memory[0, table[seat, positions // page_rows], positions % page_rows] = layout.encode(values)
        runs.append([])
        extend_runs(runs[-1], pages)
    seat_of = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return PagedRows(memory, runs, layout, table, seat_of)


@EXAMPLES
@given(
    segments=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), min_size=1, max_size=4),
    k=st.integers(1, 12),
    heads=st.integers(1, 3),
    block_scores=st.sampled_from([1, 100, 1 << 21]),
    min_grouped=st.sampled_from([5, 1000]),
    dtype=DTYPES,
    fp8=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_index_topk_selects_what_the_reference_selects(
    segments: list[tuple[int, int]],
    k: int,
    heads: int,
    block_scores: int,
    min_grouped: int,
    dtype: torch.dtype,
    fp8: bool,
    seed: int,
) -> None:
    """Scores are sums of small multiples of 1/2: exact in any order of summation, with many ties."""
    torch.manual_seed(seed)
    counts, starts = [count for count, _ in segments], [start for _, start in segments]
    lengths = [count + start for count, start in segments]
    keys = paged_keys(lengths, counts, 4, index_key_row(8, dtype, fp8))
    q = torch.randn(sum(counts), heads, 8).round()
    q[..., 0] = 7  # as in `paged_keys`
    q = q.to(dtype)
    weights = torch.randn(sum(counts), heads).round().to(torch.float64 if dtype == torch.float64 else torch.float32)
    arguments = (q, weights, keys, make_segments(starts, counts, CPU), k, 0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_cpu, "BLOCK_SCORES", block_scores)
        patch.setattr(index_cpu, "MIN_GROUPED_CONTEXT", min_grouped)
        selected = index_cpu.index_topk(*arguments)
    assert torch.equal(selected, index_reference.index_topk(*arguments))


@pytest.mark.parametrize("impl", [index_reference, index_cpu])
def test_queries_are_quantised_where_keys_are(impl: ModuleType) -> None:
    """The query (448, 17) becomes (448, 16) in e4m3, so it prefers a key that scores 16.5 to one that scores 17."""
    q = torch.zeros(1, 1, 8)
    q[0, 0, :2] = torch.tensor([448.0, 17.0])
    values = torch.zeros(2, 8)
    values[0, 1], values[1, 0] = 1.0, 16.5 / 448
    for fp8, best in ((False, 0), (True, 1)):
        layout = index_key_row(8, torch.float32, fp8)
        keys = PagedRows(layout.encode(values)[None, None], [[(0, 1)]], layout, torch.tensor([[0]]), torch.tensor([0]))
        assert impl.index_topk(q, torch.ones(1, 1), keys, make_segments([1], [1], CPU), 1, 1.0).tolist() == [[best]]


@EXAMPLES
@given(
    rows=st.integers(1, 6),
    length=st.integers(2, 90),
    values=st.sampled_from([1, 3, 1000]),
    min_grouped=st.sampled_from([5, 1000]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_topk_positions_equal_stable_topk(
    rows: int, length: int, values: int, min_grouped: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    torch.manual_seed(seed)
    k = data.draw(st.integers(1, length - 1) | st.integers(1, max(1, length // 5 - 1)))
    scores = torch.randn(rows, length, dtype=dtype).mul(values).round()
    scores[torch.rand(rows, length) < 0.2] = float("-inf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_cpu, "MIN_GROUPED_CONTEXT", min_grouped)
        assert torch.equal(index_cpu.topk_positions(scores, k), stable_topk(scores, k))


@EXAMPLES
@given(
    queries=st.integers(1, 40),
    heads=st.integers(1, 3),
    k=st.integers(1, 9),
    usable=st.integers(1, 25),
    empty=st.sampled_from([0.0, 0.3, 1.0]),
    block_values=st.sampled_from([1, 500, 1 << 21]),
    dtype=DTYPES,
    fp8=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_sparse_attention_equals_the_reference_and_reads_only_selected_rows(
    queries: int,
    heads: int,
    k: int,
    usable: int,
    empty: float,
    block_values: int,
    dtype: torch.dtype,
    fp8: bool,
    seed: int,
) -> None:
    """Entries may be EMPTY or duplicates. No query selects row 0 or another row that is NaN."""
    torch.manual_seed(seed)
    rank, layout = 16, mla_row(16, 8, dtype, fp8)
    pool = poisoned(60, layout)
    filled = 1 + torch.randperm(59)[:usable]
    pool[filled] = layout.encode(torch.randn(usable, layout.width).to(dtype))
    row_ids = filled[torch.randint(usable, (queries, k))]
    row_ids[torch.rand(queries, k) < empty] = EMPTY
    q = torch.randn(queries, heads, layout.width).to(dtype)
    q[(row_ids == EMPTY).all(-1)] = float("nan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_cpu, "BLOCK_VALUES", block_values)
        out = attention_cpu.sparse_attention(q, pool, row_ids, layout, rank, 0.21)
    assert bool(torch.isfinite(out).all())
    torch.testing.assert_close(out, attention_reference.sparse_attention(q, pool, row_ids, layout, rank, 0.21))
    assert bool((out[(row_ids == EMPTY).all(-1)] == 0).all())


@pytest.mark.parametrize("positions", [40, 4000])  # a long context is searched by groups
def test_no_position_with_a_score_of_nan_is_selected(positions: int) -> None:
    scores = torch.randn(6, positions)
    scores[1, 3], scores[2, 5:] = float("nan"), float("nan")
    scores[3], scores[4, ::2] = float("nan"), float("nan")
    scores[5, 0], scores[5, 7:] = float("nan"), float("-inf")
    selected = index_cpu.topk_positions(scores, 8)
    assert torch.equal(selected, stable_topk(scores, 8))
    assert [(row != EMPTY).sum().item() for row in selected] == [8, 8, 5, 0, 8, 6]
    assert not any(scores[query, row[row != EMPTY]].isnan().any() for query, row in enumerate(selected))


def test_a_row_of_nan_affects_only_the_queries_that_selected_it() -> None:
    layout = mla_row(16, 8, torch.float32)
    pool = torch.randn(10, layout.width)
    pool[3] = float("nan")
    row_ids = torch.tensor([[1, 2, EMPTY], [2, 3, 4], [4, 5, 6]])
    out = attention_cpu.sparse_attention(torch.randn(3, 2, layout.width), pool, row_ids, layout, 16, 0.2)
    assert torch.isfinite(out).flatten(1).all(1).tolist() == [True, False, True]
