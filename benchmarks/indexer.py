"""Index scoring and exact top-k over paged index keys, on one GPU.

    python benchmarks/indexer.py --json indexer.json --png indexer.png

Decode: one query row per request, each with a context of its own, top-k 2048. Scoring must read every key of every
context once: its rate is those bytes over its time, held against a large copy in the same run. The bars, at 32k and
128k tokens and batches of 32 and 128: scoring at 60 % of the copy's rate, top-k no longer than the scoring. Other
cells are reported. Prefill: a chunk of query rows that share one context; held against a large matrix product.
Every call is timed cold (the L2 is flushed), top-k too, which in a step finds some of its scores in the L2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gpu_timing import copy_bandwidth, matrix_rate, require_gpu, seconds_of
from report import make_parser, report
from torch import Tensor

from hotset.kernels.index_topk import index_topk
from hotset.kernels.rows import PagedRows, index_key_row
from hotset.kernels.segments import Segments, make_segments

TOPK = 2048
HEAD_DIM = 128
PART_BYTES = 64 * 656  # of a page of 64 fp8 rows in one layer: this many bytes hold one block of index keys
PAGES_ENCODED_AT_ONCE = 2048
SCORING_BAR, TOPK_BAR = 0.6, 1.0
BARRED = {(batch, context) for batch in (32, 128) for context in (32 << 10, 128 << 10)}


@dataclass(frozen=True, slots=True)
class Cell:
    """`batch` requests with `context` tokens each; `chunk` query rows of each, the newest."""

    batch: int
    context: int
    heads: int = 32
    fp8: bool = True
    chunk: int = 1


QUICK = [Cell(batch, context << 10) for context in (32, 128) for batch in (1, 32, 128)]
DECODE = [
    *QUICK,
    *(Cell(8, 128 << 10), Cell(1, 1 << 20)),
    *(Cell(batch, 128 << 10, heads=64) for batch in (1, 32, 128)),
    *(Cell(batch, 128 << 10, fp8=False) for batch in (1, 32)),
]
PREFILL = [Cell(1, context << 10, heads, chunk=2048) for context in (32, 128) for heads in (32, 64)]


@dataclass(frozen=True, slots=True)
class Inputs:
    q: Tensor
    weights: Tensor
    keys: PagedRows
    segments: Segments

    @property
    def room(self) -> int:
        """Scores of a row: its context, rounded up as index_topk does."""
        from hotset.kernels.index_topk.triton_select import CONTEXT_MULTIPLE

        return -(-max(self.segments.lengths) // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE


@cache
def pool(fp8: bool) -> Tensor:
    """[1, pages, keys of a block, stored width]: enough for the largest cell, all of it random keys."""
    layout = index_key_row(HEAD_DIM, torch.bfloat16, fp8)
    per_block = PART_BYTES // layout.stride_bytes
    cells = [cell for cell in (*DECODE, *PREFILL) if cell.fp8 == fp8]
    pages = max(cell.batch * -(-cell.context // per_block) for cell in cells)
    stored = torch.empty(1, pages, PART_BYTES, dtype=torch.uint8, device="cuda").view(layout.stored_dtype)
    blocks = stored[:, :, : per_block * layout.stored_width].unflatten(2, (per_block, layout.stored_width))
    for first in range(0, pages, PAGES_ENCODED_AT_ONCE):
        part = blocks[0, first : first + PAGES_ENCODED_AT_ONCE]
        values = torch.randn(*part.shape[:2], HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        part.copy_(layout.encode(values))
    return blocks


def inputs(cell: Cell) -> Inputs:
    blocks = pool(cell.fp8)
    layout = index_key_row(HEAD_DIM, torch.bfloat16, cell.fp8)
    each = -(-cell.context // blocks.shape[2])
    table = torch.randperm(blocks.shape[1], device="cuda")[: cell.batch * each].view(cell.batch, each)
    rows = cell.batch * cell.chunk
    seat_of = torch.arange(cell.batch, device="cuda").repeat_interleave(cell.chunk)
    return Inputs(
        torch.randn(rows, cell.heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda"),
        torch.randn(rows, cell.heads, device="cuda"),
        PagedRows(blocks, (), layout, table, seat_of),
        make_segments([cell.context - cell.chunk] * cell.batch, [cell.chunk] * cell.batch, torch.device("cuda")),
    )


def score(given: Inputs, tuning: Any = None, part: slice = slice(None)) -> Any:
    from hotset.kernels.index_topk import triton_impl

    return triton_impl.score(
        *(given.q[part], given.weights[part], given.keys, given.keys.seat_of[part], given.segments.positions[part]),
        *(given.room, TOPK, HEAD_DIM**-0.5),
        share_context=not given.segments.decoding,
        tuning=tuning,
    )


def scoring_seconds(given: Inputs, tuning: Any = None) -> float:
    """Of all rows, or of as many as the workspace takes."""
    return seconds_of([lambda: score(given, tuning, rows_at_once(given))])


def rows_at_once(given: Inputs) -> slice:
    from hotset.kernels.index_topk import triton_impl

    return slice(0, max(1, triton_impl.WORKSPACE_BYTES // (4 * given.room)))


def topk_seconds(given: Inputs, **tuning: Any) -> float:
    """Of as many rows, from scores that are there already."""
    from hotset.kernels.index_topk import triton_impl

    part = rows_at_once(given)
    scores = score(given, part=part)
    out = torch.empty(scores.values.shape[0], TOPK, dtype=torch.int64, device="cuda")
    seats, positions = given.keys.seat_of[part], given.segments.positions[part]
    return seconds_of([lambda: triton_impl.select(scores, seats, positions, TOPK, out, **tuning)])


def both_seconds(given: Inputs) -> float:
    return seconds_of([lambda: index_topk(given.q, given.weights, given.keys, given.segments, TOPK, HEAD_DIM**-0.5)])


def measured(cell: Cell) -> dict[str, Any]:
    given = inputs(cell)
    rows = min(given.q.shape[0], rows_at_once(given).stop)
    scoring, topk = scoring_seconds(given), topk_seconds(given)
    moved = rows * cell.context * given.keys.layout.stride_bytes if cell.chunk == 1 else None
    pairs = int((given.segments.positions[:rows] + 1).sum())
    flops = 2 * cell.heads * HEAD_DIM * pairs / scoring
    ceiling = moved / scoring / copy_bandwidth() if moved is not None else flops / matrix_rate()
    return {
        "rows": f"{cell.batch} x {cell.chunk}" if cell.chunk > 1 else cell.batch,
        "context": cell.context,
        "heads": cell.heads,
        "keys": "fp8" if cell.fp8 else "bf16",
        "scoring us": scoring * 1e6,
        "GB/s": moved / scoring * 1e-9 if moved is not None else "-",
        "TFLOP/s": flops * 1e-12,
        "of ceiling": ceiling,
        "top-k us": topk * 1e6,
        "top-k/scoring": topk / scoring,
        "all rows us": both_seconds(given) * 1e6,
        "bars": verdict(cell, ceiling, topk / scoring),
    }


def verdict(cell: Cell, of_copy: float, ratio: float) -> str:
    if (cell.batch, cell.context) not in BARRED:
        return "-"
    missed = [name for name, met in (("scoring", of_copy >= SCORING_BAR), ("top-k", ratio <= TOPK_BAR)) if not met]
    return f"missed: {', '.join(missed)}" if missed else "met"


def sweep() -> None:
    """Tries other sizes of tiles, pipelines and grids, and prints every time: for whoever sets the constants."""
    from hotset.kernels.index_topk import triton_score, triton_select

    def times(configurations: Sequence[Any], cells: Sequence[Cell], seconds: Any) -> list[dict[str, Any]]:
        made = {cell: inputs(cell) for cell in cells}
        rows = [
            {"tuning": tuning_text(tuning)}
            | {
                f"{cell.batch}x{cell.chunk} @{cell.context >> 10}k us": seconds(made[cell], tuning) * 1e6
                for cell in cells
            }
            for tuning in configurations
        ]
        return sorted(rows, key=lambda row: sum(value for value in row.values() if isinstance(value, float)))

    decode = [Cell(32, 32 << 10), Cell(128, 32 << 10), Cell(32, 128 << 10)]
    alone = triton_score.OWN_CONTEXT[32]
    scoring = [replace(alone, programs_per_sm=each) for each in (4, 5, 6, 10)]
    scoring += [replace(alone, stages=each) for each in (3, 5, 6)]
    scoring += [replace(alone, registers=None), replace(alone, keys=128, registers=None, programs_per_sm=3)]
    scoring += [replace(alone, keys=128, warps=8, registers=None, programs_per_sm=2)]
    report("scoring, one query row", times(scoring, decode, scoring_seconds), None)
    plain = triton_select.TUNED
    selecting = [plain, replace(plain, bins=64), replace(plain, bins=256), replace(plain, programs_per_sm=4)]
    selecting += [replace(plain, programs_per_sm=16), replace(plain, block=4096, warps=8), replace(plain, block=1024)]
    selecting += [replace(plain, finish_warps=each) for each in (4, 16)]
    few = [Cell(1, 128 << 10), *decode]
    report("top-k", times(selecting, few, lambda given, tuning: topk_seconds(given, tuning=tuning)), None)
    together = triton_score.SHARED_CONTEXT
    wide = [together, replace(together, stages=3), replace(together, columns=64, programs_per_sm=3)]
    wide += [
        replace(together, keys=128, warps=8, programs_per_sm=1),
        replace(together, columns=256, warps=8, programs_per_sm=1),
    ]
    report("scoring, a chunk of query rows", times(wide, [Cell(1, 32 << 10, chunk=2048)], scoring_seconds), None)


def tuning_text(tuning: Any) -> str:
    return ", ".join(f"{name} {getattr(tuning, name)}" for name in tuning.__dataclass_fields__)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [f"{row['rows']} at {row['context'] >> 10}k\n{row['heads']} heads, {row['keys']}" for row in rows]
    figure, (rate, time) = pyplot.subplots(2, 1, figsize=(1.1 * len(rows) + 2, 7), sharex=True)
    rate.bar(names, [100 * row["of ceiling"] for row in rows], color="tab:blue")
    rate.axhline(100 * SCORING_BAR, color="tab:red", linewidth=1, label="bar at batch 32 and 128")
    rate.set_ylabel("scoring, % of copy bandwidth\n(chunks: of matrix rate)")
    rate.legend()
    time.bar(names, [row["scoring us"] for row in rows], color="tab:blue", label="scoring")
    time.bar(names, [row["top-k us"] for row in rows], bottom=[row["scoring us"] for row in rows], label="top-k")
    time.set_yscale("log")
    time.set_ylabel("us")
    time.legend()
    time.tick_params("x", labelrotation=90)
    figure.suptitle(f"index scoring and top-{TOPK}, {torch.cuda.get_device_name()}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--png", type=Path, help="also draw the results to this file")
    parser.add_argument("--quick", action="store_true", help="only the cells with a bar, and batch 1")
    parser.add_argument("--sweep", action="store_true", help="try other sizes instead, and print their times")
    options = parser.parse_args()
    require_gpu()
    torch.manual_seed(0)
    if options.sweep:
        sweep()
        return
    rows = [measured(cell) for cell in (QUICK if options.quick else [*DECODE, *PREFILL])]
    notes = (
        f"copy {copy_bandwidth() * 1e-12:.2f} TB/s"
        + ("" if options.quick else f", matrix product {matrix_rate() * 1e-12:.0f} TFLOP/s")
        + f"; ceiling: the copy for one query row, the product for chunks; bars at batch 32 and 128: scoring >= "
        f"{SCORING_BAR:.0%} of it, top-k <= {TOPK_BAR:g}x the scoring; 'all rows us' is the whole op, for chunks "
        "longer than the workspace in several turns"
    )
    report(f"index scoring and exact top-{TOPK}", rows, options.json, notes)
    if options.png is not None:
        draw(rows, options.png)


if __name__ == "__main__":
    main()
