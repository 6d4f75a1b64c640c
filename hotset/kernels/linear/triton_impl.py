"""fp32_linear in Triton. A program computes a few outputs of a few tokens.

It does not use the matrix units, because they would round the factors. The weight is small, so every block of tokens
reads it again from the L2 cache. The loop over blocks of values is unrolled, so that all loads of a program are in
flight at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS_PER_PROGRAM = 8
OUTPUTS_PER_PROGRAM = 2
VALUES_PER_BLOCK = 1024
WARPS = 8
OPTIONS = {"enable_fp_fusion": True}


def fp32_linear(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    (tokens, width), outputs = x.shape, weight.shape[0]
    assert x.stride(1) == 1 and weight.is_contiguous() and weight.shape[1] == width, "values must be adjacent"
    out = torch.empty(tokens, outputs, dtype=torch.float32, device=x.device)
    if tokens == 0:
        return out
    block_tokens = min(TOKENS_PER_PROGRAM, triton.next_power_of_2(tokens))
    _fp32_linear_kernel[(triton.cdiv(outputs, OUTPUTS_PER_PROGRAM), triton.cdiv(tokens, block_tokens))](
        x=x,
        weight=weight,
        out=out,
        tokens=tokens,
        x_stride=x.stride(0),
        scale=scale,
        width=width,
        outputs=outputs,
        block_tokens=block_tokens,
        block_outputs=OUTPUTS_PER_PROGRAM,
        block_values=min(VALUES_PER_BLOCK, triton.next_power_of_2(width)),
        num_warps=WARPS,
        **OPTIONS,
    )
    return out


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _fp32_linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    x_stride: tl.tensor,
    scale: tl.tensor,
    width: tl.constexpr,
    outputs: tl.constexpr,
    block_tokens: tl.constexpr,
    block_outputs: tl.constexpr,
    block_values: tl.constexpr,
) -> None:
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    token = tl.program_id(1).to(tl.int64) * block_tokens + tl.arange(0, block_tokens)
    total = tl.zeros([block_tokens, block_outputs, block_values], tl.float32)
    for start in tl.static_range(0, width, block_values):
        value = start + tl.arange(0, block_values)
        x_inside = (token < tokens)[:, None] & (value < width)[None, :]
        weight_inside = (output < outputs)[:, None] & (value < width)[None, :]
        x_block = tl.load(x + token[:, None] * x_stride + value[None, :], mask=x_inside, other=0).to(tl.float32)
        weight_block = tl.load(weight + output[:, None] * width + value[None, :], mask=weight_inside, other=0)
        total += x_block[:, None, :] * weight_block[None, :, :]
    inside = (token < tokens)[:, None] & (output < outputs)[None, :]
    tl.store(out + token[:, None] * outputs + output[None, :], tl.sum(total, 2) * scale, mask=inside)
