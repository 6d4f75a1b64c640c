"""paged_attention of decode steps in Triton.

A program processes one KV head of one query and one split of the query's context. It computes all heads that share the
KV head together, so K and V are read once. If there are too few queries and KV heads to fill the GPU, contexts are
divided into splits, and a second kernel merges the results of the splits. The number of splits depends on shapes and on
the GPU. The length of a split depends on the query's position, which is on the device: a split that would begin after
the end of its context has no rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.fast_path import multiprocessors
from hotset.kernels.rows import PagedRows

SHAPES = {torch.bfloat16: (64, 4, 3), torch.float32: (32, 8, 2)}  # rows per tile, warps, stages
PROGRAMS_PER_SM = 8  # contexts are split to reach this number of programs per multiprocessor
MIN_SPLIT_ROWS = 256  # merging a shorter split costs more than it saves
MAX_SPLITS = 64
LOG2_E = 1.4426950408889634
OPTIONS = {"enable_fp_fusion": True}

_EMPTY = tl.constexpr(EMPTY)
_MIN_LSE = tl.constexpr(-1e30)  # replaces -inf, which must not be subtracted from itself


def decode(q: Tensor, context: PagedRows, positions: Tensor, kv_heads: int, scale: float, out: Tensor) -> None:
    """Writes the attention of every query to `out`. Queries may have the same seat."""
    queries, heads, dim = q.shape
    if queries == 0:
        return
    blocks, table = context.blocks, context.table
    page_rows = blocks.shape[2]
    splits = _num_splits(queries * kv_heads, table.shape[1] * page_rows, multiprocessors(q.device))
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty(queries, heads, splits, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(queries, heads, splits, dtype=torch.float32, device=q.device)
    block_rows, warps, stages = SHAPES[q.dtype]
    if page_rows % block_rows == block_rows // 2:
        block_rows //= 2  # so that each tile is within one page
    sizes: dict[str, Any] = {"heads": heads, "dim": dim, "block_dim": triton.next_power_of_2(dim)}
    _decode_kernel[(kv_heads, queries, splits)](
        q=q,
        blocks=blocks,
        table=table,
        seat_of=context.seat_of,
        positions=positions,
        out=out,
        partial=partial,
        lse=lse,
        scale=scale * LOG2_E,
        min_split_rows=MIN_SPLIT_ROWS,
        query_stride=q.stride(0),
        head_stride=q.stride(1),
        page_stride=blocks.stride(1),
        row_stride=blocks.stride(2),
        table_stride=table.stride(0),
        **sizes,
        group=heads // kv_heads,
        page_rows=page_rows,
        one_split=splits == 1,
        block_group=max(16, triton.next_power_of_2(heads // kv_heads)),
        block_rows=block_rows,
        num_warps=warps,
        num_stages=stages,
        **OPTIONS,
    )
    if splits > 1:
        _merge_kernel[(queries, heads)](
            partial=partial,
            lse=lse,
            out=out,
            splits=splits,
            **sizes,
            block_splits=triton.next_power_of_2(splits),
            num_warps=4,
            **OPTIONS,
        )


def _num_splits(programs: int, longest: int, num_multiprocessors: int) -> int:
    filling = num_multiprocessors * PROGRAMS_PER_SM // programs
    return max(1, min(filling, longest // MIN_SPLIT_ROWS, MAX_SPLITS))


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(
    q: tl.tensor,
    blocks: tl.tensor,
    table: tl.tensor,
    seat_of: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,  # written if `one_split`; otherwise `partial` and `lse` are written
    partial: tl.tensor,  # [queries, heads, splits, dim]: attention over the split alone
    lse: tl.tensor,  # [queries, heads, splits]: log2 of the sum of 2**score; -inf for an empty split
    scale: tl.tensor,  # includes the factor LOG2_E: scores are base-2 logarithms
    min_split_rows: tl.tensor,
    query_stride: tl.tensor,
    head_stride: tl.tensor,
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    table_stride: tl.tensor,
    heads: tl.constexpr,
    dim: tl.constexpr,
    block_dim: tl.constexpr,
    group: tl.constexpr,
    page_rows: tl.constexpr,
    one_split: tl.constexpr,
    block_group: tl.constexpr,
    block_rows: tl.constexpr,
) -> None:
    kv_head, query, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    kv_heads: tl.constexpr = heads // group
    seat = tl.load(seat_of + query)
    length = tl.where(seat == _EMPTY, 0, tl.load(positions + query) + 1).to(tl.int32)
    split_rows = tl.cdiv(tl.cdiv(length, tl.num_programs(2)), block_rows) * block_rows
    split_rows = tl.maximum(split_rows, min_split_rows)
    begin = split * split_rows
    end = tl.minimum(begin + split_rows, length)

    member = tl.arange(0, block_group)
    value = tl.arange(0, block_dim)
    head = kv_head * group + member
    valid = (member < group)[:, None] & (value < dim)[None, :]
    q_at = q + query * query_stride + head[:, None] * head_stride + value[None, :]
    q_tile = tl.load(q_at, mask=valid, other=0)
    pages = table + tl.maximum(seat, 0) * table_stride
    k_values = blocks + kv_head * dim + value[None, :]

    max_score = tl.full([block_group], float("-inf"), tl.float32)
    weight_sum = tl.zeros([block_group], tl.float32)
    sums = tl.zeros([block_group, block_dim], tl.float32)
    page = page_of(pages, begin, end, page_rows, block_rows)
    for start in range(begin, end, block_rows):
        position = start + tl.arange(0, block_rows)
        seen = position < end
        rows = page * page_stride + (position % page_rows).to(tl.int64) * row_stride
        # The page is looked up one tile ahead, so that the loads of rows never wait for the lookup.
        page = page_of(pages, start + block_rows, end, page_rows, block_rows)
        readable = seen[:, None] & (value < dim)[None, :]
        k = tl.load(k_values + rows[:, None], mask=readable, other=0)
        scores = tl.dot(q_tile, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_max = tl.maximum(max_score, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(max_score - new_max)
        weight_sum = weight_sum * rescale + tl.sum(weights, 1)
        v = tl.load(k_values + kv_heads * dim + rows[:, None], mask=readable, other=0)
        sums = tl.dot(weights.to(v.dtype), v, acc=sums * rescale[:, None], input_precision="ieee")
        max_score = new_max

    weight_sum = tl.where(begin < end, weight_sum, 1)  # an empty split has sums of 0, and its result is 0 / 1
    result = sums / weight_sum[:, None]
    if one_split:
        target = out + (query * heads + head)[:, None] * dim + value[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=valid)
    else:
        number = (query * heads + head) * tl.num_programs(2) + split
        tl.store(lse + number, max_score + tl.log2(weight_sum), mask=member < group)
        # The result of an empty split is not stored, because the merge does not read it.
        filled = member < tl.where(begin < end, group, 0)
        stored = filled[:, None] & (value < dim)[None, :]
        tl.store(partial + number[:, None] * dim + value[None, :], result, mask=stored)


@triton.jit  # type: ignore[untyped-decorator]
def page_of(
    pages: tl.tensor, start: tl.tensor, end: tl.tensor, page_rows: tl.constexpr, block_rows: tl.constexpr
) -> tl.tensor:
    """Returns the page of each row of a tile, or a single page if all rows of a tile share it.

    All rows share a page if a page holds a whole number of tiles, because splits begin at multiples of the tile.
    """
    if page_rows % block_rows == 0:
        return tl.load(pages + start // page_rows, mask=start < end, other=0)
    else:
        position = start + tl.arange(0, block_rows)
        return tl.load(pages + position // page_rows, mask=position < end, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(
    partial: tl.tensor,
    lse: tl.tensor,
    out: tl.tensor,
    splits: tl.tensor,
    heads: tl.constexpr,
    dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_splits: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    split = tl.arange(0, block_splits)
    value = tl.arange(0, block_dim)
    split_lse = tl.load(lse + number * splits + split, mask=split < splits, other=float("-inf"))
    filled = split_lse > float("-inf")
    max_lse = tl.maximum(tl.max(split_lse, 0), _MIN_LSE)
    weight = tl.exp2(split_lse - max_lse)
    inside = filled[:, None] & (value < dim)[None, :]
    results = tl.load(partial + (number * splits + split)[:, None] * dim + value[None, :], mask=inside, other=0)
    weight_sum = tl.sum(weight, 0)
    result = tl.sum(results * weight[:, None], 0) / tl.where(weight_sum == 0, 1, weight_sum)
    tl.store(out + number * dim + value, result.to(out.dtype.element_ty), mask=value < dim)
