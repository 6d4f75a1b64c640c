"""Measures index scoring and exact top-k over paged index keys on one GPU, against the copy bandwidth of the same run.

    python benchmarks/indexer.py --json indexer.json --png indexer.png

Decode: each request has one query and its own context; top-k is 2048. Scoring must read every key once. "of ceiling" is
the rate of these reads over the bandwidth of a large copy. Prefill: the queries of a chunk share one context, and "of
ceiling" is the share of a large matrix product's rate. The L2 is flushed before every call, also before top-k, although
in a real step some of the scores are still in the L2. Bars (required results), at 32k and 128k tokens and batch 32 and
128, for all numbers of heads: scoring reaches 93 % of the copy bandwidth over fp8 keys and 60 % over 16-bit keys, and
top-k takes no longer than scoring. Other combinations have no bar. "21 of 78" groups of layers are those of GLM-5.2:
the blocks of keys that a group reads lie between those of other groups, which should not change the time.

--peer FILE compares scoring with another kernel, such as DeepGEMM's: "speedup" is its time over ours, and must be 0.97
in every case.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import gcd
from pathlib import Path
from typing import Any

import torch
from gpu_timing import copy_bandwidth, matrix_rate, require_gpu, seconds_of
from peer_timings import PeerTimings, add_peer_option
from report import make_parser, report
from torch import Tensor

from hotset.kernels.index_topk import index_topk
from hotset.kernels.rows import PagedRows, index_key_row
from hotset.kernels.segments import Segments, make_segments

TOPK = 2048
HEAD_DIM = 128
BLOCK_BYTES = 64 * 656  # one layer of a page of 64 fp8 rows; a block of index keys has the same size
BLOCKS_PER_ENCODING = 2048
SCORING_BAR = {True: 0.93, False: 0.6}  # by fp8 keys
TOPK_BAR = 1.0
PEER_COLUMNS = ("queries", "context", "heads", "keys", "groups")
PEER_SLOWEST = 0.97  # speedup
CASES_WITH_BARS = {(batch, context) for batch in (32, 128) for context in (32 << 10, 128 << 10)}


@dataclass(frozen=True, slots=True)
class IndexerCase:
    """`batch` requests with contexts of `context` tokens, whose newest `chunk` tokens are the queries."""

    batch: int
    context: int
    heads: int = 32
    fp8: bool = True
    chunk: int = 1
    groups: int = 1  # index groups whose blocks of keys take turns in the layers of a page
    layers: int = 1

    @property
    def parts(self) -> int:
        """The number of layers of a page that can hold blocks of one group."""
        return self.layers // gcd(self.groups, self.layers)

    @property
    def step(self) -> int:
        return self.groups // gcd(self.groups, self.layers)

    def pages(self, block_keys: int) -> int:
        return -(-(-(-self.context // block_keys) * self.step) // self.parts)


QUICK = [
    *(IndexerCase(batch, context << 10) for context in (32, 128) for batch in (1, 32, 128)),
    *(IndexerCase(batch, 128 << 10, groups=21, layers=78) for batch in (1, 32)),
]
DECODE = [
    *QUICK,
    IndexerCase(8, 128 << 10),
    IndexerCase(1, 1 << 20),
    *(IndexerCase(batch, context << 10, heads=64) for context in (32, 128) for batch in (1, 32, 128)),
    *(IndexerCase(batch, 128 << 10, fp8=False) for batch in (1, 32)),
]
PREFILL = [IndexerCase(1, context << 10, heads, chunk=2048) for context in (32, 128) for heads in (32, 64)]


@dataclass(frozen=True, slots=True)
class CudaSelection:
    """A shape of `cuda_select`."""

    shape: Any  # a `cuda_select.BlockShape`
    cluster: int


@dataclass(frozen=True, slots=True)
class IndexerInputs:
    """The arguments of `index_topk`."""

    q: Tensor
    weights: Tensor
    keys: PagedRows
    segments: Segments

    @property
    def scores_per_query(self) -> int:
        """The length of the longest context, rounded up as in `index_topk`."""
        from hotset.kernels.index_topk.scores import CONTEXT_MULTIPLE

        return -(-max(self.segments.lengths) // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE


@cache
def pool(fp8: bool) -> Tensor:
    """Returns random keys [blocks, keys per block, stored width], enough for the largest case."""
    layout = index_key_row(HEAD_DIM, torch.bfloat16, fp8)
    per_block = BLOCK_BYTES // layout.stride_bytes
    cases = [case for case in (*DECODE, *PREFILL) if case.fp8 == fp8]
    count = max(case.batch * case.pages(per_block) * case.parts for case in cases)
    stored = torch.empty(count, BLOCK_BYTES, dtype=torch.uint8, device="cuda").view(layout.stored_dtype)
    blocks = stored[:, : per_block * layout.stored_width].unflatten(1, (per_block, layout.stored_width))
    for first in range(0, count, BLOCKS_PER_ENCODING):
        encoded = blocks[first : first + BLOCKS_PER_ENCODING]
        values = torch.randn(*encoded.shape[:2], HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        encoded.copy_(layout.encode(values))
    return blocks


def make_inputs(case: IndexerCase) -> IndexerInputs:
    blocks = pool(case.fp8)
    layout = index_key_row(HEAD_DIM, torch.bfloat16, case.fp8)
    pages = case.pages(blocks.shape[1])
    blocks = blocks[: len(blocks) // case.parts * case.parts].unflatten(0, (case.parts, -1))
    table = torch.randperm(blocks.shape[1], device="cuda")[: case.batch * pages].view(case.batch, pages)
    queries = case.batch * case.chunk
    seat_of = torch.arange(case.batch, device="cuda").repeat_interleave(case.chunk)
    return IndexerInputs(
        torch.randn(queries, case.heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda"),
        torch.randn(queries, case.heads, device="cuda"),
        PagedRows(blocks, (), layout, table, seat_of, step=case.step, first_part=case.step - 1),
        make_segments([case.context - case.chunk] * case.batch, [case.chunk] * case.batch, torch.device("cuda")),
    )


def score(inputs: IndexerInputs, tuning: Any = None, queries: slice = slice(None)) -> Any:
    """Scores with the kernel that `index_topk` uses, or, given the tuning of a kernel, with this kernel."""
    from hotset.kernels.index_topk import cuda_score, triton_impl, triton_score

    arguments = (
        inputs.q[queries],
        inputs.weights[queries],
        inputs.keys,
        inputs.keys.seat_of[queries],
        inputs.segments.positions[queries],
        inputs.scores_per_query,
        TOPK,
        HEAD_DIM**-0.5,
    )
    if isinstance(tuning, cuda_score.BlockShape):
        return cuda_score.score(*arguments, tuning)
    share_context = not inputs.segments.decoding
    if tuning is None:
        return triton_impl.score(*arguments, share_context=share_context)
    return triton_score.score(*arguments, share_context=share_context, tuning=tuning)


def workspace_queries(inputs: IndexerInputs) -> slice:
    """Returns the slice of the first queries whose scores fit in the workspace together."""
    from hotset.kernels.index_topk import triton_impl

    return slice(0, max(1, triton_impl.WORKSPACE_BYTES // (4 * inputs.scores_per_query)))


def scoring_seconds(inputs: IndexerInputs, tuning: Any = None) -> float:
    """Times the scoring of the queries of `workspace_queries`."""
    return seconds_of([lambda: score(inputs, tuning, workspace_queries(inputs))])


def topk_seconds(inputs: IndexerInputs, tuning: Any = None) -> float:
    """Times the selection for the queries of `workspace_queries`. Their scores are computed before the timing. If the
    tuning of a kernel is given, this kernel selects."""
    from hotset.kernels.index_topk import cuda_select, triton_impl, triton_select

    select: Any = triton_impl.select
    if isinstance(tuning, triton_select.SelectTuning):
        select = partial(triton_select.select, tuning=tuning)
    elif isinstance(tuning, CudaSelection):
        select = partial(cuda_select.select, shape=tuning.shape, cluster=tuning.cluster)
    queries = workspace_queries(inputs)
    scores = score(inputs, queries=queries)
    out = torch.empty(scores.values.shape[0], TOPK, dtype=torch.int64, device="cuda")
    seats, positions = inputs.keys.seat_of[queries], inputs.segments.positions[queries]
    return seconds_of([lambda: select(scores, seats, positions, TOPK, out)])


def index_topk_seconds(inputs: IndexerInputs) -> float:
    return seconds_of(
        [lambda: index_topk(inputs.q, inputs.weights, inputs.keys, inputs.segments, TOPK, HEAD_DIM**-0.5)]
    )


def measure(case: IndexerCase) -> dict[str, Any]:
    from hotset.kernels.index_topk import triton_select

    inputs = make_inputs(case)
    queries = min(inputs.q.shape[0], workspace_queries(inputs).stop)
    scoring_s, topk_s = scoring_seconds(inputs), topk_seconds(inputs)
    key_bytes = queries * case.context * inputs.keys.layout.stride_bytes if case.chunk == 1 else None
    pairs = int((inputs.segments.positions[:queries] + 1).sum())
    flops = 2 * case.heads * HEAD_DIM * pairs / scoring_s
    of_ceiling = flops / matrix_rate() if key_bytes is None else key_bytes / scoring_s / copy_bandwidth()
    return {
        "queries": f"{case.batch} x {case.chunk}" if case.chunk > 1 else case.batch,
        "context": case.context,
        "heads": case.heads,
        "keys": "fp8" if case.fp8 else "bf16",
        "groups": f"{case.groups} of {case.layers}",
        "scoring us": scoring_s * 1e6,
        "GB/s": "-" if key_bytes is None else key_bytes / scoring_s * 1e-9,
        "TFLOP/s": flops * 1e-12,
        "of ceiling": of_ceiling,
        "top-k us": topk_s * 1e6,
        "Triton top-k us": topk_seconds(inputs, triton_select.TUNED) * 1e6,
        "top-k/scoring": topk_s / scoring_s,
        "whole op us": index_topk_seconds(inputs) * 1e6,
        "bars": verdict(case, of_ceiling, topk_s / scoring_s),
    }


def verdict(case: IndexerCase, of_copy: float, ratio: float) -> str:
    if (case.batch, case.context) not in CASES_WITH_BARS:
        return "-"
    results = {"scoring": of_copy >= SCORING_BAR[case.fp8], "top-k": ratio <= TOPK_BAR}
    missed = [name for name, met in results.items() if not met]
    return f"MISSED: {', '.join(missed)}" if missed else "met"


def sweep() -> None:
    """Prints the times of other tiles, pipelines and grids. Use the times to set the constants of the kernels."""
    from hotset.kernels.index_topk import cuda_score, cuda_select, triton_score, triton_select

    def times(configurations: Sequence[Any], cases: Sequence[IndexerCase], seconds: Any) -> list[dict[str, Any]]:
        inputs = {case: make_inputs(case) for case in cases}
        rows = [
            {"tuning": tuning_text(tuning)}
            | {
                f"{case.batch}x{case.chunk} @{case.context >> 10}k us": seconds(inputs[case], tuning) * 1e6
                for case in cases
            }
            for tuning in configurations
        ]
        return sorted(rows, key=lambda row: sum(value for value in row.values() if isinstance(value, float)))

    few = [IndexerCase(1, 32 << 10), IndexerCase(1, 128 << 10)]
    decode = [IndexerCase(32, 32 << 10), IndexerCase(128, 32 << 10), IndexerCase(32, 128 << 10)]
    own = triton_score.OWN_CONTEXT[32]
    scoring = [cuda_score.BlockShape(*shape) for shape in ((4, 4), (8, 4), (12, 4), (16, 4), (12, 3), (12, 6))]
    scoring += [own, *(replace(own, programs_per_sm=programs) for programs in (4, 6, 10)), replace(own, stages=6)]
    report("Scoring, one query per context", times(scoring, [*few, *decode], scoring_seconds), None)
    shapes = [cuda_select.BlockShape(threads, bins) for threads in (256, 512, 1024) for bins in (1024, 2048)]
    selecting = [triton_select.TUNED, *(CudaSelection(shape, size) for shape in shapes for size in (1, 2, 4, 8))]
    cases = [IndexerCase(1, 128 << 10), *decode, IndexerCase(128, 128 << 10)]
    report("Top-k", times(selecting, cases, topk_seconds), None)
    shared = triton_score.SHARED_CONTEXT
    chunk_scoring = [shared, replace(shared, stages=3), replace(shared, columns=64, programs_per_sm=3)]
    chunk_scoring += [
        replace(shared, keys=128, warps=8, programs_per_sm=1),
        replace(shared, columns=256, warps=8, programs_per_sm=1),
    ]
    chunk = IndexerCase(1, 32 << 10, chunk=2048)
    report("Scoring, a chunk of queries", times(chunk_scoring, [chunk], scoring_seconds), None)


def tuning_text(tuning: Any) -> str:
    return ", ".join(f"{name} {getattr(tuning, name)}" for name in tuning.__dataclass_fields__)


def draw(rows: Sequence[dict[str, Any]], path: Path, peer: PeerTimings | None) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [
        f"{row['queries']} at {row['context'] >> 10}k\n{row['heads']} heads, {row['keys']}, {row['groups']}"
        for row in rows
    ]
    panels = 2 if peer is None else 3
    figure, (rate, time, *below) = pyplot.subplots(panels, 1, figsize=(1.1 * len(rows) + 2, 3.5 * panels), sharex=True)
    if peer is not None:
        peer.draw(below[0], names, rows, "scoring us")
    rate.bar(names, [100 * row["of ceiling"] for row in rows], color="tab:blue")
    rate.axhline(100 * SCORING_BAR[True], color="tab:red", linewidth=1, label="bar of fp8 keys at batch 32 and 128")
    rate.set_ylabel("scoring, % of copy bandwidth\n(chunks: % of matrix rate)")
    rate.legend()
    time.bar(names, [row["scoring us"] for row in rows], color="tab:blue", label="scoring")
    time.bar(names, [row["top-k us"] for row in rows], bottom=[row["scoring us"] for row in rows], label="top-k")
    time.set_yscale("log")
    time.set_ylabel("us")
    time.legend()
    time.tick_params("x", labelrotation=90)
    figure.suptitle(f"Index scoring and top-{TOPK}, {torch.cuda.get_device_name()}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--png", type=Path, help="also draw the results to this file")
    parser.add_argument(
        "--quick", action="store_true", help="only decode with 32 heads and fp8 keys at 32k and 128k tokens"
    )
    parser.add_argument("--sweep", action="store_true", help="print the times of other kernel constants instead")
    add_peer_option(parser, PEER_COLUMNS)
    options = parser.parse_args()
    require_gpu()
    torch.manual_seed(0)
    if options.sweep:
        sweep()
        return
    rows = [measure(case) for case in (QUICK if options.quick else [*DECODE, *PREFILL])]
    notes = (
        f"copy bandwidth {copy_bandwidth() * 1e-12:.2f} TB/s"
        + ("" if options.quick else f", matrix product {matrix_rate() * 1e-12:.0f} TFLOP/s")
        + f"; ceiling: the copy bandwidth for decode, the matrix rate for chunks; bars at batch 32 and 128: scoring >= "
        f"{SCORING_BAR[True]:.0%} of the ceiling (16-bit keys: {SCORING_BAR[False]:.0%}), top-k <= {TOPK_BAR:g}x "
        "scoring; 'whole op us' includes all queries, while scoring and top-k are limited to the queries whose scores "
        "fit in the workspace"
    )
    shown = rows if options.peer is None else options.peer.beside(rows, "scoring us")
    report(f"Index scoring and exact top-{TOPK}", shown, options.json, notes)
    if options.peer is not None and (bars := options.peer.bars(rows, PEER_SLOWEST, PEER_SLOWEST, "scoring us")):
        report("Bars", [bar.row() for bar in bars], None)
    if options.png is not None:
        draw(rows, options.png, options.peer)


if __name__ == "__main__":
    main()
