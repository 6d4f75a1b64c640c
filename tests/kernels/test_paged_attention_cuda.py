"""Tests paged_attention's CUDA kernel for prompts without a GPU: emulated on the CPU, and compiled for sm_90.

test_paged_attention.py tests it on a GPU.
"""

import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from cuda_on_cpu import needs_compiler
from hopper_on_cpu import emulated_attention
from nvcc import REGISTERS_OF_SM, compile_with_nvcc, needs_nvcc
from paged_attention_batch import CPU, Batch, error
from torch import Tensor

from hotset.kernels import cuda_source
from hotset.kernels.fast_path import is_hopper
from hotset.kernels.paged_attention import cuda_prefill

DIM = 128


def emulated_map(address: int, shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> Tensor:
    (pages, rows, _width), (page_stride, row_stride) = shape, strides
    return torch.tensor([address, 2 * page_stride, 2 * row_stride, pages, rows, math.gcd(rows, 128)], device=device)


def prefill(batch: Batch) -> Tensor:
    out = torch.full(batch.q.shape, float("nan"), dtype=torch.bfloat16)
    with (
        mock.patch.object(cuda_source, "kernel", emulated_attention),
        mock.patch.object(cuda_prefill, "_tensor_map", emulated_map),
    ):
        cuda_prefill.prefill(
            batch.q, batch.context(CPU), batch.positions, batch.segment_of, batch.kv_heads, batch.scale, out
        )
    return out


def check(batch: Batch) -> None:
    got = prefill(batch)
    assert error(got, batch.expect(torch.float64)) < 1e-2
    assert bool((got[-1] == 0).all())  # padding


CASES = {  # lengths, counts, heads, KV heads, rows per page
    "four tiles": ([450], [200], 2, 1, 64),
    "tiles across segments": ([40, 7, 33, 100, 64, 1, 150], [40, 3, 1, 37, 2, 1, 9], 2, 1, 16),
    "groups of heads": ([130], [30], 4, 2, 256),
    "boxes of 8 rows": ([150, 5], [10, 5], 1, 1, 24),
    "long contexts of few tokens": ([400, 150], [1, 2], 1, 1, 48),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_the_emulated_kernel_equals_the_reference(name: str) -> None:
    lengths, counts, heads, kv_heads, page_rows = CASES[name]
    check(Batch(lengths, heads, kv_heads, DIM, page_rows, torch.bfloat16, counts))


@needs_compiler
def test_the_result_of_a_token_does_not_depend_on_its_place_in_the_batch() -> None:
    batch = Batch([160], 1, 1, DIM, 64, torch.bfloat16, [140])
    whole = prefill(batch)[:-1]
    for first in (63, 130):
        later = Batch([160], 1, 1, DIM, 64, torch.bfloat16, [140 - first])
        later.blocks, later.table, later.q = batch.blocks, batch.table, batch.q[first:]
        assert torch.equal(prefill(later)[:-1], whole[first:])


@needs_compiler
def test_earlier_sums_shrink_when_a_much_larger_score_appears() -> None:
    """Sums are multiplied only when a score exceeds the earlier ones by more than 8, which random rows seldom do."""
    batch = Batch([400], 1, 1, DIM, 400, torch.bfloat16, [2])
    q = torch.randn(DIM)
    q *= 8 / q.norm()
    batch.q[:2] = q.to(torch.bfloat16)
    rows = batch.blocks[0, batch.runs[0][0][0], :400]
    growth = torch.arange(400) / 40  # scores grow by 10 per 40 rows
    rows[:, :DIM] = (growth[:, None] * q + torch.randn(400, DIM) / 10).to(torch.bfloat16)
    check(batch)


@needs_compiler
def test_queries_that_are_not_aligned_are_copied_first() -> None:
    batch = Batch([140], 2, 1, DIM, 64, torch.bfloat16, [20])
    misaligned = torch.full((*batch.q.shape[:2], DIM + 1), float("nan"), dtype=torch.bfloat16)[:, :, 1:]
    batch.q = misaligned.copy_(batch.q)
    check(batch)


@pytest.mark.parametrize(
    ("dtype", "dim", "page_rows", "hopper", "served"),
    [
        (torch.bfloat16, 128, 64, True, True),
        (torch.bfloat16, 128, 24, True, True),
        (torch.float32, 128, 64, True, False),
        (torch.bfloat16, 64, 64, True, False),
        (torch.bfloat16, 128, 20, True, False),
        (torch.bfloat16, 128, 64, False, False),
    ],
)
def test_other_sizes_and_gpus_use_triton(
    dtype: torch.dtype, dim: int, page_rows: int, hopper: bool, served: bool
) -> None:
    batch = Batch([3], 1, 1, dim, page_rows, dtype)
    with mock.patch.object(cuda_prefill, "is_hopper", lambda device: hopper):
        assert cuda_prefill.supports(batch.q, batch.context(CPU)) == served


@pytest.mark.parametrize(("major", "hopper"), [(8, False), (9, True), (10, False)])
def test_only_gpus_of_compute_capability_9_are_hopper(major: int, hopper: bool) -> None:
    with mock.patch.object(torch.cuda, "get_device_capability", lambda device: (major, 0)):
        assert is_hopper.__wrapped__(torch.device("cuda")) == hopper


@needs_nvcc
def test_the_kernel_compiles_for_sm_90(tmp_path: Path) -> None:
    constants = {"PAGE_ROWS": 64, "BOX_ROWS": 64, "SHARED_BYTES": cuda_prefill.SHARED_BYTES}
    compiled = compile_with_nvcc(cuda_prefill.SOURCE, constants, tmp_path)
    assert compiled.spilled_bytes == 0 and not compiled.serialized
    # Two warpgroups claim 232 registers per thread, and the third keeps 40. The block must have that many at launch.
    assert 128 * (2 * 232 + 40) <= cuda_prefill.THREADS * compiled.registers <= REGISTERS_OF_SM
    assert cuda_prefill.SHARED_BYTES <= 227 << 10
