"""Compares the collectives of real processes with the reference: over gloo on CPUs, and with several ranks on one GPU.

On a GPU, the multi-process service must run: nvidia-cuda-mps-control -d
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from engine.symmetric_ranks import COLLECTIVES, has_mps, run_ranks
from torch import Tensor

from hotset.base.errors import EngineStopped
from hotset.engine.workers.distributed import World
from hotset.engine.workers.messages import WorkerRank
from hotset.kernels.collectives import reference

REPLAYS = 200
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not has_mps(), reason="needs nvidia-cuda-mps-control -d")]


def marked(*values: object) -> list[object]:
    return [pytest.param(value, marks=on_gpu) for value in values]


@dataclass(frozen=True)
class Inputs:
    """What one rank passes to each collective, in the order of `run_all`."""

    reduced: Sequence[Tensor]
    columns: Tensor
    tokens: Sequence[Tensor]
    scattered: Tensor

    @staticmethod
    def random(
        seed: int, sizes: Sequence[Sequence[int]], own: int, total: int, dtype: torch.dtype, device: torch.device
    ) -> "Inputs":
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        ids = torch.randint(0, 256, (own, 8), generator=generator).to(device)
        return Inputs(
            reduced=[randn(*shape) for shape in sizes],
            columns=randn(5, 1003, dtype=torch.float32),
            tokens=[randn(own, 520), ids, randn(own, 8, dtype=torch.float32)],
            scattered=randn(total, 520),
        )

    @property
    def all(self) -> list[Tensor]:
        return [*self.reduced, self.columns, *self.tokens, self.scattered]

    def rolled(self, steps: int) -> "Inputs":
        return Inputs(
            reduced=[x.roll(steps, dims=-1) for x in self.reduced],
            columns=self.columns.roll(steps, dims=-1),
            tokens=[x.roll(steps, dims=-1) for x in self.tokens],
            scattered=self.scattered.roll(steps, dims=-1),
        )


def run_all(world: World, inputs: Inputs) -> list[Tensor]:
    ranks = world.collectives
    return [
        *(ranks.all_reduce(x.clone()) for x in inputs.reduced),
        ranks.all_gather_columns(inputs.columns),
        *ranks.all_gather_tokens(*inputs.tokens),
        ranks.reduce_scatter(inputs.scattered.clone()),
        ranks.broadcast(inputs.columns.clone()),
    ]


def expected(parts: Sequence[Inputs], tokens_per_rank: Sequence[int], rank: int) -> list[Tensor]:
    return [
        *(reference.all_reduce(of_ranks) for of_ranks in zip(*(part.reduced for part in parts), strict=True)),
        reference.all_gather_columns([part.columns for part in parts]),
        *(reference.all_gather_tokens(of_ranks) for of_ranks in zip(*(part.tokens for part in parts), strict=True)),
        reference.reduce_scatter([part.scattered for part in parts], tokens_per_rank, rank),
        parts[0].columns,
    ]


def equal(result: Tensor, right: Tensor) -> Tensor:
    """Returns which values are right. NCCL adds in an order of its own, and rounds to bf16 after every addition."""
    if COLLECTIVES == "nccl" and result.is_cuda:
        return torch.isclose(result, right, rtol=0.05, atol=0.05)
    return result == right


def check_every_collective(world: World, rank: WorkerRank, device: torch.device) -> None:
    """Messages of a few bytes and of several rounds alternate. Ranks have unequal numbers of tokens, some none."""
    ranks = world.collectives
    for number in range(6):
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        sizes = [(3,), (64, 520), (1025, 1031) if device.type == "cuda" else (33, 31), (1,), (300, 520)]
        tokens = [(5 * number + 3 * member) % 7 for member in range(ranks.size)]
        ranks.tokens_per_rank = tokens
        parts = [
            Inputs.random(100 * number + member, sizes, own, sum(tokens), dtype, device)
            for member, own in enumerate(tokens)
        ]
        results = run_all(world, parts[ranks.rank])
        for name, (result, right) in enumerate(zip(results, expected(parts, tokens, ranks.rank), strict=True)):
            is_right = equal(result, right).all().item()
            assert result.dtype == right.dtype and is_right, f"result {name} of call {number}"
    ranks.barrier()


@pytest.mark.slow
def test_collectives_of_cpu_processes_give_the_result_of_the_reference() -> None:
    run_ranks(check_every_collective, "cpu", size=3)


@pytest.mark.parametrize("size", marked(2, 4, 8))
def test_collectives_of_ranks_on_one_gpu_give_the_bits_of_the_reference(size: int) -> None:
    run_ranks(check_every_collective, "cuda:0", size)


def check_replays(world: World, rank: WorkerRank, device: torch.device) -> None:
    """Replays follow each other without a wait of the host, so that ranks get ahead of each other."""
    ranks, sizes = world.collectives, [(5, 520), (1025, 1031), (3,), (64, 7168)]
    ranks.tokens_per_rank = tokens = [5] * ranks.size
    parts = [Inputs.random(seed, sizes, 5, sum(tokens), torch.bfloat16, device) for seed in range(ranks.size)]
    static = parts[ranks.rank].rolled(0)
    run_all(world, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_all(world, static)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for replay in range(REPLAYS):
        rolled = [part.rolled(replay) for part in parts]
        for target, source in zip(static.all, rolled[ranks.rank].all, strict=True):
            target.copy_(source)
        right = expected(rolled, tokens, ranks.rank)
        graph.replay()
        for result, tensor in zip(results, right, strict=True):
            wrong += (~equal(result, tensor)).sum()
        if replay % 40 == 0:  # calls outside of graphs in between
            for result, tensor in zip(run_all(world, static), right, strict=True):
                wrong += (~equal(result, tensor)).sum()
    assert wrong.item() == 0, f"{wrong.item()} values are wrong"


@pytest.mark.parametrize("size", marked(2, 4, 8))
def test_a_graph_of_collectives_is_right_in_each_of_200_replays(size: int) -> None:
    run_ranks(check_replays, "cuda:0", size)


def check_abort(world: World, rank: WorkerRank, device: torch.device) -> None:
    """The last rank never replays the graph. Its process lives until the others are done."""
    ranks, x = world.collectives, torch.ones(64, 7168, dtype=torch.bfloat16, device=device)
    ranks.all_reduce(x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ranks.all_reduce(x)
    if ranks.rank < ranks.size - 1:
        graph.replay()
        done = torch.cuda.current_stream().record_event()
        time.sleep(0.2)  # if the kernel did not wait, it would have ended
        assert not done.query(), "the kernel did not wait for the missing rank"
        world.abort.set()
        deadline = time.monotonic() + 20.0
        while not done.query():
            assert time.monotonic() < deadline, "the kernel ignores the abort flag"
            time.sleep(0.001)
        with pytest.raises(EngineStopped):
            world.abort.check()
        with pytest.raises(EngineStopped):
            ranks.barrier()
    dist.barrier()


@pytest.mark.skipif(COLLECTIVES == "nccl", reason="kernels of NCCL end with their process only")
@pytest.mark.parametrize("size", marked(2, 4, 8))
def test_the_abort_flag_frees_ranks_that_wait_in_a_graph_for_one_that_never_arrives(size: int) -> None:
    run_ranks(check_abort, "cuda:0", size)


def check_stages(world: World, rank: WorkerRank, device: torch.device) -> None:
    """Every stage adds 1 in each step. On a GPU, steps are replays of a graph, and stages get ahead of each other."""
    size, last = rank.split.size, rank.stage == rank.stages - 1
    base = torch.arange(301 * 1031, device=device).remainder(1000).view(301, 1031).to(torch.float32)
    x, out = base.clone(), torch.empty_like(base)

    def step() -> None:
        if rank.stage == 0:
            out.copy_(x)
        else:
            world.receive(out, rank.number - size)
        out.add_(1)
        if size > 1:
            out.copy_(world.collectives.all_reduce(out / size))
        if not last:
            world.send(out, rank.number + size)

    step()
    run = step
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(50 if device.type == "cuda" else 5):
        x.copy_(base + number)
        run()
        wrong += (out != base + number + rank.stage + 1).sum()
    assert wrong.item() == 0, f"{wrong.item()} values are wrong"


@pytest.mark.slow
def test_tensors_pass_through_stages_of_cpu_processes() -> None:
    run_ranks(check_stages, "cpu", size=1, stages=3)


@pytest.mark.parametrize("shape", marked((1, 2), (2, 2), (1, 4), (2, 4)), ids=str)
def test_tensors_pass_through_captured_stages_on_one_gpu(shape: tuple[int, int]) -> None:
    size, stages = shape
    run_ranks(check_stages, "cuda:0", size, stages)
