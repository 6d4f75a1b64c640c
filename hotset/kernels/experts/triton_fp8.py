"""experts with weights in fp8, in Triton: sort, quantise, two products, a weighted sum.

There are five launches, or six if the pairs do not fit into one chunk of the sort. Sort and weighted sum are those of
`triton_impl.py`, and so is the order of the pairs. `_quantise_pairs_kernel` writes the codes of every pair's token in
sorted order. A program of a product computes two tiles of outputs for one block of pairs. For each group of SCALE_BLOCK
inputs, the matrix units multiply codes and add the products of the group; the program multiplies the sum by its scales
and adds it to the sums of earlier groups, in float32. A program of gate_up computes one tile of gate and one of up.
These are SCALE_BLOCK activations of each pair, a group of down's inputs, so the program quantises them itself. No sum
crosses programs, so a token gets the same bits in all batches that use the same `Tiles`, which depend on the mean
number of pairs per expert only.
"""

from dataclasses import dataclass
from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hotset.base.errors import InternalError
from hotset.kernels.early_launch.triton_launch import let_next_launch_start, wait_for_previous_launch
from hotset.kernels.experts.triton_fp8_products import two_products
from hotset.kernels.experts.triton_impl import OPTIONS, SMALL_OPTIONS, SortedPairs, sort_by_expert, weighted_sum
from hotset.kernels.fp8 import SCALE_BLOCK, Fp8Weight
from hotset.kernels.quantise.triton_impl import group_codes, group_scale


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one program of a product. It computes two tiles of `outputs` outputs of each pair of a block."""

    outputs: int
    warps: int
    stages: int
    tma: bool = False  # the tensor memory accelerator reads the codes; requires a multiple of 16 inputs


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
# weights in flight. Blocks of 128 pairs read the fewest bytes from the L2 per product; their sums fill the registers.
TILES = {
    8: Tiles(16, False, Tile(128, 4, 3), Tile(64, 4, 5)),
    20: Tiles(32, False, Tile(128, 4, 3), Tile(64, 4, 4)),
    160: Tiles(64, True, Tile(128, 8, 4), Tile(64, 4, 3, tma=True)),
    1 << 62: Tiles(128, True, Tile(128, 8, 4), Tile(64, 8, 3, tma=True)),
}
# Programs run in groups of this many blocks: all blocks of a group with the first tile of outputs, then with the next.
# The inputs and weights of a group stay in the L2 cache until all its tiles are computed.
GROUP_BLOCKS = 8
MARGIN = 1.25  # a launch has programs for this many times the expected number of pairs
QUANTISED_GROUPS = 8  # groups of a pair's input that a program quantises at a time
QUANTISING_PROGRAMS = 2048  # at most; an H200 runs 2112 of them at a time
TMA_ALIGN = 16  # bytes


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
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Fp8Weight,
    down: Fp8Weight,
    pairs_per_expert: int,
    first_expert: int = 0,
) -> Tensor:
    tiles = tiles_for(pairs_per_expert)
    slots = slots_for(pairs_per_expert, gate_up.shape[0], tiles.block_pairs)
    return experts_in_tiles(x, expert_ids, weights, gate_up, down, tiles, slots, first_expert)


def tiles_for(pairs_per_expert: int) -> Tiles:
    return next(tiles for max_pairs, tiles in TILES.items() if pairs_per_expert <= max_pairs)


def slots_for(pairs_per_expert: int, experts: int, block_pairs: int) -> int:
    """Returns how many blocks a launch should have programs for.

    If other ranks hold most experts, most pairs are EMPTY. With programs for all blocks that there could be, a launch
    would consist mostly of programs that find nothing to do. If there are more blocks than expected, because routing is
    skewed, some programs compute several blocks one after the other.
    """
    return experts + ceil(MARGIN * experts * pairs_per_expert / block_pairs)


def experts_in_tiles(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Fp8Weight,
    down: Fp8Weight,
    tiles: Tiles,
    slots: int,
    first_expert: int = 0,
) -> Tensor:
    for weight in (gate_up, down):
        if not (weight.codes.is_contiguous() and weight.scales.is_contiguous()):
            raise InternalError("the weights must be contiguous")
    by_expert = sort_by_expert(expert_ids, gate_up.shape[0], tiles.block_pairs, first_expert)
    activation = activation_of(quantise_pairs(x, by_expert), by_expert, gate_up, x.dtype, tiles, slots)
    results = results_of(activation, by_expert, down, x.dtype, tiles, slots)
    return weighted_sum(results, by_expert, weights)


def quantise_pairs(x: Tensor, by_expert: SortedPairs) -> QuantisedPairs:
    """Returns the codes and scales of each pair's token, bit for bit as `hotset.kernels.fp8.quantise` computes them."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (tokens, hidden), pairs = x.shape, by_expert.pairs.numel()
    out = QuantisedPairs.empty(pairs, hidden, x.device)
    parts = triton.cdiv(out.scales.shape[0], QUANTISED_GROUPS)  # of a pair's input
    _quantise_pairs_kernel[(min(pairs * parts, QUANTISING_PROGRAMS),)](
        x=x,
        pairs=by_expert.pairs,
        ends=by_expert.ends,
        codes=out.codes,
        scales=out.scales,
        num_pairs=pairs,
        x_stride=x.stride(0),
        k=pairs // tokens,
        experts=by_expert.ends.numel(),
        parts=parts,
        hidden=hidden,
        scale_block=SCALE_BLOCK,
        block_groups=QUANTISED_GROUPS,
        num_warps=4,
        **SMALL_OPTIONS,
    )
    return out


def activation_of(
    x: QuantisedPairs,
    by_expert: SortedPairs,
    gate_up: Fp8Weight,  # [experts, 2 * width, hidden]: gate, then up
    dtype: torch.dtype,
    tiles: Tiles,
    slots: int,
) -> QuantisedPairs:
    """Returns silu(gate @ x) * (up @ x), computed in float32, rounded to `dtype` and then quantised."""
    (pairs, hidden), width = x.codes.shape, gate_up.shape[1] // 2
    if tiles.gate_up.outputs != SCALE_BLOCK:
        raise InternalError(f"{tiles.gate_up.outputs} activations are not a group of {SCALE_BLOCK}")
    if width % gate_up.block_rows != 0:
        raise InternalError(f"up begins at {width}, inside a block of {gate_up.block_rows} outputs")
    out = QuantisedPairs.empty(pairs, width, x.codes.device)
    slots, tma = min(slots, by_expert.block_expert.shape[0]), tiles.gate_up.tma and hidden % TMA_ALIGN == 0
    _gate_up_kernel[(slots * triton.cdiv(width, SCALE_BLOCK),)](
        x=x.codes,
        x_tiles=_descriptor(x.codes, tiles.block_pairs) if tma else x.codes,
        x_scales=x.scales,
        gate_up=gate_up.codes,
        gate_up_tiles=_descriptor(gate_up.codes, SCALE_BLOCK) if tma else gate_up.codes,
        gate_up_scales=gate_up.scales,
        block_expert=by_expert.block_expert,
        block_first=by_expert.block_first,
        ends=by_expert.ends,
        num_blocks=by_expert.num_blocks,
        activation=out.codes,
        activation_scales=out.scales,
        slots=slots,
        num_pairs=pairs,
        hidden=hidden,
        width=width,
        scale_block=SCALE_BLOCK,
        block_rows=gate_up.block_rows,
        block_pairs=tiles.block_pairs,
        pairs_are_rows=tiles.pairs_are_rows,
        rounded=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
        tma=tma,
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
    slots: int,
) -> Tensor:  # [pairs, hidden], in sorted order; EMPTY pairs are undefined
    (pairs, width), hidden = activation.codes.shape, down.shape[1]
    results = torch.empty(pairs, hidden, dtype=dtype, device=down.device)
    slots, tma = min(slots, by_expert.block_expert.shape[0]), tiles.down.tma and width % TMA_ALIGN == 0
    _down_kernel[(slots * triton.cdiv(hidden, 2 * tiles.down.outputs),)](
        activation=activation.codes,
        activation_tiles=_descriptor(activation.codes, tiles.block_pairs) if tma else activation.codes,
        activation_scales=activation.scales,
        down=down.codes,
        down_tiles=_descriptor(down.codes, tiles.down.outputs) if tma else down.codes,
        down_scales=down.scales,
        block_expert=by_expert.block_expert,
        block_first=by_expert.block_first,
        ends=by_expert.ends,
        num_blocks=by_expert.num_blocks,
        results=results,
        slots=slots,
        num_pairs=pairs,
        hidden=hidden,
        width=width,
        scale_block=SCALE_BLOCK,
        block_rows=down.block_rows,
        block_pairs=tiles.block_pairs,
        pairs_are_rows=tiles.pairs_are_rows,
        tile_out=tiles.down.outputs,
        tma=tma,
        stages=tiles.down.stages,
        group_blocks=GROUP_BLOCKS,
        num_warps=tiles.down.warps,
        **OPTIONS,
    )
    return results


def _descriptor(codes: Tensor, rows: int) -> TensorDescriptor:
    """Describes tiles of `rows` vectors by SCALE_BLOCK values. Values beyond the last are read as zero."""
    return TensorDescriptor.from_tensor(codes.view(-1, codes.shape[-1]), [rows, SCALE_BLOCK])


@triton.jit(do_not_specialize=["num_pairs"])  # type: ignore[untyped-decorator]
def _quantise_pairs_kernel(
    x: tl.tensor,
    pairs: tl.tensor,
    ends: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    num_pairs: tl.tensor,
    x_stride: tl.tensor,
    k: tl.constexpr,
    experts: tl.constexpr,
    parts: tl.constexpr,
    hidden: tl.constexpr,
    scale_block: tl.constexpr,
    block_groups: tl.constexpr,
) -> None:
    wait_for_previous_launch()
    # EMPTY pairs come after the pairs of the last expert.
    for part in range(tl.program_id(0), tl.load(ends + experts - 1) * parts, tl.num_programs(0)):
        index = part // parts
        token = (tl.load(pairs + index) // k).to(tl.int64)
        group = part % parts * block_groups + tl.arange(0, block_groups)
        entry = group[:, None] * scale_block + tl.arange(0, scale_block)[None, :]
        values = tl.load(x + token * x_stride + entry, mask=entry < hidden, other=0).to(tl.float32)
        scale = group_scale(values)
        target = codes + tl.cast(index, tl.int64) * hidden + entry
        tl.store(target, group_codes(values, scale), mask=entry < hidden)
        tl.store(scales + group * num_pairs + index, scale, mask=group * scale_block < hidden)


@triton.jit  # type: ignore[untyped-decorator]
def _slot_and_tile(slots: tl.tensor, tiles: tl.constexpr, group_blocks: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Returns the first block of pairs and the tile of outputs that this program computes (see GROUP_BLOCKS)."""
    program = tl.program_id(0)
    first = program // (group_blocks * tiles) * group_blocks
    count = tl.minimum(slots - first, group_blocks)
    rest = program % (group_blocks * tiles)
    return first + rest % count, rest // count


@triton.jit(do_not_specialize=["slots", "num_pairs"])  # type: ignore[untyped-decorator]
def _gate_up_kernel(
    x: tl.tensor,
    x_tiles: tl.tensor,
    x_scales: tl.tensor,
    gate_up: tl.tensor,
    gate_up_tiles: tl.tensor,
    gate_up_scales: tl.tensor,
    block_expert: tl.tensor,
    block_first: tl.tensor,
    ends: tl.tensor,
    num_blocks: tl.tensor,
    activation: tl.tensor,
    activation_scales: tl.tensor,
    slots: tl.tensor,
    num_pairs: tl.tensor,
    hidden: tl.constexpr,
    width: tl.constexpr,
    scale_block: tl.constexpr,
    block_rows: tl.constexpr,
    block_pairs: tl.constexpr,
    pairs_are_rows: tl.constexpr,
    rounded: tl.constexpr,
    tma: tl.constexpr,
    stages: tl.constexpr,
    group_blocks: tl.constexpr,
) -> None:
    slot, tile = _slot_and_tile(slots, (width + scale_block - 1) // scale_block, group_blocks)
    for block in range(slot, tl.load(num_blocks), slots):
        expert = tl.load(block_expert + block).to(tl.int64)
        first_index, end = tl.load(block_first + block), tl.load(ends + expert)
        gate, up = two_products(
            x,
            x_tiles,
            x_scales,
            num_pairs,
            gate_up,
            gate_up_tiles,
            gate_up_scales,
            expert,
            first_index,
            end,
            tile * scale_block,
            width + tile * scale_block,
            2 * width,
            hidden,
            scale_block,
            block_rows,
            block_pairs,
            pairs_are_rows,
            scale_block,
            tma,
            stages,
        )
        value = (gate * tl.sigmoid(gate) * up).to(rounded).to(tl.float32)
        if not pairs_are_rows:
            value = tl.trans(value)
        output = tile * scale_block + tl.arange(0, scale_block)
        index = first_index + tl.arange(0, block_pairs)
        inside = index < end
        stored = inside[:, None] & (output < width)[None, :]
        value = tl.where(stored, value, 0)  # values beyond the last activation must not affect the scale
        scale = group_scale(value)
        target = activation + index.to(tl.int64)[:, None] * width + output[None, :]
        tl.store(target, group_codes(value, scale), mask=stored)
        tl.store(activation_scales + tile * num_pairs + index, scale, mask=inside)


@triton.jit(do_not_specialize=["slots", "num_pairs"])  # type: ignore[untyped-decorator]
def _down_kernel(
    activation: tl.tensor,
    activation_tiles: tl.tensor,
    activation_scales: tl.tensor,
    down: tl.tensor,
    down_tiles: tl.tensor,
    down_scales: tl.tensor,
    block_expert: tl.tensor,
    block_first: tl.tensor,
    ends: tl.tensor,
    num_blocks: tl.tensor,
    results: tl.tensor,
    slots: tl.tensor,
    num_pairs: tl.tensor,
    hidden: tl.constexpr,
    width: tl.constexpr,
    scale_block: tl.constexpr,
    block_rows: tl.constexpr,
    block_pairs: tl.constexpr,
    pairs_are_rows: tl.constexpr,
    tile_out: tl.constexpr,
    tma: tl.constexpr,
    stages: tl.constexpr,
    group_blocks: tl.constexpr,
) -> None:
    let_next_launch_start()
    slot, tile = _slot_and_tile(slots, (hidden + 2 * tile_out - 1) // (2 * tile_out), group_blocks)
    for block in range(slot, tl.load(num_blocks), slots):
        expert = tl.load(block_expert + block).to(tl.int64)
        first_index, end = tl.load(block_first + block), tl.load(ends + expert)
        first, second = two_products(
            activation,
            activation_tiles,
            activation_scales,
            num_pairs,
            down,
            down_tiles,
            down_scales,
            expert,
            first_index,
            end,
            tile * (2 * tile_out),
            tile * (2 * tile_out) + tile_out,
            hidden,
            width,
            scale_block,
            block_rows,
            block_pairs,
            pairs_are_rows,
            tile_out,
            tma,
            stages,
        )
        if not pairs_are_rows:
            first, second = tl.trans(first), tl.trans(second)
        index = first_index + tl.arange(0, block_pairs)
        inside = (index < end)[:, None]
        output = (tile * (2 * tile_out) + tl.arange(0, tile_out))[None, :]
        target = results + index.to(tl.int64)[:, None] * hidden + output
        tl.store(target, first.to(results.dtype.element_ty), mask=inside & (output < hidden))
        tl.store(target + tile_out, second.to(results.dtype.element_ty), mask=inside & (output + tile_out < hidden))
