"""The fused small ops of a decode step beside what torch would run in their place, and GQA decode attention.

Shapes are those of dsa-50b (hidden 4096, q_lora 1536, 32 heads of 128 + 64, rank 512, 32 index heads x 128). Small ops
are timed warm, one after another in a CUDA graph, as in a decode step: what they read was just written. `floor` is the
time of a kernel that does next to nothing, in the same graph. The bars: at batch 16 every fused op that is not a matrix
product takes at most 3 floors; GQA decode at 32k reaches 60 % of the copy bandwidth at batch 16 and 64.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_timing import copy_bandwidth, require_gpu, seconds_of
from report import make_parser, report
from torch import Tensor

from hotset.kernels.fast_path import kernels_of
from hotset.kernels.gqa_append import gqa_append
from hotset.kernels.gqa_append import reference as gqa_reference
from hotset.kernels.key_append import key_append
from hotset.kernels.key_append.reference import index_keys
from hotset.kernels.linear import fp32_linear, per_head_matmul
from hotset.kernels.linear import reference as linear_reference
from hotset.kernels.mla_append import mla_append
from hotset.kernels.mla_append import reference as mla_reference
from hotset.kernels.norm import add_rms_norm, rms_norm
from hotset.kernels.norm import reference as norm_reference
from hotset.kernels.paged_attention import paged_attention
from hotset.kernels.rope import Rotation, rope_query, rotate
from hotset.kernels.rope import reference as rope_reference
from hotset.kernels.rows import PagedRows, gqa_row, index_key_row, mla_row
from hotset.kernels.segments import Segments

HIDDEN, Q_LORA, HEADS, NOPE, ROPE, RANK, V_DIM = 4096, 1536, 32, 128, 64, 512, 128
INDEX_HEADS, INDEX_DIM = 32, 128
KV_HEADS, HEAD_DIM = 8, 128
PAGE_ROWS, PAGES = 64, 1024
LAYERS = 40
EPS = 1e-6
INPUTS = 3  # that calls rotate among
MAX_FLOORS, LEAST_FRACTION = 3.0, 0.6

Call = Callable[[], object]


@dataclass(frozen=True)
class Pair:
    """The same work twice, on several inputs."""

    name: str
    per_layer: int  # how often a decode layer of DSA does it
    fused: Sequence[Call]
    torch: Sequence[Call]


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def angles(rows: int, dim: int) -> Rotation:
    turns = torch.randn(rows, 1, dim // 2, device="cuda")
    return Rotation(turns.cos().bfloat16(), turns.sin().bfloat16())


def pair(name: str, per_layer: int, make: Callable[[], tuple[Call, Call]]) -> Pair:
    both = [make() for _ in range(INPUTS)]
    return Pair(name, per_layer, [fused for fused, _ in both], [torch_ for _, torch_ in both])


def norms(batch: int) -> tuple[tuple[Call, Call], tuple[Call, Call]]:
    x, delta, weight = values(batch, HIDDEN), values(batch, HIDDEN), values(HIDDEN)
    latent, latent_weight = values(batch, Q_LORA), values(Q_LORA)
    return (
        (partial(add_rms_norm, x, delta, weight, EPS), partial(norm_reference.add_rms_norm, x, delta, weight, EPS)),
        (partial(rms_norm, latent, latent_weight, EPS), partial(norm_reference.rms_norm, latent, latent_weight, EPS)),
    )


def mla(batch: int, fp8: bool) -> tuple[Call, Call]:
    layout = mla_row(RANK, ROPE, torch.bfloat16, fp8)
    rows = torch.zeros(PAGES * PAGE_ROWS, layout.stored_width, dtype=layout.stored_dtype, device="cuda")
    at = torch.randperm(rows.shape[0], device="cuda")[:batch]
    inputs = (values(batch, RANK + ROPE), values(RANK), EPS, angles(batch, ROPE), layout, rows, at)
    return partial(mla_append, *inputs), partial(mla_reference.mla_append, *inputs)


def key(batch: int, fp8: bool) -> tuple[Call, Call]:
    layout = index_key_row(INDEX_DIM, torch.bfloat16, fp8)
    per_page = PAGE_ROWS * 656 // layout.stride_bytes
    blocks = torch.zeros(1, PAGES, per_page, layout.stored_width, dtype=layout.stored_dtype, device="cuda")
    table = torch.randperm(PAGES, device="cuda")[: batch * (PAGES // batch)].view(batch, -1)
    positions = torch.randint(table.shape[1] * per_page, (batch,), device="cuda")
    keys = PagedRows(blocks, [], layout, table, torch.arange(batch, device="cuda"))
    inputs = (values(batch, INDEX_DIM), values(INDEX_DIM), values(INDEX_DIM), EPS, angles(batch, ROPE), False)
    page, within = table[keys.seat_of, positions // per_page], positions % per_page
    part = torch.zeros_like(page)

    def by_torch() -> None:
        blocks[part, page, within] = layout.encode(index_keys(*inputs))

    return partial(key_append, *inputs, keys, positions), by_torch


def queries(batch: int) -> tuple[tuple[Call, Call], ...]:
    q, key_up, rotation = values(batch, HEADS, NOPE + ROPE), values(HEADS, NOPE + V_DIM, RANK), angles(batch, ROPE)
    up, value_up = key_up[:, :NOPE], key_up[:, NOPE:].transpose(1, 2)
    index_q, attended = values(batch, INDEX_HEADS, INDEX_DIM), values(batch, HEADS, RANK)
    x, wide = values(batch, HIDDEN), values(INDEX_HEADS, HIDDEN, dtype=torch.float32)
    scale = INDEX_HEADS**-0.5
    return (
        (partial(rope_query, q, up, rotation), partial(rope_reference.rope_query, q, up, rotation)),
        (partial(rotate, index_q, rotation, False), partial(rope_reference.rotate, index_q, rotation, False)),
        (
            partial(per_head_matmul, attended, value_up),
            lambda: linear_reference.per_head_matmul(attended, value_up).reshape(batch, -1),
        ),
        (partial(fp32_linear, x, wide, scale), partial(linear_reference.fp32_linear, x, wide, scale)),
    )


def gqa(batch: int) -> tuple[Call, Call]:
    layout = gqa_row(KV_HEADS, HEAD_DIM, torch.bfloat16)
    rows = torch.zeros(PAGES * PAGE_ROWS, layout.stored_width, dtype=torch.bfloat16, device="cuda")
    at = torch.randperm(PAGES * PAGE_ROWS, device="cuda")[:batch]
    qkv = values(batch, HEADS + 2 * KV_HEADS, HEAD_DIM)
    inputs = (qkv, KV_HEADS, None, angles(batch, HEAD_DIM), layout, rows, at)
    return partial(gqa_append, *inputs), partial(gqa_reference.gqa_append, *inputs)


def pairs(batch: int) -> list[Pair]:
    return [
        pair("add + norm, 4096", 2, lambda: norms(batch)[0]),
        pair("norm, 1536", 1, lambda: norms(batch)[1]),
        pair("mla append, fp8", 1, lambda: mla(batch, True)),
        pair("mla append, bf16", 0, lambda: mla(batch, False)),
        pair("key append, fp8", 1, lambda: key(batch, True)),
        pair("key append, bf16", 0, lambda: key(batch, False)),
        pair("absorb + rope of queries", 1, lambda: queries(batch)[0]),
        pair("rope of index queries", 1, lambda: queries(batch)[1]),
        pair("value up-projection", 1, lambda: queries(batch)[2]),
        pair("head weights, float32", 1, lambda: queries(batch)[3]),
        pair("gqa append", 0, lambda: gqa(batch)),
    ]


def floor() -> float:
    one = torch.zeros(1, device="cuda")
    return seconds_of([lambda: one.add_(1)], cold=False)


def small_ops(batches: Sequence[int]) -> list[dict[str, Any]]:
    least, results = floor(), []
    for batch in batches:
        layer = {"fused": 0.0, "torch": 0.0}
        for each in pairs(batch):
            fused, by_torch = (seconds_of(calls, cold=False) for calls in (each.fused, each.torch))
            layer["fused"] += each.per_layer * fused
            layer["torch"] += each.per_layer * by_torch
            results.append(_row(each.name, batch, fused, by_torch, least))
        results.append(_row(f"{LAYERS} DSA layers", batch, LAYERS * layer["fused"], LAYERS * layer["torch"], None))
    return results


def _row(name: str, batch: int, fused: float, by_torch: float, least: float | None) -> dict[str, Any]:
    floors = "" if least is None else fused / least
    ratio = by_torch / fused
    return {"op": name, "batch": batch, "us": fused * 1e6, "torch us": by_torch * 1e6, "x": ratio, "floors": floors}


def decode_inputs(batch: int, context: int) -> Call:
    layout = gqa_row(KV_HEADS, HEAD_DIM, torch.bfloat16)
    pages = batch * context // PAGE_ROWS
    blocks = torch.empty(1, pages, PAGE_ROWS, layout.stored_width, dtype=torch.bfloat16, device="cuda").normal_()
    table = torch.randperm(pages, device="cuda").view(batch, -1)
    seat_of, positions = torch.arange(batch, device="cuda"), torch.full((batch,), context - 1, device="cuda")
    segments = Segments([1] * batch, [1] * batch, positions, seat_of)
    q, keys = values(batch, HEADS, HEAD_DIM), PagedRows(blocks, [], layout, table, seat_of)
    return partial(paged_attention, q, keys, segments, KV_HEADS, HEAD_DIM**-0.5)


def decode(batch: int, context: int) -> dict[str, Any]:
    spent = seconds_of([decode_inputs(batch, context)])
    read = batch * context * gqa_row(KV_HEADS, HEAD_DIM, torch.bfloat16).stride_bytes
    operations = 4 * batch * context * HEADS * HEAD_DIM
    return {
        "batch": batch,
        "context": context,
        "us": spent * 1e6,
        "TB/s": read / spent * 1e-12,
        "of copy bandwidth": read / spent / copy_bandwidth(),
        "TFLOP/s": operations / spent * 1e-12,
    }


@contextmanager
def constants(module: str, **changed: Any) -> Iterator[None]:
    impl = kernels_of(module)
    before = {name: getattr(impl, name) for name in changed}
    for name, value in changed.items():
        setattr(impl, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(impl, name, value)


def sweep() -> list[dict[str, Any]]:
    """The constants at the top of each triton_impl: what else they could be."""
    results: list[dict[str, Any]] = []

    def tried(module: str, calls: dict[str, Sequence[Call]], cold: bool, **changed: Any) -> None:
        with constants(module, **changed):
            times = {name: round(seconds_of(each, cold=cold) * 1e6, 2) for name, each in calls.items()}
        shown = ", ".join(f"{name} {value}" for name, value in changed.items())
        results.append({"op": module, "constants": shown, "us": str(times)})

    attention = {f"batch {batch}": [decode_inputs(batch, 32_768)] for batch in (1, 16, 64)}
    for shape in ((64, 4, 3), (64, 4, 2), (64, 4, 4), (32, 4, 4)):
        for programs in (4, 8, 16):
            shapes = {torch.bfloat16: shape}
            tried("paged_attention", attention, True, SHAPES=shapes, PROGRAMS_PER_SM=programs)
    del attention
    added = {f"batch {batch}": [norms(batch)[0][0] for _ in range(INPUTS)] for batch in (1, 16, 128)}
    for per_warp in (256, 512, 1024):
        tried("norm", added, False, VALUES_PER_WARP=per_warp)
    turned = {f"batch {batch}": [queries(batch)[1][0] for _ in range(INPUTS)] for batch in (1, 16, 128)}
    for heads, warps in ((4, 1), (8, 2), (32, 4)):
        tried("rope", turned, False, HEADS_PER_PROGRAM=heads, WARPS=warps)
    wide = {f"batch {batch}": [queries(batch)[3][0] for _ in range(INPUTS)] for batch in (1, 16, 128)}
    for tokens, outputs, per_block in ((8, 2, 1024), (4, 2, 1024), (4, 4, 1024), (8, 4, 512), (16, 2, 512)):
        sizes = {"TOKENS_PER_PROGRAM": tokens, "OUTPUTS_PER_PROGRAM": outputs, "VALUES_PER_BLOCK": per_block}
        tried("linear", wide, False, **sizes)
    return results


def draw(small: list[dict[str, Any]], attention: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), width_ratios=(2, 1))
    shown = [row for row in small if row["batch"] == 16 and row["floors"] != ""]
    names = [row["op"] for row in shown]
    left.barh(names, [row["torch us"] for row in shown], label="torch")
    left.barh(names, [row["us"] for row in shown], label="fused")
    left.invert_yaxis()
    left.set(xlabel="us per call, batch 16")
    left.legend()
    right.bar([f"batch {row['batch']}" for row in attention], [row["of copy bandwidth"] for row in attention])
    right.axhline(LEAST_FRACTION, color="black", linewidth=0.8)
    right.set(ylabel="of copy bandwidth", ylim=(0, 1.1), title="GQA decode, 32k")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


@torch.inference_mode()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--png", type=Path, help="also draw the results to this file")
    parser.add_argument("--quick", action="store_true", help="only what the bars are about")
    parser.add_argument("--sweep", action="store_true", help="instead: try other constants of the kernels")
    options = parser.parse_args()
    require_gpu()
    if options.sweep:
        report("Constants of the small ops", sweep(), options.json)
        return
    small = small_ops((16,) if options.quick else (1, 16, 128))
    attention = [decode(batch, 32_768) for batch in ((16,) if options.quick else (1, 16, 64))]
    notes = f"floor: {floor() * 1e6:.2f} us; bar: at most {MAX_FLOORS} floors at batch 16, products aside"
    report("Small ops of a decode step, bf16", small, options.json, notes)
    ceiling = f"copy bandwidth {copy_bandwidth() * 1e-12:.2f} TB/s; bar: {LEAST_FRACTION} of it at batch 16 and 64"
    beside = None if options.json is None else options.json.with_stem(f"{options.json.stem}_gqa")
    report(f"GQA decode, {HEADS} heads on {KV_HEADS} KV heads of {HEAD_DIM}, bf16", attention, beside, ceiling)
    if options.png is not None:
        draw(small, attention, options.png)


if __name__ == "__main__":
    main()
