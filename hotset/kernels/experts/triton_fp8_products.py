"""The product of a block of pairs with two tiles of an expert's fp8 weight, in Triton.

A matrix instruction of Hopper has 64 rows and 8 to 256 columns. Blocks of fewer than 64 pairs are its columns (weight @
tokens^T), larger blocks its rows (tokens @ weight^T): a thread holds few rows and many columns of a product, and the
weights of a tile share one scale, so a thread then loads two scales per group instead of one per column.
"""

import triton
import triton.language as tl


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
def _read_outputs(first: tl.tensor, outputs: tl.constexpr, tile_out: tl.constexpr) -> tl.tensor:
    """Returns the outputs from `first` on, as int64 [tile_out]. Beyond the last output, the last one is repeated.

    If the outputs are a multiple of two tiles, no tile extends beyond the last output. The addresses then need fewer
    registers.
    """
    output = first + tl.arange(0, tile_out).to(tl.int64)
    if outputs % (2 * tile_out) != 0:
        output = tl.minimum(output, outputs - 1)
    return output


@triton.jit  # type: ignore[untyped-decorator]
def _tile_scales(
    scales: tl.tensor,  # of one expert
    first: tl.tensor,
    outputs: tl.constexpr,
    groups: tl.constexpr,
    block_rows: tl.constexpr,
    tile_out: tl.constexpr,
    one_scale: tl.constexpr,
) -> tl.tensor:
    """Returns pointers to the scales of the outputs from `first` on: one if `one_scale`, or else [tile_out]."""
    output = first if one_scale else first + tl.arange(0, tile_out)
    return scales + tl.minimum(output, outputs - 1) // block_rows * groups


@triton.jit  # type: ignore[untyped-decorator]
def two_products(
    tokens: tl.tensor,  # codes in sorted order
    token_tiles: tl.tensor,  # their descriptor; only if tma
    token_scales: tl.tensor,
    num_pairs: tl.tensor,
    weight: tl.tensor,  # codes of all experts
    weight_tiles: tl.tensor,  # their descriptor; only if tma
    weight_scales: tl.tensor,
    expert: tl.tensor,
    first_index: tl.tensor,  # sorted index of the block's first pair
    end: tl.tensor,  # sorted index after the expert's last pair
    first: tl.tensor,  # the first output of the first tile
    second: tl.tensor,  # the first output of the second tile
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    scale_block: tl.constexpr,
    block_rows: tl.constexpr,
    block_pairs: tl.constexpr,
    pairs_are_rows: tl.constexpr,
    tile_out: tl.constexpr,
    tma: tl.constexpr,
    stages: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the products of a block of pairs with two tiles of outputs, in float32 (shape: `_scaled_product`).

    A tile may extend beyond the last output, and a block beyond the last pair. What is computed there is undefined and
    must not be stored.
    """
    rows: tl.constexpr = block_pairs if pairs_are_rows else tile_out
    columns: tl.constexpr = tile_out if pairs_are_rows else block_pairs
    first_sum = tl.zeros([rows, columns], tl.float32)
    second_sum = tl.zeros([rows, columns], tl.float32)
    groups: tl.constexpr = (inputs + scale_block - 1) // scale_block
    one_scale: tl.constexpr = block_rows % tile_out == 0
    expert_scales = weight_scales + expert * ((outputs + block_rows - 1) // block_rows * groups)
    first_scales = _tile_scales(expert_scales, first, outputs, groups, block_rows, tile_out, one_scale)
    second_scales = _tile_scales(expert_scales, second, outputs, groups, block_rows, tile_out, one_scale)
    index = first_index + tl.arange(0, block_pairs)
    inside = index < end
    entry = tl.arange(0, scale_block)[None, :]
    expert_weight = weight + expert * (outputs * inputs) + entry
    first_at = expert_weight + _read_outputs(first, outputs, tile_out)[:, None] * inputs
    second_at = expert_weight + _read_outputs(second, outputs, tile_out)[:, None] * inputs
    token_at = tokens + index.to(tl.int64)[:, None] * inputs + entry
    first_row = (expert * outputs + first).to(tl.int32)
    second_row = (expert * outputs + second).to(tl.int32)
    for group in tl.range(0, groups, num_stages=stages):
        start = group * scale_block
        if tma:
            first_tile = weight_tiles.load([first_row, start])
            second_tile = weight_tiles.load([second_row, start])
            token_tile = token_tiles.load([first_index, start])
        else:
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
