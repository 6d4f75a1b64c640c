"""Sparse prefill, part by part: what the query rows of one chunk cost in one layer, on one GPU.

    python benchmarks/prefill.py --json prefill.json --png prefill.png

Attention: every query row of the chunk attends to 2048 rows of its context, which all of them share; neighbours choose
mostly the same rows, here half of them. TFLOP/s counts the two products, held against a large matrix product of the
same run; there is no bar. Each part is a function from the cells it measures to rows of the report, listed in PARTS.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_timing import copy_bandwidth, matrix_rate, require_gpu, seconds_of
from report import make_parser, report
from torch import Tensor

from hotset.kernels.rows import mla_row
from hotset.kernels.sparse_attention import sparse_attention

TOPK, RANK, ROPE = 2048, 512, 64
SCALE = (RANK + ROPE) ** -0.5
SHARED_WITH_NEIGHBOURS = 0.5  # of a query row's selection


@dataclass(frozen=True, slots=True)
class Cell:
    """A chunk of query rows over a context that is `context` tokens long."""

    chunk: int
    context: int
    heads: int
    fp8: bool


ALL = [
    Cell(chunk, context << 10, heads, fp8)
    for heads in (16, 32, 128)
    for fp8 in (False, True)
    for chunk, context in ((512, 32), (2048, 32), (2048, 128))
]
QUICK = [cell for cell in ALL if cell.chunk == 2048 and cell.context == 32 << 10 and cell.heads in (16, 128)]


def attention(cell: Cell) -> dict[str, Any]:
    layout = mla_row(RANK, ROPE, torch.bfloat16, cell.fp8)
    rows = layout.encode(torch.randn(cell.context, RANK + ROPE, dtype=torch.bfloat16, device="cuda"))
    q = torch.randn(cell.chunk, cell.heads, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    chosen = selections(cell)
    spent = seconds_of([lambda: sparse_attention(q, rows, chosen, layout, RANK, SCALE)])
    flops = 2 * cell.chunk * cell.heads * TOPK * (2 * RANK + ROPE)
    return {
        "part": "attention",
        "chunk": cell.chunk,
        "context": cell.context,
        "heads": cell.heads,
        "rows": "fp8" if cell.fp8 else "bf16",
        "us": spent * 1e6,
        "us per query row": spent / cell.chunk * 1e6,
        "GB/s of rows": cell.chunk * TOPK * layout.row_bytes / spent * 1e-9,
        "TFLOP/s": flops / spent * 1e-12,
        "of matrix": flops / spent / matrix_rate(),
    }


def selections(cell: Cell) -> Tensor:
    """[chunk, k] positions: some that the whole chunk shares, the others at random."""
    shared = round(SHARED_WITH_NEIGHBOURS * TOPK)
    common = torch.randperm(cell.context, device="cuda")[:shared].expand(cell.chunk, -1)
    own = torch.randint(cell.context, (cell.chunk, TOPK - shared), device="cuda")
    return torch.cat((common, own), dim=1).sort(dim=1).values


# Index scoring and top-k of a chunk is measured by indexer.py; a part of it here would stand beside attention.
PARTS: dict[str, Callable[[Cell], dict[str, Any]]] = {"attention": attention}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [
        f"{row['part']}\n{row['heads']} heads\n{row['rows']}\n{row['chunk']} at {row['context'] >> 10}k" for row in rows
    ]
    figure, axes = pyplot.subplots(figsize=(0.75 * len(rows) + 2, 5))
    axes.bar(names, [100 * row["of matrix"] for row in rows])
    axes.set_ylabel("% of the matrix rate")
    axes.set_title(f"sparse prefill, top-k {TOPK}, {torch.cuda.get_device_name()}")
    axes.tick_params("x", labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--png", type=Path, help="also draw the results to this file")
    parser.add_argument("--quick", action="store_true", help="few cells")
    parser.add_argument("--parts", nargs="*", choices=sorted(PARTS), default=sorted(PARTS), help="what to measure")
    options = parser.parse_args()
    require_gpu()
    torch.manual_seed(0)
    rows = [PARTS[part](cell) for part in options.parts for cell in (QUICK if options.quick else ALL)]
    notes = f"copy {copy_bandwidth() * 1e-12:.2f} TB/s, matrix product {matrix_rate() * 1e-12:.0f} TFLOP/s"
    report(f"sparse prefill of one chunk in one layer, top-k {TOPK}", rows, options.json, notes)
    if options.png is not None:
        draw(rows, options.png)


if __name__ == "__main__":
    main()
