"""Compares the attention ops with plain Python loops over queries, heads and positions."""

import math
from types import ModuleType
from unittest import mock

import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.kernels import EMPTY
from hotset.kernels.index_topk import index_topk
from hotset.kernels.paged_attention import paged_attention
from hotset.kernels.rows import PagedRows, RowLayout
from hotset.kernels.segments import make_segments
from hotset.kernels.sparse_attention import cpu_impl, reference
from hotset.kernels.stable_topk import stable_topk
from hotset.memory.pages import extend_runs

CPU = torch.device("cpu")
EXAMPLES = examples(30)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    """Draws the queries per segment, the context length of each segment, page_rows and a seed."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    lengths = [count + draw(st.integers(0, 12)) for count in counts]
    return counts, lengths, draw(st.integers(1, 5)), draw(st.integers(0, 2**31))


def paged(counts: list[int], lengths: list[int], page_rows: int, width: int) -> tuple[PagedRows, list[torch.Tensor]]:
    """Makes contexts on scattered pages of a pool that is otherwise NaN. Segment i has seat i.

    Returns the paged rows, and the same contexts as one tensor each.
    """
    page_counts = [-(-length // page_rows) for length in lengths]
    order = torch.randperm(sum(page_counts) + 2).tolist()
    layout = RowLayout(width, torch.float64)
    pool = torch.full((1, len(order), page_rows, layout.stored_width), float("nan"), dtype=torch.float64)
    contexts, runs = [], []
    table = torch.full((len(lengths), max(page_counts)), EMPTY)
    for seat, (length, count) in enumerate(zip(lengths, page_counts, strict=True)):
        pages = [order.pop() for _ in range(count)]
        table[seat, :count] = torch.tensor(pages)
        context = torch.randn(length, width, dtype=torch.float64)
        for position in range(length):
            pool[0, pages[position // page_rows], position % page_rows, :width] = context[position]
        contexts.append(context)
        runs.append([])
        extend_runs(runs[-1], pages)
    seat_of = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return PagedRows(pool, runs, layout, table, seat_of), contexts


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
    context, contexts = paged(counts, lengths, page_rows, 2 * kv_heads * dim)
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
    keys, contexts = paged(counts, lengths, page_rows, dim)
    for context in (keys.blocks, *contexts):
        context.round_()  # small whole numbers, so that equal scores are frequent and exact
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
@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(0, 2**31),
    st.sampled_from([1, 1 << 24]),
    st.sampled_from([reference, cpu_impl]),
)
def test_sparse_attention_reads_only_selected_rows(
    queries: int, heads: int, k: int, seed: int, block: int, impl: ModuleType
) -> None:
    torch.manual_seed(seed)
    rank, rope, scale = 5, 2, 0.21
    pool = torch.full((20, rank + rope), float("nan"), dtype=torch.float64)
    usable = torch.randperm(19)[:10] + 1  # row 0 stays NaN, to notice code that clamps EMPTY to 0
    pool[usable] = torch.randn(10, rank + rope, dtype=torch.float64)
    row_ids = usable[torch.randint(10, (queries, k))]
    row_ids[torch.rand(queries, k) < 0.3] = EMPTY
    row_ids[:, 0] = usable[0]
    q = torch.randn(queries, heads, rank + rope, dtype=torch.float64)
    with mock.patch.object(impl, "BLOCK_VALUES", block):
        out = impl.sparse_attention(q, pool, row_ids, RowLayout(pool.shape[1], pool.dtype), rank, scale)
    for query in range(queries):
        selected = pool[[row_id for row_id in row_ids[query].tolist() if row_id != EMPTY]]
        for head in range(heads):
            weights = softmax([scale * float(q[query, head] @ key) for key in selected])
            expected = sum(weight * key[:rank] for weight, key in zip(weights, selected, strict=True))
            torch.testing.assert_close(out[query, head], expected)
