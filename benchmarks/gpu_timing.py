"""Times GPU calls, and measures the copy bandwidth and the matrix rate in the same run, for comparison.

A call is timed inside a CUDA graph. One graph flushes the L2 and runs the call, for each of several inputs; a second
graph only flushes the L2, and its time is subtracted. Launches from Python are therefore not timed, every input is
cold, and calls of a few microseconds can be timed. A flush writes a buffer of more than twice the size of the L2 and
then reads this buffer. Without the read, the call would also be charged for writing back the dirty lines of the flush
(5 to 7 us for a call that reads 75 MB).
"""

import statistics
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

FLUSH_BYTES = 128 << 20  # more than twice the size of an H200's L2
ROUNDS = 4  # number of times that one graph runs all inputs
REPLAYS = 15

Call = Callable[[], object]


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs an NVIDIA GPU and a torch with CUDA; torch found no GPU")


def seconds_of(
    calls: Sequence[Call], *, cold: bool = True, clean: bool = True, before: Sequence[Call] | None = None
) -> float:
    """Returns the median seconds per call. `calls` do the same work on different inputs and run in rotation.

    A call must not synchronise with the host, because a graph captures it. `cold` flushes the L2 before every call. If
    `clean` is false, the flush only writes and leaves the lines of the L2 dirty. `before` has one function per call,
    which restores the inputs of this call. It runs before the flush, and its time is subtracted.
    """
    flush = _flusher(clean) if cold else (lambda: None)
    restores = before if before is not None else [lambda: None] * len(calls)
    for restore, call in zip(restores, calls, strict=True):
        restore()
        call()  # the first call compiles and allocates
    torch.cuda.synchronize()
    timed = _graph([step for restore, call in zip(restores, calls, strict=True) for step in (restore, flush, call)])
    baseline = _graph([step for restore in restores for step in (restore, flush)]) if cold or before else None
    differences = []
    for _ in range(REPLAYS):
        elapsed = replay_seconds(timed)
        if baseline is not None:
            elapsed -= replay_seconds(baseline)
        differences.append(elapsed / (ROUNDS * len(calls)))
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


def replay_seconds(graph: torch.cuda.CUDAGraph, times: int = 1) -> float:
    """Returns the seconds per replay when the graph is replayed `times` times without a pause."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / times


@cache
def _flush_buffer() -> Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")


def _flusher(clean: bool) -> Call:
    block = _flush_buffer().view(torch.int64)

    def flush() -> None:
        block.fill_(1)
        if clean:
            block.sum()

    return flush


@cache
def copy_bandwidth() -> float:
    """Returns the bytes per second (read plus written) of a large copy within device memory.

    The copy is a kernel that inverts the bits. Memory copies in a CUDA graph reached only two thirds of this kernel's
    rate.
    """
    source, target = (torch.empty(1 << 28, dtype=torch.int64, device="cuda") for _ in range(2))
    source.random_()
    return 2 * source.nbytes / seconds_of([lambda: torch.bitwise_not(source, out=target)], cold=False)


@cache
def matrix_rate(dtype: torch.dtype = torch.bfloat16) -> float:
    """Returns the FLOP per second of a large matrix product on random values."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    return 2 * size**3 / seconds_of([lambda: a @ b], cold=False)
