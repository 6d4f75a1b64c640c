"""Products of a few tokens with bfloat16 weights in Triton, at the speed at which the weights are read.

A program computes a few outputs. It loads all of their weights at once, so that many reads are in flight, keeps them in
registers and multiplies them with one token after the other. No program needs the sums of another. (For one token,
cuBLAS divides the inputs of most products between blocks and adds their sums in a second launch.)

A token gets the same bits in every batch that this kernel computes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.base.units import ceil_div
from hotset.kernels.early_launch.triton_launch import EARLY_LAUNCH, wait_for_previous_launch

TILE_OUTPUTS = 4  # of a program
INPUTS_OF_WARP = 1024
TILE_WEIGHTS = 8192  # of a program of `per_head_matmul_into`
OPTIONS = {"enable_fp_fusion": True} | EARLY_LAUNCH


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    tile_inputs = triton.next_power_of_2(inputs)
    _few_tokens_kernel[(ceil_div(outputs, TILE_OUTPUTS),)](
        x=x,
        weight=weight,
        bias=weight if bias is None else bias,
        out=out,
        tokens=tokens,
        x_stride=x.stride(0),
        outputs=outputs,
        inputs=inputs,
        has_bias=bias is not None,
        tile_outputs=TILE_OUTPUTS,
        tile_inputs=tile_inputs,
        num_warps=max(1, tile_inputs // INPUTS_OF_WARP),
        **OPTIONS,
    )
    return out


def per_head_matmul_into(out: Tensor, x: Tensor, weight: Tensor) -> None:
    heads, inputs, outputs = weight.shape
    tile_inputs = triton.next_power_of_2(inputs)
    tile_outputs = min(triton.next_power_of_2(outputs), max(1, TILE_WEIGHTS // tile_inputs))
    _few_tokens_per_head_kernel[(ceil_div(outputs, tile_outputs), heads)](
        x=x,
        weight=weight,
        out=out,
        tokens=x.shape[0],
        x_token_stride=x.stride(0),
        x_head_stride=x.stride(1),
        weight_head_stride=weight.stride(0),
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        inputs=inputs,
        outputs=outputs,
        input_stride=weight.stride(1),
        output_stride=weight.stride(2),
        tile_outputs=tile_outputs,
        tile_inputs=tile_inputs,
        num_warps=4,
        **OPTIONS,
    )


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _few_tokens_kernel(
    x: tl.tensor,  # [tokens, inputs]
    weight: tl.tensor,  # [outputs, inputs]
    bias: tl.tensor,  # [outputs]; unused without has_bias
    out: tl.tensor,  # [tokens, outputs]
    tokens: tl.tensor,
    x_stride: tl.tensor,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    has_bias: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
) -> None:
    output, entry = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs), tl.arange(0, tile_inputs)
    inside = (output < outputs)[:, None] & (entry < inputs)[None, :]
    weight_at = weight + output.to(tl.int64)[:, None] * inputs + entry[None, :]
    weights = tl.load(weight_at, mask=inside, other=0)
    added = tl.zeros([tile_outputs], tl.float32)
    if has_bias:
        added = tl.load(bias + output, mask=output < outputs, other=0).to(tl.float32)
    wait_for_previous_launch()
    for token in tl.range(tokens):
        values = tl.load(x + token * x_stride + entry, mask=entry < inputs, other=0)
        total = tl.sum(weights.to(tl.float32) * values.to(tl.float32)[None, :], 1) + added
        tl.store(out + token * outputs + output, total.to(tl.bfloat16), mask=output < outputs)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _few_tokens_per_head_kernel(
    x: tl.tensor,  # [tokens, heads, inputs]
    weight: tl.tensor,  # [heads, inputs, outputs], of which inputs or outputs are adjacent
    out: tl.tensor,  # [tokens, heads, outputs]
    tokens: tl.tensor,
    x_token_stride: tl.tensor,
    x_head_stride: tl.tensor,
    weight_head_stride: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    input_stride: tl.constexpr,
    output_stride: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
) -> None:
    output, entry = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs), tl.arange(0, tile_inputs)
    head = tl.program_id(1)
    inside = (output < outputs)[:, None] & (entry < inputs)[None, :]
    weight_at = head.to(tl.int64) * weight_head_stride + output[:, None] * output_stride + entry[None, :] * input_stride
    weights = tl.load(weight + weight_at, mask=inside, other=0)
    wait_for_previous_launch()
    for token in tl.range(tokens):
        values = tl.load(x + token * x_token_stride + head * x_head_stride + entry, mask=entry < inputs, other=0)
        total = tl.sum(weights.to(tl.float32) * values.to(tl.float32)[None, :], 1)
        out_at = token * out_token_stride + head * out_head_stride + output
        tl.store(out + out_at, total.to(tl.bfloat16), mask=output < outputs)
