"""Measures sparse attention of one prefill chunk in one layer on one GPU, against the matrix rate of the same run.

    python benchmarks/prefill.py --json prefill.json --png prefill.png

All tokens of the chunk share one context, and each attends to 2048 of its rows. In real prompts, adjacent tokens select
mostly the same rows; here, half of the selection is the same for all tokens. TFLOP/s counts the two matrix products.
There is no required result. indexer.py measures index scoring and top-k of a chunk.
"""

from collections.abc import Sequence
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
SHARED_SELECTION = 0.5  # share of a selection that all tokens have in common


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """A chunk of `chunk` tokens over a context of `context` tokens."""

    chunk: int
    context: int
    heads: int
    fp8: bool


ALL = [
    PrefillCase(chunk, context << 10, heads, fp8)
    for heads in (16, 32, 128)
    for fp8 in (False, True)
    for chunk, context in ((512, 32), (2048, 32), (2048, 128))
]
QUICK = [case for case in ALL if case.chunk == 2048 and case.context == 32 << 10 and case.heads in (16, 128)]


def measure(case: PrefillCase) -> dict[str, Any]:
    layout = mla_row(RANK, ROPE, torch.bfloat16, case.fp8)
    rows = layout.encode(torch.randn(case.context, RANK + ROPE, dtype=torch.bfloat16, device="cuda"))
    q = torch.randn(case.chunk, case.heads, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    row_ids = make_selections(case)
    seconds = seconds_of([lambda: sparse_attention(q, rows, row_ids, layout, RANK, SCALE)])
    flops = 2 * case.chunk * case.heads * TOPK * (2 * RANK + ROPE)
    return {
        "chunk": case.chunk,
        "context": case.context,
        "heads": case.heads,
        "rows": "fp8" if case.fp8 else "bf16",
        "us": seconds * 1e6,
        "us per token": seconds / case.chunk * 1e6,
        "GB/s of rows": case.chunk * TOPK * layout.row_bytes / seconds * 1e-9,
        "TFLOP/s": flops / seconds * 1e-12,
        "of matrix": flops / seconds / matrix_rate(),
    }


def make_selections(case: PrefillCase) -> Tensor:
    """Returns [chunk, k] ascending positions. SHARED_SELECTION of them are the same for the whole chunk. The others are
    random; a position can occur more than once."""
    shared = round(SHARED_SELECTION * TOPK)
    common = torch.randperm(case.context, device="cuda")[:shared].expand(case.chunk, -1)
    own = torch.randint(case.context, (case.chunk, TOPK - shared), device="cuda")
    return torch.cat((common, own), dim=1).sort(dim=1).values


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [f"{row['heads']} heads\n{row['rows']}\n{row['chunk']} at {row['context'] >> 10}k" for row in rows]
    figure, axes = pyplot.subplots(figsize=(0.75 * len(rows) + 2, 5))
    axes.bar(names, [100 * row["of matrix"] for row in rows])
    axes.set_ylabel("% of the matrix rate")
    axes.set_title(f"Sparse prefill attention, top-k {TOPK}, {torch.cuda.get_device_name()}")
    axes.tick_params("x", labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--png", type=Path, help="also draw the results to this file")
    parser.add_argument("--quick", action="store_true", help="only chunks of 2048 tokens at 32k, with 16 and 128 heads")
    options = parser.parse_args()
    require_gpu()
    torch.manual_seed(0)
    rows = [measure(case) for case in (QUICK if options.quick else ALL)]
    notes = f"copy bandwidth {copy_bandwidth() * 1e-12:.2f} TB/s, matrix product {matrix_rate() * 1e-12:.0f} TFLOP/s"
    report(f"Sparse attention of one prefill chunk in one layer, top-k {TOPK}", rows, options.json, notes)
    if options.png is not None:
        draw(rows, options.png)


if __name__ == "__main__":
    main()
