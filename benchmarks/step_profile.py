"""Shows where GPU time goes: a torch profile, grouped by the parts of a model.

The group of one of Hotset's kernels follows from the folder of `hotset/kernels` that defines it.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import hotset.kernels

GAPS = "launch gaps"
OTHER = "other torch ops"
GROUP_OF_FOLDER = {
    "sparse_attention": "attention",
    "page_table_lookup": "attention",
    "decode_rows": "attention",
    "index_topk": "indexer",
    "swap_in": "swap-in",
    "page_copy": "swap-in",
    "save_last_topk": "swap-in",
    "experts": "experts",
    "route": "experts",
    "linear": "linear",
    "quantise": "linear",
    "norm": "norm/rope",
    "rope": "norm/rope",
    "swiglu": "norm/rope",
    "mla_append": "norm/rope",
    "index_append": "norm/rope",
    "draw": "sampling",
}
# Kernels of libraries, by parts of their names. The first match counts. The collectives are those of `SimulatedRanks`.
GROUP_OF_LIBRARY_KERNEL = (
    ("CatArrayBatchedCopy", "collectives"),
    ("copysign", "collectives"),
    ("sum_functor", "collectives"),
    ("nvjet", "linear"),
    ("gemm", "linear"),
    ("gemv", "linear"),
    ("cutlass", "linear"),
    ("xmma", "linear"),
    ("sort", "sampling"),
    ("SoftMax", "sampling"),
    ("scan", "sampling"),
    ("Memcpy HtoD", "host copies"),
    ("Memcpy DtoH", "host copies"),
)
# Folders whose kernels no sparse-attention decoder launches. Some share names with other folders.
UNUSED_FOLDERS = ("gqa_append", "paged_attention", "slice_pack")
DEFINITION = re.compile(
    r"@triton\.jit\b[^\n]*\n(?:@[^\n]*\n)*def (\w+)"  # Triton
    r"|__global__\s+void(?:\s+(?:[A-Z_]+|__launch_bounds__\([^)]*\)))*\s+(\w+)\s*\("  # CUDA C++
)


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One kernel or copy in a profile."""

    name: str
    start_us: float
    end_us: float
    stream: int = 0


@cache
def kernels_by_name() -> dict[str, str]:
    """Returns the group of every kernel in hotset/kernels. If kernels of two groups have the same name, names both."""
    groups: dict[str, set[str]] = defaultdict(set)
    for source in sorted(Path(hotset.kernels.__file__).parent.glob("*/*")):
        folder = source.parent.name
        if source.suffix in (".py", ".cu") and folder not in UNUSED_FOLDERS:
            for match in DEFINITION.finditer(source.read_text()):
                groups[match[1] or match[2]].add(GROUP_OF_FOLDER.get(folder, folder))
    return {name: " or ".join(sorted(names)) for name, names in groups.items()}


def group_of(kernel: str) -> str:
    """Returns the group of a kernel with this name in a profile."""
    plain = kernel.removeprefix("void ").partition("(")[0].partition("<")[0]
    known = kernels_by_name().get(plain)
    if known is not None:
        return known
    return next((group for part, group in GROUP_OF_LIBRARY_KERNEL if part in kernel), OTHER)


def grouped_ms(runs: Iterable[KernelRun], steps: int) -> dict[str, float]:
    """Returns the milliseconds per step of each group, the largest first, and of the gaps in which no kernel runs.

    Kernels on several streams can overlap, so the sum of all groups can exceed the time of a step.
    """
    ordered = sorted(runs, key=lambda run: run.start_us)
    totals: dict[str, float] = defaultdict(float)
    busy_until = ordered[0].start_us if ordered else 0.0
    for run in ordered:
        totals[group_of(run.name)] += run.end_us - run.start_us
        totals[GAPS] += max(0.0, run.start_us - busy_until)
        busy_until = max(busy_until, run.end_us)
    return {group: us / 1e3 / steps for group, us in sorted(totals.items(), key=lambda item: item[1], reverse=True)}


def without_waits(runs: Iterable[KernelRun]) -> list[KernelRun]:
    """Returns the runs without overlaps: each begins when the previous one on its stream has ended.

    A kernel that starts early (programmatic dependent launch) first waits for the previous one. This wait is left out.
    """
    ended: dict[int, float] = {}
    result = []
    for run in sorted(runs, key=lambda run: (run.start_us, run.end_us)):
        start = max(run.start_us, ended.get(run.stream, run.start_us))
        ended[run.stream] = max(start, run.end_us)
        result.append(replace(run, start_us=start, end_us=ended[run.stream]))
    return result


def layer_rows(runs: Iterable[KernelRun], first: str = "score") -> list[dict[str, Any]]:
    """Returns the kernels of the layer of median length, from a run of the kernel `first` to the next run of it.

    The median is never the last layer of a step, whose time includes the sampling of tokens."""
    ordered = sorted(runs, key=lambda run: run.start_us)
    starts = [run.start_us for run in ordered if run.name == first]
    layers = sorted(pairwise(starts), key=lambda layer: layer[1] - layer[0])
    if not layers:
        return []
    begin, end = layers[len(layers) // 2]
    return [
        {
            "start us": run.start_us - begin,
            "us": run.end_us - run.start_us,
            "kernel": run.name[:60],
            "group": group_of(run.name),
        }
        for run in ordered
        if begin <= run.start_us < end
    ]


def profiled(work: Callable[[], object]) -> list[KernelRun]:
    """Runs `work` and returns everything that it ran on the GPU, without the waits of kernels that started early."""
    # With CUDA graphs, loading CUPTI a second time can crash. torch sets the same variables for graphs of its compiler.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    return without_waits(
        KernelRun(event.name, event.time_range.start, event.time_range.end, event.device_resource_id)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.end > event.time_range.start
    )
