"""save_last_topk in Triton, with one program per token and block of positions."""

import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels import EMPTY

BLOCK = 1024
OPTIONS = {"enable_fp_fusion": False}  # there are no floats here, but Triton 3.9 warns if this is not set

_EMPTY = tl.constexpr(EMPTY)


def save_last_topk(last_topk: Tensor, seat_of: Tensor, positions: Tensor) -> None:
    tokens, k = positions.shape
    block = min(BLOCK, triton.next_power_of_2(k))
    _save_last_topk_kernel[(tokens, triton.cdiv(k, block))](
        last_topk=last_topk,
        seat_of=seat_of,
        positions=positions,
        seat_stride=last_topk.stride(0),
        saved_stride=last_topk.stride(1),
        token_stride=positions.stride(0),
        position_stride=positions.stride(1),
        k=k,
        block=block,
        num_warps=4,
        **OPTIONS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _save_last_topk_kernel(
    last_topk: tl.tensor,
    seat_of: tl.tensor,
    positions: tl.tensor,
    seat_stride: tl.tensor,
    saved_stride: tl.tensor,
    token_stride: tl.tensor,
    position_stride: tl.tensor,
    k: tl.tensor,
    block: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * block + tl.arange(0, block)
    seat = tl.load(seat_of + token)
    following = tl.load(seat_of + token + 1, mask=token + 1 < tl.num_programs(0), other=_EMPTY)
    inside = index < tl.where((seat == _EMPTY) | (seat == following), 0, k)
    position = tl.load(positions + token * token_stride + index * position_stride, mask=inside)
    tl.store(last_topk + seat * seat_stride + index * saved_stride, position.to(tl.int32), mask=inside)
