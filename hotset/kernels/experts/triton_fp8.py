"""experts with weights in fp8, in Triton: sort, quantise, two products, a weighted sum. Five launches.

Sort and weighted sum are those of `triton_impl.py`, and so is the order of the pairs. `_quantise_kernel` writes the
codes of every pair's token in sorted order. A program of a product computes two tiles of outputs for one block of
pairs. For each group of SCALE_BLOCK inputs, the matrix units multiply codes and add the products of the group; the
program multiplies the sum by its scales and adds it to the sums of earlier groups, in float32. A program of gate_up
computes one tile of gate and one of up. These are SCALE_BLOCK activations of each pair, a group of down's inputs, so
the program quantises them itself. No sum crosses programs, so a token gets the same bits in all batches that use the
same `Tiles`, which depend on the mean number of pairs per expert only.

A matrix instruction of Hopper has 64 rows and 8 to 256 columns. Blocks of fewer than 64 pairs are its columns (weight @
tokens^T), larger blocks its rows (tokens @ weight^T): a thread holds few rows and many columns of a product, and the
weights of a tile share one scale, so a thread then loads two scales per group instead of one per column.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.experts.triton_impl import OPTIONS, SortedPairs, sort_by_expert, weighted_sum
from hotset.kernels.fp8 import SCALE_BLOCK, Fp8Weight
from hotset.kernels.quantise.triton_impl import group_codes, group_scale


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one program of a product. It computes two tiles of `outputs` outputs of each pair of a block."""

    outputs: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """The number of pairs in a block, whether they are the rows of the matrix instructions, and the tile per product.

    Rows require blocks of 64 pairs or more.
    """

    block_pairs: int
    pairs_are_rows: bool
    gate_up: Tile  # one tile of gate, one of up; `outputs` must be SCALE_BLOCK
    down: Tile


# The key of an entry is the largest mean number of pairs per expert for which the entry is used. A multiprocessor needs
# about 40 KB of weights in flight. With blocks of 16 or 32 pairs, it runs two programs at a time, each with 64 KB of
# weights in flight.
TILES = {
    8: Tiles(16, False, Tile(128, 4, 3), Tile(128, 4, 3)),
    20: Tiles(32, False, Tile(128, 4, 3), Tile(128, 4, 3)),
    1 << 62: Tiles(64, True, Tile(128, 8, 4), Tile(128, 8, 4)),
}
# Programs run in groups of this many blocks: all blocks of a group with the first tile of outputs, then with the next.
# The inputs and weights of a group stay in the L2 cache until all its tiles are computed.
GROUP_BLOCKS = 8
QUANTISED_GROUPS = 8  # groups of a pair's input that one program quantises

_EMPTY = tl.constexpr(EMPTY)


@dataclass(frozen=True, slots=True)
class QuantisedPairs:
    """A vector per pair, in sorted order, in fp8. EMPTY pairs, which come last, have undefined values."""

    codes: Tensor  # [pairs, width] float8_e4m3fn
    scales: Tensor  # [ceil(width / SCALE_BLOCK), pairs] float32; indexed with 32 bits, unlike codes

    @staticmethod
    def empty(pairs: int, width: int, device: torch.device) -> "QuantisedPairs":
        codes = torch.empty(pairs, width, dtype=torch.float8_e4m3fn, device=device)
        return QuantisedPairs(codes, torch.empty(triton.cdiv(width, SCALE_BLOCK), pairs, device=device))


def experts(
    x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Fp8Weight, down: Fp8Weight, pairs_per_expert: int
) -> Tensor:
    return experts_in_tiles(x, expert_ids, weights, gate_up, down, tiles_for(pairs_per_expert))


def tiles_for(pairs_per_expert: int) -> Tiles:
    return next(tiles for max_pairs, tiles in TILES.items() if pairs_per_expert <= max_pairs)


def experts_in_tiles(
    x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Fp8Weight, down: Fp8Weight, tiles: Tiles
) -> Tensor:
    by_expert = sort_by_expert(expert_ids, gate_up.shape[0], tiles.block_pairs)
    activation = activation_of(quantise_pairs(x, by_expert), by_expert, gate_up, x.dtype, tiles)
    results = results_of(activation, by_expert, down, x.dtype, tiles)
    return weighted_sum(results, by_expert, expert_ids, weights)


def quantise_pairs(x: Tensor, by_expert: SortedPairs) -> QuantisedPairs:
    """Returns the codes and scales of each pair's token, bit for bit as `hotset.kernels.fp8.quantise` computes them."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (tokens, hidden), pairs = x.shape, by_expert.pairs.numel()
    out = QuantisedPairs.empty(pairs, hidden, x.device)
    _quantise_kernel[(pairs, triton.cdiv(out.scales.shape[0], QUANTISED_GROUPS))](
        x=x,
        pairs=by_expert.pairs,
        ends=by_expert.ends,
        codes=out.codes,
        scales=out.scales,
        num_pairs=pairs,
        x_stride=x.stride(0),
        k=pairs // tokens,
        experts=by_expert.ends.numel(),
        hidden=hidden,
        scale_block=SCALE_BLOCK,
        block_groups=QUANTISED_GROUPS,
        num_warps=4,
        **OPTIONS,
    )
    return out


def activation_of(
    x: QuantisedPairs,
    by_expert: SortedPairs,
    gate_up: Fp8Weight,  # [experts, 2 * width, hidden]: gate, then up
    dtype: torch.dtype,
    tiles: Tiles,
) -> QuantisedPairs:
    """Returns silu(gate @ x) * (up @ x), computed in float32, rounded to `dtype` and then quantised."""
    (pairs, hidden), width = x.codes.shape, gate_up.shape[1] // 2
    assert tiles.gate_up.outputs == SCALE_BLOCK, f"{tiles.gate_up.outputs} activations are not a group of {SCALE_BLOCK}"
    assert width % gate_up.block_rows == 0, f"up begins at {width}, inside a block of {gate_up.block_rows} outputs"
    out = QuantisedPairs.empty(pairs, width, x.codes.device)
    blocks = by_expert.block_expert.shape[0]
    _gate_up_kernel[(blocks * triton.cdiv(width, SCALE_BLOCK),)](
        x=x.codes,
        x_scales=x.scales,
        gate_up=gate_up.codes.contiguous(),
        gate_up_scales=gate_up.scales.contiguous(),
        block_expert=by_expert.block_expert,
        block_first=by_expert.block_first,
        ends=by_expert.ends,
        activation=out.codes,
        activation_scales=out.scales,
        blocks=blocks,
        num_pairs=pairs,
        hidden=hidden,
        width=width,
        scale_block=SCALE_BLOCK,
        block_rows=gate_up.block_rows,
        block_pairs=tiles.block_pairs,
        pairs_are_rows=tiles.pairs_are_rows,
        rounded=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
        stages=tiles.gate_up.stages,
        group_blocks=GROUP_BLOCKS,
        num_warps=tiles.gate_up.warps,
        **OPTIONS,
    )
    return out


def results_of(
    activation: QuantisedPairs,
    by_expert: SortedPairs,
    down: Fp8Weight,  # [experts, hidden, width]
    dtype: torch.dtype,
    tiles: Tiles,
) -> Tensor:  # [pairs, hidden], in sorted order; EMPTY pairs are undefined
    (pairs, width), hidden = activation.codes.shape, down.shape[1]
    results = torch.empty(pairs, hidden, dtype=dtype, device=down.device)
    blocks = by_expert.block_expert.shape[0]
    _down_kernel[(blocks * triton.cdiv(hidden, 2 * tiles.down.outputs),)](
        activation=activation.codes,
        activation_scales=activation.scales,
        down=down.codes.contiguous(),
        down_scales=down.scales.contiguous(),
        block_expert=by_expert.block_expert,
        block_first=by_expert.block_first,
        ends=by_expert.ends,
        results=results,
        blocks=blocks,
        num_pairs=pairs,
        hidden=hidden,
        width=width,
        scale_block=SCALE_BLOCK,
        block_rows=down.block_rows,
        block_pairs=tiles.block_pairs,
        pairs_are_rows=tiles.pairs_are_rows,
        tile_out=tiles.down.outputs,
        stages=tiles.down.stages,
        group_blocks=GROUP_BLOCKS,
        num_warps=tiles.down.warps,
        **OPTIONS,
    )
    return results


@triton.jit(do_not_specialize=["num_pairs"])  # type: ignore[untyped-decorator]
def _quantise_kernel(
    x: tl.tensor,
    pairs: tl.tensor,
    ends: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    num_pairs: tl.tensor,
    x_stride: tl.tensor,
    k: tl.constexpr,
    experts: tl.constexpr,
    hidden: tl.constexpr,
    scale_block: tl.constexpr,
    block_groups: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    if index >= tl.load(ends + experts - 1):
        return  # an EMPTY pair
    token = (tl.load(pairs + index) // k).to(tl.int64)
    group = tl.program_id(1) * block_groups + tl.arange(0, block_groups)
    entry = group[:, None] * scale_block + tl.arange(0, scale_block)[None, :]
    values = tl.load(x + token * x_stride + entry, mask=entry < hidden, other=0).to(tl.float32)
    scale = group_scale(values)
    tl.store(codes + index.to(tl.int64) * hidden + entry, group_codes(values, scale), mask=entry < hidden)
    tl.store(scales + group * num_pairs + index, scale, mask=group * scale_block < hidden)


@triton.jit  # type: ignore[untyped-decorator]
def _block_and_tile(blocks: tl.tensor, tiles: tl.constexpr, group_blocks: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Returns the block of pairs and the number of the tile that this program computes (see GROUP_BLOCKS)."""
    program = tl.program_id(0)
    first = program // (group_blocks * tiles) * group_blocks
    count = tl.minimum(blocks - first, group_blocks)
    rest = program % (group_blocks * tiles)
    return first + rest % count, rest // count


@triton.jit  # type: ignore[untyped-decorator]
def _scaled_product(
    weight: tl.tensor,  # [tile_out, SCALE_BLOCK]
    tokens: tl.tensor,  # [block_pairs, SCALE_BLOCK]
    weight_scale: tl.tensor,  # a number if `one_scale`, or else [tile_out]
    token_scale: tl.tensor,  # [block_pairs]
    one_scale: tl.constexpr,
    pairs_are_rows: tl.constexpr,
) -> tl.tensor:  # [block_pairs, tile_out] if `pairs_are_rows`, or else [tile_out, block_pairs]
    if one_scale:
        token_scale = token_scale * weight_scale
    if pairs_are_rows:
        product = tl.dot(tokens, tl.trans(weight)) * token_scale[:, None]
        if not one_scale:
            product *= weight_scale[None, :]
    else:
        product = tl.dot(weight, tl.trans(tokens)) * token_scale[None, :]
        if not one_scale:
            product *= weight_scale[:, None]
    return product


@triton.jit  # type: ignore[untyped-decorator]
def _two_products(
    tokens: tl.tensor,  # pointer to the codes of pair 0
    token_scales: tl.tensor,
    index: tl.tensor,  # [block_pairs]: sorted indices
    inside: tl.tensor,  # [block_pairs]: the pairs to read
    num_pairs: tl.tensor,
    first: tl.tensor,  # [tile_out]: pointers to the codes of the first tile's outputs
    second: tl.tensor,  # [tile_out]: those of the second tile
    first_scales: tl.tensor,  # pointers to their scales: one if `one_scale`, or else [tile_out]
    second_scales: tl.tensor,
    inputs: tl.constexpr,
    scale_block: tl.constexpr,
    one_scale: tl.constexpr,
    pairs_are_rows: tl.constexpr,
    stages: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the products of a block of pairs with two tiles of outputs, in float32 (shape: `_scaled_product`)."""
    block_pairs: tl.constexpr = index.shape[0]
    tile_out: tl.constexpr = first.shape[0]
    rows: tl.constexpr = block_pairs if pairs_are_rows else tile_out
    columns: tl.constexpr = tile_out if pairs_are_rows else block_pairs
    first_sum = tl.zeros([rows, columns], tl.float32)
    second_sum = tl.zeros([rows, columns], tl.float32)
    entry = tl.arange(0, scale_block)[None, :]
    first_at, second_at = first[:, None] + entry, second[:, None] + entry
    token_at = tokens + index.to(tl.int64)[:, None] * inputs + entry
    for group in tl.range(0, (inputs + scale_block - 1) // scale_block, num_stages=stages):
        start = group * scale_block
        if inputs % scale_block == 0:
            first_tile = tl.load(first_at + start)
            second_tile = tl.load(second_at + start)
            token_tile = tl.load(token_at + start, mask=inside[:, None], other=0.0)
        else:
            in_range = start + entry < inputs
            first_tile = tl.load(first_at + start, mask=in_range, other=0.0)
            second_tile = tl.load(second_at + start, mask=in_range, other=0.0)
            token_tile = tl.load(token_at + start, mask=inside[:, None] & in_range, other=0.0)
        token_scale = tl.load(token_scales + (group * num_pairs + index), mask=inside, other=0)
        first_scale = tl.load(first_scales + group)
        second_scale = tl.load(second_scales + group)
        first_sum += _scaled_product(first_tile, token_tile, first_scale, token_scale, one_scale, pairs_are_rows)
        second_sum += _scaled_product(second_tile, token_tile, second_scale, token_scale, one_scale, pairs_are_rows)
    return first_sum, second_sum


@triton.jit(do_not_specialize=["blocks", "num_pairs"])  # type: ignore[untyped-decorator]
def _gate_up_kernel(
    x: tl.tensor,
    x_scales: tl.tensor,
    gate_up: tl.tensor,
    gate_up_scales: tl.tensor,
    block_expert: tl.tensor,
    block_first: tl.tensor,
    ends: tl.tensor,
    activation: tl.tensor,
    activation_scales: tl.tensor,
    blocks: tl.tensor,
    num_pairs: tl.tensor,
    hidden: tl.constexpr,
    width: tl.constexpr,
    scale_block: tl.constexpr,
    block_rows: tl.constexpr,
    block_pairs: tl.constexpr,
    pairs_are_rows: tl.constexpr,
    rounded: tl.constexpr,
    stages: tl.constexpr,
    group_blocks: tl.constexpr,
) -> None:
    block, tile = _block_and_tile(blocks, (width + scale_block - 1) // scale_block, group_blocks)
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert == _EMPTY:
        return
    index = tl.load(block_first + block) + tl.arange(0, block_pairs)
    inside = index < tl.load(ends + expert)
    output = tile * scale_block + tl.arange(0, scale_block)
    # A tile may extend beyond the last output. These extra outputs read the weights of other outputs, so that the loads
    # need no mask. They are not stored.
    row = (output if width % scale_block == 0 else output % width).to(tl.int64)
    gate = gate_up + expert * (2 * width * hidden) + row * hidden
    one_scale: tl.constexpr = block_rows == scale_block
    in_groups: tl.constexpr = (hidden + scale_block - 1) // scale_block
    scale_row = tile if one_scale else row // block_rows
    gate_scales = gate_up_scales + (expert * (2 * width // block_rows) + scale_row) * in_groups
    gate_sum, up_sum = _two_products(
        x,
        x_scales,
        index,
        inside,
        num_pairs,
        gate,
        gate + width * hidden,
        gate_scales,
        gate_scales + width // block_rows * in_groups,
        hidden,
        scale_block,
        one_scale,
        pairs_are_rows,
        stages,
    )
    value = (gate_sum * tl.sigmoid(gate_sum) * up_sum).to(rounded).to(tl.float32)
    if not pairs_are_rows:
        value = tl.trans(value)
    in_width = (output < width)[None, :]
    value = tl.where(in_width, value, 0)  # the extra outputs must not affect the scale
    scale = group_scale(value)
    target = activation + index.to(tl.int64)[:, None] * width + output[None, :]
    tl.store(target, group_codes(value, scale), mask=inside[:, None] & in_width)
    tl.store(activation_scales + tile * num_pairs + index, scale, mask=inside)


@triton.jit(do_not_specialize=["blocks", "num_pairs"])  # type: ignore[untyped-decorator]
def _down_kernel(
    activation: tl.tensor,
    activation_scales: tl.tensor,
    down: tl.tensor,
    down_scales: tl.tensor,
    block_expert: tl.tensor,
    block_first: tl.tensor,
    ends: tl.tensor,
    results: tl.tensor,
    blocks: tl.tensor,
    num_pairs: tl.tensor,
    hidden: tl.constexpr,
    width: tl.constexpr,
    scale_block: tl.constexpr,
    block_rows: tl.constexpr,
    block_pairs: tl.constexpr,
    pairs_are_rows: tl.constexpr,
    tile_out: tl.constexpr,
    stages: tl.constexpr,
    group_blocks: tl.constexpr,
) -> None:
    block, tile = _block_and_tile(blocks, (hidden + 2 * tile_out - 1) // (2 * tile_out), group_blocks)
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert == _EMPTY:
        return
    index = tl.load(block_first + block) + tl.arange(0, block_pairs)
    inside = index < tl.load(ends + expert)
    first_output = tile * (2 * tile_out) + tl.arange(0, tile_out)
    second_output = first_output + tile_out
    exact: tl.constexpr = hidden % (2 * tile_out) == 0
    first_row = (first_output if exact else first_output % hidden).to(tl.int64)
    second_row = (second_output if exact else second_output % hidden).to(tl.int64)
    weights = down + expert * (hidden * width)
    in_groups: tl.constexpr = (width + scale_block - 1) // scale_block
    scale_rows: tl.constexpr = (hidden + block_rows - 1) // block_rows
    one_scale: tl.constexpr = block_rows % tile_out == 0
    scales = down_scales + expert * (scale_rows * in_groups)
    if one_scale:
        # The last tile may be wholly beyond the last output.
        first_scale_row = tile * (2 * tile_out) // block_rows
        second_scale_row = tl.minimum((tile * (2 * tile_out) + tile_out) // block_rows, scale_rows - 1)
    else:
        first_scale_row = first_row // block_rows
        second_scale_row = second_row // block_rows
    first_sum, second_sum = _two_products(
        activation,
        activation_scales,
        index,
        inside,
        num_pairs,
        weights + first_row * width,
        weights + second_row * width,
        scales + first_scale_row * in_groups,
        scales + second_scale_row * in_groups,
        width,
        scale_block,
        one_scale,
        pairs_are_rows,
        stages,
    )
    if not pairs_are_rows:
        first_sum, second_sum = tl.trans(first_sum), tl.trans(second_sum)
    target = results + index.to(tl.int64)[:, None] * hidden
    dtype = results.dtype.element_ty
    tl.store(target + first_output, first_sum.to(dtype), mask=inside[:, None] & (first_output < hidden)[None, :])
    tl.store(target + second_output, second_sum.to(dtype), mask=inside[:, None] & (second_output < hidden)[None, :])
