"""Measures the collectives of ranks that share one GPU against torch's one_shot_all_reduce, inside CUDA graphs.

    nvidia-cuda-mps-control -d
    python benchmarks/collectives.py --json collectives.json

Each graph holds 50 calls of one collective on bfloat16. All ranks replay it at the same time; the slowest rank counts.
Calls follow each other without other work, so the times contain the waits between ranks. `one shot` and `two shots` are
our all_reduce with a forced algorithm; `all_reduce` chooses between the two by size. For the gathers and
reduce_scatter, the size is the sum over all ranks. Without the multi-process service, ranks take turns, and a call
takes milliseconds.
"""

import os
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gpu_timing import replay_seconds, require_gpu
from report import make_parser, report

from hotset.engine.workers.distributed import make_world
from hotset.engine.workers.messages import WorkerRank
from hotset.kernels.collectives import cuda_impl
from hotset.models.split import Split

CALLS, REPLAYS = 50, 15
WIDTH = 7168  # bfloat16 values per token
TOKENS = (1, 8, 64, 256, 2048)
DEADLINE_S = 300.0
DEVICE = torch.device("cuda:0")


def microseconds(call: Callable[[], object]) -> float:
    """Returns the median time of a call on the slowest rank."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPLAYS):
        dist.barrier()
        times.append(replay_seconds(graph) / CALLS)
    medians: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(medians, statistics.median(times))
    return 1e6 * max(medians)


def with_one_shot_limit(limit: int, call: Callable[[], object]) -> Callable[[], object]:
    """Returns `call` with another limit of the size up to which all_reduce takes one shot."""

    def run() -> object:
        with mock.patch.object(cuda_impl, "ONE_SHOT_EXTRA_BYTES", limit):
            return call()

    return run


def measure(rank: WorkerRank) -> list[dict[str, Any]]:
    import torch.distributed._symmetric_memory as symmetric_memory

    torch.cuda.set_device(DEVICE)
    ranks, group = make_world(rank, DEVICE).collectives, dist.group.WORLD
    assert group is not None
    one_shot, name = torch.ops.symm_mem.one_shot_all_reduce, group.group_name
    rows = []
    for tokens in TOKENS:
        x = torch.zeros(tokens, WIDTH, dtype=torch.bfloat16, device=DEVICE)
        shared = symmetric_memory.empty(x.numel(), dtype=x.dtype, device=DEVICE)
        symmetric_memory.rendezvous(shared, group)
        shared.zero_()
        row: dict[str, Any] = {"ranks": rank.workers, "tokens": tokens, "KiB": x.nbytes >> 10}
        row["torch one shot us"] = microseconds(lambda shared=shared: one_shot(shared, "sum", name))
        row["one shot us"] = microseconds(with_one_shot_limit(1 << 60, lambda x=x: ranks.all_reduce(x)))
        row["two shots us"] = microseconds(with_one_shot_limit(-1, lambda x=x: ranks.all_reduce(x)))
        row["all_reduce us"] = microseconds(lambda x=x: ranks.all_reduce(x))
        per_rank = max(1, tokens // rank.workers)
        ranks.tokens_per_rank = [per_rank] * rank.workers
        every = torch.zeros(per_rank * rank.workers, WIDTH, dtype=torch.bfloat16, device=DEVICE)
        ids = torch.zeros(per_rank, 8, dtype=torch.int64, device=DEVICE)
        weights = torch.zeros(per_rank, 8, device=DEVICE)
        own = every[:per_rank].clone()
        row["all_gather_tokens us"] = microseconds(
            lambda own=own, ids=ids, weights=weights: ranks.all_gather_tokens(own, ids, weights)
        )
        row["reduce_scatter us"] = microseconds(lambda every=every: ranks.reduce_scatter(every))
        columns = torch.zeros(tokens, WIDTH // rank.workers, dtype=torch.bfloat16, device=DEVICE)
        row["all_gather_columns us"] = microseconds(lambda columns=columns: ranks.all_gather_columns(columns))
        rows.append(row)
    return rows


def run_rank(rank: WorkerRank, pipe: Connection) -> None:
    try:
        pipe.send(measure(rank))
    except BaseException:
        traceback.print_exc()
        pipe.send(None)
    os._exit(0)  # destroying the process group could wait for a rank that failed


def measure_ranks(size: int) -> list[dict[str, Any]]:
    context = get_context("spawn")
    processes, pipes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(size):
            rank = WorkerRank(
                number=number,
                workers=size,
                stage=0,
                stages=1,
                split=Split(number, size),
                rendezvous=str(Path(folder) / "rendezvous"),
                device=str(DEVICE),
                ranks_on_gpu=size,
            )
            pipe, end = context.Pipe()
            processes.append(context.Process(target=run_rank, args=(rank, end), daemon=True))
            processes[-1].start()
            end.close()
            pipes.append(pipe)
        try:
            rows = pipes[0].recv() if pipes[0].poll(DEADLINE_S) else None
        finally:
            for process in processes:
                process.join(5.0)
                if process.is_alive():
                    process.kill()
    if rows is None:
        sys.exit(f"error: {size} ranks failed, or did not finish within {DEADLINE_S:g} s")
    return list(rows)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    arguments = parser.parse_args()
    require_gpu()
    rows = [row for size in arguments.ranks for row in measure_ranks(size)]
    report("Collectives of ranks on one GPU", rows, arguments.json)


if __name__ == "__main__":
    main()
