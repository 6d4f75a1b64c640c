"""Runs functions in processes that are ranks of one `World`, on CPUs or together on one GPU."""

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from hotset.base.devices import mps_pipe_directory
from hotset.base.engine_settings import CollectivesChoice
from hotset.engine.workers.distributed import World, make_world
from hotset.engine.workers.messages import WorkerRank
from hotset.models.split import Split

DEADLINE_S = 240.0
# How ranks on a GPU exchange data. `scripts/gpu ranks` runs their tests again with "nccl".
COLLECTIVES: CollectivesChoice = "nccl" if os.environ.get("HOTSET_TEST_COLLECTIVES") == "nccl" else "auto"
Work = Callable[[World, WorkerRank, torch.device], Any]


def has_mps() -> bool:
    """Returns whether the multi-process service runs. Without it, ranks take turns on a GPU, and tests take minutes."""
    return (mps_pipe_directory() / "control").exists()


def run_ranks(work: Work, device: str, size: int, stages: int = 1) -> list[Any]:
    """Calls `work(world, rank, device)` in `stages` x `size` processes. Returns the results by number of the worker.

    Fails with the traceback of the first rank that fails, or if the ranks take more than DEADLINE_S.
    """
    context = get_context("spawn")
    workers = stages * size
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for number in range(workers):
            rank = WorkerRank(
                number=number,
                workers=workers,
                stage=number // size,
                stages=stages,
                split=Split(number % size, size),
                rendezvous=str(Path(folder) / "rendezvous"),
                device=device,
                ranks_on_gpu=1 if device == "cpu" else workers,
            )
            pipe, end = context.Pipe()
            processes.append(context.Process(target=_run, args=(work, rank, end), daemon=True))
            pipes.append(pipe)
            processes[-1].start()
            end.close()
        try:
            return _results(pipes)
        finally:
            for process in processes:
                process.join(5.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _results(pipes: list[Connection]) -> list[Any]:
    deadline = time.monotonic() + DEADLINE_S
    results = []
    for number, pipe in enumerate(pipes):
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            # Another rank may have failed, which is why this one waits.
            failures = [other.recv() for other in pipes[number + 1 :] if other.poll(0)]
            traces = [trace for trace, _ in failures if trace is not None]
            raise AssertionError(traces[0] if traces else f"rank {number} did not finish within {DEADLINE_S:g} s")
        trace, result = pipe.recv()
        assert trace is None, trace
        results.append(result)
    return results


def _run(work: Work, rank: WorkerRank, pipe: Connection) -> None:
    device = torch.device(rank.device)
    torch.set_num_threads(1)
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        pipe.send((None, work(make_world(rank, device, COLLECTIVES), rank, device)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    os._exit(0)  # other ranks may have failed, and a process group that is destroyed may wait for them
