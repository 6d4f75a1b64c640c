"""Measures the small fused ops of a decode step against torch ops, and GQA decode attention, on one GPU.

    python benchmarks/small_ops.py --json small_ops.json --png small_ops.png

DSA ops have the shapes of dsa-50b: hidden size 4096, q_lora 1536, 32 heads of 128 + 64, rank 512, 32 index heads of
128. Small ops are timed with a warm L2 in a CUDA graph, as in a decode step, where their inputs have just been
written. A "floor" is the time of a kernel that does almost nothing, in the same kind of graph. Bars (required results):
at batch 16, a fused op that is not a matrix product takes at most 3 floors; GQA decode attention at 32k tokens reaches
60 % of the copy bandwidth at batch 16 and 64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from gpu_timing import copy_bandwidth, seconds_of
from op_runner import OpBenchmark, run
from report import Bar, Row
from torch import Tensor

from hotset.kernels.gqa_append import gqa_append
from hotset.kernels.gqa_append import reference as gqa_reference
from hotset.kernels.index_append import index_append
from hotset.kernels.index_append.reference import index_keys
from hotset.kernels.linear import Fp32Linear, per_head_matmul
from hotset.kernels.linear import reference as linear_reference
from hotset.kernels.mla_append import mla_append
from hotset.kernels.mla_append import reference as mla_reference
from hotset.kernels.norm import add_rms_norm, rms_norm
from hotset.kernels.norm import reference as norm_reference
from hotset.kernels.paged_attention import paged_attention
from hotset.kernels.rope import Rotation, rope_query
from hotset.kernels.rope import reference as rope_reference
from hotset.kernels.rows import PagedRows, gqa_row, index_key_row, mla_row
from hotset.kernels.segments import Segments

HIDDEN, Q_LORA, HEADS, NOPE, ROPE, RANK, V_DIM = 4096, 1536, 32, 128, 64, 512, 128
INDEX_HEADS, INDEX_DIM = 32, 128
KV_HEADS, HEAD_DIM = 8, 128
PAGE_ROWS, PAGES = 64, 1024
LAYERS = 40
EPS = 1e-6
INPUTS = 3  # number of inputs, which are used in rotation
MAX_FLOORS, MIN_COPY_SHARE = 3.0, 0.6
GQA_CONTEXT = 32_768
PRODUCTS = ("absorb + rope of queries", "value up-projection", "head weights, float32")  # matrix products

Call = Callable[[], object]


@dataclass(frozen=True)
class OpPair:
    """A fused op and its torch equivalent, each with several inputs."""

    name: str
    per_layer: int  # calls per layer in a decode step of a DSA model with fp8 rows and index keys
    fused: Sequence[Call]
    torch: Sequence[Call]


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def angles(tokens: int, dim: int) -> Rotation:
    radians = torch.randn(tokens, 1, dim // 2, device="cuda")
    return Rotation(radians.cos().bfloat16(), radians.sin().bfloat16())


def make_pair(name: str, per_layer: int, make: Callable[[], tuple[Call, Call]]) -> OpPair:
    calls = [make() for _ in range(INPUTS)]
    return OpPair(name, per_layer, [fused for fused, _ in calls], [by_torch for _, by_torch in calls])


def norm_pairs(batch: int) -> tuple[tuple[Call, Call], tuple[Call, Call]]:
    x, delta, weight = values(batch, HIDDEN), values(batch, HIDDEN), values(HIDDEN)
    latent, latent_weight = values(batch, Q_LORA), values(Q_LORA)
    return (
        (partial(add_rms_norm, x, delta, weight, EPS), partial(norm_reference.add_rms_norm, x, delta, weight, EPS)),
        (partial(rms_norm, latent, latent_weight, EPS), partial(norm_reference.rms_norm, latent, latent_weight, EPS)),
    )


def mla_pair(batch: int, fp8: bool) -> tuple[Call, Call]:
    layout = mla_row(RANK, ROPE, torch.bfloat16, fp8)
    rows = torch.zeros(PAGES * PAGE_ROWS, layout.stored_width, dtype=layout.stored_dtype, device="cuda")
    row_ids = torch.randperm(rows.shape[0], device="cuda")[:batch]
    inputs = (values(batch, RANK + ROPE), values(RANK), EPS, angles(batch, ROPE), layout, rows, row_ids)
    return partial(mla_append, *inputs), partial(mla_reference.mla_append, *inputs)


def index_pair(batch: int, fp8: bool) -> tuple[Call, Call]:
    layout = index_key_row(INDEX_DIM, torch.bfloat16, fp8)
    per_page = PAGE_ROWS * 656 // layout.stride_bytes
    blocks = torch.zeros(1, PAGES, per_page, layout.stored_width, dtype=layout.stored_dtype, device="cuda")
    table = torch.randperm(PAGES, device="cuda")[: batch * (PAGES // batch)].view(batch, -1)
    positions = torch.randint(table.shape[1] * per_page, (batch,), device="cuda")
    keys = PagedRows(blocks, [], layout, table, torch.arange(batch, device="cuda"))
    query, rotation = values(batch, INDEX_HEADS, INDEX_DIM), angles(batch, ROPE)
    inputs = (values(batch, INDEX_DIM), values(INDEX_DIM), values(INDEX_DIM), EPS, rotation, False)
    page, offset = table[keys.seat_of, positions // per_page], positions % per_page
    group = torch.zeros_like(page)

    def by_torch() -> None:
        blocks[group, page, offset] = layout.encode(index_keys(*inputs))
        rope_reference.rotate(query, rotation, False)

    return partial(index_append, query, *inputs, keys, positions), by_torch


def query_pairs(batch: int) -> tuple[tuple[Call, Call], ...]:
    q, key_up, rotation = values(batch, HEADS, NOPE + ROPE), values(HEADS, NOPE + V_DIM, RANK), angles(batch, ROPE)
    up, value_up = key_up[:, :NOPE], key_up[:, NOPE:].transpose(1, 2)
    attention_out = values(batch, HEADS, RANK)
    x, weight = values(batch, HIDDEN), values(INDEX_HEADS, HIDDEN, dtype=torch.float32)
    scale = INDEX_HEADS**-0.5
    return (
        (partial(rope_query, q, up, rotation), partial(rope_reference.rope_query, q, up, rotation)),
        (
            partial(per_head_matmul, attention_out, value_up),
            lambda: linear_reference.per_head_matmul(attention_out, value_up).reshape(batch, -1),
        ),
        (partial(Fp32Linear(weight, scale), x), partial(linear_reference.fp32_linear, x, weight, scale)),
    )


def gqa_pair(batch: int) -> tuple[Call, Call]:
    layout = gqa_row(KV_HEADS, HEAD_DIM, torch.bfloat16)
    rows = torch.zeros(PAGES * PAGE_ROWS, layout.stored_width, dtype=torch.bfloat16, device="cuda")
    row_ids = torch.randperm(PAGES * PAGE_ROWS, device="cuda")[:batch]
    qkv = values(batch, HEADS + 2 * KV_HEADS, HEAD_DIM)
    inputs = (qkv, KV_HEADS, None, angles(batch, HEAD_DIM), layout, rows, row_ids)
    return partial(gqa_append, *inputs), partial(gqa_reference.gqa_append, *inputs)


def op_pairs(batch: int) -> list[OpPair]:
    return [
        make_pair("add + norm, 4096", 2, lambda: norm_pairs(batch)[0]),
        make_pair("norm, 1536", 1, lambda: norm_pairs(batch)[1]),
        make_pair("mla append, fp8", 1, lambda: mla_pair(batch, True)),
        make_pair("mla append, bf16", 0, lambda: mla_pair(batch, False)),
        make_pair("key append + rope of index queries, fp8", 1, lambda: index_pair(batch, True)),
        make_pair("key append + rope of index queries, bf16", 0, lambda: index_pair(batch, False)),
        make_pair("absorb + rope of queries", 1, lambda: query_pairs(batch)[0]),
        make_pair("value up-projection", 1, lambda: query_pairs(batch)[1]),
        make_pair("head weights, float32", 1, lambda: query_pairs(batch)[2]),
        make_pair("gqa append", 0, lambda: gqa_pair(batch)),
    ]


@cache
def floor_seconds() -> float:
    """Times a kernel that does almost nothing."""
    one = torch.zeros(1, device="cuda")
    return seconds_of([lambda: one.add_(1)], cold=False)


@torch.inference_mode()
def measure(batch: int) -> list[Row]:
    """Returns a row for each small op, one for 40 layers, and one for GQA decode attention."""
    floor_s, rows = floor_seconds(), []
    layer_fused_s = layer_torch_s = 0.0
    for pair in op_pairs(batch):
        fused_s, torch_s = (seconds_of(calls, cold=False) for calls in (pair.fused, pair.torch))
        layer_fused_s += pair.per_layer * fused_s
        layer_torch_s += pair.per_layer * torch_s
        rows.append(table_row(pair.name, batch, fused_s, torch_s, floor_s))
    rows.append(table_row(f"{LAYERS} DSA layers", batch, LAYERS * layer_fused_s, LAYERS * layer_torch_s, None))
    return [*rows, gqa_decode_row(batch)]


def table_row(name: str, batch: int, fused_s: float, torch_s: float, floor_s: float | None) -> Row:
    return {
        "op": name,
        "batch": batch,
        "us": fused_s * 1e6,
        "torch us": torch_s * 1e6,
        "speedup": torch_s / fused_s,
        "floors": "" if floor_s is None else fused_s / floor_s,
        "of copy": "",
    }


def gqa_decode_call(batch: int, context: int) -> Call:
    layout = gqa_row(KV_HEADS, HEAD_DIM, torch.bfloat16)
    pages = batch * context // PAGE_ROWS
    blocks = torch.empty(1, pages, PAGE_ROWS, layout.stored_width, dtype=torch.bfloat16, device="cuda").normal_()
    table = torch.randperm(pages, device="cuda").view(batch, -1)
    seat_of, positions = torch.arange(batch, device="cuda"), torch.full((batch,), context - 1, device="cuda")
    segments = Segments([1] * batch, [1] * batch, positions, seat_of)
    q, keys = values(batch, HEADS, HEAD_DIM), PagedRows(blocks, [], layout, table, seat_of)
    return partial(paged_attention, q, keys, segments, KV_HEADS, HEAD_DIM**-0.5)


def gqa_decode_row(batch: int) -> Row:
    seconds = seconds_of([gqa_decode_call(batch, GQA_CONTEXT)])
    row_bytes = batch * GQA_CONTEXT * gqa_row(KV_HEADS, HEAD_DIM, torch.bfloat16).stride_bytes
    empty = dict.fromkeys(("torch us", "speedup", "floors"), "")
    name = f"GQA decode attention, {HEADS} on {KV_HEADS} heads, 32k"
    of_copy = row_bytes / seconds / copy_bandwidth()
    return {"op": name, "batch": batch, "us": seconds * 1e6} | empty | {"of copy": of_copy}


def bars(rows: list[Row]) -> list[Bar]:
    results = []
    for row in rows:
        what = f"{row['op']}, batch {row['batch']}"
        if row["batch"] == 16 and row["floors"] != "" and row["op"] not in PRODUCTS:
            results.append(Bar(f"{what}: floors", row["floors"], MAX_FLOORS))
        if row["batch"] >= 16 and row["of copy"] != "":
            results.append(Bar(f"{what}: of copy", row["of copy"], MIN_COPY_SHARE, at_least=True))
    return results


OP = OpBenchmark(
    doc=__doc__,
    title="Small ops of a decode step, and GQA decode attention, bf16",
    cases=(1, 16, 64, 128),
    quick=(16,),
    measure=measure,
    bars=bars,
    drawn=("us", "torch us"),
)

if __name__ == "__main__":
    run(OP)
