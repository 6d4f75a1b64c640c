"""decode_rows in Triton, for rows with fp8 values, then their scales, then bfloat16 values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels.fp8 import SCALE_BLOCK
from hotset.kernels.rows import RowLayout

ROWS_PER_PROGRAM = 8
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}

_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)


def decode_rows(rows: Tensor, row_ids: Tensor, layout: RowLayout) -> Tensor:
    count, others = row_ids.shape[0], layout.width - layout.quantised
    out = torch.empty(count, layout.width, dtype=layout.dtype, device=rows.device)
    if count:
        _decode_rows_kernel[(triton.cdiv(count, ROWS_PER_PROGRAM),)](
            rows=rows,
            row_ids=row_ids,
            out=out,
            count=count,
            row_stride=rows.stride(0),
            quantised=layout.quantised,
            scales=layout.scales,
            others=others,
            block_quantised=triton.next_power_of_2(layout.quantised),
            block_others=triton.next_power_of_2(max(1, others)),
            block_rows=ROWS_PER_PROGRAM,
            **OPTIONS,
        )
    return out


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _decode_rows_kernel(
    rows: tl.tensor,
    row_ids: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    row_stride: tl.tensor,
    quantised: tl.constexpr,
    scales: tl.constexpr,
    others: tl.constexpr,
    block_quantised: tl.constexpr,
    block_others: tl.constexpr,
    block_rows: tl.constexpr,
) -> None:
    index = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    row = rows + tl.load(row_ids + index, mask=index < count, other=0) * row_stride
    target = out + index.to(tl.int64) * (quantised + others)
    entry = tl.arange(0, block_quantised)
    inside = (index < count)[:, None] & (entry < quantised)[None, :]
    codes = tl.load(row[:, None] + entry[None, :], mask=inside, other=0).to(tl.float8e4nv, bitcast=True)
    scale_at = (row + quantised).to(tl.pointer_type(tl.float32), bitcast=True)
    scale = tl.load(scale_at[:, None] + entry[None, :] // _SCALE_BLOCK, mask=inside, other=0)
    tl.store(target[:, None] + entry[None, :], (codes.to(tl.float32) * scale).to(out.dtype.element_ty), mask=inside)
    if others > 0:
        other = tl.arange(0, block_others)
        inside = (index < count)[:, None] & (other < others)[None, :]
        other_at = (row + (quantised + 4 * scales)).to(tl.pointer_type(out.dtype.element_ty), bitcast=True)
        values = tl.load(other_at[:, None] + other[None, :], mask=inside, other=0)
        tl.store(target[:, None] + quantised + other[None, :], values, mask=inside)
