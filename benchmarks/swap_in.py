"""Measures swap-in (plan and copy of one layer) on one GPU against SGLang's kernel and against a bare gather.

    python benchmarks/swap_in.py --row-bytes 656 --json swap_in.json --png swap_in.png

Top-k is 2048 over contexts of 131,072 tokens. Every context has its own host pages, which are consecutive; contexts of
1152-byte rows share host pages in large batches (the caption shows from which batch on). The rows in slots, the hits,
the misses, the order of the selected positions and the ages of the slots are random. 8 inputs are used in rotation (4
at batch 128). The maps are restored and the L2 is overwritten before every call. SGLang's times (commit cce0a12) were
measured under the same conditions on an H200; --peer FILE replaces them. The bare gather copies exactly the missing
rows from a given list, by a kernel with one warp per row or by swap-in's own copy, whichever is faster. "two launches"
runs plan and copy as separate kernels.

Bars (required results), for 656-byte rows: without misses at most 9 us up to batch 32 and 14 us at batch 128; 2.1 times
as fast as SGLang (geometric mean), and no case more than 3 % slower than SGLang; with misses, at most 6 us more than
the bare gather up to batch 8, and with 5 % misses or more at most 1.15 times its time from batch 32 on. The benchmark
pins 10.3 GiB of host memory (2.6 GiB with --quick).
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_timing import require_gpu, seconds_of
from peer_timings import PeerTimings, add_peer_option, geometric_mean
from report import Bar, make_parser, report
from swap_in_state import PAGE_ROWS, TOP_K, PinnedRows, SwapInState, make_state, pinned_host_rows

from hotset.kernels import cuda_source
from hotset.kernels.cuda_source import LaunchShape
from hotset.kernels.page_copy import cuda_impl as page_copy_cuda
from hotset.kernels.swap_in import RowCopies, cuda_impl

SLOTS = (4096, 8192)
BATCHES = (1, 8, 32, 128)
MISSES = (0.0, 0.01, 0.05, 0.2)
INPUTS = 8  # number of inputs, which are used in rotation
TWO_LAUNCHES = replace(cuda_impl.TUNED, clusters=((1, None),))

PEER_COLUMNS = ("row bytes", "slots", "batch", "misses")


@dataclass(frozen=True, slots=True)
class SwapInCase:
    """One combination that is measured."""

    row_bytes: int
    slots: int
    batch: int
    misses: float  # as a share of top-k

    @property
    def columns(self) -> dict[str, Any]:
        values = (self.row_bytes, self.slots, self.batch, f"{self.misses:.0%}")
        return dict(zip(PEER_COLUMNS, values, strict=True))


# Microseconds of SGLang's kernel for each of MISSES, by (slots, batch).
SGLANG_US = {
    (4096, 1): (17.8, 20.7, 31.8, 60.7),
    (4096, 8): (19.3, 24.4, 39.1, 79.3),
    (4096, 32): (21.8, 30.1, 98.8, 305.0),
    (4096, 128): (23.3, 89.7, 465.0, 1684.0),
    (8192, 1): (29.6, 33.8, 43.3, 73.6),
    (8192, 8): (31.8, 35.6, 51.2, 99.0),
    (8192, 32): (33.5, 42.3, 120.0, 330.0),
    (8192, 128): (36.5, 103.0, 479.0, 1694.0),
}
SGLANG = PeerTimings(
    "SGLang",
    [
        SwapInCase(656, slots, batch, misses).columns | {"us": us}
        for (slots, batch), times in SGLANG_US.items()
        for misses, us in zip(MISSES, times, strict=True)
    ],
)


@dataclass(frozen=True, slots=True)
class SwapInResult:
    """The times of one case."""

    case: SwapInCase
    us: float
    two_launches_us: float
    gather_us: float | None  # None if no row is missing
    missing_rows: int

    @property
    def over_gather(self) -> float | None:
        return None if self.gather_us is None else self.us / self.gather_us

    def row(self) -> dict[str, Any]:
        bytes_per_us = self.missing_rows * self.case.row_bytes / self.us
        return self.case.columns | {
            "us": round(self.us, 2),
            "gather us": round(self.gather_us, 2) if self.gather_us else "-",
            "of gather": round(self.over_gather, 2) if self.over_gather else "-",
            "GB/s": round(bytes_per_us * 1e-3, 1),
            "two launches us": round(self.two_launches_us, 2),
        }


def with_cluster(cluster: cuda_impl.BlockCluster) -> cuda_impl.SwapInTuning:
    """Returns a tuning that uses this cluster for every batch."""
    return replace(cuda_impl.TUNED, clusters=((1, cluster),))


def make_states(case: SwapInCase, host: PinnedRows, count: int = INPUTS) -> list[SwapInState]:
    rows = host.rows(case.row_bytes)
    return [make_state(case.slots, case.batch, case.misses, rows, seed) for seed in range(count)]


def swap_in_us(states: list[SwapInState], tuning: cuda_impl.SwapInTuning) -> float:
    calls = [partial(state.swap_in, tuning) for state in states]
    return 1e6 * seconds_of(calls, clean=False, before=[state.restore for state in states])


def gather_us(states: list[SwapInState]) -> float:
    """Times two ways to copy the missing rows, which a plan has listed before. Returns the shorter time."""
    lists = []
    for state in states:
        state.restore()
        lists.append(state.swap_in(cuda_impl.TUNED).copies)
    flat = [state.flat(copies) for state, copies in zip(states, lists, strict=True)]
    kernel = cuda_source.kernel(Path(__file__).with_name("bare_gather.cu"), "bare_gather")

    def gather(state: SwapInState, copies: RowCopies) -> None:
        count = copies.host_rows.shape[1]
        shape = LaunchShape(-(-count // 4), 128)
        units = state.host_rows.shape[1] // 16
        rows = (copies.host_rows, copies.device_rows, count)
        kernel.launch(shape, *rows, state.host_rows, state.device_rows, units)

    def copy(state: SwapInState, copies: RowCopies) -> None:
        cuda_impl.copy(copies, state.host_rows, state.device_rows)

    def microseconds(function: Callable[[SwapInState, RowCopies], None], inputs: list[RowCopies]) -> float:
        calls = [partial(function, state, copies) for state, copies in zip(states, inputs, strict=True)]
        return 1e6 * seconds_of(calls, clean=False)

    return min(microseconds(gather, flat), microseconds(copy, lists))


def measure(case: SwapInCase, host: PinnedRows) -> SwapInResult:
    states = make_states(case, host, INPUTS if case.batch <= 32 else INPUTS // 2)
    for tuning in (cuda_impl.TUNED, TWO_LAUNCHES):
        states[0].check(tuning)
    return SwapInResult(
        case,
        us=swap_in_us(states, cuda_impl.TUNED),
        two_launches_us=swap_in_us(states, TWO_LAUNCHES),
        gather_us=gather_us(states) if case.misses else None,
        missing_rows=states[0].missing * case.batch,
    )


def make_bars(results: list[SwapInResult], peer: PeerTimings) -> list[Bar]:
    """Returns the bars, which apply only to 656-byte rows. There are none if no such rows were measured."""
    grid = [result for result in results if result.case.row_bytes == 656]
    if not grid:
        return []
    bars = []
    for limit, batches in ((9.0, (1, 8, 32)), (14.0, (128,))):
        times = [result.us for result in grid if not result.case.misses and result.case.batch in batches]
        if times:
            bars.append(Bar(f"us without misses, batch {', '.join(map(str, batches))}", max(times), limit))
    bars += peer.bars([result.row() for result in grid], 2.1, 1 / 1.03)
    beside_gather = [(result.case, result.us, result.gather_us) for result in grid if result.gather_us is not None]
    small = [us - gather_us for case, us, gather_us in beside_gather if case.batch <= 8]
    if small:
        bars.append(Bar("us more than the bare gather, with misses, batch 1 to 8", max(small), 6))
    large = [us / gather_us for case, us, gather_us in beside_gather if case.batch >= 32 and case.misses >= 0.05]
    if large:
        bars.append(Bar("time / bare gather, 5 % misses or more, batch 32 to 128", max(large), 1.15))
    return bars


def measure_pages(host: PinnedRows, blocks: int = page_copy_cuda.TUNED.blocks) -> list[dict[str, Any]]:
    """Measures the bandwidth of copies of whole pages in 8 layers, to the host and to the device."""
    layers, pages = 8, 64
    rows = pages * PAGE_ROWS
    host_rows = host.rows(656)[: layers * 2 * rows].view(layers, 2 * rows, 656)
    device_rows = torch.zeros(layers, 2 * rows, 656, dtype=torch.uint8, device="cuda")
    order = torch.randperm(2 * pages)[:pages] * PAGE_ROWS
    pieces = torch.stack([order, order.flip(0), torch.full_like(order, PAGE_ROWS)], dim=1).cuda()
    tuning = page_copy_cuda.PageCopyTuning(blocks=blocks)
    results = []
    for name, to_host in (("to host", True), ("to device", False)):
        copy = partial(page_copy_cuda.copy, pieces, device_rows, host_rows, to_host=to_host, tuning=tuning)
        rate = layers * rows * 656 / seconds_of([copy])
        results.append({"pages": name, "blocks": blocks, "GB/s": round(rate * 1e-9, 1)})
    return results


TWO, THREE, FOUR, SIX, EIGHT = (cuda_impl.BlockCluster(blocks) for blocks in (2, 3, 4, 6, 8))
SMALL_BATCHES = {
    "8 blocks, 1024 threads": with_cluster(replace(EIGHT, threads=1024)),
    "8 blocks, 1024 threads, 1 row": with_cluster(replace(EIGHT, threads=1024, rows_at_once=1)),
    "8 blocks": with_cluster(EIGHT),
    "4 blocks, 1024 threads": with_cluster(replace(FOUR, threads=1024)),
    "two launches": TWO_LAUNCHES,
}
LARGE_BATCHES = {
    "8 blocks": with_cluster(EIGHT),
    "6 blocks": with_cluster(SIX),
    "6 blocks, 4 lists": replace(with_cluster(SIX), lists_at_once=4),
    "6 blocks, 16 lists": replace(with_cluster(SIX), lists_at_once=16),
    "4 blocks": with_cluster(FOUR),
    "3 blocks": with_cluster(THREE),
    "2 blocks": with_cluster(TWO),
    "2 blocks, 1 row": with_cluster(replace(TWO, rows_at_once=1)),
    "2 blocks, 1280 rows in turn": replace(with_cluster(TWO), turn_rows=1280),
    "2 blocks, 16 lists": replace(with_cluster(TWO), lists_at_once=16),
    "2 blocks, all lists": replace(with_cluster(TWO), lists_at_once=128),
    "two launches, 16 lists": replace(TWO_LAUNCHES, copy_lists_at_once=16),
    "two launches, 32 blocks of 256 threads": replace(TWO_LAUNCHES, copy_blocks=32, copy_threads=256),
    "two launches": TWO_LAUNCHES,
}
SWEEP = {
    1: SMALL_BATCHES,
    8: SMALL_BATCHES,
    24: LARGE_BATCHES,
    32: LARGE_BATCHES,
    58: LARGE_BATCHES,
    128: LARGE_BATCHES,
}
SWEEP_MISSES = (0.0, 0.01, 0.05, 0.134, 0.2)
# Copies in launches of their own: (blocks, threads, requests whose rows are copied at the same time).
COPIES = (
    (16, 128, 4),
    (24, 128, 4),
    (24, 256, 4),
    (16, 128, 2),
    (16, 128, 8),
    (8, 256, 4),
    (32, 256, 4),
    (32, 256, 16),
)
COPY_BATCHES, COPY_MISSES = (20, 29, 57), 0.134


def sweep(host: PinnedRows) -> None:
    """Prints the times of other launches at 4096 slots. Use the times to set `cuda_impl.TUNED`.

    With few inputs, the GPU would still have the address translations of the last time that one was used.
    """
    for batch, tunings in SWEEP.items():
        states = {misses: make_states(SwapInCase(656, 4096, batch, misses), host) for misses in SWEEP_MISSES}
        rows = []
        for name, tuning in tunings.items():
            times = {misses: swap_in_us(inputs, tuning) for misses, inputs in states.items()}
            columns = {f"{misses:.0%} us": round(us, 2) for misses, us in times.items()}
            rows.append({"launch": name} | columns | {"mean us": round(geometric_mean(list(times.values())), 2)})
        report(f"Batch {batch}", rows, None)
        print(f"fastest at batch {batch}: {min(rows, key=lambda row: float(row['mean us']))['launch']}")
    inputs_of = {batch: make_states(SwapInCase(656, 4096, batch, COPY_MISSES), host) for batch in COPY_BATCHES}
    rows = []
    for blocks, threads, lists in COPIES:
        tuning = replace(cuda_impl.TUNED, copy_blocks=blocks, copy_threads=threads, copy_lists_at_once=lists)
        times = {f"batch {batch} us": round(copy_us(states, tuning), 1) for batch, states in inputs_of.items()}
        rows.append({"copy": f"{blocks} blocks of {threads} threads, {lists} requests at a time"} | times)
    report(f"Copies in launches of their own, {COPY_MISSES:.0%} misses", rows, None)


def copy_us(states: list[SwapInState], tuning: cuda_impl.SwapInTuning) -> float:
    """Returns the time of the copy alone, from lists that a plan has made before."""
    calls = []
    for state in states:
        state.restore()
        copies = state.swap_in(cuda_impl.TUNED).copies
        calls.append(partial(cuda_impl.copy, copies, state.host_rows, state.device_rows, tuning=tuning))
    return 1e6 * seconds_of(calls, clean=False)


def draw(results: list[SwapInResult], path: Path, peer: PeerTimings) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    grid = [result for result in results if result.case.row_bytes == 656]
    batches = sorted({result.case.batch for result in grid})
    size = (3.2 * len(batches), 6)
    figure, axes = pyplot.subplots(len(SLOTS), len(batches), figsize=size, squeeze=False, sharex=True)
    for i, slots in enumerate(SLOTS):
        for j, batch in enumerate(batches):
            shown = [result for result in grid if (result.case.slots, result.case.batch) == (slots, batch)]
            misses = [f"{result.case.misses:.0%}" for result in shown]
            theirs = [math.nan if (us := peer.us_of(result.row())) is None else us for result in shown]
            axes[i][j].plot(misses, theirs, "o-", color="#c0504d", label=peer.name)
            axes[i][j].plot(misses, [result.us for result in shown], "o-", color="#1f77b4", label="Hotset")
            gathers = [math.nan if result.gather_us is None else result.gather_us for result in shown]
            axes[i][j].plot(misses, gathers, "--", color="#888888", label="bare gather")
            axes[i][j].set(yscale="log", title=f"batch {batch}, {slots} slots")
            axes[i][j].yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes[i][j].yaxis.set_major_formatter("{x:.0f}")
            axes[i][j].yaxis.set_minor_formatter(ticker.NullFormatter())
    axes[0][0].set_ylabel("us")
    axes[1][0].set(ylabel="us", xlabel="misses")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="upper right", ncols=3, frameon=False)
    title = f"Swap-in of 656-byte rows, top-{TOP_K}, {torch.cuda.get_device_name()}"
    figure.suptitle(title, x=0.02, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def make_cases(options: argparse.Namespace) -> list[SwapInCase]:
    batches = (8, 32) if options.quick else BATCHES
    return [
        SwapInCase(row_bytes, slots, batch, misses)
        for row_bytes in options.row_bytes
        for slots in SLOTS
        for batch in batches
        for misses in MISSES
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--png", type=Path, help="also draw the results of 656-byte rows to this file")
    parser.add_argument("--quick", action="store_true", help="only batch 8 and 32")
    parser.add_argument("--row-bytes", type=int, nargs="+", default=[656, 1152], choices=[656, 1152], help="row sizes")
    parser.add_argument("--sweep", action="store_true", help="print the times of other launches instead")
    add_peer_option(parser, PEER_COLUMNS)
    options = parser.parse_args()
    peer = options.peer or SGLANG
    require_gpu()
    max_batch = 32 if options.quick else 128
    with pinned_host_rows(max_batch * 656) as host:
        if options.sweep:
            sweep(host)
            return
        results = [measure(case, host) for case in make_cases(options)]
        pages = measure_pages(host)
    notes = (
        f"{host.gib:.1f} GiB of pinned rows, which contexts of 1152-byte rows share from batch "
        f"{max_batch * 656 // 1152 + 1} on; speedup: against {peer.name}; of gather: time / time of the bare gather"
    )
    report("Swap-in", peer.beside([result.row() for result in results]), options.json, notes)
    report("Copies of whole pages by one kernel, 656-byte rows, 8 layers", pages, None)
    if rows := [bar.row() for bar in make_bars(results, peer)]:
        report("Bars", rows, None)
    if options.png is not None:
        draw(results, options.png, peer)


if __name__ == "__main__":
    main()
