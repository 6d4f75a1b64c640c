"""Tests sparse_attention's CUDA kernels without a GPU: emulated on the CPU, and compiled for sm_90.

test_sparse_attention.py tests them on a GPU.
"""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from cuda_on_cpu import needs_compiler
from hopper_on_cpu import emulated_attention
from matrix import slow_if
from nvcc import REGISTERS_OF_SM, compile_with_nvcc, needs_nvcc, recorded
from sparse_attention_cases import Case, Inputs, make_inputs
from torch import Tensor

from hotset.kernels import EMPTY, cuda_source
from hotset.kernels.sparse_attention import cuda_impl
from hotset.kernels.sparse_attention.launch import HOPPER, LaunchConfig

SHARED_OF_SM = 228 << 10  # bytes; each block takes 1 KiB more than it requests


def run(inputs: Inputs, launch: LaunchConfig) -> Tensor:
    case = inputs.case
    shape = (case.queries, launch.splits, case.heads)
    out = torch.full((*shape[::2], 512), float("nan"), dtype=torch.bfloat16)
    partial, lse = torch.full((*shape, 512), float("nan")), torch.full(shape, float("nan"))
    tensors = (inputs.q, inputs.pool.view(torch.uint8), inputs.row_ids, partial if launch.splits > 1 else out, lse)
    with mock.patch.object(cuda_source, "kernel", emulated_attention):
        cuda_impl.attend(case.shape, launch, tensors, case.scale * 1.4426950408889634)
        if launch.splits > 1:
            written = ~partial.isnan().all(-1)
            assert torch.equal(written, lse != float("-inf")), "an empty split wrote sums, or another did not"
            cuda_impl.merge(case.shape, launch, partial, lse, out)
    return out


PLAIN_16, FP8_16, FP8_32, FP8_64 = HOPPER[False, 16], HOPPER[True, 16], HOPPER[True, 32], HOPPER[True, 64]
PLAIN_32, PLAIN_64 = FP8_32, HOPPER[False, 64]
CASES = {
    "plain, 16 heads": (Case(2, 16, 300), PLAIN_16),
    "plain, 20 heads, 3 splits": (Case(2, 20, 150), replace(PLAIN_32, splits=3)),
    "plain, long tiles": (Case(2, 8, 300), replace(PLAIN_16, block_keys=64, programs_per_sm=1)),
    "plain, gaps between rows": (Case(2, 16, 40, spare_bytes=48), PLAIN_16),
    "plain, 20 splits": (Case(1, 16, 640), replace(PLAIN_16, splits=20)),
    "plain, empty splits": (Case(2, 16, 256, used=40), replace(PLAIN_16, splits=8)),
    "fp8, 5 heads, one tile": (Case(2, 5, 9, fp8=True), FP8_16),
    "fp8, more heads than a block": (Case(2, 40, 70, fp8=True), FP8_32),
    "fp8, long tiles": (Case(2, 16, 300, fp8=True), replace(FP8_16, block_keys=64)),
    "fp8, 4 splits, masked heads": (Case(2, 3, 700, fp8=True), replace(FP8_16, splits=4)),
    "fp8, empty splits": (Case(2, 17, 256, fp8=True, used=9), replace(FP8_32, splits=4)),
    "fp8, small values": (Case(2, 8, 130, fp8=True, magnitude=1e-4), FP8_16),
    "fp8, uneven scales": (Case(2, 8, 40, fp8=True, uneven=True), FP8_16),
    "plain, 64 heads": (Case(2, 64, 330), PLAIN_64),
    "fp8, 64 heads": (Case(2, 64, 330, fp8=True), FP8_64),
    "fp8, many heads, one tile": (Case(2, 40, 37, fp8=True), FP8_64),
    "fp8, many heads, empty splits": (Case(2, 33, 512, fp8=True, used=9), replace(FP8_64, splits=4)),
    "fp8, many heads, small values": (Case(2, 33, 130, fp8=True, magnitude=1e-4), FP8_64),
    "fp8, many heads, uneven scales": (Case(2, 33, 40, fp8=True, uneven=True), FP8_64),
}


@needs_compiler
@pytest.mark.parametrize("name", slow_if(CASES, {"plain, long tiles", "fp8, long tiles", "plain, 20 splits"}))
def test_the_emulated_kernel_equals_the_reference(name: str) -> None:
    case, launch = CASES[name]
    inputs = make_inputs(case, device=torch.device("cpu"))
    inputs.check(run(inputs, launch))


@needs_compiler
def test_the_merge_does_not_hide_nan() -> None:
    case, launch = Case(2, 16, 640), replace(PLAIN_16, splits=20)
    partial, lse = torch.randn(2, 20, 16, 512), torch.randn(2, 20, 16)
    lse[0, 17, 3] = float("nan")
    out = torch.zeros(2, 16, 512, dtype=torch.bfloat16)
    with mock.patch.object(cuda_source, "kernel", emulated_attention):
        cuda_impl.merge(case.shape, launch, partial, lse, out)
    assert bool(out[0, 3].isnan().all()) and int(out.isnan().sum()) == 512


@needs_compiler
@pytest.mark.parametrize("fp8", [False, True])
def test_earlier_sums_of_many_heads_shrink_when_a_much_larger_score_appears(fp8: bool) -> None:
    """Sums are multiplied only when a score exceeds the earlier ones by more than 8, which random rows seldom do."""
    inputs = make_inputs(Case(1, 33, 150, fp8=fp8), device=torch.device("cpu"))
    q, ids = inputs.q * 12, inputs.row_ids[0]
    rows = inputs.case.layout.decode(inputs.pool[ids.clamp_min(0)], torch.float32)
    scores = (rows @ q[0, 0].float() * inputs.case.scale).where(ids != EMPTY, -1e30)
    inputs = replace(inputs, q=q, row_ids=ids[scores.argsort()][None])  # the largest score of the first head comes last
    inputs.check(run(inputs, FP8_64 if fp8 else PLAIN_64))


@needs_compiler
@pytest.mark.parametrize("launch", [FP8_16, FP8_64], ids=["few heads", "many heads"])
def test_queries_that_are_not_aligned_are_copied_first(launch: LaunchConfig) -> None:
    inputs = make_inputs(Case(2, 3, 20, fp8=True), device=torch.device("cpu"))
    misaligned = torch.full((2, 3, 577), float("nan"), dtype=torch.bfloat16)[:, :, 1:]
    misaligned.copy_(inputs.q)
    inputs.check(run(replace(inputs, q=misaligned), launch))


KINDS = [(16, True), (64, False), (16, False), (32, True), (64, True)]  # 32 heads of plain rows use the block for 64


@needs_nvcc
@pytest.mark.parametrize(("heads", "fp8"), slow_if(KINDS, KINDS[2:]))
def test_the_kernel_compiles_for_sm_90_and_the_chosen_blocks_fit(heads: int, fp8: bool, tmp_path: Path) -> None:
    launch = HOPPER[fp8, heads]
    inputs = make_inputs(Case(2, heads, 40, fp8=fp8), device=torch.device("cpu"))
    tensors = (inputs.q, inputs.pool, inputs.row_ids, inputs.q, inputs.q)
    source, constants, _ = recorded(lambda: cuda_impl.attend(inputs.case.shape, launch, tensors, 1.0))
    compiled = compile_with_nvcc(source, constants, tmp_path)
    assert compiled.spilled_bytes <= 64, f"{compiled.spilled_bytes} bytes of registers are spilled"
    assert not compiled.serialized, "the kernel waits for every single product"
    registers = compiled.registers
    threads = 32 * launch.warps
    assert launch.programs_per_sm * threads * -(-registers // 8) * 8 <= REGISTERS_OF_SM, f"{registers} registers"
    shared_bytes = -(-(constants["SHARED_BYTES"] + 1024) // 128) * 128  # allocated in units of 128 bytes
    assert launch.programs_per_sm * shared_bytes <= SHARED_OF_SM


@needs_nvcc
def test_merge_compiles_for_sm_90(tmp_path: Path) -> None:
    compiled = compile_with_nvcc(cuda_impl.MERGE, {"THREADS": 128, "AT_ONCE": 16}, tmp_path)
    assert compiled.spilled_bytes == 0
