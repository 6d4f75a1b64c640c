"""Tests index_topk's CUDA selection kernel without a GPU: emulated on the CPU, and compiled for sm_90a.

test_index_topk.py tests it on a GPU.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import needs_compiler
from index_topk_cases import KINDS, NAN, check_selection, draw_scores
from matrix import matrix, slow_if
from nvcc import REGISTERS_OF_SM, compile_with_nvcc, needs_nvcc, recorded

from hotset.kernels import cuda_source
from hotset.kernels.cuda_source import LaunchShape
from hotset.kernels.index_topk import cuda_select
from hotset.kernels.index_topk.cuda_select import BlockShape
from hotset.kernels.index_topk.scores import Scores

CPU = torch.device("cpu")
CONTEXT = 8192
SMALL = BlockShape(threads=64, bins=128)  # with one block, a thread has 128 of 8192 scores: 4 words
HELD = {"all": 1 << 20, "some": 4 * 512}  # bytes of a block's scores that are in shared memory


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with mock.patch.object(cuda_source, "kernel", cuda_on_cpu.kernel):
        yield


@needs_compiler
@pytest.mark.parametrize(("kind", "cluster", "held"), matrix(KINDS, [(3, "some"), (8, "all"), (1, "all")], together=1))
def test_emulated_selection_equals_stable_topk(kind: str, cluster: int, held: str) -> None:
    torch.manual_seed(cluster)
    select = partial(cuda_select.select, shape=SMALL, cluster=cluster, max_held_bytes=HELD[held])
    for k in (1, 130, 1000):
        lengths = [CONTEXT, CONTEXT - 1, 3001, k + 1, k]
        check_selection(CPU, select, draw_scores(kind, len(lengths), CONTEXT), lengths, k)


@needs_compiler
@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize("k", [1, 63, 64, 65, 129, 700])
def test_emulated_selection_is_exact_at_lengths_around_k_and_around_shares(k: int, cluster: int) -> None:
    torch.manual_seed(k)
    edges = {1, k - 1, k, k + 1, *(size + more for size in (128, 256, 1024, 4096) for more in (-1, 0, 1))} - {0}
    lengths = sorted(edges)
    select = partial(cuda_select.select, shape=SMALL, cluster=cluster)
    check_selection(CPU, select, draw_scores("ties", len(lengths), CONTEXT), lengths, k)


@needs_compiler
def test_a_kernel_for_longer_contexts_selects_the_same() -> None:
    torch.manual_seed(5)
    select = partial(cuda_select.select, shape=SMALL, cluster=3, limit=5 * CONTEXT)
    check_selection(CPU, select, draw_scores("ties", 3, CONTEXT), [CONTEXT, 3001, 131], 130)


@needs_compiler
@pytest.mark.parametrize("wrong", slow_if([NAN, 1e38, 0.0, 1.0, -5.0, float("inf")], {1.0, -5.0, float("inf")}))
def test_wrong_moments_do_not_change_the_selection(wrong: float) -> None:
    torch.manual_seed(3)
    moments = torch.full((2, 3, 2), wrong)
    moments[1, :, 0] *= -1
    select = partial(cuda_select.select, shape=SMALL, cluster=2)
    check_selection(CPU, select, draw_scores("ties", 2, CONTEXT), [3000, CONTEXT], 40, moments)


# Queries, context, blocks that share a query.
LAUNCHES = [
    (1, 32 << 10, 4),
    (1, 128 << 10, 8),
    (24, 128 << 10, 4),
    (25, 128 << 10, 3),
    (64, 128 << 10, 2),
    (65, 160 << 10, 1),
    (500, 1 << 20, 4),  # with fewer, a thread would have too many scores
]


@pytest.mark.parametrize(("queries", "context", "cluster"), LAUNCHES)
def test_queries_are_shared_by_as_many_blocks_as_run_at_once(queries: int, context: int, cluster: int) -> None:
    _, constants, shape = selection(queries, context)
    assert constants["CLUSTER"] == cluster and constants["WORDS"] <= cuda_select.MAX_WORDS
    assert shape.blocks == queries * cluster and shape.shared_bytes <= 227 << 10


def test_contexts_of_all_lengths_have_the_same_kernel() -> None:
    for queries in (1, 20, 30, 60, 4096):
        kernels = [selection(queries, context, limit=163_840)[:2] for context in (4096, 40_960, 163_840)]
        assert kernels[0] == kernels[1] == kernels[2]


def selection(queries: int, context: int, limit: int | None = None) -> tuple[Path, dict[str, int], LaunchShape]:
    """Records a selection of 2048 positions."""
    values, zeros = torch.empty(1, context).expand(queries, -1), torch.zeros(queries, dtype=torch.int64)
    scores = Scores(values, torch.zeros(queries, 1, 2), torch.ones(queries, dtype=torch.int32))
    out = torch.zeros(queries, 2048, dtype=torch.int64)
    return recorded(lambda: cuda_select.select(scores, zeros, zeros, 2048, out, limit=limit))


@needs_nvcc
@pytest.mark.parametrize("queries", slow_if([1, 132], [1]))
def test_kernel_compiles_for_sm_90a_and_a_block_fits(queries: int, tmp_path: Path) -> None:
    source, constants, _ = selection(queries, 131_072)
    compiled = compile_with_nvcc(source, constants, tmp_path)
    assert compiled.spilled_bytes == 0
    assert constants["THREADS"] * compiled.registers <= REGISTERS_OF_SM
