"""experts in Triton: order the pairs by expert, two products, a weighted sum. Four launches, no word to the host.

A pair is one (row, chosen expert): pair p belongs to row p // k. `_order_kernel` sorts the pairs by expert and cuts
each expert's run of them into blocks. A program of a product serves one block and one tile of outputs; those of the
same outputs run next to each other, so that the weights of an expert with several blocks come from memory once.
The products are taken as weight @ rows^T: the weight is the tall operand, so Hopper's wide matrix instructions serve
blocks of 16 rows too. Nothing is added up across programs: a row gets the same bits whatever else is in the batch.

Where an expert has many rows the products are bound by arithmetic, and torch's grouped product takes their place.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels import EMPTY
from hotset.kernels.swiglu import swiglu


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program of a product computes, and with what: `outputs` x rows of a block, `inputs` terms at a time."""

    outputs: int
    inputs: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the experts are served: blocks of `rows`, and the tile of either product on them."""

    rows: int
    gate_up: Tile  # so many outputs of gate and as many of up
    down: Tile


# By the mean number of rows per expert: the first entry that reaches it. A multiprocessor wants about 40 KB of weights
# in flight; it holds two of these programs, each with stages of 32 KB or more under way.
TILES = {
    8: Tiles(16, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
    20: Tiles(32, Tile(64, 64, 4, 5), Tile(128, 64, 4, 5)),
    56: Tiles(64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    1 << 62: Tiles(128, Tile(64, 64, 8, 3), Tile(128, 64, 8, 3)),
}
FLOAT32_TILES = Tiles(16, Tile(32, 32, 4, 3), Tile(32, 32, 4, 3))
TORCH_FROM = 96  # mean rows per expert from which torch's grouped product is the faster one
PAIRS_AT_ONCE = (
    256,
    1024,
    4096,
)  # pairs are counted and placed in chunks: the first of these that holds all, or the last
SUM_BLOCK = 1024  # values of a row that one program of the weighted sum makes
OPTIONS = {"enable_fp_fusion": True}  # Triton 3.9 warns where this is left open

_EMPTY = tl.constexpr(EMPTY)


@dataclass(frozen=True, slots=True)
class Order:
    """The pairs, sorted by expert. EMPTY pairs come last, after every expert's end, and are in no block."""

    pairs: Tensor  # [pairs] int32: pair at each place
    places: Tensor  # [pairs] int32: place of each pair
    ends: Tensor  # [experts] int32: place at which each expert's run ends
    block_expert: Tensor  # [blocks] int32, EMPTY-padded at the end
    block_first: Tensor  # [blocks] int32: place of a block's first pair; it ends after `rows` places or with the run


def experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    rows_per_expert = triton.cdiv(chosen.numel(), gate_up.shape[0])
    if rows_per_expert >= TORCH_FROM and torch_serves(x, down):
        return experts_by_torch(x, chosen, weights, gate_up, down)
    tiles = tiles_for(x.dtype, rows_per_expert)
    return experts_in_tiles(x, chosen, weights, gate_up, down, tiles)


def tiles_for(dtype: torch.dtype, rows_per_expert: int) -> Tiles:
    if dtype == torch.float32:
        return FLOAT32_TILES
    return next(tiles for most, tiles in TILES.items() if rows_per_expert <= most)


def torch_serves(x: Tensor, down: Tensor) -> bool:
    """Its grouped product wants bf16 and 16-byte rows."""
    return x.dtype == torch.bfloat16 and down.shape[1] % 8 == 0 and down.shape[2] % 8 == 0


def experts_in_tiles(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, tiles: Tiles) -> Tensor:
    _, hidden, width = down.shape
    order = order_by_expert(chosen, gate_up.shape[0], tiles.rows)
    blocks = (order.block_expert, order.block_first, order.ends)
    x = x if x.stride(1) == 1 else x.contiguous()
    activation = torch.empty(chosen.numel(), width, dtype=x.dtype, device=x.device)  # by place, as the results
    results = torch.empty(chosen.numel(), hidden, dtype=x.dtype, device=x.device)
    sizes = {"hidden": hidden, "width": width, "block_rows": tiles.rows}
    _gate_up_kernel[_grid(order, width, tiles.gate_up)](
        *(x, gate_up.contiguous(), order.pairs, *blocks, activation, x.stride(0)),
        k=chosen.shape[1],
        **sizes,
        **_launch(tiles.gate_up),
    )
    _down_kernel[_grid(order, hidden, tiles.down)](
        *(activation, down.contiguous(), *blocks, results), **sizes, **_launch(tiles.down)
    )
    return weighted_sum(results, order, chosen, weights)


def experts_by_torch(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    order = order_by_expert(chosen, gate_up.shape[0], chosen.numel())
    gathered = x.index_select(0, order.pairs // chosen.shape[1])
    activation = swiglu(F.grouped_mm(gathered, gate_up.transpose(1, 2), offs=order.ends))
    results = F.grouped_mm(activation, down.transpose(1, 2), offs=order.ends)
    return weighted_sum(results, order, chosen, weights)


def _grid(order: Order, outputs: int, tile: Tile) -> tuple[int, int]:
    return order.block_expert.shape[0], triton.cdiv(outputs, tile.outputs)


def _launch(tile: Tile) -> dict[str, Any]:
    sizes = {"tile_out": tile.outputs, "tile_in": tile.inputs}
    return sizes | {"num_warps": tile.warps, "num_stages": tile.stages} | OPTIONS


def order_by_expert(
    chosen: Tensor,  # [rows, k] expert ids, or EMPTY
    experts: int,
    block_rows: int,
) -> Order:
    pairs = chosen.numel()
    # An expert's last block may be part full: with n experts touched, n blocks and one more for every further full one.
    touched = min(experts, pairs)
    blocks = touched + (pairs - touched) // block_rows
    of_pairs, places, ends, block_expert, block_first = (
        torch.empty(count, dtype=torch.int32, device=chosen.device) for count in (pairs, pairs, experts, blocks, blocks)
    )
    chunk = next((size for size in PAIRS_AT_ONCE if size >= pairs), PAIRS_AT_ONCE[-1])
    _order_kernel[(experts + 1,)](
        *(chosen.contiguous(), of_pairs, places, ends, block_expert, block_first, pairs, blocks, block_rows),
        experts=experts,
        bins=max(32, triton.next_power_of_2(experts + 1)),
        chunk=chunk,
        num_warps=max(4, chunk // 256),
        **OPTIONS,
    )
    return Order(of_pairs, places, ends, block_expert, block_first)


def weighted_sum(results: Tensor, order: Order, chosen: Tensor, weights: Tensor) -> Tensor:
    """[rows, hidden]: the results of each row's pairs, by place, times their weights, added up in float32."""
    rows, k = chosen.shape
    hidden = results.shape[1]
    out = torch.empty(rows, hidden, dtype=results.dtype, device=results.device)
    _sum_kernel[(rows, triton.cdiv(hidden, SUM_BLOCK))](
        *(results, order.places, chosen.contiguous(), weights.contiguous(), out),
        hidden=hidden,
        k=k,
        block=SUM_BLOCK,
        num_warps=4,
        **OPTIONS,
    )
    return out


@triton.jit(do_not_specialize=["pairs_count", "blocks", "block_rows"])  # type: ignore[untyped-decorator]
def _order_kernel(
    chosen: tl.tensor,
    pairs: tl.tensor,
    places: tl.tensor,
    ends: tl.tensor,
    block_expert: tl.tensor,
    block_first: tl.tensor,
    pairs_count: tl.tensor,
    blocks: tl.tensor,
    block_rows: tl.tensor,
    experts: tl.constexpr,
    bins: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """One program per expert, and one for the EMPTY pairs: each counts all pairs and places its own."""
    mine = tl.program_id(0)
    counts = tl.zeros([bins], tl.int32)
    for start in range(0, pairs_count, chunk):
        counts += tl.histogram(_expert_of(chosen, start + tl.arange(0, chunk), pairs_count, experts), bins)
    bin_number = tl.arange(0, bins)
    before = bin_number < mine
    first = tl.sum(tl.where(before, counts, 0), 0)
    first_block = tl.sum(tl.where(before, (counts + block_rows - 1) // block_rows, 0), 0)
    if mine < experts:
        end = first + tl.sum(tl.where(bin_number == mine, counts, 0), 0)
        tl.store(ends + mine, end)
        for block in range(tl.cdiv(end - first, block_rows)):
            tl.store(block_expert + first_block + block, mine)
            tl.store(block_first + first_block + block, first + block * block_rows)
    else:
        for block in range(first_block, blocks):
            tl.store(block_expert + block, _EMPTY)
    for start in range(0, pairs_count, chunk):
        pair = start + tl.arange(0, chunk)
        here = (_expert_of(chosen, pair, pairs_count, experts) == mine) & (pair < pairs_count)
        place = first + tl.cumsum(here.to(tl.int32), 0) - 1
        tl.store(pairs + place, pair, mask=here)
        tl.store(places + pair, place, mask=here)
        first += tl.sum(here.to(tl.int32), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _expert_of(chosen: tl.tensor, pair: tl.tensor, pairs_count: tl.tensor, experts: tl.constexpr) -> tl.tensor:
    """The expert of each pair as int32; `experts` for an EMPTY one, and beyond the last."""
    expert = tl.load(chosen + pair, mask=pair < pairs_count, other=_EMPTY).to(tl.int32)
    return tl.where(expert == _EMPTY, experts, expert)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_up_kernel(
    x: tl.tensor,
    gate_up: tl.tensor,
    pairs: tl.tensor,
    block_expert: tl.tensor,
    block_first: tl.tensor,
    ends: tl.tensor,
    activation: tl.tensor,
    x_stride: tl.tensor,
    k: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    block_rows: tl.constexpr,
    tile_out: tl.constexpr,
    tile_in: tl.constexpr,
) -> None:
    expert = tl.load(block_expert + tl.program_id(0)).to(tl.int64)
    if expert == _EMPTY:
        return
    place = tl.load(block_first + tl.program_id(0)) + tl.arange(0, block_rows)
    inside = place < tl.load(ends + expert)
    row = tl.load(pairs + place, mask=inside, other=0) // k
    output = tl.program_id(1) * tile_out + tl.arange(0, tile_out)
    # Outputs beyond the last read the weights of the first ones, unmasked, and are not stored.
    entry = tl.arange(0, tile_in)
    gate_at = gate_up + expert * (2 * width * hidden) + (output % width)[:, None] * hidden + entry[None, :]
    up_at = gate_at + width * hidden
    x_at = x + row.to(tl.int64)[:, None] * x_stride + entry[None, :]
    gate = tl.zeros([tile_out, block_rows], tl.float32)
    up = tl.zeros([tile_out, block_rows], tl.float32)
    for start in range(0, hidden, tile_in):
        if hidden % tile_in == 0:
            gate_part = tl.load(gate_at + start)
            up_part = tl.load(up_at + start)
            x_part = tl.load(x_at + start, mask=inside[:, None], other=0)
        else:
            there = (start + entry < hidden)[None, :]
            gate_part = tl.load(gate_at + start, mask=there, other=0)
            up_part = tl.load(up_at + start, mask=there, other=0)
            x_part = tl.load(x_at + start, mask=inside[:, None] & there, other=0)
        gate = tl.dot(gate_part, tl.trans(x_part), gate, input_precision="tf32x3")
        up = tl.dot(up_part, tl.trans(x_part), up, input_precision="tf32x3")
    value = tl.trans(gate * tl.sigmoid(gate) * up).to(activation.dtype.element_ty)
    at = activation + place.to(tl.int64)[:, None] * width + output[None, :]
    tl.store(at, value, mask=inside[:, None] & (output < width)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _down_kernel(
    activation: tl.tensor,
    down: tl.tensor,
    block_expert: tl.tensor,
    block_first: tl.tensor,
    ends: tl.tensor,
    results: tl.tensor,
    hidden: tl.constexpr,
    width: tl.constexpr,
    block_rows: tl.constexpr,
    tile_out: tl.constexpr,
    tile_in: tl.constexpr,
) -> None:
    expert = tl.load(block_expert + tl.program_id(0)).to(tl.int64)
    if expert == _EMPTY:
        return
    place = tl.load(block_first + tl.program_id(0)) + tl.arange(0, block_rows)
    inside = place < tl.load(ends + expert)
    output = tl.program_id(1) * tile_out + tl.arange(0, tile_out)
    entry = tl.arange(0, tile_in)
    down_at = down + expert * (hidden * width) + (output % hidden)[:, None] * width + entry[None, :]
    activation_at = activation + place.to(tl.int64)[:, None] * width + entry[None, :]
    result = tl.zeros([tile_out, block_rows], tl.float32)
    for start in range(0, width, tile_in):
        if width % tile_in == 0:
            down_part = tl.load(down_at + start)
            activation_part = tl.load(activation_at + start, mask=inside[:, None], other=0)
        else:
            there = (start + entry < width)[None, :]
            down_part = tl.load(down_at + start, mask=there, other=0)
            activation_part = tl.load(activation_at + start, mask=inside[:, None] & there, other=0)
        result = tl.dot(down_part, tl.trans(activation_part), result, input_precision="tf32x3")
    at = results + place.to(tl.int64)[:, None] * hidden + output[None, :]
    tl.store(at, tl.trans(result).to(results.dtype.element_ty), mask=inside[:, None] & (output < hidden)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(
    results: tl.tensor,
    places: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    hidden: tl.constexpr,
    k: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for j in tl.static_range(k):
        pair = row * k + j
        end = tl.where(tl.load(chosen + pair) == _EMPTY, 0, hidden)
        at = results + tl.load(places + pair).to(tl.int64) * hidden + entry
        total += tl.load(weights + pair).to(tl.float32) * tl.load(at, mask=entry < end, other=0).to(tl.float32)
    tl.store(out + row * hidden + entry, total.to(out.dtype.element_ty), mask=entry < hidden)
