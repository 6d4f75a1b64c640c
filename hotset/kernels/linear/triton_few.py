"""Products of a few tokens in Triton, at the speed at which the weights are read.

The weights are in bfloat16. The same launch can normalise the tokens, or also multiply them with float32 weights.

A program computes a few outputs. It loads all of their weights at once, so that many reads are in flight, keeps them in
registers and multiplies them with one token after the other. No program needs the sums of another. (For one token,
cuBLAS divides the inputs of most products between blocks and adds their sums in a second launch.)

A token gets the same bits in every batch of one of these kernels, but other bits than in those of larger batches.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.base.units import ceil_div
from hotset.kernels.early_launch.triton_launch import EARLY_LAUNCH, wait_for_previous_launch
from hotset.kernels.norm.triton_impl import rms_normed

MAX_TILE_OUTPUTS, FP32_TILE_OUTPUTS = 4, 2  # of a program
LINEAR_TILE_WEIGHTS = 16384  # with more than 4096 inputs, a program computes fewer outputs
INPUTS_OF_WARP = 1024
TILE_WEIGHTS = 8192  # of a program of `per_head_matmul_into`
OPTIONS = {"enable_fp_fusion": True} | EARLY_LAUNCH


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _linear(x, weight, bias, weight, 0.0, has_norm=False)


def linear_of_normed(x: Tensor, gain: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies the RMS norm of x, which every program computes for itself."""
    if not (gain.shape == x.shape[1:] and gain.dtype == x.dtype and gain.is_contiguous()):
        raise InternalError(f"the gain of the norm is {_described(gain)} for inputs {_described(x)}")
    return _linear(x, weight, bias, gain, eps, has_norm=True)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor, eps: float, *, has_norm: bool) -> Tensor:
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    tile_outputs = _tile_outputs(inputs)
    _few_tokens_kernel[(ceil_div(outputs, tile_outputs),)](
        x=x,
        weight=weight,
        bias=weight if bias is None else bias,
        gain=gain,
        out=out,
        tokens=tokens,
        x_stride=x.stride(0),
        eps=eps,
        outputs=outputs,
        has_bias=bias is not None,
        has_norm=has_norm,
        tile_outputs=tile_outputs,
        **_input_options(inputs),
    )
    return out


def linear_and_fp32(
    x: Tensor, weight: Tensor, bias: Tensor | None, fp32_weight: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Multiplies x with two weights in one launch. The second result is that of `fp32_linear`, up to rounding."""
    if not (fp32_weight.shape[1:] == x.shape[1:] and fp32_weight.is_contiguous()):
        raise InternalError(f"the float32 weight is {_described(fp32_weight)} for inputs {_described(x)}")
    (tokens, inputs), outputs, fp32_outputs = x.shape, weight.shape[0], fp32_weight.shape[0]
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    fp32_out = torch.empty(tokens, fp32_outputs, dtype=torch.float32, device=x.device)
    if tokens == 0:
        return out, fp32_out
    fp32_tiles, tile_outputs = ceil_div(fp32_outputs, FP32_TILE_OUTPUTS), _tile_outputs(inputs)
    _few_tokens_and_fp32_kernel[(fp32_tiles + ceil_div(outputs, tile_outputs),)](
        x=x,
        weight=weight,
        bias=weight if bias is None else bias,
        out=out,
        fp32_weight=fp32_weight,
        fp32_out=fp32_out,
        tokens=tokens,
        x_stride=x.stride(0),
        scale=scale,
        fp32_tiles=fp32_tiles,
        outputs=outputs,
        fp32_outputs=fp32_outputs,
        has_bias=bias is not None,
        tile_outputs=tile_outputs,
        fp32_tile_outputs=FP32_TILE_OUTPUTS,
        **_input_options(inputs),
    )
    return out, fp32_out


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()}"


def _tile_outputs(inputs: int) -> int:
    tile_inputs: int = triton.next_power_of_2(inputs)
    return max(1, min(MAX_TILE_OUTPUTS, LINEAR_TILE_WEIGHTS // tile_inputs))


def _input_options(inputs: int) -> dict[str, Any]:
    tile_inputs = triton.next_power_of_2(inputs)
    warps = max(1, tile_inputs // INPUTS_OF_WARP)
    return {"inputs": inputs, "tile_inputs": tile_inputs, "num_warps": warps} | OPTIONS


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
    gain: tl.tensor,  # [inputs]; unused without has_norm
    out: tl.tensor,  # [tokens, outputs]
    tokens: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    has_bias: tl.constexpr,
    has_norm: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
) -> None:
    entry = tl.arange(0, tile_inputs)
    weights, added, output = _load_tile(weight, bias, tl.program_id(0), entry, outputs, inputs, has_bias, tile_outputs)
    if has_norm:
        gains = tl.load(gain + entry, mask=entry < inputs, other=0)
    wait_for_previous_launch()
    for token in tl.range(tokens):
        values = tl.load(x + token * x_stride + entry, mask=entry < inputs, other=0).to(tl.float32)
        if has_norm:
            values = rms_normed(values, tl.sum(values * values, 0), gains, eps, inputs).to(tl.float32)
        total = tl.sum(weights.to(tl.float32) * values[None, :], 1) + added
        tl.store(out + token * outputs + output, total.to(tl.bfloat16), mask=output < outputs)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _few_tokens_and_fp32_kernel(
    x: tl.tensor,  # [tokens, inputs]
    weight: tl.tensor,  # [outputs, inputs]
    bias: tl.tensor,  # [outputs]; unused without has_bias
    out: tl.tensor,  # [tokens, outputs]
    fp32_weight: tl.tensor,  # [fp32 outputs, inputs]
    fp32_out: tl.tensor,  # [tokens, fp32 outputs]
    tokens: tl.tensor,
    x_stride: tl.tensor,
    scale: tl.tensor,
    fp32_tiles: tl.constexpr,
    outputs: tl.constexpr,
    fp32_outputs: tl.constexpr,
    inputs: tl.constexpr,
    has_bias: tl.constexpr,
    tile_outputs: tl.constexpr,
    fp32_tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
) -> None:
    """The tiles of the second product come first, so that none of them is left over when the others have ended."""
    entry = tl.arange(0, tile_inputs)
    if tl.program_id(0) >= fp32_tiles:
        weights, added, output = _load_tile(
            weight, bias, tl.program_id(0) - fp32_tiles, entry, outputs, inputs, has_bias, tile_outputs
        )
        wait_for_previous_launch()
        for token in tl.range(tokens):
            values = tl.load(x + token * x_stride + entry, mask=entry < inputs, other=0).to(tl.float32)
            total = tl.sum(weights.to(tl.float32) * values[None, :], 1) + added
            tl.store(out + token * outputs + output, total.to(tl.bfloat16), mask=output < outputs)
    else:
        fp32_weights, _, fp32_output = _load_tile(
            fp32_weight, bias, tl.program_id(0), entry, fp32_outputs, inputs, False, fp32_tile_outputs
        )
        wait_for_previous_launch()
        for token in tl.range(tokens):
            fp32_values = tl.load(x + token * x_stride + entry, mask=entry < inputs, other=0).to(tl.float32)
            fp32_total = tl.sum(fp32_weights * fp32_values[None, :], 1) * scale
            fp32_inside = fp32_output < fp32_outputs
            tl.store(fp32_out + token * fp32_outputs + fp32_output, fp32_total, mask=fp32_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _load_tile(
    weight: tl.tensor,
    bias: tl.tensor,
    tile: tl.tensor,
    entry: tl.tensor,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    has_bias: tl.constexpr,
    tile_outputs: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns the weights of a tile of outputs, their bias, and which outputs they are."""
    output = tile * tile_outputs + tl.arange(0, tile_outputs)
    inside = (output < outputs)[:, None] & (entry < inputs)[None, :]
    weights = tl.load(weight + output.to(tl.int64)[:, None] * inputs + entry[None, :], mask=inside, other=0)
    added = tl.zeros([tile_outputs], tl.float32)
    if has_bias:
        added = tl.load(bias + output, mask=output < outputs, other=0).to(tl.float32)
    return weights, added, output


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
