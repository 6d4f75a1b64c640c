"""fp32_linear in Triton. A program multiplies some inputs of a few tokens by the weights of a few outputs.

It does not use the matrix units, because they would round the factors. There are few outputs, so the inputs are divided
too (into splits), to keep the whole GPU reading. Each program stores its sums, and the last program of a tile to finish
adds them in the order of the splits. As in `triton_fp8.py`, the programs of a tile count in `counters`.

All programs have the same shape, and the number of splits depends only on the number of inputs. So a token gets the
same bits in every batch. The weight is small, so every block of tokens reads it again from the L2 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.base.units import ceil_div
from hotset.kernels.early_launch.triton_launch import EARLY_LAUNCH, wait_for_previous_launch

TILE_TOKENS, TILE_OUTPUTS, TILE_INPUTS = 8, 4, 1024  # of a program; a split has TILE_INPUTS inputs
MIN_TILE_INPUTS = 32
WARPS = 4
OPTIONS = {"enable_fp_fusion": True} | EARLY_LAUNCH


def make_counters(weight: Tensor, max_tokens: int) -> Tensor:
    """Returns the counters that calls with this weight need. Calls that share them must not run at the same time."""
    tiles = ceil_div(weight.shape[0], TILE_OUTPUTS) * ceil_div(max_tokens, TILE_TOKENS)
    return torch.zeros(tiles, dtype=torch.int32, device=weight.device)


def fp32_linear(x: Tensor, weight: Tensor, scale: float, counters: Tensor) -> Tensor:
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    if not (x.stride(1) == 1 and weight.is_contiguous() and weight.shape[1] == inputs):
        raise InternalError("values must be adjacent")
    out = torch.empty(tokens, outputs, dtype=torch.float32, device=x.device)
    if tokens == 0:
        return out
    tile_inputs = min(TILE_INPUTS, max(MIN_TILE_INPUTS, triton.next_power_of_2(inputs)))
    splits = ceil_div(inputs, tile_inputs)
    grid = (ceil_div(outputs, TILE_OUTPUTS), splits, ceil_div(tokens, TILE_TOKENS))
    if grid[0] * grid[2] > counters.numel():
        raise InternalError(f"{counters.numel()} counters for {grid[0]} x {grid[2]} tiles")
    partial_count = grid[0] * grid[2] * splits * TILE_OUTPUTS * TILE_TOKENS if splits > 1 else 1
    _fp32_linear_kernel[grid](
        x=x,
        weight=weight,
        out=out,
        partial=torch.empty(partial_count, dtype=torch.float32, device=x.device),
        counters=counters,
        tokens=tokens,
        x_stride=x.stride(0),
        scale=scale,
        inputs=inputs,
        outputs=outputs,
        splits=splits,
        tile_tokens=TILE_TOKENS,
        tile_outputs=TILE_OUTPUTS,
        tile_inputs=tile_inputs,
        num_warps=WARPS,
        **OPTIONS,
    )
    return out


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _fp32_linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,  # [tiles, splits, tile tokens, tile outputs]
    counters: tl.tensor,
    tokens: tl.tensor,
    x_stride: tl.tensor,
    scale: tl.tensor,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    splits: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
) -> None:
    output = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    first = tl.program_id(1) * tile_inputs
    token = tl.program_id(2) * tile_tokens + tl.arange(0, tile_tokens)
    entry = first + tl.arange(0, tile_inputs)[None, None, :]
    x_inside = (token < tokens)[:, None, None] & (entry < inputs)
    weight_inside = (output < outputs)[None, :, None] & (entry < inputs)
    weight_tile = tl.load(weight + output[None, :, None] * inputs + entry, mask=weight_inside, other=0)
    wait_for_previous_launch()
    x_tile = tl.load(x + token.to(tl.int64)[:, None, None] * x_stride + entry, mask=x_inside, other=0)
    total = tl.sum(x_tile.to(tl.float32) * weight_tile, 2)
    if splits > 1:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        cell = tl.arange(0, tile_tokens)[:, None] * tile_outputs + tl.arange(0, tile_outputs)[None, :]
        size: tl.constexpr = tile_tokens * tile_outputs
        partial_at = partial + tile * (splits * size) + cell
        tl.store(partial_at + tl.program_id(1) * size, total)
        tl.debug_barrier()  # every thread has stored before one of them counts
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") < splits - 1:
            return
        total = tl.zeros([tile_tokens, tile_outputs], tl.float32)
        for split in tl.static_range(splits):
            total += tl.load(partial_at + split * size, cache_modifier=".cg")  # from the L2: others have written it
        tl.store(counters + tile, 0)
    inside = (token < tokens)[:, None] & (output < outputs)[None, :]
    tl.store(out + token.to(tl.int64)[:, None] * outputs + output[None, :], total * scale, mask=inside)
