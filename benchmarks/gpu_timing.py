"""Times on a GPU, and the ceilings they are held against, measured in the same run.

A call is timed inside a CUDA graph: a graph of (flush the L2, call) for each of several inputs, less a graph that only
flushes the L2. So launches from Python cost nothing, no input is warm, and short calls are timed as well as long ones.
A flush overwrites the cache and then reads it full of something else: else the call would also pay for writing back
what the flush wrote (5 us to 7 us of a call that reads 75 MB).
"""

import statistics
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

L2_BYTES = 128 << 20  # more than twice the cache
ROUNDS = 4  # of all inputs, in one graph
REPLAYS = 15

Call = Callable[[], object]


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs an NVIDIA GPU and a torch with CUDA; none was found")


def seconds_of(
    calls: Sequence[Call], *, cold: bool = True, clean: bool = True, before: Sequence[Call] | None = None
) -> float:
    """Median seconds of one call, over `calls` in turn: the same work on different inputs.

    Each must be free of host synchronisation. `cold`: the L2 is flushed before every call. Not `clean`: it is only
    overwritten, and full of what is still to be written back. `before`: for each call, what makes its inputs as they
    were; it is not timed and comes before the flush.
    """
    flush = _flusher(clean) if cold else (lambda: None)
    ready = before if before is not None else [lambda: None] * len(calls)
    for prepare, call in zip(ready, calls, strict=True):
        prepare()
        call()  # compiles, allocates
    torch.cuda.synchronize()
    timed = _graph([step for prepare, call in zip(ready, calls, strict=True) for step in (prepare, flush, call)])
    bare = _graph([step for prepare in ready for step in (prepare, flush)]) if cold or before is not None else None
    differences = []
    for _ in range(REPLAYS):
        spent = replayed(timed)
        if bare is not None:
            spent -= replayed(bare)
        differences.append(spent / (ROUNDS * len(calls)))
    return statistics.median(differences)


def _graph(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replayed(graph: torch.cuda.CUDAGraph, times: int = 1) -> float:
    """Seconds of one replay, of so many right after each other."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / times


@cache
def _l2_sized() -> Tensor:
    return torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")


def _flusher(clean: bool) -> Call:
    block = _l2_sized().view(torch.int64)

    def flush() -> None:
        block.fill_(1)
        if clean:
            block.sum()

    return flush


@cache
def copy_bandwidth() -> float:
    """Bytes per second of a large copy within device memory, read and written bytes together.

    By a kernel that writes what it read, inverted: a graph's own copies were seen to run at two thirds of that.
    """
    source, target = (torch.empty(1 << 28, dtype=torch.int64, device="cuda") for _ in range(2))
    source.random_()
    return 2 * source.nbytes / seconds_of([lambda: torch.bitwise_not(source, out=target)], cold=False)


@cache
def matrix_rate(dtype: torch.dtype = torch.bfloat16) -> float:
    """FLOP per second of a large matrix product on random values."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    return 2 * size**3 / seconds_of([lambda: a @ b], cold=False)
