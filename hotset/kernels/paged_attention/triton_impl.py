"""paged_attention of decoding query rows in Triton.

A program takes one KV head of one query row and one part of its context; all heads that share the KV head are computed
together, so K and V are read once. Where query rows and KV heads alone would leave the GPU idle, contexts are cut into
parts and a second kernel merges these. How many parts there are depends on shapes; how long they are, on the device's
positions: a part that begins beyond its context's end does nothing.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.rows import PagedRows

SHAPES = {torch.bfloat16: (64, 4, 3), torch.float32: (32, 8, 2)}  # rows of a context read at once, warps, stages
PROGRAMS_PER_SM = 8  # what the cutting of contexts aims at
MIN_PART_ROWS = 256  # a shorter part is not worth its merging
MAX_PARTS = 64
SMS_ELSEWHERE = 132  # under the interpreter
LOG2_E = 1.4426950408889634
OPTIONS = {"enable_fp_fusion": True}

_EMPTY = tl.constexpr(EMPTY)
_MIN_WEIGHT = tl.constexpr(-1e30)  # stands for -inf, which could not be subtracted from itself


def decode(q: Tensor, context: PagedRows, positions: Tensor, kv_heads: int, scale: float) -> Tensor:
    queries, heads, dim = q.shape
    blocks, table = context.blocks, context.table
    assert blocks.shape[0] == 1 and blocks.stride(3) == 1 and table.stride(1) == 1, "rows of one layer, values adjacent"
    assert q.stride(2) == 1 and context.seat_of.is_contiguous() and positions.is_contiguous()
    out = torch.empty(queries, heads, dim, dtype=q.dtype, device=q.device)
    if queries == 0:
        return out
    page_rows = blocks.shape[2]
    parts = _parts(queries * kv_heads, table.shape[1] * page_rows, _multiprocessors(q.device))
    partial, weight = out, out
    if parts > 1:
        partial = torch.empty(queries, heads, parts, dim, dtype=torch.float32, device=q.device)
        weight = torch.empty(queries, heads, parts, dtype=torch.float32, device=q.device)
    block_rows, warps, stages = SHAPES[q.dtype]
    if page_rows % block_rows == block_rows // 2:
        block_rows //= 2  # then each block lies in one page
    sizes: dict[str, Any] = {"heads": heads, "dim": dim, "block_dim": triton.next_power_of_2(dim)}
    _decode_kernel[(kv_heads, queries, parts)](
        q=q,
        blocks=blocks,
        table=table,
        seat_of=context.seat_of,
        positions=positions,
        out=out,
        partial=partial,
        weight=weight,
        scale=scale * LOG2_E,
        min_part_rows=MIN_PART_ROWS,
        query_stride=q.stride(0),
        head_stride=q.stride(1),
        page_stride=blocks.stride(1),
        row_stride=blocks.stride(2),
        table_stride=table.stride(0),
        **sizes,
        group=heads // kv_heads,
        page_rows=page_rows,
        whole=parts == 1,
        block_group=max(16, triton.next_power_of_2(heads // kv_heads)),
        block_rows=block_rows,
        num_warps=warps,
        num_stages=stages,
        **OPTIONS,
    )
    if parts > 1:
        _merge_kernel[(queries, heads)](
            partial=partial,
            weight=weight,
            out=out,
            parts=parts,
            **sizes,
            block_parts=triton.next_power_of_2(parts),
            num_warps=4,
            **OPTIONS,
        )
    return out


def _parts(programs: int, longest: int, multiprocessors: int) -> int:
    wanted = multiprocessors * PROGRAMS_PER_SM // programs
    return max(1, min(wanted, longest // MIN_PART_ROWS, MAX_PARTS))


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return SMS_ELSEWHERE
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(
    q: tl.tensor,
    blocks: tl.tensor,
    table: tl.tensor,
    seat_of: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,  # written if `whole`, otherwise the next two are
    partial: tl.tensor,  # [queries, heads, parts, dim]: each part's own softmax applied to its V
    weight: tl.tensor,  # [queries, heads, parts]: log2 of the sum of each part's exponentials; -inf: nothing in it
    scale: tl.tensor,  # of scores that are powers of 2
    min_part_rows: tl.tensor,
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
    whole: tl.constexpr,
    block_group: tl.constexpr,
    block_rows: tl.constexpr,
) -> None:
    kv_head, query, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    kv_heads: tl.constexpr = heads // group
    seat = tl.load(seat_of + query)
    length = tl.where(seat == _EMPTY, 0, tl.load(positions + query) + 1).to(tl.int32)
    part_rows = tl.cdiv(tl.cdiv(length, tl.num_programs(2)), block_rows) * block_rows
    part_rows = tl.maximum(part_rows, min_part_rows)
    begin = part * part_rows
    end = tl.minimum(begin + part_rows, length)

    member = tl.arange(0, block_group)
    value = tl.arange(0, block_dim)
    head = kv_head * group + member
    real = (member < group)[:, None] & (value < dim)[None, :]
    q_at = q + query * query_stride + head[:, None] * head_stride + value[None, :]
    q_tile = tl.load(q_at, mask=real, other=0)
    pages = table + tl.maximum(seat, 0) * table_stride
    k_values = blocks + kv_head * dim + value[None, :]

    largest = tl.full([block_group], float("-inf"), tl.float32)
    total = tl.zeros([block_group], tl.float32)
    sums = tl.zeros([block_group, block_dim], tl.float32)
    page = _page_of(pages, begin, end, page_rows, block_rows)
    for start in range(begin, end, block_rows):
        position = start + tl.arange(0, block_rows)
        seen = position < end
        rows = page * page_stride + (position % page_rows).to(tl.int64) * row_stride
        # Looked up a round ahead, so that the reading of rows never waits for it.
        page = _page_of(pages, start + block_rows, end, page_rows, block_rows)
        there = seen[:, None] & (value < dim)[None, :]
        k = tl.load(k_values + rows[:, None], mask=there, other=0)
        scores = tl.dot(q_tile, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        grown = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - grown[:, None])
        shrink = tl.exp2(largest - grown)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(k_values + kv_heads * dim + rows[:, None], mask=there, other=0)
        sums = tl.dot(weights.to(v.dtype), v, acc=sums * shrink[:, None], input_precision="ieee")
        largest = grown

    total = tl.where(begin < end, total, 1)  # of nothing: zeros
    result = sums / total[:, None]
    if whole:
        target = out + (query * heads + head)[:, None] * dim + value[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=real)
    else:
        number = (query * heads + head) * tl.num_programs(2) + part
        tl.store(weight + number, largest + tl.log2(total), mask=member < group)
        # A part with nothing in it is not stored: the merge does not read it.
        held = member < tl.where(begin < end, group, 0)
        tl.store(partial + number[:, None] * dim + value[None, :], result, mask=held[:, None] & (value < dim)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _page_of(
    pages: tl.tensor, start: tl.tensor, end: tl.tensor, page_rows: tl.constexpr, block_rows: tl.constexpr
) -> tl.tensor:
    """The page of each row of a block: a single one where pages hold whole blocks, since parts begin with a block."""
    if page_rows % block_rows == 0:
        return tl.load(pages + start // page_rows, mask=start < end, other=0)
    else:
        position = start + tl.arange(0, block_rows)
        return tl.load(pages + position // page_rows, mask=position < end, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(
    partial: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    heads: tl.constexpr,
    dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_parts: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    part = tl.arange(0, block_parts)
    value = tl.arange(0, block_dim)
    weights = tl.load(weight + number * parts + part, mask=part < parts, other=float("-inf"))
    held = weights > float("-inf")
    largest = tl.maximum(tl.max(weights, 0), _MIN_WEIGHT)
    shares = tl.exp2(weights - largest)
    inside = held[:, None] & (value < dim)[None, :]
    each = tl.load(partial + (number * parts + part)[:, None] * dim + value[None, :], mask=inside, other=0)
    total = tl.sum(shares, 0)
    result = tl.sum(each * shares[:, None], 0) / tl.where(total == 0, 1, total)
    tl.store(out + number * dim + value, result.to(out.dtype.element_ty), mask=value < dim)
