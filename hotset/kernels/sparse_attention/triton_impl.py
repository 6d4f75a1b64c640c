"""sparse_attention in Triton: a program processes one query, a block of its heads and one split of its row ids.

Keys and values are the same rows, so a tile of rows is loaded once and used by both products. Scores are base-2
logarithms.

A tile of fp8 rows is converted to float16, because the conversion from e4m3 is one instruction for two values. Each row
is divided by a power of two, its `unit`, such that its largest scale is in [1, 2). Scores and weights are multiplied by
the unit. The running maximum is that of score + log2(unit), so that no weight exceeds 1. The query of each head is also
divided by a power of two. Therefore values of any magnitude are rounded to the precision of float16, not worse.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.base.units import ceil_div
from hotset.kernels.fast_path import is_hopper, multiprocessors
from hotset.kernels.fp8 import SCALE_BLOCK
from hotset.kernels.rows import RowLayout
from hotset.kernels.sparse_attention import cuda_impl
from hotset.kernels.sparse_attention.launch import AttentionShape, GpuTraits, LaunchConfig, choose_launch

LOG2_E = 1.4426950408889634
SCAN = 1024  # entries inspected together to find the last one that is not EMPTY
OPTIONS = {"enable_fp_fusion": True}  # Triton 3.9 warns if this is not set
VARYING = ["row_ids_stride", "k", "heads", "split_keys"]  # not specialised: they vary between calls
MERGE_VALUES = 4096  # partial sums per program of the merge
# The interpreter supports neither products of bfloat16 nor inline assembly.
INTERPRETED = bool(triton.knobs.runtime.interpret)

_MIN_SCORE = tl.constexpr(-1.0e30)  # below every score, and finite, so that it can be subtracted from itself
_MIN_WEIGHT_SUM = tl.constexpr(1.0e-37)  # lower bound of divisors
_SMALLEST_UNIT = tl.constexpr(2.0**-40)  # a lower bound; e4m3 values times 2**-40 are negligible
_DEQUANTISE = tl.constexpr(
    """{
    .reg .b16 low, high;
    .reg .b32 first, second;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mul.rn.f16x2 $0, first, $3;
    mul.rn.f16x2 $1, second, $4;
    }"""
)


def sparse_attention(
    q: Tensor,
    rows: Tensor,
    row_ids: Tensor,
    layout: RowLayout,
    rank: int,
    scale: float,
    launch: LaunchConfig | None = None,  # None: that of `choose_launch`
) -> Tensor:
    q, row_ids = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, row_ids))
    queries, heads, width = q.shape
    out = q.new_empty(queries, heads, rank)
    shape = AttentionShape(queries, heads, row_ids.shape[1], rank, width - rank, layout.quantised > 0)
    if out.numel() == 0:
        return out
    launch = launch or choose_launch(shape, GpuTraits(multiprocessors(q.device), is_hopper(q.device)))
    splits = launch.splits
    partial = q.new_empty(queries, splits, heads, rank, dtype=torch.float32) if splits > 1 else out
    lse = q.new_empty(queries, splits, heads, dtype=torch.float32)
    tensors = (q, rows.view(torch.uint8), row_ids, partial, lse)
    # The merge in CUDA C++ is a dependent launch, which needs Hopper, like the kernels before it.
    attend, merge = (_attend, _merge) if launch.kernel == "triton" else (cuda_impl.attend, cuda_impl.merge)
    attend(shape, launch, tensors, scale * LOG2_E)
    if splits > 1:
        merge(shape, launch, partial, lse, out)
    return out


def _attend(shape: AttentionShape, launch: LaunchConfig, tensors: tuple[Tensor, ...], scale: float) -> None:
    """Launches the kernel. The tensors are (q, rows as bytes, row_ids, out, lse); `scale` includes LOG2_E."""
    q, rows, row_ids, out, lse = tensors
    _attend_kernel[ceil_div(shape.heads, launch.block_heads) * shape.queries, launch.splits](
        q=q,
        rows=rows,
        row_ids=row_ids,
        out=out,
        lse=lse,
        query_stride=q.stride(0),
        head_stride=q.stride(1),
        row_stride=rows.stride(0),
        row_ids_stride=row_ids.stride(0),
        k=shape.k,
        heads=shape.heads,
        split_keys=launch.split_keys(shape),
        scale=scale,
        rank=shape.rank,
        rope=shape.rope,
        group=min(shape.rank, SCALE_BLOCK),
        fp8=shape.fp8,
        split=launch.splits > 1,
        block_h=launch.block_heads,
        block_k=launch.block_keys,
        scan=SCAN,
        stages=launch.stages,
        interpreted=INTERPRETED,
        num_warps=launch.warps,
        **OPTIONS,
    )


def _merge(shape: AttentionShape, launch: LaunchConfig, partial: Tensor, lse: Tensor, out: Tensor) -> None:
    block_s = triton.next_power_of_2(launch.splits)
    block = min(shape.rank, max(64, MERGE_VALUES // block_s))
    _merge_kernel[shape.queries * shape.heads, shape.rank // block](
        partial=partial,
        lse=lse,
        out=out,
        heads=shape.heads,
        splits=launch.splits,
        rank=shape.rank,
        block_s=block_s,
        block=block,
        num_warps=4,
        **OPTIONS,
    )


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _attend_kernel(
    q: tl.tensor,
    rows: tl.tensor,  # bytes
    row_ids: tl.tensor,
    out: tl.tensor,  # [queries, heads, rank] bfloat16; if split: [queries, splits, heads, rank] float32
    lse: tl.tensor,  # [queries, splits, heads] float32: log2 of the sum of 2**score; written if split
    query_stride: tl.tensor,
    head_stride: tl.tensor,
    row_stride: tl.tensor,  # in bytes
    row_ids_stride: tl.tensor,
    k: tl.tensor,
    heads: tl.tensor,
    split_keys: tl.tensor,
    scale: tl.tensor,
    rank: tl.constexpr,
    rope: tl.constexpr,
    group: tl.constexpr,  # latents that share a scale
    fp8: tl.constexpr,
    split: tl.constexpr,
    block_h: tl.constexpr,
    block_k: tl.constexpr,
    scan: tl.constexpr,
    stages: tl.constexpr,
    interpreted: tl.constexpr,
) -> None:
    head_blocks = tl.cdiv(heads, block_h)
    query = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = tl.program_id(0) % head_blocks * block_h + tl.arange(0, block_h)
    valid = head < heads
    latent, rope_value = tl.arange(0, rank), tl.arange(0, rope)
    my_q = q + query * query_stride + head[:, None] * head_stride
    q_latent = tl.load(my_q + latent[None, :], mask=valid[:, None], other=0.0)
    q_rope = tl.load(my_q + rank + rope_value[None, :], mask=valid[:, None], other=0.0)
    my_row_ids = row_ids + query * row_ids_stride
    first = tl.program_id(1) * split_keys
    end, fallback_row = _used_extent(my_row_ids, first, tl.minimum(first + split_keys, k), scan)

    if fp8:
        q_unit = _unit(tl.max(tl.abs(q_latent.to(tl.float32)), 1))
        q_latent = (q_latent.to(tl.float32) * _inverse(q_unit)[:, None]).to(tl.float16)
    max_score = tl.full([block_h], _MIN_SCORE, tl.float32)
    weight_sum = tl.zeros([block_h], tl.float32)
    sums = tl.zeros([block_h, rank], tl.float32)
    key = tl.arange(0, block_k)
    row_id = tl.load(my_row_ids + first + key, mask=first + key < end, other=-1)
    for start in tl.range(first, end, block_k, num_stages=stages):
        # Row ids are loaded one tile ahead, so that the loads of rows never wait for them.
        next_entry = start + block_k + key
        next_row_id = tl.load(my_row_ids + next_entry, mask=next_entry < end, other=-1)
        at = rows + tl.where(row_id < 0, fallback_row, row_id) * row_stride
        bias = tl.where(row_id < 0, float("-inf"), 0.0)
        if fp8:
            tile, unit = _dequantised(at, rank, group, block_k, interpreted)
            at_rope = (at + rank + rank // group * 4).to(tl.pointer_type(tl.bfloat16))
            k_rope = tl.load(at_rope[:, None] + rope_value[None, :])
            s = _dot(q_latent, tl.trans(tile), None, interpreted) * (q_unit * scale)[:, None] * unit[None, :]
            s += _dot(q_rope, tl.trans(k_rope), None, interpreted) * scale + bias[None, :]
            new_max = tl.maximum(max_score, tl.max(s + _exponent(unit)[None, :], 1))
            p = tl.exp2(s - new_max[:, None])
            weights = (p * unit[None, :]).to(tl.float16)
        else:
            at_values = at.to(tl.pointer_type(tl.bfloat16))
            tile = tl.load(at_values[:, None] + latent[None, :])
            k_rope = tl.load(at_values[:, None] + rank + rope_value[None, :])
            s = _dot(q_rope, tl.trans(k_rope), None, interpreted)
            s = _dot(q_latent, tl.trans(tile), s, interpreted) * scale + bias[None, :]
            new_max = tl.maximum(max_score, tl.max(s, 1))
            p = tl.exp2(s - new_max[:, None])
            weights = p.to(tl.bfloat16)
        rescale = tl.exp2(max_score - new_max)
        weight_sum = weight_sum * rescale + tl.sum(p, 1)
        sums = _dot(weights, tile, sums * rescale[:, None], interpreted)
        max_score = new_max
        row_id = next_row_id
    result = sums * (1 / tl.maximum(weight_sum, _MIN_WEIGHT_SUM))[:, None]  # if weight_sum is 0, sums are 0
    if split:
        part = (query * tl.num_programs(1) + tl.program_id(1)) * heads + head
        tl.store(lse + part, _lse(max_score, weight_sum), mask=valid)
        # A split without rows stores no sums, because the merge does not read them.
        filled = head < tl.where(end > first, heads, 0)
        tl.store(out + part[:, None] * rank + latent[None, :], result, mask=filled[:, None])
    else:
        at_out = out + (query * heads + head[:, None]) * rank + latent[None, :]
        tl.store(at_out, result.to(tl.bfloat16), mask=valid[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _used_extent(row_ids: tl.tensor, first: tl.tensor, stop: tl.tensor, scan: tl.constexpr) -> tl.tensor:
    """Returns (end, fallback row): all entries in [end, stop) are EMPTY, and EMPTY entries read the fallback row.

    The fallback row is one of the selected rows. Any other row might hold NaN, and NaN with weight 0 is still NaN. If
    all entries are EMPTY, end <= first and the fallback row is 0.
    """
    entry = tl.arange(0, scan)
    last, some_row_id = tl.zeros([scan], tl.int32), tl.zeros([scan], tl.int32)
    for start in tl.range(first, stop, scan, num_stages=1):
        row_id = tl.load(row_ids + start + entry, mask=start + entry < stop, other=-1).to(tl.int32)
        last = tl.maximum(last, tl.where(row_id < 0, 0, start + entry + 1))
        some_row_id = tl.maximum(some_row_id, row_id)
    return tl.max(last, 0), tl.max(some_row_id, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _dequantised(
    at: tl.tensor, rank: tl.constexpr, group: tl.constexpr, block_k: tl.constexpr, interpreted: tl.constexpr
) -> tl.tensor:
    """Loads the fp8 rows at `at`. Returns [block_k, rank] float16 latents divided by units, and [block_k] units."""
    blocks = tl.arange(0, rank // group)
    codes = tl.load(at[:, None, None] + blocks[None, :, None] * group + tl.arange(0, group)[None, None, :])
    scales = tl.load((at + rank).to(tl.pointer_type(tl.float32))[:, None] + blocks[None, :])
    unit = _unit(tl.max(scales, 1))
    ratios = (scales * _inverse(unit)[:, None]).to(tl.float16)[:, :, None]
    if interpreted:
        tile = (codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * ratios.to(tl.float32)).to(tl.float16)
    else:
        # If the assembly were pure, the compiler would run it twice, in the layouts of both products, byte by byte.
        tile = tl.inline_asm_elementwise(
            _DEQUANTISE, "=r,=r,r,r,r", [codes, ratios], dtype=tl.float16, is_pure=False, pack=4
        )
    return tl.reshape(tile, [block_k, rank]), unit


@triton.jit  # type: ignore[untyped-decorator]
def _unit(x: tl.tensor) -> tl.tensor:
    """Returns the largest power of two up to `x` >= 0 (the float32 without its mantissa), but at least 2**-40."""
    return (tl.maximum(x, _SMALLEST_UNIT).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _inverse(unit: tl.tensor) -> tl.tensor:
    """Returns 1 / unit: its exponent is twice that of 1, minus that of `unit`."""
    return (0x7F000000 - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _exponent(unit: tl.tensor) -> tl.tensor:
    """Returns log2 of a power of two: its exponent bits, as the last bits of 2**23, make 2**23 + 127 + log2."""
    return ((unit.to(tl.int32, bitcast=True) >> 23) | 0x4B000000).to(tl.float32, bitcast=True) - 8388735.0


@triton.jit  # type: ignore[untyped-decorator]
def _lse(max_score: tl.tensor, weight_sum: tl.tensor) -> tl.tensor:
    """Returns log2 of the sum of 2**score, or -inf if there are no rows."""
    return tl.where(weight_sum > 0, max_score + tl.log2(tl.maximum(weight_sum, _MIN_WEIGHT_SUM)), float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _dot(a: tl.tensor, b: tl.tensor, sums: tl.tensor, interpreted: tl.constexpr) -> tl.tensor:
    if interpreted:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    return tl.dot(a, b, sums)


@triton.jit(do_not_specialize=["heads", "splits"])  # type: ignore[untyped-decorator]
def _merge_kernel(
    partial: tl.tensor,
    lse: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    splits: tl.tensor,
    rank: tl.constexpr,
    block_s: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Merges the splits of one query and head: computes the mean of their results, weighted by 2**lse."""
    query = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    split = tl.arange(0, block_s)
    value = tl.program_id(1) * block + tl.arange(0, block)
    part = (query * splits + split) * heads + head
    split_lse = tl.load(lse + part, mask=split < splits, other=float("-inf"))
    filled = split_lse > float("-inf")
    weight = tl.where(filled, tl.exp2(split_lse - tl.maximum(tl.max(split_lse, 0), _MIN_SCORE)), 0.0)
    results = tl.load(partial + part[:, None] * rank + value[None, :], mask=filled[:, None], other=0.0)
    total = tl.sum(weight, 0)
    merged = tl.sum(results * weight[:, None], 0) * (1 / tl.maximum(total, _MIN_WEIGHT_SUM))
    tl.store(out + (query * heads + head) * rank + value, merged.to(tl.bfloat16))
