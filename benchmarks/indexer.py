"""Measures index scoring and exact top-k over paged index keys on one GPU, against the copy bandwidth.

    python benchmarks/indexer.py --json indexer.json --png indexer.png

Decode: each request has one query and its own context; top-k is 2048. Scoring must read every key once. "of ceiling" is
the rate of these reads over the bandwidth of a large copy. Prefill: the queries of a chunk share one context, and "of
ceiling" is the share of a large matrix product's rate. The L2 is flushed before every call, also before top-k, although
in a real step some of the scores are still in the L2. Bars (required results), at 32k and 128k tokens and batch 32 and
128, for all numbers of heads: scoring reaches 93 % of the copy bandwidth over fp8 keys and 60 % over 16-bit keys, and
top-k takes no longer than scoring. Other combinations have no bar. GLM-5.2 has "21 of 78" index groups and layers: the
blocks of keys that a group reads lie between blocks of other groups, which should not change the time.

--peer FILE compares scoring with another kernel, such as DeepGEMM's: "speedup" is its time over ours, and must be 0.97
in every case. --sweep prints times for setting the constants of the kernels.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from math import gcd
from typing import Any

import torch
from gpu_timing import copy_bandwidth, matrix_rate, seconds_of
from op_runner import OpBenchmark, PeerComparison, Sweep, run
from report import Bar, Row
from torch import Tensor

from hotset.kernels.index_topk import index_topk
from hotset.kernels.rows import PagedRows, index_key_row
from hotset.kernels.segments import Segments, make_segments

TOPK = 2048
HEAD_DIM = 128
BLOCK_BYTES = 64 * 656  # one layer of a page of 64 fp8 rows; a block of index keys has the same size
BLOCKS_PER_ENCODING = 2048
SCORING_BAR = {"fp8": 0.93, "bf16": 0.6}
TOPK_BAR = 1.0
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
    """Scores with the kernel that `index_topk` uses, or with the kernel to which `tuning` belongs."""
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
    """Returns a slice of as many queries as have their scores in the workspace at once."""
    from hotset.kernels.index_topk import triton_impl

    return slice(0, max(1, triton_impl.WORKSPACE_BYTES // (4 * inputs.scores_per_query)))


def scoring_seconds(inputs: IndexerInputs, tuning: Any = None) -> float:
    """Times the scoring of the queries of `workspace_queries`."""
    return seconds_of([lambda: score(inputs, tuning, workspace_queries(inputs))])


def topk_seconds(inputs: IndexerInputs, tuning: Any = None) -> float:
    """Times the selection for the queries of `workspace_queries`, by default with the tuned shape. The scores are
    computed before."""
    from hotset.kernels.index_topk import cuda_select, triton_impl

    select: Any = triton_impl.select
    if isinstance(tuning, CudaSelection):
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


def measure(case: IndexerCase) -> Row:
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
        "top-k/scoring": topk_s / scoring_s,
        "whole op us": index_topk_seconds(inputs) * 1e6,
    }


def bars(rows: list[Row]) -> list[Bar]:
    results = []
    for row in rows:
        if (row["queries"], row["context"]) in CASES_WITH_BARS:
            what = f"{row['queries']} queries at {row['context']}, {row['heads']} heads, {row['keys']}, {row['groups']}"
            limit = SCORING_BAR[row["keys"]]
            results.append(Bar(f"{what}: scoring, of the copy bandwidth", row["of ceiling"], limit, at_least=True))
            results.append(Bar(f"{what}: top-k / scoring", row["top-k/scoring"], TOPK_BAR))
    return results


def sweeps() -> Iterator[Sweep]:
    from hotset.kernels.index_topk import cuda_score, cuda_select, triton_score

    def of(title: str, tunings: list[Any], cases: list[IndexerCase], seconds: Any) -> Sweep:
        inputs = {f"{case.batch}x{case.chunk} @{case.context >> 10}k": make_inputs(case) for case in cases}
        timed = {name: partial(seconds, of_case) for name, of_case in inputs.items()}
        return Sweep(title, {str(tuning): tuning for tuning in tunings}, timed)

    few = [IndexerCase(1, 32 << 10), IndexerCase(1, 128 << 10)]
    decode = [IndexerCase(32, 32 << 10), IndexerCase(128, 32 << 10), IndexerCase(32, 128 << 10)]
    own = triton_score.OWN_CONTEXT[32]
    scoring: list[Any] = [
        cuda_score.BlockShape(*shape) for shape in ((4, 4), (8, 4), (12, 4), (16, 4), (12, 3), (12, 6))
    ]
    scoring += [own, *(replace(own, programs_per_sm=programs) for programs in (4, 6, 10)), replace(own, stages=6)]
    yield of("Scoring, one query per context", scoring, [*few, *decode], scoring_seconds)
    shapes = [cuda_select.BlockShape(threads, bins) for threads in (256, 512, 1024) for bins in (1024, 2048)]
    selecting = [CudaSelection(shape, size) for shape in shapes for size in (1, 2, 4, 8)]
    cases = [IndexerCase(1, 128 << 10), *decode, IndexerCase(128, 128 << 10)]
    yield of("Top-k", selecting, cases, topk_seconds)


OP = OpBenchmark(
    doc=__doc__,
    title=f"Index scoring and exact top-{TOPK}",
    cases=[*DECODE, *PREFILL],
    quick=QUICK,
    measure=measure,
    bars=bars,
    peer=PeerComparison(
        columns=("queries", "context", "heads", "keys", "groups"), mean=0.97, slowest=0.97, own="scoring us"
    ),
    sweeps=sweeps,
    drawn=("scoring us", "of ceiling", "top-k us"),
    notes=(
        "ceiling: the copy bandwidth for decode, the matrix rate for chunks; 'whole op us' includes all queries, while "
        "scoring and top-k are limited to the queries whose scores fit in the workspace"
    ),
)

if __name__ == "__main__":
    run(OP)
