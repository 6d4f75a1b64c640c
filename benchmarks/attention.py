"""Measures sparse MLA decode attention on one GPU against the copy bandwidth and the matrix rate of the same run.

    python benchmarks/attention.py --json attention.json --png attention.png

Each request has one query and selects 2048 random rows from a pool of about 2 GiB. MLA rows have 512 + 64 values, in
bf16 (1152 bytes) or fp8 (656 bytes). GB/s counts every selected row once per query; TFLOP/s counts the two matrix
products. "of copy" and "of matrix" are shares of a large copy's bandwidth and of a large matrix product's rate. The L2
is flushed before every call. Bars (required results), at batch 32 and 128: 60 % of the copy bandwidth with 16 heads;
50 % (bf16 rows) and 40 % (fp8 rows) of the matrix rate with 128 heads. Other combinations have no bar.

--peer FILE compares with another kernel, such as FlashMLA's: "speedup" is its time over ours. With 64 and 128 heads and
fp8 rows, Hotset must be as fast in every case, and 1.05 times as fast in the geometric mean.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gpu_timing import copy_bandwidth, matrix_rate, require_gpu, seconds_of
from peer_timings import PeerTimings, add_peer_option
from report import make_parser, report
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.rows import RowLayout, mla_row
from hotset.kernels.sparse_attention import sparse_attention
from hotset.kernels.sparse_attention.launch import (
    HOPPER,
    MAX_SPLITS,
    PORTABLE,
    AttentionShape,
    GpuTraits,
    LaunchConfig,
    choose_launch,
    with_splits,
)

TOPK, RANK, ROPE = 2048, 512, 64
SCALE = (RANK + ROPE) ** -0.5
POOL_BYTES = 2 << 30
ENCODED_ROWS = 1 << 16  # the pool repeats these rows, because only the addresses of rows affect the time
INPUTS = 3  # number of inputs, which are used in rotation
COPY_BAR = {16: 0.6}
MATRIX_BAR = {(128, False): 0.5, (128, True): 0.4}
BAR_BATCHES = (32, 128)
PEER_COLUMNS = ("batch", "heads", "rows")
PEER_MEAN, PEER_SLOWEST = 1.05, 1.0  # speedups with 64 and 128 heads and fp8 rows
SWEPT_HEADS, SWEPT_BATCHES = (16, 32), (8, 16, 32, 128)


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One combination that is measured."""

    batch: int
    heads: int
    fp8: bool

    @property
    def layout(self) -> RowLayout:
        return mla_row(RANK, ROPE, torch.bfloat16, self.fp8)

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.batch, self.heads, TOPK, RANK, ROPE, self.fp8)

    @property
    def selected_bytes(self) -> int:
        return self.batch * TOPK * self.layout.row_bytes

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.heads * TOPK * (2 * RANK + ROPE)


ALL = [
    AttentionCase(batch, heads, fp8)
    for heads in (16, 32, 64, 128)
    for fp8 in (False, True)
    for batch in (1, 8, 32, 128)
]
QUICK = [case for case in ALL if case.heads != 64 and case.batch in BAR_BATCHES]


@cache
def pool(fp8: bool) -> Tensor:
    layout = mla_row(RANK, ROPE, torch.bfloat16, fp8)
    rows = layout.encode(torch.randn(ENCODED_ROWS, RANK + ROPE, dtype=torch.bfloat16, device="cuda"))
    return rows.repeat(POOL_BYTES // layout.stride_bytes // ENCODED_ROWS, 1)


def measure_seconds(case: AttentionCase, launch: LaunchConfig | None = None, *, empty: bool = False) -> float:
    """Returns the seconds of a call. With `empty`, no rows are selected: this measures the fixed cost of a call."""
    rows = pool(case.fp8)
    inputs = [
        (
            torch.randn(case.batch, case.heads, RANK + ROPE, dtype=torch.bfloat16, device="cuda"),
            torch.randint(EMPTY if empty else 0, 0 if empty else rows.shape[0], (case.batch, TOPK), device="cuda"),
        )
        for _ in range(INPUTS)
    ]

    def call(q: Tensor, row_ids: Tensor) -> object:
        if launch is None:
            return sparse_attention(q, rows, row_ids, case.layout, RANK, SCALE)
        from hotset.kernels.sparse_attention import triton_impl

        return triton_impl.sparse_attention(q, rows, row_ids, case.layout, RANK, SCALE, launch)

    return seconds_of([lambda q=q, row_ids=row_ids: call(q, row_ids) for q, row_ids in inputs])


def measure(case: AttentionCase) -> dict[str, Any]:
    seconds, launch = measure_seconds(case), choose_launch(case.shape, gpu_traits())
    of_copy = case.selected_bytes / seconds / copy_bandwidth()
    of_matrix = case.flops / seconds / matrix_rate()
    return {
        "batch": case.batch,
        "heads": case.heads,
        "rows": "fp8" if case.fp8 else "bf16",
        "kernel": f"{launch.kernel} {launch.block_heads}x{launch.block_keys}",
        "splits": launch.splits,
        "us": seconds * 1e6,
        "GB/s": case.selected_bytes / seconds * 1e-9,
        "TFLOP/s": case.flops / seconds * 1e-12,
        "of copy": of_copy,
        "of matrix": of_matrix,
        "bar": verdict(case, of_copy, of_matrix),
    }


def verdict(case: AttentionCase, of_copy: float, of_matrix: float) -> str:
    """Returns the bar of a case and whether it is met."""
    if case.batch in BAR_BATCHES:
        if (minimum := COPY_BAR.get(case.heads)) is not None:
            return f"copy {minimum:.0%} {'met' if of_copy >= minimum else 'MISSED'}"
        if (minimum := MATRIX_BAR.get((case.heads, case.fp8))) is not None:
            return f"matrix {minimum:.0%} {'met' if of_matrix >= minimum else 'MISSED'}"
    return "-"


def gpu_traits() -> GpuTraits:
    properties = torch.cuda.get_device_properties(0)
    return GpuTraits(properties.multi_processor_count, properties.major == 9)


def candidates(heads: int, fp8: bool) -> list[LaunchConfig]:
    """Returns the launch in HOPPER and the launch in PORTABLE, which uses the Triton kernel."""
    group = 16 if heads <= 16 else 32 if heads <= 32 else 64
    return [HOPPER[fp8, group], PORTABLE[fp8, group]]


def sweep(heads: Iterable[int], batches: Sequence[int]) -> None:
    """Prints the times of several launches and numbers of splits.

    Use the times to set HOPPER and the costs of splits in hotset/kernels/sparse_attention/launch.py. A star marks the
    number of splits that `with_splits` chooses. "us without rows" is measured only for that number.
    """
    for count in heads:
        for fp8 in (False, True):
            rows: list[dict[str, Any]] = []
            cases = [AttentionCase(batch, count, fp8) for batch in batches]
            for launch in candidates(count, fp8):
                rows += sweep_rows(launch, cases)
            rows.sort(key=lambda row: (row["batch"], row["us"]))
            report(f"{count} heads, {'fp8' if fp8 else 'bf16'} rows", rows, None)


def sweep_rows(launch: LaunchConfig, cases: Sequence[AttentionCase]) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        chosen = with_splits(launch, case.shape, gpu_traits()).splits
        for splits in sorted({max(1, chosen // 2), chosen, min(MAX_SPLITS, 2 * chosen)}):
            tried = replace(launch, splits=splits)
            try:
                seconds = measure_seconds(case, tried)
                empty = f"{measure_seconds(case, tried, empty=True) * 1e6:.3g}" if splits == chosen else "-"
            except Exception as error:  # a launch that does not compile or fit must not end the sweep
                print(f"{tried}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
                continue
            rows.append(
                {
                    "batch": case.batch,
                    "launch": f"{launch.kernel} {launch.block_heads}x{launch.block_keys}",
                    "per SM": launch.programs_per_sm,
                    "splits": f"{splits}{' *' if splits == chosen else ''}",
                    "us": seconds * 1e6,
                    "us without rows": empty,
                    "of copy": case.selected_bytes / seconds / copy_bandwidth(),
                    "of matrix": case.flops / seconds / matrix_rate(),
                }
            )
    return rows


def draw(rows: Sequence[dict[str, Any]], path: Path, peer: PeerTimings | None) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [f"{row['heads']} heads\n{row['rows']}\nbatch {row['batch']}" for row in rows]
    panels = 1 if peer is None else 2
    figure, grid = pyplot.subplots(panels, 1, figsize=(0.55 * len(rows) + 3, 5 * panels), squeeze=False)
    axes = grid[0][0]
    if peer is not None:
        peer.draw(grid[1][0], names, rows)
    ticks = range(len(rows))
    axes.bar([x - 0.2 for x in ticks], [100 * row["of copy"] for row in rows], 0.4, label="of copy bandwidth")
    axes.bar([x + 0.2 for x in ticks], [100 * row["of matrix"] for row in rows], 0.4, label="of matrix rate")
    for x, row in zip(ticks, rows, strict=True):
        if row["bar"] != "-":
            ceiling, minimum, _ = row["bar"].split()
            middle = x - 0.2 if ceiling == "copy" else x + 0.2
            axes.hlines(float(minimum.rstrip("%")), middle - 0.25, middle + 0.25, color="black", linewidth=2)
    axes.set_xticks(list(ticks), names, fontsize=7)
    axes.set_ylabel("% (black lines: bars)")
    axes.set_title(f"Sparse MLA decode attention, top-k {TOPK}, {torch.cuda.get_device_name()}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--png", type=Path, help="also draw the results to this file")
    add_peer_option(parser, PEER_COLUMNS)
    parser.add_argument("--quick", action="store_true", help="only batches 32 and 128, without 64 heads")
    parser.add_argument("--sweep", action="store_true", help="print the times of several launches instead")
    parser.add_argument("--heads", type=int, nargs="*", default=SWEPT_HEADS, help="numbers of heads in the sweep")
    parser.add_argument("--batches", type=int, nargs="*", default=SWEPT_BATCHES, help="batch sizes in the sweep")
    options = parser.parse_args()
    require_gpu()
    torch.manual_seed(0)
    if options.sweep:
        sweep(options.heads, options.batches)
        return
    rows = [measure(case) for case in (QUICK if options.quick else ALL)]
    notes = (
        f"copy bandwidth {copy_bandwidth() * 1e-12:.2f} TB/s (read + written), "
        f"matrix product {matrix_rate() * 1e-12:.0f} TFLOP/s"
    )
    shown = rows if options.peer is None else options.peer.beside(rows)
    report(f"Sparse MLA decode attention, top-k {TOPK}", shown, options.json, notes)
    wide = [row for row in rows if row["heads"] >= 64 and row["rows"] == "fp8"]
    if options.peer is not None and (bars := options.peer.bars(wide, PEER_MEAN, PEER_SLOWEST)):
        report("Bars", [bar.row() for bar in bars], None)
    if options.png is not None:
        draw(rows, options.png, options.peer)


if __name__ == "__main__":
    main()
