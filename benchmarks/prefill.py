"""Measures sparse attention of one prefill chunk in one layer on one GPU, against the matrix rate of the same run.

    python benchmarks/prefill.py --json prefill.json --png prefill.png

All tokens of the chunk share one context, and each attends to 2048 of its rows. In real prompts, adjacent tokens select
mostly the same rows; here, half of the selection is the same for all tokens. TFLOP/s counts the two matrix products.
There is no required result. indexer.py measures index scoring and top-k of a chunk.
"""

from dataclasses import dataclass

import torch
from attention import RANK, ROPE, SCALE, TOPK
from gpu_timing import matrix_rate, seconds_of
from op_runner import OpBenchmark, run
from report import Row
from torch import Tensor

from hotset.kernels.rows import mla_row
from hotset.kernels.sparse_attention import sparse_attention

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


def measure(case: PrefillCase) -> Row:
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


OP = OpBenchmark(
    doc=__doc__,
    title=f"Sparse attention of one prefill chunk in one layer, top-k {TOPK}",
    cases=ALL,
    quick=[case for case in ALL if case.chunk == 2048 and case.context == 32 << 10 and case.heads != 32],
    measure=measure,
    drawn=("us per token", "of matrix"),
)

if __name__ == "__main__":
    run(OP)
