"""Compares the attention ops with plain Python loops over queries, heads and positions, and their implementations for a
CPU with their references, over poisoned memory."""

import math
from types import ModuleType
from unittest import mock

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_tensors import paged_rows

from hotset.kernels import EMPTY
from hotset.kernels.index_topk import cpu_impl as index_cpu
from hotset.kernels.index_topk import index_topk
from hotset.kernels.index_topk import reference as index_reference
from hotset.kernels.paged_attention import paged_attention
from hotset.kernels.rows import PagedRows, RowLayout, index_key_row, mla_row
from hotset.kernels.segments import make_segments
from hotset.kernels.sparse_attention import cpu_impl as attention_cpu
from hotset.kernels.sparse_attention import reference as attention_reference
from hotset.kernels.stable_topk import stable_topk

CPU = torch.device("cpu")
EXAMPLES = examples(30)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    """Draws the queries per segment, the context length of each segment, page_rows and a seed."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    lengths = [count + draw(st.integers(0, 12)) for count in counts]
    return counts, lengths, draw(st.integers(1, 5)), draw(st.integers(0, 2**31))


def segment_positions(counts: list[int], lengths: list[int]) -> list[tuple[int, int]]:
    """Returns (segment, position) of each query."""
    return [
        (segment, length - count + i)
        for segment, (count, length) in enumerate(zip(counts, lengths, strict=True))
        for i in range(count)
    ]


def softmax(scores: list[float]) -> list[float]:
    exponentials = [math.exp(score - max(scores)) for score in scores]
    return [value / sum(exponentials) for value in exponentials]


@EXAMPLES
@given(batches(), st.sampled_from([(1, 1), (2, 1), (3, 2)]))
def test_paged_attention_is_causal_attention_over_the_context_of_the_segment(
    batch: tuple[list[int], list[int], int, int], heads: tuple[int, int]
) -> None:
    counts, lengths, page_rows, seed = batch
    torch.manual_seed(seed)
    group, kv_heads = heads
    dim, scale = 4, 0.37
    contexts = [torch.randn(length, 2 * kv_heads * dim, dtype=torch.float64) for length in lengths]
    context = paged_rows(contexts, counts, page_rows, RowLayout(2 * kv_heads * dim, torch.float64))
    q = torch.randn(sum(counts), group * kv_heads, dim, dtype=torch.float64)
    starts = [length - count for count, length in zip(counts, lengths, strict=True)]
    out = paged_attention(q, context, make_segments(starts, counts, CPU), kv_heads, scale)
    for query, (segment, position) in enumerate(segment_positions(counts, lengths)):
        rows = contexts[segment][: position + 1].view(-1, 2, kv_heads, dim)
        for head in range(group * kv_heads):
            keys, values = rows[:, 0, head // group], rows[:, 1, head // group]
            weights = softmax([scale * float(q[query, head] @ key) for key in keys])
            expected = sum(weight * value for weight, value in zip(weights, values, strict=True))
            torch.testing.assert_close(out[query, head], expected)


@EXAMPLES
@given(batches(), st.integers(1, 9), st.integers(1, 3))
def test_index_topk_selects_the_best_positions_and_the_earlier_among_equals(
    batch: tuple[list[int], list[int], int, int], k: int, heads: int
) -> None:
    counts, lengths, page_rows, seed = batch
    torch.manual_seed(seed)
    dim, scale = 3, 0.5
    # Small whole numbers, so that equal scores are frequent and exact.
    contexts = [torch.randn(length, dim, dtype=torch.float64).round() for length in lengths]
    keys = paged_rows(contexts, counts, page_rows, RowLayout(dim, torch.float64))
    q = torch.randn(sum(counts), heads, dim, dtype=torch.float64).round()
    weights = torch.randn(sum(counts), heads, dtype=torch.float64).round()
    starts = [length - count for count, length in zip(counts, lengths, strict=True)]
    got = index_topk(q, weights, keys, make_segments(starts, counts, CPU), k, scale)
    for query, (segment, position) in enumerate(segment_positions(counts, lengths)):
        scores = [
            sum(float(weights[query, h]) * max(0.0, scale * float(q[query, h] @ key)) for h in range(heads))
            for key in contexts[segment][: position + 1]
        ]
        best = sorted(sorted(range(position + 1), key=lambda i: (-scores[i], i))[:k])
        assert got[query].tolist() == best + [EMPTY] * (k - len(best))


@EXAMPLES
@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 2**31), st.data())
def test_stable_topk_equals_a_stable_sort(rows: int, width: int, seed: int, data: st.DataObject) -> None:
    torch.manual_seed(seed)
    k = data.draw(st.integers(1, width))
    scores = torch.randn(rows, width).mul(2).round()
    scores[torch.rand(rows, width) < 0.2] = float("-inf")
    for got, row in zip(stable_topk(scores, k).tolist(), scores.tolist(), strict=True):
        finite = [i for i in range(width) if row[i] > float("-inf")]
        best = sorted(sorted(finite, key=lambda i: (-row[i], i))[:k])
        assert got == best + [EMPTY] * (k - len(best))


@EXAMPLES
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.integers(0, 2**31), st.sampled_from([1, 1 << 24]))
def test_sparse_attention_reads_only_selected_rows(queries: int, heads: int, k: int, seed: int, block: int) -> None:
    torch.manual_seed(seed)
    rank, rope, scale = 5, 2, 0.21
    pool = torch.full((20, rank + rope), float("nan"), dtype=torch.float64)
    usable = torch.randperm(19)[:10] + 1  # row 0 stays NaN, to notice code that clamps EMPTY to 0
    pool[usable] = torch.randn(10, rank + rope, dtype=torch.float64)
    row_ids = usable[torch.randint(10, (queries, k))]
    row_ids[torch.rand(queries, k) < 0.3] = EMPTY
    row_ids[:, 0] = usable[0]
    q = torch.randn(queries, heads, rank + rope, dtype=torch.float64)
    with mock.patch.object(attention_reference, "BLOCK_VALUES", block):
        out = attention_reference.sparse_attention(q, pool, row_ids, RowLayout(pool.shape[1], pool.dtype), rank, scale)
    for query in range(queries):
        selected = pool[[row_id for row_id in row_ids[query].tolist() if row_id != EMPTY]]
        for head in range(heads):
            weights = softmax([scale * float(q[query, head] @ key) for key in selected])
            expected = sum(weight * key[:rank] for weight, key in zip(weights, selected, strict=True))
            torch.testing.assert_close(out[query, head], expected)


@examples(40)
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
    contexts = [torch.randn(length, 8).mul(2).round().clamp(-7, 7) for length in lengths]
    for context in contexts:
        context[:, 0] = 7  # the scale of an fp8 key becomes 7 / 448, a power of two, and every value is stored exactly
    keys = paged_rows([context.to(dtype) for context in contexts], counts, 4, index_key_row(8, dtype, fp8))
    q = torch.randn(sum(counts), heads, 8).round()
    q[..., 0] = 7  # as in the keys
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


@examples(40)
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


@examples(40)
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
    pool = torch.full((60, layout.stride_bytes), 0xFF, dtype=torch.uint8).view(layout.stored_dtype)  # NaN
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
