"""Tests index_topk's CUDA scoring kernel without a GPU: emulated on the CPU, and compiled for sm_90a.

test_index_topk.py tests it on a GPU.
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
from index_topk_cases import SCALE, Case, Inputs, make_inputs, reference_scores, with_padding
from matrix import slow_if

from hotset.base.errors import InternalError
from hotset.kernels import cuda_source
from hotset.kernels.index_topk import cuda_score
from hotset.kernels.index_topk.cuda_score import BlockShape
from hotset.kernels.index_topk.scores import Scores

HEADER = Path(__file__).with_name("warpgroup_on_cpu.h")
NVCC = shutil.which("nvcc")
NAN = float("nan")
CPU = torch.device("cpu")

_folder = tempfile.TemporaryDirectory(prefix="index-score-on-cpu-")


@cache
def with_warpgroups(source: Path) -> Path:
    joined = Path(_folder.name) / f"{source.stem}.cpp"
    joined.write_text(f'#include "{HEADER}"\n#include "{source}"\n')
    return joined


def emulated(source: Path, name: str, **constants: int) -> cuda_on_cpu.EmulatedKernel:
    return cuda_on_cpu.kernel(with_warpgroups(source), name, **constants)


def run(inputs: Inputs, shape: BlockShape, k: int = 0, blocks: int = 2) -> Scores:
    context = -(-max(inputs.segments.lengths, default=512) // 64) * 64
    with (
        mock.patch.object(cuda_source, "kernel", emulated),
        mock.patch.object(cuda_score, "multiprocessors", lambda _: blocks),
        mock.patch.object(torch, "empty", lambda *size, **kinds: torch.ones(*size, **kinds).mul_(-77)),
    ):
        return cuda_score.score(
            inputs.q,
            inputs.weights,
            inputs.keys,
            inputs.keys.seat_of,
            inputs.segments.positions,
            context,
            k,
            SCALE,
            shape,
        )


# Queries, the shape of a block, and the number of blocks.
CASES = {
    "one block of keys": (Case((1,), (70,), block_rows=318), BlockShape(2, 1), 2),
    "more blocks than tiles": (Case((1,), (100,), block_rows=318), BlockShape(2, 1), 8),
    "several queries per block": (Case((1,) * 5, (30, 700, 64, 65, 1)), BlockShape(4, 2), 2),
    "64 heads": (Case((1,) * 2, (330, 200), heads=64), BlockShape(3, 3), 2),
    "96 of 128 heads, float16": (Case((1,), (150,), heads=96, dtype=torch.float16), BlockShape(2, 1), 2),
    "5 heads, short blocks of keys": (Case((1,) * 2, (300, 77), heads=5, block_rows=44, parts=2), BlockShape(4, 2), 4),
    "several index groups": (
        Case((1,) * 2, (900, 70), block_rows=66, parts=5, step=3, first_part=2),
        BlockShape(2, 2),
        2,
    ),
    "the shape for 32 heads, more tiles than stages": (Case((1,) * 2, (1500, 400)), cuda_score.TUNED[1], 1),
}


@pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="no host compiler for C++")
@pytest.mark.parametrize("name", slow_if(CASES, {"96 of 128 heads, float16"}))
def test_emulated_kernel_equals_the_reference(name: str) -> None:
    case, shape, blocks = CASES[name]
    inputs = make_inputs(case, seed=1, device=CPU)
    scores = run(inputs, shape, blocks=blocks)
    for row, expected in enumerate(reference_scores(inputs)):
        got = scores.values[row, : len(expected)]
        assert float((got - expected).norm() / expected.norm()) < 1e-4
        assert bool((scores.values[row, len(expected) :] == -77).all()), "positions that a query does not see"
        moments = scores.moments[row, : int(scores.shares[row])].sum(0)
        torch.testing.assert_close(moments[0], got.sum(), rtol=1e-4, atol=1e-4 * float(got.abs().sum()))
        torch.testing.assert_close(moments[1], got.square().sum(), rtol=1e-4, atol=0.0)


@pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="no host compiler for C++")
def test_padded_queries_and_queries_that_select_every_position_are_not_scored() -> None:
    inputs = with_padding(make_inputs(Case((1,) * 4, (200, 90, 91, 130)), seed=2, device=CPU))
    values = run(inputs, BlockShape(2, 1), k=90).values
    assert (values != -77).any(1).tolist() == [False, True, False, True, True, False]


@pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="no host compiler for C++")
def test_scores_do_not_depend_on_the_batch_or_on_the_number_of_blocks() -> None:
    inputs = make_inputs(Case((1,) * 3, (330, 100, 200)), seed=3, device=CPU)
    together = run(inputs, BlockShape(4, 2), blocks=3).values
    for query, length in enumerate(inputs.segments.lengths):
        part = slice(query, query + 1)
        segments = replace(inputs.segments, counts=(1,), lengths=(length,), positions=inputs.segments.positions[part])
        keys = replace(inputs.keys, seat_of=inputs.keys.seat_of[part])
        alone = run(Inputs(inputs.q[part], inputs.weights[part], keys, segments), BlockShape(2, 1)).values
        assert torch.equal(alone[0, :length], together[query, :length])


def test_stages_that_move_between_warpgroups_are_refused() -> None:
    """A warpgroup that is ahead could take a tile for one that has arrived. 22 stages failed on a GPU."""
    with pytest.raises(InternalError, match="22 stages do not divide evenly between 4 warpgroups"):
        BlockShape(22, 4)


def test_stages_that_exceed_shared_memory_are_refused() -> None:
    inputs = make_inputs(Case((1,), (70,), heads=128), seed=5, device=CPU)
    with pytest.raises(InternalError, match="bytes of shared memory"):
        run(inputs, BlockShape(26, 2))


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize("groups", slow_if({str(n): n for n in cuda_score.TUNED}, {"3", "4"}))
def test_kernel_compiles_for_sm_90a_and_a_block_fits(groups: str, tmp_path: Path) -> None:
    inputs = make_inputs(Case((1,), (70,), heads=32 * int(groups)), seed=4, device=CPU)
    shape = cuda_score.TUNED[int(groups)]
    recorder = mock.Mock()
    with mock.patch.object(cuda_source, "kernel", recorder):
        arguments = (inputs.keys.seat_of, inputs.segments.positions, 4096, 0, SCALE)
        cuda_score.score(inputs.q, inputs.weights, inputs.keys, *arguments)
    (source, _), constants = recorder.call_args
    macros = [f"-D{name}={value}" for name, value in constants.items()]
    options = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-Xptxas", "-v", "-Werror", "all-warnings"]
    command = [str(NVCC), *options, "-cubin", *macros, str(source), "-o", str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert " 0 bytes stack frame, 0 bytes spill stores" in done.stderr, done.stderr
    registers = int(done.stderr.split(" registers")[0].split()[-1])
    assert shape.threads * -(-registers // 8) * 8 <= 64 << 10, f"{registers} registers"
