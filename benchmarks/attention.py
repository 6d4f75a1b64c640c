"""Sparse MLA decode attention over row indices, on one GPU.

    python benchmarks/attention.py --json attention.json --png attention.png

One query row per request, each with 2048 rows of its own, drawn at random from a pool of 2 GiB; MLA 512 + 64, plain
bf16 rows (1152 B) and fp8 rows (656 B). GB/s counts every chosen row once; TFLOP/s counts the two products. Each is
held against what the same run measures for a large copy and a large matrix product. The bars, at batch 32 and 128:
16 heads at 60 % of the copy bandwidth; 128 heads at 50 % (bf16 rows) and 40 % (fp8 rows) of the matrix rate. Other
cells are reported. Every call is timed cold: the L2 is flushed before it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gpu_timing import copy_bandwidth, matrix_rate, require_gpu, seconds_of
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
ROWS_ENCODED = 1 << 16  # the pool repeats them: what counts is where rows lie
INPUTS = 3  # different ones, in turn
COPY_BAR = {16: 0.6}
MATRIX_BAR = {(128, False): 0.5, (128, True): 0.4}
BARRED_BATCHES = (32, 128)
SWEPT_HEADS, SWEPT_BATCHES = (16, 32), (8, 16, 32, 128)


@dataclass(frozen=True, slots=True)
class Cell:
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
    def row_bytes(self) -> int:
        return self.batch * TOPK * self.layout.row_bytes

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.heads * TOPK * (2 * RANK + ROPE)


ALL = [Cell(batch, heads, fp8) for heads in (16, 32, 64, 128) for fp8 in (False, True) for batch in (1, 8, 32, 128)]
QUICK = [cell for cell in ALL if cell.heads != 64 and cell.batch in BARRED_BATCHES]


@cache
def pool(fp8: bool) -> Tensor:
    layout = mla_row(RANK, ROPE, torch.bfloat16, fp8)
    rows = layout.encode(torch.randn(ROWS_ENCODED, RANK + ROPE, dtype=torch.bfloat16, device="cuda"))
    return rows.repeat(POOL_BYTES // layout.stride_bytes // ROWS_ENCODED, 1)


def seconds(cell: Cell, launch: LaunchConfig | None = None, *, empty: bool = False) -> float:
    """`empty`: nothing is chosen, so what is left is what every call costs."""
    rows = pool(cell.fp8)
    inputs = [
        (
            torch.randn(cell.batch, cell.heads, RANK + ROPE, dtype=torch.bfloat16, device="cuda"),
            torch.randint(EMPTY if empty else 0, 0 if empty else rows.shape[0], (cell.batch, TOPK), device="cuda"),
        )
        for _ in range(INPUTS)
    ]

    def call(q: Tensor, row_ids: Tensor) -> object:
        if launch is None:
            return sparse_attention(q, rows, row_ids, cell.layout, RANK, SCALE)
        from hotset.kernels.sparse_attention import triton_impl

        return triton_impl.sparse_attention(q, rows, row_ids, cell.layout, RANK, SCALE, launch)

    return seconds_of([lambda q=q, row_ids=row_ids: call(q, row_ids) for q, row_ids in inputs])


def measured(cell: Cell) -> dict[str, Any]:
    spent, launch = seconds(cell), choose_launch(cell.shape, gpu())
    of_copy, of_matrix = (cell.row_bytes / spent / copy_bandwidth(), cell.flops / spent / matrix_rate())
    return {
        "batch": cell.batch,
        "heads": cell.heads,
        "rows": "fp8" if cell.fp8 else "bf16",
        "kernel": f"{launch.kernel} {launch.block_heads}x{launch.block_keys}",
        "splits": launch.splits,
        "us": spent * 1e6,
        "GB/s": cell.row_bytes / spent * 1e-9,
        "TFLOP/s": cell.flops / spent * 1e-12,
        "of copy": of_copy,
        "of matrix": of_matrix,
        "bar": verdict(cell, of_copy, of_matrix),
    }


def verdict(cell: Cell, of_copy: float, of_matrix: float) -> str:
    """The bar of a cell, and whether it is met."""
    if cell.batch in BARRED_BATCHES:
        if (least := COPY_BAR.get(cell.heads)) is not None:
            return f"copy {least:.0%} {'met' if of_copy >= least else 'MISSED'}"
        if (least := MATRIX_BAR.get((cell.heads, cell.fp8))) is not None:
            return f"matrix {least:.0%} {'met' if of_matrix >= least else 'MISSED'}"
    return "-"


def gpu() -> GpuTraits:
    found = torch.cuda.get_device_properties(0)
    return GpuTraits(found.multi_processor_count, found.major == 9)


def candidates(heads: int, fp8: bool) -> list[LaunchConfig]:
    """The launch in use and that of the Triton kernel."""
    group = 16 if heads <= 16 else 32 if heads <= 32 else 64
    return [HOPPER[fp8, group], PORTABLE[fp8, group]]


def sweep(heads: Iterable[int], batches: Sequence[int]) -> None:
    """Tries another launch and other numbers of splits, and prints every time: for whoever sets the constants.

    Where they stand: HOPPER and the costs of splits in hotset/kernels/sparse_attention/launch.py. A star stands at the
    number of splits that `with_splits` takes; only there the time of a call without rows is taken.
    """
    for count in heads:
        for fp8 in (False, True):
            rows: list[dict[str, Any]] = []
            cells = [Cell(batch, count, fp8) for batch in batches]
            for launch in candidates(count, fp8):
                rows += sweep_rows(launch, cells)
            rows.sort(key=lambda row: (row["batch"], row["us"]))
            report(f"{count} heads, {'fp8' if fp8 else 'bf16'} rows", rows, None)


def sweep_rows(launch: LaunchConfig, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    rows = []
    for cell in cells:
        taken = with_splits(launch, cell.shape, gpu()).splits
        for splits in sorted({max(1, taken // 2), taken, min(MAX_SPLITS, 2 * taken)}):
            tried = replace(launch, splits=splits)
            try:
                spent = seconds(cell, tried)
                empty = f"{seconds(cell, tried, empty=True) * 1e6:.3g}" if splits == taken else "-"
            except Exception as error:  # what does not compile or fit must not end the sweep
                print(f"{tried}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
                continue
            rows.append(
                {
                    "batch": cell.batch,
                    "launch": f"{launch.kernel} {launch.block_heads}x{launch.block_keys}",
                    "per SM": launch.programs_per_sm,
                    "splits": f"{splits}{' *' if splits == taken else ''}",
                    "us": spent * 1e6,
                    "us empty": empty,
                    "of copy": cell.row_bytes / spent / copy_bandwidth(),
                    "of matrix": cell.flops / spent / matrix_rate(),
                }
            )
    return rows


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [f"{row['heads']} heads\n{row['rows']}\nbatch {row['batch']}" for row in rows]
    figure, axes = pyplot.subplots(figsize=(0.55 * len(rows) + 3, 5))
    places = range(len(rows))
    axes.bar([at - 0.2 for at in places], [100 * row["of copy"] for row in rows], 0.4, label="of copy bandwidth")
    axes.bar([at + 0.2 for at in places], [100 * row["of matrix"] for row in rows], 0.4, label="of matrix rate")
    for at, row in zip(places, rows, strict=True):
        if row["bar"] != "-":
            ceiling, least, _ = row["bar"].split()
            middle = at - 0.2 if ceiling == "copy" else at + 0.2
            axes.hlines(float(least.rstrip("%")), middle - 0.25, middle + 0.25, color="black", linewidth=2)
    axes.set_xticks(list(places), names, fontsize=7)
    axes.set_ylabel("%; black: the bar")
    axes.set_title(f"sparse MLA decode attention, top-k {TOPK}, {torch.cuda.get_device_name()}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--png", type=Path, help="also draw the results to this file")
    parser.add_argument("--quick", action="store_true", help="only the cells with a bar, and those of 32 heads")
    parser.add_argument("--sweep", action="store_true", help="try other launches instead, and print their times")
    parser.add_argument("--heads", type=int, nargs="*", default=SWEPT_HEADS, help="of the sweep")
    parser.add_argument("--batches", type=int, nargs="*", default=SWEPT_BATCHES, help="of the sweep")
    options = parser.parse_args()
    require_gpu()
    torch.manual_seed(0)
    if options.sweep:
        sweep(options.heads, options.batches)
        return
    rows = [measured(cell) for cell in (QUICK if options.quick else ALL)]
    notes = (
        f"copy {copy_bandwidth() * 1e-12:.2f} TB/s (read + written), matrix product {matrix_rate() * 1e-12:.0f} TFLOP/s"
    )
    report(f"sparse MLA decode attention, top-k {TOPK}", rows, options.json, notes)
    if options.png is not None:
        draw(rows, options.png)


if __name__ == "__main__":
    main()
