"""Measures swap-in (plan and copy of one layer) on one GPU against SGLang's kernel and against a bare gather.

    python benchmarks/swap_in.py --row-bytes 656 --json swap_in.json --png swap_in.png

Top-k is 2048 over contexts of 131,072 tokens. Every context has its own host pages, which are consecutive; contexts of
1152-byte rows share host pages in large batches (the caption shows from which batch on). The rows in slots, the hits,
the misses, the order of the selected positions and the ages of the slots are random. 8 inputs are used in rotation (4
at batch 128). The maps are restored and the L2 is overwritten before every call. SGLang's times (commit cce0a12) were
measured under the same conditions on an H200; --peer FILE replaces them. The bare gather copies exactly the missing
rows from a given list, by a kernel with one warp per row or by swap-in's own copy, whichever is faster. "two launches"
runs plan and copy as separate kernels. --sweep tries other launches at 4096 slots: its times set `cuda_impl.TUNED`.

Bars (required results), for 656-byte rows: without misses at most 9 us up to batch 32 and 14 us at batch 128; 2.1 times
as fast as SGLang (geometric mean), and no case more than 3 % slower than SGLang; with misses, at most 6 us more than
the bare gather up to batch 8, and with 5 % misses or more at most 1.15 times its time from batch 32 on. The benchmark
pins 10.3 GiB of host memory (2.6 GiB with --quick).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu_timing import require_gpu, seconds_of
from op_runner import OpBenchmark, PeerComparison, Sweep, make_options, run
from peer_timings import PeerTimings
from report import Bar, Row
from swap_in_state import TOP_K, PinnedRows, SwapInState, make_state, pinned_host_rows

from hotset.kernels import cuda_source
from hotset.kernels.cuda_source import LaunchShape
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
    """Times two ways to copy the missing rows that a plan has listed. Returns the shorter time."""
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


def measure(host: PinnedRows, case: SwapInCase) -> Row:
    states = make_states(case, host, INPUTS if case.batch <= 32 else INPUTS // 2)
    for tuning in (cuda_impl.TUNED, TWO_LAUNCHES):
        states[0].check(tuning)
    us = swap_in_us(states, cuda_impl.TUNED)
    two_launches = swap_in_us(states, TWO_LAUNCHES)
    gather = gather_us(states) if case.misses else None
    missing_rows = states[0].missing * case.batch
    return case.columns | {
        "us": round(us, 2),
        "gather us": round(gather, 2) if gather else "-",
        "of gather": round(us / gather, 2) if gather else "-",
        "GB/s": round(missing_rows * case.row_bytes / us * 1e-3, 1),
        "two launches us": round(two_launches, 2),
    }


def bars(rows: list[Row]) -> list[Bar]:
    """Returns the bars, which apply only to 656-byte rows."""
    grid = [row for row in rows if row["row bytes"] == 656]
    found = []
    for limit, batches in ((9.0, (1, 8, 32)), (14.0, (128,))):
        times = [row["us"] for row in grid if row["gather us"] == "-" and row["batch"] in batches]
        if times:
            found.append(Bar(f"us without misses, batch {', '.join(map(str, batches))}", max(times), limit))
    missing = [row for row in grid if row["gather us"] != "-"]
    small = [row["us"] - row["gather us"] for row in missing if row["batch"] <= 8]
    if small:
        found.append(Bar("us more than the bare gather, with misses, batch 1 to 8", max(small), 6))
    large = [row["us"] / row["gather us"] for row in missing if row["batch"] >= 32 and row["misses"] != "1%"]
    if large:
        found.append(Bar("time / bare gather, 5 % misses or more, batch 32 to 128", max(large), 1.15))
    return found


TWO, THREE, FOUR, SIX, EIGHT = (cuda_impl.BlockCluster(blocks) for blocks in (2, 3, 4, 6, 8))
SMALL_BATCHES = {
    "8 blocks, 1024 threads": with_cluster(replace(EIGHT, threads=1024)),
    "8 blocks": with_cluster(EIGHT),
    "4 blocks, 1024 threads": with_cluster(replace(FOUR, threads=1024)),
    "two launches": TWO_LAUNCHES,
}
LARGE_BATCHES = {
    "8 blocks": with_cluster(EIGHT),
    "6 blocks": with_cluster(SIX),
    "6 blocks, 16 lists": replace(with_cluster(SIX), lists_at_once=16),
    "4 blocks": with_cluster(FOUR),
    "3 blocks": with_cluster(THREE),
    "2 blocks": with_cluster(TWO),
    "2 blocks, 16 lists": replace(with_cluster(TWO), lists_at_once=16),
    "two launches, 16 lists": replace(TWO_LAUNCHES, copy_lists_at_once=16),
    "two launches, 32 blocks of 256 threads": replace(TWO_LAUNCHES, copy_blocks=32, copy_threads=256),
    "two launches": TWO_LAUNCHES,
}
SWEEP = dict.fromkeys((1, 8), SMALL_BATCHES) | dict.fromkeys((24, 32, 58, 128), LARGE_BATCHES)
SWEEP_MISSES = (0.0, 0.01, 0.05, 0.134, 0.2)


def sweeps(host: PinnedRows) -> Iterator[Sweep]:
    """Yields other launches at 4096 slots.

    They use all inputs: with few inputs, the GPU would still have their address translations from the previous use.
    """
    for batch, tunings in SWEEP.items():
        states = {misses: make_states(SwapInCase(656, 4096, batch, misses), host) for misses in SWEEP_MISSES}
        timed = {f"{misses:.0%}": partial(seconds_with, inputs) for misses, inputs in states.items()}
        yield Sweep(f"Batch {batch}, by share of misses", tunings, timed)


def seconds_with(states: list[SwapInState], tuning: cuda_impl.SwapInTuning) -> float:
    return 1e-6 * swap_in_us(states, tuning)


OP = OpBenchmark(
    doc=__doc__,
    title=f"Swap-in, top-{TOP_K}",
    cases=[
        SwapInCase(row_bytes, slots, batch, misses)
        for row_bytes in (656, 1152)
        for slots in SLOTS
        for batch in BATCHES
        for misses in MISSES
    ],
    quick=[SwapInCase(656, slots, batch, misses) for slots in SLOTS for batch in (8, 32) for misses in MISSES],
    measure=lambda case: [],  # `main` knows the host rows
    bars=bars,
    peer=PeerComparison(
        columns=PEER_COLUMNS, mean=2.1, slowest=1 / 1.03, counts=lambda row: row["row bytes"] == 656, default=SGLANG
    ),
    sweeps=lambda: iter(()),
    drawn=("us",),
    notes="of gather: time / time of the bare gather",
)


def main() -> None:
    parser = make_options(OP)
    parser.add_argument("--row-bytes", type=int, nargs="+", default=[656, 1152], choices=[656, 1152], help="row sizes")
    options = parser.parse_args()
    require_gpu()
    max_batch = 32 if options.quick else 128
    with pinned_host_rows(max_batch * 656) as host:
        notes = (
            f"{OP.notes}; {host.gib:.1f} GiB of pinned rows, which contexts of 1152-byte rows share from batch "
            f"{max_batch * 656 // 1152 + 1} on"
        )
        cases = [case for case in OP.cases if case.row_bytes in options.row_bytes]
        of_host = replace(OP, cases=cases, measure=partial(measure, host), sweeps=partial(sweeps, host), notes=notes)
        run(of_host, options)


if __name__ == "__main__":
    main()
