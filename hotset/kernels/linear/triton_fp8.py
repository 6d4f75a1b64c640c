"""fp8_linear in Triton for few tokens, and by torch's library for many.

The kernel computes weight @ x^T: the weight is the tall operand of the matrix instructions, so 8 tokens suffice for
them. A program computes a tile of outputs for a block of tokens, one group of SCALE_BLOCK inputs after the other. The
products of a group are summed by the matrix units. Then the sum is multiplied by both scales and added in float32.

Reading the codes of the weight takes most of the time. If there are too few tiles to keep the whole GPU reading,
several programs divide the groups of one tile (`splits`). Each stores its sums in memory, and the program that finishes
last adds them in the order of the groups. It knows that it is the last because all programs of a tile count in
`counters`, and it sets the count back to zero for the next call.

A token gets the same bits in all batches that use the same `Tile`, because neither the order of its sums nor `splits`
depends on the other tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from hotset.base.errors import InternalError
from hotset.base.units import ceil_div
from hotset.kernels.early_launch.triton_launch import EARLY_LAUNCH, let_next_launch_start, wait_for_previous_launch
from hotset.kernels.fp8 import SCALE_BLOCK, Fp8Weight
from hotset.kernels.quantise import QuantisedTokens, quantise
from hotset.kernels.quantise.triton_impl import group_codes, group_scale

READ_AHEAD_GROUPS = 4  # groups that a program reads into the L2 while it waits for the previous kernel

_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)
_READ_AHEAD_GROUPS = tl.constexpr(READ_AHEAD_GROUPS)


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one program: `outputs` outputs of `tokens` tokens. `stages` groups are being read at a time."""

    tokens: int
    outputs: int
    warps: int
    stages: int
    max_programs: int  # the groups of a tile are divided among more programs as long as a launch has at most this many
    fused: bool  # every program quantises the activations itself; otherwise, a launch before it does
    # The kernel starts before the previous one has ended, and reads its first codes into the L2 meanwhile.
    starts_early: bool = False


# The key of an entry is the largest number of tokens for which the entry is used. Weights with enough tiles of
# WIDE_OUTPUTS outputs for a whole GPU use WIDE_TILES, because a wider tile reads the activations less often; others
# need tiles of fewer outputs. Chosen by trying other tiles on an H200.
WIDE_TILES = {
    8: Tile(8, 128, 4, 4, max_programs=264, fused=True),
    16: Tile(16, 128, 4, 4, max_programs=264, fused=True),
    32: Tile(32, 64, 4, 5, max_programs=264, fused=False),
    64: Tile(64, 128, 4, 4, max_programs=132, fused=False),
    1 << 62: Tile(128, 64, 4, 4, max_programs=0, fused=False),
}
NARROW_TILES = {
    8: Tile(8, 64, 4, 5, max_programs=264, fused=False, starts_early=True),
    16: Tile(16, 64, 4, 5, max_programs=264, fused=False, starts_early=True),
    32: Tile(32, 64, 4, 5, max_programs=264, fused=False),
    64: Tile(64, 64, 4, 5, max_programs=132, fused=False),
    128: Tile(128, 64, 4, 4, max_programs=132, fused=False),
    1 << 62: Tile(128, 64, 4, 4, max_programs=0, fused=False),
}
WIDE_OUTPUTS, MIN_WIDE_PROGRAMS, MIN_WIDE_GROUPS, MAX_WIDE_SPLITS = 128, 192, 7, 8
MIN_TILE_OUTPUTS = 64
# Each split reads at least MIN_GROUPS groups, or MIN_GROUPS_IF_ENOUGH groups if there are already ENOUGH_PROGRAMS to
# keep the GPU busy: adding up more splits would then take longer than it saves.
ENOUGH_PROGRAMS, MIN_GROUPS, MIN_GROUPS_IF_ENOUGH = 100, 4, 12
# More tokens than these use torch's library if it supports the weight.
MAX_WIDE_TOKENS, MAX_NARROW_TOKENS = 64, 128
LIBRARY_CAPABILITY = (9, 0)  # torch's library multiplies blocks of these sizes on Hopper only
GROUP_ALIGN = 4  # torch's library requires a multiple of this many groups in the scales of a weight
OPTIONS = {"enable_fp_fusion": True}  # Triton 3.9 warns if this is not set


def make_counters(weight: Fp8Weight) -> Tensor:
    """Returns the counters that calls with this weight need. Calls that share them must not run at the same time."""
    return torch.zeros(ceil_div(weight.shape[0], MIN_TILE_OUTPUTS), dtype=torch.int32, device=weight.device)


def linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None, counters: Tensor) -> Tensor:
    tokens = x.shape[0]
    most = MAX_WIDE_TOKENS if is_wide(weight) else MAX_NARROW_TOKENS
    if tokens > most and library_supports(x.dtype, weight, bias):
        return fp8_linear_by_library(x, weight)
    return fp8_linear_in_tiles(x, weight, bias, counters, tile_for(tokens, weight))


def is_wide(weight: Fp8Weight) -> bool:
    """Returns whether tiles of WIDE_OUTPUTS outputs keep a whole GPU reading, if each is divided into a few splits."""
    outputs, inputs = weight.shape
    splits = max(1, min(MAX_WIDE_SPLITS, ceil_div(inputs, SCALE_BLOCK) // MIN_WIDE_GROUPS))
    return ceil_div(outputs, WIDE_OUTPUTS) * splits >= MIN_WIDE_PROGRAMS


def tile_for(tokens: int, weight: Fp8Weight) -> Tile:
    tiles = WIDE_TILES if is_wide(weight) else NARROW_TILES
    return next(tile for most, tile in tiles.items() if tokens <= most)


def library_supports(dtype: torch.dtype, weight: Fp8Weight, bias: Tensor | None) -> bool:
    if weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) != LIBRARY_CAPABILITY:
        return False
    outputs, inputs = weight.shape
    whole = inputs % SCALE_BLOCK == 0 and outputs % 16 == 0 and weight.block_rows == SCALE_BLOCK
    return dtype == torch.bfloat16 and bias is None and whole


def fp8_linear_by_library(x: Tensor, weight: Fp8Weight) -> Tensor:
    out: Tensor = F.scaled_mm(**library_arguments(quantise(x), weight), output_dtype=x.dtype)
    return out[: x.shape[0]]


def library_arguments(x: QuantisedTokens, weight: Fp8Weight) -> dict[str, Any]:
    """Returns the operands of `F.scaled_mm`.

    In the scales of the weight, the number of groups is padded to a multiple of GROUP_ALIGN. cuBLAS assumes this, and
    would return wrong results without it (pytorch/pytorch#166752).
    """
    weight_scales = weight.scales
    if padding := -weight_scales.shape[1] % GROUP_ALIGN:
        weight_scales = F.pad(weight_scales, (0, padding))
    return {
        "mat_a": x.codes,
        "mat_b": weight.codes.t(),
        "scale_a": x.scales,  # strides (1, padded tokens)
        "scale_recipe_a": F.ScalingType.BlockWise1x128,
        "scale_b": weight_scales.t(),  # strides (1, groups)
        "scale_recipe_b": F.ScalingType.BlockWise128x128,
    }


def splits_for(outputs: int, inputs: int, tile: Tile) -> int:
    """Returns how many programs divide the groups of one tile: a power of two, so that few kernels are compiled."""
    groups, blocks = ceil_div(inputs, SCALE_BLOCK), ceil_div(outputs, tile.outputs)
    splits = 1
    while 2 * splits * blocks <= tile.max_programs:
        if groups < 2 * splits * (MIN_GROUPS if splits * blocks < ENOUGH_PROGRAMS else MIN_GROUPS_IF_ENOUGH):
            break
        splits *= 2
    return splits


def fp8_linear_in_tiles(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    counters: Tensor,
    tile: Tile,
    splits: int | None = None,  # None: as `splits_for` says
) -> Tensor:
    tokens, (outputs, inputs) = x.shape[0], weight.shape
    if x.shape[1] != inputs:
        raise InternalError(f"{x.shape[1]} values per token for a weight with {inputs} inputs")
    if not (weight.codes.is_contiguous() and weight.scales.is_contiguous()):
        raise InternalError("the weight must be contiguous")
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    splits = splits or splits_for(outputs, inputs, tile)
    if tile.fused:
        codes = scales = x if x.stride(1) == 1 else x.contiguous()  # the kernel does not read the scales
    else:
        of_x = quantise(x)
        codes, scales = of_x.codes, of_x.scales
    grid = (ceil_div(outputs, tile.outputs), splits, ceil_div(tokens, tile.tokens))
    if not (splits == 1 or grid[2] == 1):
        raise InternalError(f"{grid[2]} blocks of tokens cannot share the counters of {grid[0]} tiles")
    partial_count = grid[0] * splits * tile.outputs * tile.tokens if splits > 1 else 1
    partial = torch.empty(partial_count, dtype=torch.float32, device=x.device)
    early = EARLY_LAUNCH if tile.starts_early else {}
    _linear_kernel[grid](
        x=codes,
        x_scales=scales,
        weight=weight.codes,
        weight_scales=weight.scales,
        bias=out if bias is None else bias,
        out=out,
        partial=partial,
        counters=counters,
        tokens=tokens,
        inputs=inputs,
        outputs=outputs,
        groups=weight.scales.shape[1],
        split_groups=ceil_div(weight.scales.shape[1], splits),
        x_stride=codes.stride(0),
        x_scale_stride=scales.stride(1),
        block_rows=weight.block_rows,
        whole_groups=inputs % SCALE_BLOCK == 0,
        with_bias=bias is not None,
        splits=splits,
        fused=tile.fused,
        starts_early=bool(early),
        tile_tokens=tile.tokens,
        tile_outputs=tile.outputs,
        stages=tile.stages,
        num_warps=tile.warps,
        **early,
        **OPTIONS,
    )
    return out


@triton.jit(do_not_specialize=["tokens", "groups", "split_groups", "x_scale_stride"])  # type: ignore[untyped-decorator]
def _linear_kernel(
    x: tl.tensor,  # values if fused, else codes
    x_scales: tl.tensor,  # not if fused
    weight: tl.tensor,
    weight_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,  # [tiles, splits, tile outputs, tile tokens]
    counters: tl.tensor,
    tokens: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    groups: tl.tensor,
    split_groups: tl.tensor,
    x_stride: tl.tensor,
    x_scale_stride: tl.tensor,
    block_rows: tl.constexpr,
    whole_groups: tl.constexpr,
    with_bias: tl.constexpr,
    splits: tl.constexpr,
    fused: tl.constexpr,
    starts_early: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_outputs: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    first_output = tl.program_id(0) * tile_outputs
    output = first_output + tl.arange(0, tile_outputs)
    first_token = tl.program_id(2) * tile_tokens
    token = first_token + tl.arange(0, tile_tokens)
    # Entries of the tile beyond the last output or token read the last one, so that the loads need no mask. They are
    # not stored.
    read_output = tl.minimum(output, outputs - 1)
    read_token = tl.minimum(token, tokens - 1)
    entry = tl.arange(0, _SCALE_BLOCK)
    x_at = x + read_token.to(tl.int64)[:, None] * x_stride + entry[None, :]
    weight_at = weight + read_output.to(tl.int64)[:, None] * inputs + entry[None, :]
    one_scale: tl.constexpr = block_rows % tile_outputs == 0  # all outputs of the tile have the same scale
    scale_at = weight_scales + (first_output if one_scale else read_output) // block_rows * groups
    total = tl.zeros([tile_outputs, tile_tokens], tl.float32)
    first_group = tl.program_id(1) * split_groups
    if starts_early:
        read_ahead = tl.minimum(first_group + tl.arange(0, _READ_AHEAD_GROUPS), groups - 1) * _SCALE_BLOCK
        _read_into_l2(weight + read_output.to(tl.int64)[:, None] * inputs + read_ahead[None, :])
        wait_for_previous_launch()
    else:
        let_next_launch_start()
    for group in tl.range(first_group, tl.minimum(first_group + split_groups, groups), num_stages=stages):
        start = group * _SCALE_BLOCK
        if whole_groups:
            weight_tile, x_tile = tl.load(weight_at + start), tl.load(x_at + start)
        else:
            inside = (start + entry < inputs)[None, :]
            weight_tile = tl.load(weight_at + start, mask=inside, other=0.0)
            x_tile = tl.load(x_at + start, mask=inside, other=0.0)
        if fused:
            values = x_tile.to(tl.float32)
            scale = group_scale(values)
            x_tile = group_codes(values, scale)
        else:
            scale = tl.load(x_scales + group * x_scale_stride + read_token)
        product = tl.dot(weight_tile, tl.trans(x_tile))
        weight_scale = tl.load(scale_at + group)
        if one_scale:
            total += product * (scale * weight_scale)[None, :]
        else:
            total += product * (scale[None, :] * weight_scale[:, None])

    if splits > 1:
        tile = tl.program_id(0)
        sums = tl.arange(0, tile_outputs)[:, None] * tile_tokens + tl.arange(0, tile_tokens)[None, :]
        size: tl.constexpr = tile_outputs * tile_tokens
        partial_at = partial + tile.to(tl.int64) * splits * size + sums
        tl.store(partial_at + tl.program_id(1) * size, total)
        tl.debug_barrier()  # every thread has stored before one of them counts
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") < splits - 1:
            return
        total = tl.zeros([tile_outputs, tile_tokens], tl.float32)
        for split in tl.static_range(splits):
            total += tl.load(partial_at + split * size, cache_modifier=".cg")  # from the L2: others have written it
        tl.store(counters + tile, 0)
    if with_bias:
        total += tl.load(bias + read_output).to(tl.float32)[:, None]
    stored = (token < tokens)[None, :] & (output < outputs)[:, None]
    target = out + token.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=stored)


@triton.jit  # type: ignore[untyped-decorator]
def _read_into_l2(lines: tl.tensor) -> None:
    """Starts to read lines of 128 bytes from memory into the L2, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )
