"""paged_attention of prompts in Triton.

A program processes one head of `block_queries` adjacent tokens of the batch. A tile of tokens can contain the end of
one segment and the beginning of the next ones: the program then attends for one segment after another, and stores only
the results of the segment's own tokens. No table of tiles is needed, and the result of a token does not depend on its
place in a tile. Tiles that every token of the segment sees are read without a mask.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.paged_attention.triton_impl import LOG2_E, OPTIONS, page_of
from hotset.kernels.rows import PagedRows

# Tokens per tile, rows per tile, warps, stages.
SHAPES = {torch.bfloat16: (64, 64, 4, 3), torch.float32: (32, 32, 4, 2)}
WIDE_SHAPES = {torch.bfloat16: (64, 64, 4, 2), torch.float32: (16, 16, 4, 2)}  # heads of more than 128 values

_EMPTY = tl.constexpr(EMPTY)


def prefill(
    q: Tensor, context: PagedRows, positions: Tensor, segment_of: Tensor, kv_heads: int, scale: float, out: Tensor
) -> None:
    """Writes the attention of every query to `out`. All tensors except pool and page table have one entry per query."""
    queries, heads, dim = q.shape
    if queries == 0:
        return
    blocks, table = context.blocks, context.table
    page_rows = blocks.shape[2]
    block_queries, block_rows, warps, stages = (SHAPES if dim <= 128 else WIDE_SHAPES)[q.dtype]
    if page_rows % block_rows == block_rows // 2:
        block_rows //= 2  # so that each tile is within one page
    sizes: dict[str, Any] = {"heads": heads, "dim": dim, "block_dim": max(16, triton.next_power_of_2(dim))}
    _prefill_kernel[(heads, triton.cdiv(queries, block_queries))](
        q=q,
        blocks=blocks,
        table=table,
        seat_of=context.seat_of,
        segment_of=segment_of,
        positions=positions,
        out=out,
        queries=queries,
        scale=scale * LOG2_E,
        query_stride=q.stride(0),
        head_stride=q.stride(1),
        page_stride=blocks.stride(1),
        row_stride=blocks.stride(2),
        table_stride=table.stride(0),
        **sizes,
        group=heads // kv_heads,
        page_rows=page_rows,
        block_queries=block_queries,
        block_rows=block_rows,
        num_warps=warps,
        num_stages=stages,
        **OPTIONS,
    )


# Prompts follow any number of decoding requests in a step, so these pointers can have any alignment.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["queries"], do_not_specialize_on_alignment=["seat_of", "segment_of", "positions"]
)
def _prefill_kernel(
    q: tl.tensor,
    blocks: tl.tensor,
    table: tl.tensor,
    seat_of: tl.tensor,
    segment_of: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    queries: tl.tensor,
    scale: tl.tensor,  # includes the factor LOG2_E: scores are base-2 logarithms
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
    block_queries: tl.constexpr,
    block_rows: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    # The last tokens of a prompt have the longest contexts, so their tiles begin first.
    first = ((tl.num_programs(1) - 1 - tl.program_id(1)) * block_queries).to(tl.int32)
    end = tl.minimum(first + block_queries, queries)
    query = first + tl.arange(0, block_queries)
    exists = query < end
    value = tl.arange(0, block_dim)
    stored = exists[:, None] & (value < dim)[None, :]
    q_at = q + query[:, None].to(tl.int64) * query_stride + head * head_stride + value[None, :]
    q_tile = tl.load(q_at, mask=stored, other=0)
    segment = tl.load(segment_of + query, mask=exists, other=_EMPTY)
    kv_heads: tl.constexpr = heads // group
    k_values = blocks + head // group * dim + value[None, :]

    while first < end:
        own = segment == tl.load(segment_of + first)
        count = tl.sum(own.to(tl.int32), 0)
        seat = tl.load(seat_of + first)
        start = tl.load(positions + first).to(tl.int32)  # of the segment's first token in this tile
        length = tl.where(seat == _EMPTY, 0, start + count)
        all_see = tl.where(seat == _EMPTY, 0, (start + 1) // block_rows * block_rows)
        limit = start + query - first  # the last position that each token sees
        pages = table + tl.maximum(seat, 0) * table_stride

        max_score = tl.full([block_queries], float("-inf"), tl.float32)
        weight_sum = tl.zeros([block_queries], tl.float32)
        sums = tl.zeros([block_queries, block_dim], tl.float32)
        for masked in tl.static_range(2):
            begin = all_see if masked else 0
            stop = length if masked else all_see
            page = page_of(pages, begin, length, page_rows, block_rows)
            for tile in range(begin, stop, block_rows):
                position = tile + tl.arange(0, block_rows)
                rows = page * page_stride + (position % page_rows).to(tl.int64) * row_stride
                # The page is looked up one tile ahead, so that the loads of rows never wait for the lookup.
                page = page_of(pages, tile + block_rows, length, page_rows, block_rows)
                k_at = k_values + rows[:, None]
                k = _load_rows(k_at, position, value, length, dim, block_dim, masked)
                scores = tl.dot(q_tile, tl.trans(k), input_precision="ieee")
                if masked:
                    # Tokens of other segments see everything, which keeps their unused results finite.
                    seen = (position[None, :] <= limit[:, None]) | (own == 0)[:, None]
                    scores = tl.where(seen, scores, float("-inf"))
                new_max = tl.maximum(max_score, tl.max(scores, 1) * scale)
                weights = tl.exp2(scores * scale - new_max[:, None])
                rescale = tl.exp2(max_score - new_max)
                weight_sum = weight_sum * rescale + tl.sum(weights, 1)
                v = _load_rows(k_at + kv_heads * dim, position, value, length, dim, block_dim, masked)
                sums = tl.dot(weights.to(v.dtype), v, acc=sums * rescale[:, None], input_precision="ieee")
                max_score = new_max

        result = sums / tl.where(length == 0, 1, weight_sum)[:, None]  # a padding token gets zeros
        target = out + (query[:, None].to(tl.int64) * heads + head) * dim + value[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=own[:, None] & stored)
        first += count


@triton.jit  # type: ignore[untyped-decorator]
def _load_rows(
    pointers: tl.tensor,
    position: tl.tensor,
    value: tl.tensor,
    length: tl.tensor,
    dim: tl.constexpr,
    block_dim: tl.constexpr,
    may_end: tl.constexpr,  # whether rows from `length` on can be in the tile; they are zeros
) -> tl.tensor:
    if may_end:
        return tl.load(pointers, mask=(position < length)[:, None] & (value < dim)[None, :], other=0)
    elif dim == block_dim:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(value < dim)[None, :], other=0)
