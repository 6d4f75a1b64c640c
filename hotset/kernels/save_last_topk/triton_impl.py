"""save_last_topk in Triton: one program for a block of one query row's positions."""

import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels import EMPTY

BLOCK = 1024
OPTIONS = {"enable_fp_fusion": False}  # nothing here is a float; Triton 3.9 warns where this is left open

_EMPTY = tl.constexpr(EMPTY)


def save_last_topk(kept: Tensor, seat_of: Tensor, positions: Tensor) -> None:
    rows, k = positions.shape
    block = min(BLOCK, triton.next_power_of_2(k))
    _save_last_topk_kernel[(rows, triton.cdiv(k, block))](
        *(kept, seat_of, positions, *kept.stride(), *positions.stride(), k),
        block=block,
        num_warps=4,
        **OPTIONS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _save_last_topk_kernel(
    kept: tl.tensor,
    seat_of: tl.tensor,
    positions: tl.tensor,
    kept_stride: tl.tensor,
    kept_position_stride: tl.tensor,
    positions_stride: tl.tensor,
    position_stride: tl.tensor,
    k: tl.tensor,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * block + tl.arange(0, block)
    seat = tl.load(seat_of + row)
    there = index < tl.where(seat == _EMPTY, 0, k)
    position = tl.load(positions + row * positions_stride + index * position_stride, mask=there)
    tl.store(kept + seat * kept_stride + index * kept_position_stride, position.to(tl.int32), mask=there)
