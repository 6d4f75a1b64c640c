"""Tests paged_attention's CUDA kernel for prompts without a GPU: emulated on the CPU, and compiled for sm_90.

test_paged_attention.py tests it on a GPU.
"""

import math
import shutil
from unittest import mock

import cuda_on_cpu
import pytest
import torch
from paged_attention_batch import CPU, Batch, error
from test_sparse_attention_cuda import emulated
from torch import Tensor

from hotset.kernels import cuda_source
from hotset.kernels.paged_attention import cuda_prefill

pytestmark = pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="no host compiler for C++")
NVCC = shutil.which("nvcc")


def emulated_map(address: int, shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> Tensor:
    page_stride, row_stride = strides
    rows = shape[1]
    return torch.tensor([address, 2 * page_stride, 2 * row_stride, shape[0], rows, math.gcd(rows, 128)], device=device)


def prefill(batch: Batch) -> Tensor:
    out = torch.full(batch.q.shape, float("nan"), dtype=torch.bfloat16)
    with (
        mock.patch.object(cuda_source, "kernel", emulated),
        mock.patch.object(cuda_prefill, "_tensor_map", emulated_map),
    ):
        cuda_prefill.prefill(
            batch.q, batch.context(CPU), batch.positions, batch.segment_of, batch.kv_heads, batch.scale, out
        )
    return out


@pytest.mark.parametrize(
    ("lengths", "counts", "page_rows"),
    [([300], [200], 64), ([40, 7, 33, 100, 64, 1, 150], [40, 3, 1, 37, 2, 1, 9], 16), ([129, 5], [1, 5], 48)],
    ids=["three tiles", "tiles cross segments", "one token"],
)
def test_the_emulated_kernel_equals_the_reference(lengths: list[int], counts: list[int], page_rows: int) -> None:
    batch = Batch(lengths, 2, 1, 128, page_rows, torch.bfloat16, counts)
    got = prefill(batch)
    assert error(got, batch.expect(torch.float64)) < 1e-2 and bool((got[-1] == 0).all())
