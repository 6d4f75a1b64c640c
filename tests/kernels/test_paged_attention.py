"""Compares paged attention in Triton with the reference: odd page sizes, splits, groups of heads, padded queries."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import triton_impl
from matrix import matrix
from paged_attention_batch import CPU, Batch, error
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels import EMPTY
from hotset.kernels import paged_attention as op
from hotset.kernels.paged_attention import paged_attention

needs_interpreter = pytest.mark.interpreted


@needs_interpreter
@pytest.mark.parametrize(
    ("page_rows", "heads", "kv_heads", "dim", "min_split_rows"),
    matrix([5, 16, 32], [(4, 2, 16), (3, 1, 24), (2, 2, 8)], [32, 10**6], together=1),
)
def test_kernel_equals_the_reference(
    page_rows: int, heads: int, kv_heads: int, dim: int, min_split_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    impl = triton_impl("paged_attention")
    monkeypatch.setattr(impl, "MIN_SPLIT_ROWS", min_split_rows)
    monkeypatch.setattr(impl, "multiprocessors", lambda device: 132)
    batch = Batch([1, 33, 100, 64], heads, kv_heads, dim, page_rows, torch.float32)
    got = torch.empty(batch.q.shape)
    impl.decode(batch.q, batch.context(CPU), batch.positions, kv_heads, batch.scale, got)
    torch.testing.assert_close(got.double(), batch.expect(torch.float64), atol=1e-5, rtol=1e-5)


@needs_interpreter
def test_drafts_are_decoded_like_queries_of_several_requests() -> None:
    impl = triton_impl("paged_attention")
    batch = Batch([70, 5, 33], 4, 2, 16, 16, torch.float32, [8, 2, 5])
    got = torch.empty(batch.q.shape)
    impl.decode(batch.q, batch.context(CPU), batch.positions, 2, batch.scale, got)
    torch.testing.assert_close(got.double(), batch.expect(torch.float64), atol=1e-5, rtol=1e-5)


def prefill(impl: ModuleType, batch: Batch) -> Tensor:
    out = torch.full(batch.q.shape, float("nan"))
    impl.prefill(batch.q, batch.context(CPU), batch.positions, batch.segment_of, batch.kv_heads, batch.scale, out=out)
    return out


@needs_interpreter
@pytest.mark.parametrize(
    ("page_rows", "heads", "kv_heads", "dim"), matrix([5, 16, 32], [(4, 2, 16), (3, 1, 24), (2, 2, 8)], together=1)
)
def test_prompts_equal_the_reference_across_segments(page_rows: int, heads: int, kv_heads: int, dim: int) -> None:
    impl = triton_impl("paged_attention", "triton_prefill")
    batch = Batch([40, 7, 33, 100, 64, 1], heads, kv_heads, dim, page_rows, torch.float32, [40, 3, 1, 37, 2, 1])
    torch.testing.assert_close(prefill(impl, batch).double(), batch.expect(torch.float64), atol=1e-5, rtol=1e-5)


@needs_interpreter
def test_the_result_of_a_token_does_not_depend_on_its_place_in_the_batch() -> None:
    impl = triton_impl("paged_attention", "triton_prefill")
    batch = Batch([60], 2, 1, 16, 16, torch.float32, [36])
    whole = prefill(impl, batch)[:-1]
    for first in (1, 33):
        later = Batch([60], 2, 1, 16, 16, torch.float32, [36 - first])
        later.blocks, later.table, later.q = batch.blocks, batch.table, batch.q[first:]
        assert torch.equal(prefill(impl, later)[:-1], whole[first:])


@needs_interpreter
def test_contexts_are_split_if_the_batch_is_small() -> None:
    impl = triton_impl("paged_attention")
    assert impl._num_splits(8, 131_072, 132) == impl.MAX_SPLITS and impl._num_splits(128, 131_072, 132) > 1
    assert impl._num_splits(100_000, 131_072, 132) == 1 and impl._num_splits(8, 100, 132) == 1


@needs_interpreter
@pytest.mark.parametrize(("counts", "decoded"), [([1, 16, 3, 17, 2], 20), ([1, 1, 4], 7), ([17, 1], 0)], ids=str)
def test_the_few_tokens_of_leading_requests_are_decoded_and_the_others_computed_as_prompts(
    counts: list[int], decoded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, prompts = triton_impl("paged_attention"), triton_impl("paged_attention", "triton_prefill")
    passed: list[int] = []

    def decode_and_count(q: Tensor, *others: Any) -> None:
        passed.append(len(q))
        decode.decode(q, *others)

    monkeypatch.setattr(op, "has_fast_path", lambda q: True)
    monkeypatch.setattr(op, "kernels_of", lambda name: SimpleNamespace(decode=decode_and_count))
    monkeypatch.setattr(op, "_prefill_kernels", lambda q, context: prompts)
    batch = Batch([30 + count for count in counts], 4, 2, 16, 16, torch.float32, counts)
    got = paged_attention(batch.q, batch.context(CPU), batch.segments(CPU), 2, batch.scale)
    torch.testing.assert_close(got.double(), batch.expect(torch.float64), atol=1e-5, rtol=1e-5)
    assert passed == [decoded]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "lengths", "heads", "kv_heads", "dim", "page_rows"),
    [
        (torch.bfloat16, [1, 2, 4097, 700, 63, 64, 65, 9000], 32, 8, 128, 64),
        (torch.bfloat16, [30_000], 32, 8, 128, 64),
        pytest.param(torch.bfloat16, [5, 300] * 70, 32, 8, 128, 64, id="140 contexts, one split"),
        (torch.bfloat16, [77, 1000, 1], 16, 1, 80, 48),
        (torch.bfloat16, [513, 20, 2000], 4, 4, 96, 32),
        (torch.float32, [5, 300, 1025], 9, 3, 64, 64),
    ],
    ids=str,
)
def test_decoding_on_a_gpu_equals_the_reference(
    dtype: torch.dtype, lengths: list[int], heads: int, kv_heads: int, dim: int, page_rows: int
) -> None:
    device = torch.device("cuda")
    batch = Batch(lengths, heads, kv_heads, dim, page_rows, dtype)
    got = paged_attention(batch.q.cuda(), batch.context(device), batch.segments(device), kv_heads, batch.scale)
    # In bf16, the weights of the softmax are rounded to 8 bits before the product with V. The result is rounded too.
    assert error(got, batch.expect(torch.float64)) < (1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert bool((got[-1] == 0).all())


@pytest.mark.gpu
def test_a_graph_reads_positions_pages_and_padding_at_replay() -> None:
    device = torch.device("cuda")
    batch = Batch([3000, 40, 900], 8, 2, 64, 64, torch.bfloat16)
    context, segments = batch.context(device), batch.segments(device)
    q = batch.q.cuda()
    paged_attention(q, context, segments, 2, batch.scale)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(q, context, segments, 2, batch.scale)
    # This batch uses fewer pages, so its pool and its page table fit into the captured tensors.
    other = Batch([500, 2800, 300], 8, 2, 64, 64, torch.bfloat16)
    context.blocks[:, : other.blocks.shape[1]].copy_(other.blocks)
    context.table[:, : other.table.shape[1]].copy_(other.table)
    q.copy_(other.q)
    segments.positions.copy_(other.positions)
    context.seat_of.copy_(torch.tensor([0, 1, EMPTY, 2]))
    segments.positions[3] = other.positions[2]
    graph.replay()
    expected = other.expect(torch.float64)
    assert error(out[:2], expected[:2]) < 1e-2 and bool((out[2] == 0).all())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "message"),
    [(8, 8, 36, "heads of 36 values"), (4, 4, 264, "heads of 264 values"), (65, 1, 64, "65 heads share")],
)
def test_heads_that_a_gpu_cannot_decode_are_refused(heads: int, kv_heads: int, dim: int, message: str) -> None:
    device = torch.device("cuda")
    batch = Batch([4], heads, kv_heads, dim, 16, torch.bfloat16)
    with pytest.raises(ConfigError, match=message):
        paged_attention(batch.q.cuda(), batch.context(device), batch.segments(device), kv_heads, batch.scale)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "lengths", "counts", "heads", "kv_heads", "dim", "page_rows"),
    [
        (torch.bfloat16, [9000], [9000], 32, 8, 128, 64),
        (torch.bfloat16, [9000, 5, 4097], [1000, 5, 4096], 32, 8, 128, 64),
        (torch.bfloat16, [700, 3000, 1, 65, 2000, 129, 40], [1, 1, 1, 64, 300, 2, 40], 32, 8, 128, 64),
        (torch.bfloat16, [700, 3000, 50, 900, 9, 400], [4, 16, 1, 17, 8, 300], 32, 8, 128, 64),
        *((torch.bfloat16, [900, 25, 400], [700, 25, 300], 8, 2, 128, rows) for rows in (16, 24, 32, 128, 192)),
        pytest.param(torch.bfloat16, [900, 25, 400], [700, 25, 300], 8, 2, 128, 20, id="in Triton on every GPU"),
        (torch.bfloat16, [77, 1000, 1], [77, 500, 1], 16, 1, 80, 48),
        (torch.bfloat16, [513, 20, 2000], [100, 20, 1000], 4, 4, 256, 32),
        (torch.float32, [5, 300, 1025], [5, 299, 700], 9, 3, 64, 64),
        (torch.float32, [400], [333], 4, 2, 192, 64),
    ],
    ids=str,
)
def test_prompts_and_mixed_steps_on_a_gpu_equal_the_reference(
    dtype: torch.dtype, lengths: list[int], counts: list[int], heads: int, kv_heads: int, dim: int, page_rows: int
) -> None:
    device = torch.device("cuda")
    batch = Batch(lengths, heads, kv_heads, dim, page_rows, dtype, counts)
    got = paged_attention(batch.q.cuda(), batch.context(device), batch.segments(device), kv_heads, batch.scale)
    again = paged_attention(batch.q.cuda(), batch.context(device), batch.segments(device), kv_heads, batch.scale)
    assert error(got, batch.expect(torch.float64)) < (1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert bool((got[-1] == 0).all()) and torch.equal(got, again)
