"""Tests index_topk's CUDA scoring kernel without a GPU: emulated on the CPU, and compiled for sm_90a.

test_index_topk.py tests it on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import needs_compiler
from hopper_on_cpu import emulated_scoring
from index_topk_cases import SCALE, Case, Inputs, make_inputs, reference_scores, with_padding
from matrix import slow_if
from nvcc import REGISTERS_OF_SM, compile_with_nvcc, needs_nvcc, recorded
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels import cuda_source
from hotset.kernels.index_topk import cuda_score
from hotset.kernels.index_topk.cuda_score import BlockShape
from hotset.kernels.index_topk.scores import Scores

NAN = float("nan")
CPU = torch.device("cpu")


def run(inputs: Inputs, shape: BlockShape, k: int = 0, blocks: int = 2, kernel: Any = emulated_scoring) -> Scores:
    context = -(-max(inputs.segments.lengths, default=512) // 64) * 64
    with (
        mock.patch.object(cuda_source, "kernel", kernel),
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


@needs_compiler
@pytest.mark.parametrize("name", slow_if(CASES, {"96 of 128 heads, float16"}))
def test_emulated_kernel_equals_the_reference(name: str) -> None:
    case, shape, blocks = CASES[name]
    inputs = make_inputs(case, seed=1, device=CPU)
    scores = run(inputs, shape, blocks=blocks)
    for row, expected in enumerate(reference_scores(inputs)):
        got = scores.values[row, : len(expected)]
        assert float((got - expected).norm() / expected.norm()) < 1e-4
        assert bool((scores.values[row, len(expected) :] == -77).all()), "an invisible position was scored"
        moments = scores.moments[row, : int(scores.shares[row])].sum(0)
        torch.testing.assert_close(moments[0], got.sum(), rtol=1e-4, atol=1e-4 * float(got.abs().sum()))
        torch.testing.assert_close(moments[1], got.square().sum(), rtol=1e-4, atol=0.0)


@needs_compiler
def test_padded_queries_and_queries_that_select_every_position_are_not_scored() -> None:
    inputs = with_padding(make_inputs(Case((1,) * 4, (200, 90, 91, 130)), seed=2, device=CPU))
    values = run(inputs, BlockShape(2, 1), k=90).values
    assert (values != -77).any(1).tolist() == [False, True, False, True, True, False]


@needs_compiler
@pytest.mark.parametrize("blocks", [1, 3])
def test_a_block_finds_its_share_among_more_queries_than_a_warp_has_lanes(blocks: int) -> None:
    """Each of the 32 lanes counts the tiles of up to three of the 70 queries, some of which are not scored."""
    lengths = tuple(1 + 37 * n % 140 for n in range(70))
    inputs = make_inputs(Case((1,) * 70, lengths), seed=9, device=CPU)
    values = run(inputs, BlockShape(2, 1), k=80, blocks=blocks).values
    for row, expected in enumerate(reference_scores(inputs)):
        if len(expected) <= 80:
            assert bool((values[row] == -77).all())
        else:
            assert float((values[row, : len(expected)] - expected).norm() / expected.norm()) < 1e-4


@needs_compiler
def test_scores_do_not_depend_on_the_batch_or_on_the_number_of_blocks() -> None:
    inputs = make_inputs(Case((1,) * 3, (330, 100, 200)), seed=3, device=CPU)
    together = run(inputs, BlockShape(4, 2), blocks=3).values
    for query, length in enumerate(inputs.segments.lengths):
        part = slice(query, query + 1)
        segments = replace(inputs.segments, counts=(1,), lengths=(length,), positions=inputs.segments.positions[part])
        keys = replace(inputs.keys, seat_of=inputs.keys.seat_of[part])
        alone = run(Inputs(inputs.q[part], inputs.weights[part], keys, segments), BlockShape(2, 1)).values
        assert torch.equal(alone[0, :length], together[query, :length])


# A case, the number of blocks, and how many tiles they prefetch. A block prefetches tiles of its first query only, at
# most one per warpgroup.
PREFETCHED = {
    "4, 2 and 3 tiles, divided into shares of 5 and 4": (Case((1,) * 3, (250, 100, 190)), 2, 2 + 1),
    "a block for each tile": (Case((1,) * 2, (130, 70)), 8, 5),
    "several index groups": (Case((1,) * 2, (900, 70), block_rows=66, parts=5, step=3, first_part=2), 2, 4),
    "more than MAX_PREFETCH_QUERIES": (Case((1,) * 5, (70,) * 5), 2, 0),
}


@needs_compiler
@pytest.mark.parametrize("name", PREFETCHED)
def test_the_first_tiles_of_the_share_of_every_block_are_prefetched(name: str) -> None:
    kernels: list[cuda_on_cpu.EmulatedKernel] = []

    def recorded(source: Path, name: str, **constants: int) -> cuda_on_cpu.EmulatedKernel:
        kernels.append(emulated_scoring(source, name, **constants))
        return kernels[-1]

    def counters() -> tuple[int, int]:
        return kernels[0].counter("tiles_prefetched"), kernels[0].counter("prefetched_in_vain")

    case, blocks, prefetched = PREFETCHED[name]
    inputs = make_inputs(case, seed=6, device=CPU)
    run(inputs, BlockShape(4, 2), blocks=blocks, kernel=recorded)
    before = counters()
    run(inputs, BlockShape(4, 2), blocks=blocks, kernel=recorded)
    assert counters() == (before[0] + prefetched, before[1])


@dataclass(frozen=True)
class LateInputs:
    """Inputs whose seats, positions and pages the previous launch writes when it ends."""

    memory: Tensor  # seats, positions and pages, and then numbers that the kernel must not read
    inputs: Inputs  # with views of `memory`
    correct: Tensor  # the seats, positions and pages that the previous launch writes

    @staticmethod
    def make(inputs: Inputs) -> "LateInputs":
        keys, queries = inputs.keys, inputs.keys.seat_of.shape[0]
        correct = torch.cat([keys.seat_of, inputs.segments.positions, keys.table.flatten()])
        memory = torch.cat([correct, torch.zeros(1 << 10, dtype=torch.int64)])
        table = memory[2 * queries : correct.numel()].view(keys.table.shape)
        segments = replace(inputs.segments, positions=memory[queries : 2 * queries])
        late_keys = replace(keys, seat_of=memory[:queries], table=table)
        return LateInputs(memory, replace(inputs, keys=late_keys, segments=segments), correct)

    def run(self, shape: BlockShape, blocks: int) -> tuple[Tensor, int]:
        """Returns the scores, and the number of tiles that were prefetched in vain.

        Fails if memory outside the keys was prefetched, or if numbers after the table were read.
        """
        kernels: list[cuda_on_cpu.EmulatedKernel] = []
        keys = self.inputs.keys.blocks
        last = sum((size - 1) * stride for size, stride in zip(keys.shape, keys.stride(), strict=True))
        end_of_correct = self.memory.data_ptr() + self.correct.nbytes

        def kernel(source: Path, name: str, **constants: int) -> cuda_on_cpu.EmulatedKernel:
            kernels.append(emulated_scoring(source, name, **constants))
            kernels[0].write_late(self.memory, self.correct)
            kernels[0].set_range("unreadable", end_of_correct, self.memory.data_ptr() + self.memory.nbytes)
            kernels[0].set_range("prefetchable", keys.data_ptr(), keys.data_ptr() + -(-(last + 1) // 16) * 16)
            before.append(kernels[0].counter("prefetched_in_vain"))
            return kernels[0]

        before: list[int] = []
        values = run(self.inputs, shape, blocks=blocks, kernel=kernel).values
        for name in ("unreadable", "prefetchable"):
            kernels[0].set_range(name, 0, 0)
        return values, kernels[0].counter("prefetched_in_vain") - before[0]


def fill(seat: int | None = None, position: int | None = None, page: int | None = None) -> Callable[[Inputs], object]:
    """Returns a function that writes these numbers to inputs."""

    def write(inputs: Inputs) -> None:
        targets = (inputs.keys.seat_of, inputs.segments.positions, inputs.keys.table)
        for target, value in zip(targets, (seat, position, page), strict=True):
            if value is not None:
                target.fill_(value)

    return write


LARGEST, SMALLEST = (1 << 63) - 1, -(1 << 63)
# What is in memory before the previous launch ends. There are three seats, three columns of the table, and five pages.
STALE = {
    "the largest numbers": fill(LARGEST, LARGEST, LARGEST),
    "the smallest numbers": fill(SMALLEST, SMALLEST, SMALLEST),
    "random numbers": lambda inputs: [
        numbers.random_(SMALLEST, LARGEST)
        for numbers in (inputs.keys.seat_of, inputs.segments.positions, inputs.keys.table)
    ],
    "a shorter context": fill(position=40),
    "a context of more pages than the table has columns": fill(position=500),
    "such a context in the last seat": fill(seat=2, position=500),  # the numbers after the table are not pages
    "a seat behind the last": fill(seat=3),
    "a page behind the last": fill(page=5),
    "a page far behind the last": fill(page=1 << 33),
}


@needs_compiler
@pytest.mark.parametrize("stale", STALE)
def test_seats_positions_and_pages_may_be_anything_before_the_previous_launch_has_ended(stale: str) -> None:
    inputs = make_inputs(Case((1,), (70,), block_rows=44), seed=7, device=CPU)
    assert inputs.keys.table.shape == (3, 3) and inputs.keys.blocks.shape[1] == 5
    expected = run(inputs, BlockShape(4, 4)).values
    late = LateInputs.make(inputs)
    STALE[stale](late.inputs)
    values, _ = late.run(BlockShape(4, 4), blocks=1)
    assert torch.equal(values, expected)


@needs_compiler
def test_tiles_are_prefetched_before_the_previous_launch_has_ended() -> None:
    """Until the previous launch ends, the query has the seat of another query, whose tile is prefetched in vain.

    In some launches, the warp that prefetches begins only after the previous launch has ended.
    """
    inputs = make_inputs(Case((1,) * 2, (100, 90)), seed=8, device=CPU)
    expected = run(inputs, BlockShape(2, 1)).values

    def prefetches_in_vain() -> bool:
        late = LateInputs.make(inputs)
        late.inputs.keys.seat_of.copy_(inputs.keys.seat_of.flip(0))
        values, in_vain = late.run(BlockShape(2, 1), blocks=1)
        assert torch.equal(values, expected) and in_vain <= 1
        return in_vain == 1

    assert any(prefetches_in_vain() for _ in range(30))


def test_stages_that_do_not_divide_evenly_between_warpgroups_are_refused() -> None:
    """A warpgroup that is ahead could read a stage before its tile has arrived. 22 stages failed on a GPU."""
    with pytest.raises(InternalError, match="22 stages do not divide evenly between 4 warpgroups"):
        BlockShape(22, 4)


def test_stages_that_exceed_shared_memory_are_refused() -> None:
    inputs = make_inputs(Case((1,), (70,), heads=128), seed=5, device=CPU)
    with pytest.raises(InternalError, match="bytes of shared memory"):
        run(inputs, BlockShape(26, 2))


@needs_nvcc
@pytest.mark.parametrize("groups", slow_if([str(n) for n in cuda_score.TUNED], "234"))
def test_kernel_compiles_for_sm_90a_and_a_block_fits(groups: str, tmp_path: Path) -> None:
    inputs = make_inputs(Case((1,), (70,), heads=32 * int(groups)), seed=4, device=CPU)
    shape = cuda_score.TUNED[int(groups)]
    arguments = (inputs.keys.seat_of, inputs.segments.positions, 4096, 0, SCALE)
    source, constants, _ = recorded(lambda: cuda_score.score(inputs.q, inputs.weights, inputs.keys, *arguments))
    compiled = compile_with_nvcc(source, constants, tmp_path)
    assert compiled.stack_bytes == compiled.spilled_bytes == 0
    registers = compiled.registers
    assert shape.threads * -(-registers // 8) * 8 <= REGISTERS_OF_SM, f"{registers} registers"
