"""Tests sparse_attention's CUDA kernels without a GPU: emulated on the CPU, and compiled for sm_90.

test_sparse_attention.py tests them on a GPU.
"""

import shutil
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import cuda_on_cpu
import pytest
import torch
from matrix import slow_if
from sparse_attention_cases import Case, Inputs, make_inputs
from torch import Tensor

from hotset.kernels import cuda_source
from hotset.kernels.sparse_attention import cuda_impl
from hotset.kernels.sparse_attention.launch import HOPPER, LaunchConfig

HEADER = Path(__file__).with_name("matrix_units_on_cpu.h")
NVCC = shutil.which("nvcc")
SHARED_OF_SM = 228 << 10  # bytes; each block occupies 1 KiB more than it requests
REGISTERS_OF_SM = 64 << 10
THREADS = 32 * cuda_impl.WARPS

_folder = tempfile.TemporaryDirectory(prefix="sparse-attention-on-cpu-")


@cache
def with_matrix_units(source: Path) -> Path:
    joined = Path(_folder.name) / f"{source.stem}.cpp"
    joined.write_text(f'#include "{HEADER}"\n#include "{source}"\n')
    return joined


def emulated(source: Path, name: str, **constants: int) -> cuda_on_cpu.EmulatedKernel:
    return cuda_on_cpu.kernel(with_matrix_units(source), name, **constants)


def run(inputs: Inputs, launch: LaunchConfig) -> Tensor:
    case = inputs.case
    shape = (case.queries, launch.splits, case.heads)
    out = torch.full((*shape[::2], 512), float("nan"), dtype=torch.bfloat16)
    partial, lse = torch.full((*shape, 512), float("nan")), torch.full(shape, float("nan"))
    tensors = (inputs.q, inputs.pool.view(torch.uint8), inputs.row_ids, partial if launch.splits > 1 else out, lse)
    with mock.patch.object(cuda_source, "kernel", emulated):
        cuda_impl.attend(case.shape, launch, tensors, case.scale * 1.4426950408889634)
        if launch.splits > 1:
            written = ~partial.isnan().all(-1)
            assert torch.equal(written, lse != float("-inf")), "splits with rows must write sums, others must not"
            cuda_impl.merge(case.shape, launch, partial, lse, out)
    return out


PLAIN_16, PLAIN_32, FP8_16, FP8_32 = (HOPPER[fp8, heads] for fp8 in (False, True) for heads in (16, 32))
CASES = {
    "plain, 16 heads": (Case(2, 16, 300), PLAIN_16),
    "plain, 5 heads, one tile": (Case(2, 5, 9), PLAIN_16),
    "plain, 20 heads, 3 splits": (Case(2, 20, 150), replace(PLAIN_32, splits=3)),
    "plain, more heads than a block": (Case(2, 20, 70), PLAIN_16),
    "plain, long tiles": (Case(2, 8, 300), replace(PLAIN_16, block_keys=64, programs_per_sm=1)),
    "plain, gaps between rows": (Case(2, 16, 40, spare_bytes=48), PLAIN_16),
    "plain, 8 splits": (Case(3, 16, 500), replace(PLAIN_16, splits=8)),
    "plain, 2 splits, more heads than a block": (Case(2, 37, 130), replace(PLAIN_32, splits=2)),
    "plain, empty splits": (Case(2, 16, 256, used=40), replace(PLAIN_16, splits=8)),
    "fp8, 16 heads": (Case(2, 16, 400, fp8=True), FP8_16),
    "fp8, 5 heads, one tile": (Case(2, 5, 9, fp8=True), FP8_16),
    "fp8, 20 heads, 3 splits": (Case(2, 20, 150, fp8=True), replace(FP8_32, splits=3)),
    "fp8, 32 heads": (Case(2, 32, 300, fp8=True), FP8_32),
    "fp8, more heads than a block": (Case(2, 40, 70, fp8=True), FP8_32),
    "fp8, long tiles": (Case(2, 16, 300, fp8=True), replace(FP8_16, block_keys=64)),
    "fp8, 8 splits": (Case(2, 16, 256, fp8=True), replace(FP8_16, splits=8)),
    "fp8, 4 splits, masked heads": (Case(2, 3, 700, fp8=True), replace(FP8_16, splits=4)),
    "fp8, empty splits": (Case(2, 17, 256, fp8=True, used=9), replace(FP8_32, splits=4)),
    "fp8, large": (Case(2, 8, 130, fp8=True, magnitude=3e4), FP8_16),
    "fp8, large, 4 splits": (Case(2, 8, 130, fp8=True, magnitude=3e4), replace(FP8_16, splits=4)),
    "fp8, small": (Case(2, 8, 130, fp8=True, magnitude=1e-4), FP8_16),
    "fp8, small, 4 splits": (Case(2, 8, 130, fp8=True, magnitude=1e-4), replace(FP8_16, splits=4)),
    "fp8, uneven scales": (Case(2, 8, 40, fp8=True, uneven=True), FP8_16),
    "fp8, gaps between rows": (Case(2, 16, 40, fp8=True, spare_bytes=48), FP8_16),
}


# Except for the long tiles, every property of these cases also occurs in a case that is not slow.
SLOW = {
    "plain, more heads than a block",
    "plain, long tiles",
    "plain, 8 splits",
    "fp8, 32 heads",
    "fp8, 8 splits",
    "fp8, long tiles",
    "fp8, large, 4 splits",
    "fp8, small, 4 splits",
}


@pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="no host compiler for C++")
@pytest.mark.parametrize("name", slow_if(CASES, SLOW))
def test_emulated_kernel_equals_the_reference(name: str) -> None:
    case, launch = CASES[name]
    inputs = make_inputs(case, device=torch.device("cpu"))
    inputs.check(run(inputs, launch))


@pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="no host compiler for C++")
def test_queries_that_are_not_aligned_to_eight_bytes_are_copied_first() -> None:
    inputs = make_inputs(Case(2, 3, 20, fp8=True), device=torch.device("cpu"))
    misaligned = torch.full((2, 3, 577), float("nan"), dtype=torch.bfloat16)[:, :, 1:]
    misaligned.copy_(inputs.q)
    inputs.check(run(replace(inputs, q=misaligned), FP8_16))


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("fp8", [False, True])
def test_kernel_compiles_for_sm_90_and_the_intended_number_of_blocks_fits(
    fp8: bool, heads: int, tmp_path: Path
) -> None:
    launch = HOPPER[fp8, heads]
    recorder = mock.Mock()
    inputs = make_inputs(Case(2, heads, 40, fp8=fp8), device=torch.device("cpu"))
    with mock.patch.object(cuda_source, "kernel", recorder):
        cuda_impl.attend(inputs.case.shape, launch, (inputs.q, inputs.pool, inputs.row_ids, inputs.q, inputs.q), 1.0)
    (source, _), constants = recorder.call_args
    macros = [f"-D{name}={value}" for name, value in constants.items()]
    options = ["-arch=sm_90", "-std=c++17", "-Xptxas", "-v", "-Werror", "all-warnings", "-cubin"]
    command = [str(NVCC), *options, *macros, str(source), "-o", str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    spilled = int(done.stderr.split(" bytes spill stores")[0].split()[-1])
    registers = int(done.stderr.split(" registers")[0].split()[-1])
    assert spilled <= 64, f"{spilled} B of registers spilled"
    assert launch.programs_per_sm * THREADS * -(-registers // 8) * 8 <= REGISTERS_OF_SM, f"{registers} registers"
    shared_bytes = -(-(constants["SHARED_BYTES"] + 1024) // 128) * 128  # allocated in units of 128 bytes
    assert launch.programs_per_sm * shared_bytes <= SHARED_OF_SM


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_merge_compiles_for_sm_90(tmp_path: Path) -> None:
    options = ["-arch=sm_90", "-std=c++17", "-Werror", "all-warnings", "-DTHREADS=128", "-cubin"]
    command = [str(NVCC), *options, str(cuda_impl.MERGE), "-o", str(tmp_path / "merge.cubin")]
    subprocess.run(command, check=True, timeout=240)
