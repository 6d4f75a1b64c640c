"""mla_append in Triton, with one program per token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels import EMPTY
from hotset.kernels.early_launch.triton_launch import EARLY_LAUNCH, wait_for_previous_launch
from hotset.kernels.fp8 import SCALE_BLOCK
from hotset.kernels.norm.triton_impl import rms_normed
from hotset.kernels.quantise.triton_impl import e4m3_scale
from hotset.kernels.rope import Rotation
from hotset.kernels.rope.triton_impl import rotated_first, rotated_second
from hotset.kernels.rows import ROW_ALIGN, RowLayout

WARPS = 4
OPTIONS = {"enable_fp_fusion": False} | EARLY_LAUNCH  # each product is rounded as torch rounds it

_EMPTY = tl.constexpr(EMPTY)
_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)
_ROW_ALIGN = tl.constexpr(ROW_ALIGN)


def mla_append(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    rotation: Rotation,
    layout: RowLayout,
    device_rows: Tensor,
    new_rows: Tensor,
) -> None:
    rank = weight.shape[0]
    cos, sin = rotation.cos, rotation.sin
    if not kv.stride(1) == device_rows.stride(1) == 1:
        raise InternalError("the values of a row must be adjacent")
    if not (weight.is_contiguous() and new_rows.is_contiguous()):
        raise InternalError("weight and new_rows must be contiguous")
    if kv.shape[0] == 0:
        return
    _append_kernel[(kv.shape[0],)](
        kv=kv,
        weight=weight,
        cos=cos,
        sin=sin,
        device_rows=device_rows.view(torch.uint8),
        new_rows=new_rows,
        kv_stride=kv.stride(0),
        angle_stride=cos.stride(0),
        device_stride=device_rows.stride(0) * device_rows.element_size(),
        eps=eps,
        rank=rank,
        half=rotation.dim // 2,
        row_bytes=layout.row_bytes,
        stride_bytes=layout.stride_bytes,
        fp8=layout.quantised > 0,
        blocks=triton.next_power_of_2(triton.cdiv(rank, SCALE_BLOCK)),
        block_half=triton.next_power_of_2(rotation.dim // 2),
        num_warps=WARPS,
        **OPTIONS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _append_kernel(
    kv: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    device_rows: tl.tensor,  # bytes
    new_rows: tl.tensor,
    kv_stride: tl.tensor,
    angle_stride: tl.tensor,
    device_stride: tl.tensor,  # in bytes
    eps: tl.tensor,
    rank: tl.constexpr,
    half: tl.constexpr,
    row_bytes: tl.constexpr,
    stride_bytes: tl.constexpr,
    fp8: tl.constexpr,
    blocks: tl.constexpr,
    block_half: tl.constexpr,
) -> None:
    wait_for_previous_launch()
    token = tl.program_id(0).to(tl.int64)
    device_row = tl.load(new_rows + token)
    if device_row == _EMPTY:
        return
    source = kv + token * kv_stride
    target = device_rows + device_row * device_stride

    # The latent is held as [scale blocks, 128]: the norm sums over all blocks, and each block has its own scale.
    index = tl.arange(0, blocks)[:, None] * _SCALE_BLOCK + tl.arange(0, _SCALE_BLOCK)[None, :]
    inside = index < rank
    gain = tl.load(weight + index, mask=inside, other=0)
    wide = tl.load(source + index, mask=inside, other=0).to(tl.float32)
    pair = tl.arange(0, block_half)
    in_pairs = pair < half
    c = tl.load(cos + token * angle_stride + pair, mask=in_pairs, other=0)
    s = tl.load(sin + token * angle_stride + pair, mask=in_pairs, other=0)
    first = tl.load(source + rank + 2 * pair, mask=in_pairs, other=0)
    second = tl.load(source + rank + 2 * pair + 1, mask=in_pairs, other=0)

    latent = rms_normed(wide, tl.sum(tl.sum(wide * wide, 1), 0), gain, eps, rank)
    first_out, second_out = rotated_first(first, second, c, s), rotated_second(first, second, c, s)
    if fp8:
        scales: tl.constexpr = (rank + _SCALE_BLOCK - 1) // _SCALE_BLOCK
        scale = e4m3_scale(tl.max(tl.abs(latent.to(tl.float32)), 1))
        tl.store(target + index, e4m3_codes(latent, scale[:, None]), mask=inside)
        block = tl.arange(0, blocks)
        tl.store((target + rank).to(tl.pointer_type(tl.float32)) + block, scale, mask=block < scales)
        rope = (target + rank + 4 * scales).to(tl.pointer_type(tl.bfloat16))
        tl.store(rope + pair, first_out.to(tl.bfloat16), mask=in_pairs)
        tl.store(rope + half + pair, second_out.to(tl.bfloat16), mask=in_pairs)
    else:
        values = target.to(tl.pointer_type(latent.dtype))
        tl.store(values + index, latent, mask=inside)
        tl.store(values + rank + pair, first_out, mask=in_pairs)
        tl.store(values + rank + half + pair, second_out, mask=in_pairs)
    if row_bytes < stride_bytes:  # the padding is shorter than ROW_ALIGN bytes
        padding = row_bytes + tl.arange(0, _ROW_ALIGN)
        tl.store(target + padding, tl.zeros([_ROW_ALIGN], tl.uint8), mask=padding < stride_bytes)


@triton.jit  # type: ignore[untyped-decorator]
def e4m3_codes(values: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Returns the nearest e4m3 values as bytes, with ties to even.

    The scale comes from the largest value of the block, so no quotient exceeds the largest e4m3 value.
    """
    wide, wide_scale = tl.broadcast(values.to(tl.float32), scale)
    return tl.div_rn(wide, wide_scale).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
