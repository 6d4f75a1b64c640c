"""page_table_lookup in Triton, with one program per token and block of positions."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.early_launch.triton_launch import EARLY_LAUNCH, wait_for_previous_launch

BLOCK = 512
# There are no floats here, but Triton 3.9 warns if the first option is not set.
OPTIONS = {"enable_fp_fusion": False} | EARLY_LAUNCH

_EMPTY = tl.constexpr(EMPTY)


def page_table_lookup(positions: Tensor, seat_of: Tensor, table: Tensor, page_rows: int) -> Tensor:
    tokens, n = positions.shape
    rows = torch.empty(tokens, n, dtype=torch.int64, device=positions.device)
    block = min(BLOCK, triton.next_power_of_2(n))
    _page_table_lookup_kernel[(tokens, triton.cdiv(n, block))](
        positions=positions,
        seat_of=seat_of,
        table=table,
        rows=rows,
        token_stride=positions.stride(0),
        position_stride=positions.stride(1),
        table_stride=table.stride(0),
        n=n,
        page_rows=page_rows,
        block=block,
        num_warps=4,
        **OPTIONS,
    )
    return rows


@triton.jit  # type: ignore[untyped-decorator]
def _page_table_lookup_kernel(
    positions: tl.tensor,
    seat_of: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    token_stride: tl.tensor,
    position_stride: tl.tensor,
    table_stride: tl.tensor,
    n: tl.tensor,
    page_rows: tl.constexpr,
    block: tl.constexpr,
) -> None:
    wait_for_previous_launch()
    token = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * block + tl.arange(0, block)
    seat = tl.load(seat_of + token)
    readable = index < tl.where(seat == _EMPTY, 0, n)
    position = tl.load(positions + token * token_stride + index * position_stride, mask=readable, other=_EMPTY)
    exists = position != _EMPTY
    page = tl.load(table + seat * table_stride + position // page_rows, mask=exists, other=0)
    row = tl.where(exists, page * page_rows + position % page_rows, _EMPTY)
    tl.store(rows + token * n + index, row, mask=index < n)
