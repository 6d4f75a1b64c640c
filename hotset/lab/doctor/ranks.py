"""Ranks that exchange data as the workers of an engine do: in the engine's own world, one process for each rank."""

import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.base.engine_settings import CollectivesChoice
from hotset.base.errors import HotsetError
from hotset.base.parent_death import kill_if_parent_dies
from hotset.base.units import KIB, MIB
from hotset.lab.doctor.child import LINE_BYTES, first_line

if TYPE_CHECKING:
    import torch

    from hotset.models.collectives import Collectives

SMALL_BYTES = 256 * KIB  # of a decode step's all_reduce: 16 tokens of 8,192 values
LARGE_BYTES = 64 * MIB
PERIOD = 7  # of the values in a message
SMALL_RUNS, LARGE_RUNS = 20, 3
END_SECONDS = 5.0


class RanksFailed(HotsetError):
    """A rank failed, died or did not finish. `nccl` is the first warning of NCCL, or empty."""

    def __init__(self, reason: str, nccl: str = "") -> None:
        super().__init__(f"{reason}{'; NCCL says: ' if nccl else ''}{nccl}")


@dataclass(frozen=True, slots=True)
class Ranks:
    """What to start: one rank for each device."""

    devices: tuple[str, ...]  # like "cuda:0", or "cpu"; ranks that share a GPU are neighbours
    ranks_on_gpu: int = 1
    collectives: CollectivesChoice = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)  # set in each rank


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank has measured. Times are those of an all_reduce, in seconds."""

    choice: str  # how the ranks exchange data, in the words of the engine's log; empty except for rank 0
    symmetric: bool  # whether they use symmetric memory
    multicast: bool  # whether torch sets up multicast in it, which hangs on some machines
    right: bool  # whether all results were right
    small: float
    small_in_graph: float | None = None  # this and the next are not measured on a CPU
    large: float | None = None


def run_ranks(ranks: Ranks, seconds: float) -> Exchange:
    """Starts the ranks, and returns what they have measured: the slowest times. Raises RanksFailed, also if they do not
    finish within `seconds`. All ranks have ended afterwards."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for number in range(len(ranks.devices)):
            pipe, end = context.Pipe()
            arguments = (ranks, number, folder, end, os.getpid())
            processes.append(context.Process(target=_run_rank, args=arguments, daemon=True))
            pipes.append(pipe)
            processes[-1].start()
            end.close()
        try:
            exchanges = _receive_all(pipes, seconds)
        except RanksFailed as error:
            raise RanksFailed(str(error), _first_warning(Path(folder))) from None
        finally:
            for process in processes:
                process.kill()  # its work is done, or of no use any more
                process.join(END_SECONDS)
    return Exchange(
        choice=exchanges[0].choice,
        symmetric=exchanges[0].symmetric,
        multicast=exchanges[0].multicast,
        right=all(exchange.right for exchange in exchanges),
        small=max(exchange.small for exchange in exchanges),
        small_in_graph=max(exchange.small_in_graph or 0.0 for exchange in exchanges) or None,
        large=max(exchange.large or 0.0 for exchange in exchanges) or None,
    )


def _receive_all(pipes: list[Connection], seconds: float) -> list[Exchange]:
    """Returns one result from each pipe, in their order. Fails with the first rank that fails: others may wait for
    it."""
    deadline, results = time.monotonic() + seconds, dict[int, Exchange]()
    while len(results) < len(pipes):
        waiting = {pipe: number for number, pipe in enumerate(pipes) if number not in results}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RanksFailed(f"rank {min(waiting.values())} of {len(pipes)} did not finish within {seconds:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                result = pipe.recv()
            except EOFError:
                result = "its process died"
            if isinstance(result, str):
                raise RanksFailed(f"rank {waiting[pipe]} of {len(pipes)}: {result}")
            results[waiting[pipe]] = result
    return [results[number] for number in range(len(pipes))]


def _first_warning(folder: Path) -> str:
    """Returns the first warning in the log files of NCCL, which ranks write to a folder."""
    for file in sorted(folder.glob("nccl.*")):
        for line in file.read_text(errors="replace").splitlines():
            if "NCCL WARN " in line:
                return line.partition("NCCL WARN ")[2].strip()[:LINE_BYTES]
    return ""


def _run_rank(ranks: Ranks, number: int, folder: str, pipe: Connection, parent: int) -> None:
    """Runs in the process of a rank, which waits for its end: until then, other ranks can read its memory."""
    kill_if_parent_dies(parent)
    os.environ.update(ranks.environment)
    os.environ.update({"NCCL_DEBUG_FILE": f"{folder}/nccl.%p", "NCCL_DEBUG": os.environ.get("NCCL_DEBUG") or "WARN"})
    try:
        pipe.send(_measure(ranks, number, f"{folder}/rendezvous"))
    except Exception as error:
        pipe.send(str(error) if isinstance(error, HotsetError) else first_line(error))
    pipe.poll(None)  # until this process is killed


def _measure(ranks: Ranks, number: int, rendezvous: str) -> Exchange:
    import torch

    from hotset.engine.loading import use_device
    from hotset.engine.workers.distributed import make_world
    from hotset.engine.workers.launcher import worker_rank
    from hotset.engine.workers.placement import WorkerDevice
    from hotset.engine.workers.symmetric import SymmetricCollectives
    from hotset.models.split import Split

    size, device = len(ranks.devices), torch.device(ranks.devices[number])
    splits = [Split(tp_rank=rank, tp_size=size) for rank in range(size)]
    rank = worker_rank(number, splits, rendezvous, WorkerDevice(ranks.devices[number], ranks.ranks_on_gpu))
    torch.set_num_threads(1)
    use_device(device)
    with _engine_log() as lines:
        collectives = make_world(rank, device, ranks.collectives).collectives
    kind: dict[str, Any] = {
        "choice": " ".join(lines),
        "symmetric": isinstance(collectives, SymmetricCollectives),
        "multicast": os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1",
    }
    small = _Sum(collectives, SMALL_BYTES, device)
    eager, right = small.seconds(small.run, SMALL_RUNS), small.is_right()
    if device.type == "cpu":
        return Exchange(**kind, right=right, small=eager)
    replayed = small.seconds(small.captured().replay, SMALL_RUNS)
    large = _Sum(collectives, LARGE_BYTES, device)
    seconds = large.seconds(large.run, LARGE_RUNS)
    right = right and small.is_right() and large.is_right()
    collectives.barrier()
    return Exchange(**kind, right=right, small=eager, small_in_graph=replayed, large=seconds)


class _Sum:
    """An all_reduce of `nbytes` bytes per rank whose result is known. All ranks make the same calls."""

    def __init__(self, collectives: "Collectives", nbytes: int, device: "torch.device") -> None:
        import torch

        self._collectives, self._on_gpu = collectives, device.type == "cuda"
        pattern = torch.arange(nbytes // 2, device=device) % PERIOD
        size = collectives.size
        self._input = (pattern + collectives.rank).to(torch.bfloat16)
        self._expected = (pattern * size + size * (size - 1) // 2).to(torch.bfloat16)  # at most 216: exact in bfloat16
        self._result = self._input

    def run(self) -> None:
        self._result = self._collectives.all_reduce(self._input.clone())

    def captured(self) -> "torch.cuda.CUDAGraph":
        """Captures `run` as the engine captures its steps. Each replay writes the same result."""
        import torch

        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.run()
        return graph

    def is_right(self) -> bool:
        return bool((self._result == self._expected).all())

    def seconds(self, run: Callable[[], None], runs: int) -> float:
        """Returns how long one of `runs` calls takes, after a first one and when all ranks are ready."""
        run()
        self._collectives.barrier()
        began = time.perf_counter()
        for _ in range(runs):
            run()
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
        return (time.perf_counter() - began) / runs


@contextmanager
def _engine_log() -> Iterator[list[str]]:
    """Collects what the engine logs during the block: how its workers exchange data, and why."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hotset.engine")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
