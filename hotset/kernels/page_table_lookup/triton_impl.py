"""page_table_lookup in Triton: one program for a block of one query row's positions."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels import EMPTY

BLOCK = 512
OPTIONS = {"enable_fp_fusion": False}  # nothing here is a float; Triton 3.9 warns where this is left open

_EMPTY = tl.constexpr(EMPTY)


def page_table_lookup(positions: Tensor, seat_of: Tensor, table: Tensor, page_rows: int) -> Tensor:
    rows, n = positions.shape
    found = torch.empty(rows, n, dtype=torch.int64, device=positions.device)
    block = min(BLOCK, triton.next_power_of_2(n))
    _page_table_lookup_kernel[(rows, triton.cdiv(n, block))](
        *(positions, seat_of, table, found, positions.stride(0), positions.stride(1), table.stride(0), n),
        page_rows=page_rows,
        block=block,
        num_warps=4,
        **OPTIONS,
    )
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _page_table_lookup_kernel(
    positions: tl.tensor,
    seat_of: tl.tensor,
    table: tl.tensor,
    found: tl.tensor,
    positions_stride: tl.tensor,
    position_stride: tl.tensor,
    table_stride: tl.tensor,
    n: tl.tensor,
    page_rows: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * block + tl.arange(0, block)
    seat = tl.load(seat_of + row)
    known = index < tl.where(seat == _EMPTY, 0, n)
    position = tl.load(positions + row * positions_stride + index * position_stride, mask=known, other=_EMPTY)
    there = position != _EMPTY
    page = tl.load(table + seat * table_stride + position // page_rows, mask=there, other=0)
    tl.store(found + row * n + index, tl.where(there, page * page_rows + position % page_rows, _EMPTY), mask=index < n)
