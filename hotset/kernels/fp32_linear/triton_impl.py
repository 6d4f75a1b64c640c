"""fp32_linear in Triton: a program makes a few outputs of a few rows, without matrix units, which would round.

The weight is small, so it is read again for every few rows, out of the L2. All blocks of a row are under way at once:
the loop is unrolled.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS_AT_ONCE = 8
OUTPUTS_AT_ONCE = 2
VALUES_AT_ONCE = 1024
WARPS = 8
OPTIONS = {"enable_fp_fusion": True}


def fp32_linear(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    (rows, width), outputs = x.shape, weight.shape[0]
    assert x.stride(1) == 1 and weight.is_contiguous() and weight.shape[1] == width, "values must be adjacent"
    out = torch.empty(rows, outputs, dtype=torch.float32, device=x.device)
    if rows == 0:
        return out
    block_rows = min(ROWS_AT_ONCE, triton.next_power_of_2(rows))
    _product_kernel[(triton.cdiv(outputs, OUTPUTS_AT_ONCE), triton.cdiv(rows, block_rows))](
        *(x, weight, out, rows, x.stride(0), scale),
        width=width,
        outputs=outputs,
        block_rows=block_rows,
        block_outputs=OUTPUTS_AT_ONCE,
        block_values=min(VALUES_AT_ONCE, triton.next_power_of_2(width)),
        num_warps=WARPS,
        **OPTIONS,
    )
    return out


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _product_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    scale: tl.tensor,
    width: tl.constexpr,
    outputs: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_values: tl.constexpr,
) -> None:
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    row = tl.program_id(1).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    total = tl.zeros([block_rows, block_outputs, block_values], tl.float32)
    for start in tl.static_range(0, width, block_values):
        value = start + tl.arange(0, block_values)
        x_there = (row < rows)[:, None] & (value < width)[None, :]
        weight_there = (output < outputs)[:, None] & (value < width)[None, :]
        x_part = tl.load(x + row[:, None] * x_stride + value[None, :], mask=x_there, other=0).to(tl.float32)
        weight_part = tl.load(weight + output[:, None] * width + value[None, :], mask=weight_there, other=0)
        total += x_part[:, None, :] * weight_part[None, :, :]
    there = (row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(out + row[:, None] * outputs + output[None, :], tl.sum(total, 2) * scale, mask=there)
