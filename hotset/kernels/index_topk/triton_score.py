"""Scores index keys in Triton. A program scores a tile of queries against a share of their context, tile by tile.

The left operand of the matrix product is a tile of keys. The right operand has one column for every head of every query
in the tile of queries; the heads of a query are padded to a power of two, at least 16. If several queries of a tile
share a context, its keys are read once for all of them.
If keys are in fp8, the heads of queries are quantised like them. Where queries share a context, Hopper multiplies the
codes as they are; its sums are less precise than float32, which changes scores by about 1e-4 of their magnitude.
Otherwise, codes are converted to float16, which represents every e4m3 value. The scale of a key is positive, so it is
applied after the sum over the heads. If keys are not in fp8, each head of a query is divided by a power of two.
Relative to the largest value of the head, float16 is then at least as precise as bfloat16.

The length of a block of keys is rarely a multiple of the length of a tile. The last tile of a block is moved back so
that it ends with the block, and no load needs a mask. It does not write the scores of keys that the previous tile also
contains. Only blocks shorter than a tile are loaded with a mask.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels import EMPTY
from hotset.kernels.fast_path import is_hopper, multiprocessors
from hotset.kernels.index_topk.scores import MAX_SPLITS, Scores
from hotset.kernels.quantise.triton_impl import e4m3_scale
from hotset.kernels.rows import PagedRows


@dataclass(frozen=True, slots=True)
class ScoreTuning:
    """Parameters of the scoring kernel that affect only speed."""

    columns: int = 0  # of a tile: queries x padded heads; a tile has at least one query
    keys: int = 64  # keys of a tile
    warps: int = 4
    stages: int = 4  # pipeline depth: stages - 1 tiles are in shared memory or being loaded
    registers: int | None = None  # limit per thread; None: no limit
    programs_per_sm: int = 5  # resident programs per multiprocessor


# For queries that share no context: limited by memory bandwidth. The keys are numbers of heads; the first entry with
# enough heads is used.
OWN_CONTEXT = {  # index keys in fp8
    32: ScoreTuning(registers=104),
    64: ScoreTuning(registers=128, programs_per_sm=4),
    128: ScoreTuning(stages=3, programs_per_sm=2),
}
OWN_CONTEXT_PLAIN = {  # index keys in 16 bits
    64: ScoreTuning(stages=3, programs_per_sm=3),
    128: ScoreTuning(stages=3, programs_per_sm=2),
}
SHARED_CONTEXT = ScoreTuning(columns=128, programs_per_sm=2)  # limited by arithmetic
MIN_HEADS = 16  # required by the matrix instructions; padding heads have weight 0
OPERAND = {torch.float8_e4m3fn: tl.float16, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}  # by stored dtype
OPTIONS = {"enable_fp_fusion": True}  # Triton 3.9 warns if this is not set

_EMPTY = tl.constexpr(EMPTY)


def score(
    q: Tensor,  # [queries, heads, head_dim]
    weights: Tensor,  # [queries, heads]
    keys: PagedRows,  # `keys.seat_of` is not read
    seats: Tensor,  # [queries] int64; EMPTY: a padding query, which is not scored
    positions: Tensor,  # [queries] int64: a query sees the positions up to and including this one
    context: int,  # number of positions in the result
    k: int,  # a query that sees at most k positions is not scored: it selects them all
    scale: float,
    *,
    share_context: bool = False,  # True: neighbouring queries mostly share a context
    tuning: ScoreTuning | None = None,
) -> Scores:
    num_queries, heads, head_dim = q.shape
    blocks = keys.blocks.view(torch.float8_e4m3fn) if keys.layout.quantised else keys.blocks
    parts, _, block_rows, width = blocks.shape
    if not (blocks.stride(3) == 1 and blocks.stride(2) == width):
        raise InternalError(f"index keys must be adjacent: {blocks.stride()}")
    if tuning is None and share_context:
        tuning = SHARED_CONTEXT
    elif tuning is None:
        by_heads = OWN_CONTEXT if keys.layout.quantised else OWN_CONTEXT_PLAIN
        tuning = next(tuning for max_heads, tuning in by_heads.items() if heads <= max_heads)
    multiply_fp8 = keys.layout.quantised > 0 and share_context and is_hopper(q.device)
    padded_heads = max(MIN_HEADS, triton.next_power_of_2(heads))
    tile_queries = max(1, tuning.columns // padded_heads)
    tiles = triton.cdiv(num_queries, tile_queries)
    splits = multiprocessors(q.device) * tuning.programs_per_sm // tiles
    splits = max(1, min(splits, triton.cdiv(context, tuning.keys), MAX_SPLITS))
    values = torch.empty(num_queries, context, dtype=torch.float32, device=q.device)
    moments = torch.empty(num_queries, splits, 2, dtype=torch.float32, device=q.device)
    shares = torch.empty(num_queries, dtype=torch.int32, device=q.device)
    q = q if q.stride(2) == 1 else q.contiguous()
    _score_kernel[(tiles, splits)](
        q=q,
        weights=weights.float().contiguous(),
        blocks=blocks,
        table=keys.table,
        seat_of=seats.contiguous(),
        positions=positions.contiguous(),
        values=values,
        moments=moments,
        shares=shares,
        scale=scale,
        k=k,
        num_queries=num_queries,
        heads=heads,
        query_stride=q.stride(0),
        head_stride=q.stride(1),
        table_stride=keys.table.stride(0),
        part_stride=blocks.stride(0),
        page_stride=blocks.stride(1),
        value_stride=context,
        tile_queries=tile_queries,
        heads_padded=padded_heads,
        head_dim=head_dim,
        key_stride=width,
        scaled=keys.layout.quantised > 0,
        operand=tl.float8e4nv if multiply_fp8 else OPERAND[blocks.dtype],
        first_part=keys.first_part,
        step=keys.step,
        parts=parts,
        block_rows=block_rows,
        tile_keys=tuning.keys,
        stages=tuning.stages,
        num_warps=tuning.warps,
        **launch_options(tuning),
    )
    return Scores(values, moments, shares)


def launch_options(tuning: ScoreTuning) -> dict[str, Any]:
    return OPTIONS if tuning.registers is None else OPTIONS | {"maxnreg": tuning.registers}


@triton.jit(do_not_specialize=["k", "num_queries", "first_part"])  # type: ignore[untyped-decorator]
def _score_kernel(
    q: tl.tensor,
    weights: tl.tensor,
    blocks: tl.tensor,
    table: tl.tensor,
    seat_of: tl.tensor,
    positions: tl.tensor,
    values: tl.tensor,
    moments: tl.tensor,
    shares: tl.tensor,
    scale: tl.tensor,
    k: tl.tensor,
    num_queries: tl.tensor,
    heads: tl.tensor,
    query_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    part_stride: tl.tensor,
    page_stride: tl.tensor,
    value_stride: tl.tensor,
    first_part: tl.tensor,
    tile_queries: tl.constexpr,
    heads_padded: tl.constexpr,
    head_dim: tl.constexpr,
    key_stride: tl.constexpr,
    scaled: tl.constexpr,
    operand: tl.constexpr,
    step: tl.constexpr,
    parts: tl.constexpr,
    block_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    first_query = tl.program_id(0).to(tl.int64) * tile_queries
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    query = first_query + tl.arange(0, tile_queries)
    seats = tl.load(seat_of + query, mask=query < num_queries, other=_EMPTY)
    lengths = tl.load(positions + query, mask=query < num_queries, other=_EMPTY).to(tl.int32) + 1
    seats = tl.where(lengths > k, seats, _EMPTY)
    sums = tl.zeros([tile_keys, tile_queries], tl.float32)
    squares = tl.zeros([tile_keys, tile_queries], tl.float32)
    seat = tl.max(seats, 0)
    if seat != _EMPTY:
        q_tile, head_weights = _load_queries(
            q,
            weights,
            scale,
            first_query,
            num_queries,
            heads,
            query_stride,
            head_stride,
            tile_queries,
            heads_padded,
            head_dim,
            scaled,
            operand,
        )
        key = tl.arange(0, tile_keys)
        dim = tl.arange(0, head_dim)
        block_tiles: tl.constexpr = (block_rows + tile_keys - 1) // tile_keys
        while seat != _EMPTY:  # once per seat in the tile, in descending order
            seen_lengths = tl.where(seats == seat, lengths, 0)
            length = tl.max(seen_lengths, 0)
            tiles = length // block_rows * block_tiles + tl.cdiv(length % block_rows, tile_keys)
            share = tl.cdiv(tiles, splits)
            first = split * share
            last = tl.minimum(first + share, tiles)
            pages = table + seat * table_stride
            if first < last:
                # The page is looked up one tile ahead, so that the loads of keys never wait for the lookup.
                page = tl.load(pages + (first // block_tiles * step + first_part) // parts)
                for tile in tl.range(first, last, num_stages=stages):
                    block = tile // block_tiles
                    start = (tile - block * block_tiles) * tile_keys
                    if block_rows < tile_keys:
                        from_key = 0
                        fresh = key < block_rows
                    else:
                        from_key = tl.minimum(start, block_rows - tile_keys)
                        fresh = key >= start - from_key
                    part = block * step + first_part
                    base = blocks + (part % parts).to(tl.int64) * part_stride + page * page_stride
                    key_at = base + from_key * key_stride + key * key_stride  # a scalar plus one vector term
                    if block_rows < tile_keys:
                        stored = tl.load(key_at[:, None] + dim[None, :], mask=fresh[:, None], other=0.0)
                    else:
                        stored = tl.load(key_at[:, None] + dim[None, :])
                    by_head = tl.maximum(tl.dot(stored.to(operand), q_tile), 0.0) * head_weights[None, :]
                    score = tl.sum(tl.reshape(by_head, [tile_keys, tile_queries, heads_padded]), 2)
                    if scaled:
                        scale_at = (key_at + head_dim).to(tl.pointer_type(tl.float32))
                        if block_rows < tile_keys:
                            score *= tl.load(scale_at, mask=fresh, other=0.0)[:, None]
                        else:
                            score *= tl.load(scale_at)[:, None]
                    next_block = tl.minimum(tile + 1, last - 1) // block_tiles
                    page = tl.load(pages + (next_block * step + first_part) // parts)
                    position = block * block_rows + from_key + key
                    seen = (position[:, None] < seen_lengths[None, :]) & fresh[:, None]
                    tl.store(values + query[None, :] * value_stride + position[:, None], score, mask=seen)
                    score = tl.where(seen, score, 0.0)
                    sums += score
                    squares += score * score
            seat = tl.max(tl.where(seats < seat, seats, _EMPTY), 0)
    moments_at = moments + (query * splits + split) * 2
    tl.store(moments_at, tl.sum(sums, 0), mask=query < num_queries)
    tl.store(moments_at + 1, tl.sum(squares, 0), mask=query < num_queries)
    if split == 0:
        tl.store(shares + query, tl.zeros([tile_queries], tl.int32) + splits, mask=query < num_queries)


@triton.jit  # type: ignore[untyped-decorator]
def _load_queries(
    q: tl.tensor,
    weights: tl.tensor,
    scale: tl.tensor,
    first_query: tl.tensor,
    num_queries: tl.tensor,
    heads: tl.tensor,
    query_stride: tl.tensor,
    head_stride: tl.tensor,
    tile_queries: tl.constexpr,
    heads_padded: tl.constexpr,
    head_dim: tl.constexpr,
    quantised: tl.constexpr,
    operand: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns q as [head_dim, queries x heads] and the weight of each column.

    Each column is scaled: to e4m3 codes if `quantised`, otherwise to [-2, 2]. The weights include `scale` and undo the
    scaling of q.
    """
    column = tl.arange(0, tile_queries * heads_padded)
    query = first_query + column // heads_padded
    head = column % heads_padded
    there = (query < num_queries) & (head < heads)
    dim = tl.arange(0, head_dim)
    at = q + query[None, :] * query_stride + head[None, :] * head_stride + dim[:, None]
    q_tile = tl.load(at, mask=there[None, :], other=0.0).to(tl.float32)
    head_weights = tl.load(weights + query * heads + head, mask=there, other=0.0)
    if quantised:
        unit = e4m3_scale(tl.max(tl.abs(q_tile), 0))
        quotients = tl.div_rn(q_tile, tl.broadcast_to(unit[None, :], q_tile.shape))
        return quotients.to(tl.float8e4nv).to(operand), head_weights * scale * unit
    # `unit` has the bits of the largest power of two that does not exceed the largest magnitude of a column. It is
    # clamped so that unit and 1 / unit are normal numbers.
    unit = tl.max(tl.abs(q_tile), 0).to(tl.int32, bitcast=True) & 0x7F800000
    unit = tl.minimum(tl.maximum(unit, 0x0D800000), 0x71000000)
    inverse = (0x7F000000 - unit).to(tl.float32, bitcast=True)
    head_weights = head_weights * scale * unit.to(tl.float32, bitcast=True)
    return (q_tile * inverse[None, :]).to(operand), head_weights
