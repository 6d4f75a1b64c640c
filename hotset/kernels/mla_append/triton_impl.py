"""mla_append in Triton: one program per row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.norm.triton_impl import rms_scaled
from hotset.kernels.rope.rotation import Rotation
from hotset.kernels.rope.triton_impl import turned_first, turned_second
from hotset.kernels.rows import E4M3_LARGEST, ROW_ALIGN, SCALE_BLOCK, SMALLEST_SCALE, RowLayout

WARPS = 4
OPTIONS = {"enable_fp_fusion": False}  # each product is rounded as torch rounds it

_EMPTY = tl.constexpr(EMPTY)
_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)
_E4M3_LARGEST = tl.constexpr(E4M3_LARGEST)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
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
    assert kv.stride(1) == device_rows.stride(1) == cos.stride(2) == 1, "the values of a row must be adjacent"
    assert cos.stride() == sin.stride() and weight.is_contiguous() and new_rows.is_contiguous()
    if kv.shape[0] == 0:
        return
    _append_kernel[(kv.shape[0],)](
        *(kv, weight, cos, sin, device_rows.view(torch.uint8), new_rows),
        *(kv.stride(0), cos.stride(0), device_rows.stride(0) * device_rows.element_size(), eps),
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
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(new_rows + row)
    if place == _EMPTY:
        return
    source = kv + row * kv_stride
    target = device_rows + place * device_stride

    # Latents as [scale blocks, 128]: the norm sums over all of them, a scale over its own 128.
    index = tl.arange(0, blocks)[:, None] * _SCALE_BLOCK + tl.arange(0, _SCALE_BLOCK)[None, :]
    inside = index < rank
    gain = tl.load(weight + index, mask=inside, other=0)
    wide = tl.load(source + index, mask=inside, other=0).to(tl.float32)
    pair = tl.arange(0, block_half)
    paired = pair < half
    c = tl.load(cos + row * angle_stride + pair, mask=paired, other=0)
    s = tl.load(sin + row * angle_stride + pair, mask=paired, other=0)
    first = tl.load(source + rank + 2 * pair, mask=paired, other=0)
    second = tl.load(source + rank + 2 * pair + 1, mask=paired, other=0)

    latent = rms_scaled(wide, tl.sum(tl.sum(wide * wide, 1), 0), gain, eps, rank)
    first_out, second_out = turned_first(first, second, c, s), turned_second(first, second, c, s)
    if fp8:
        scales: tl.constexpr = (rank + _SCALE_BLOCK - 1) // _SCALE_BLOCK
        scale = e4m3_scale(tl.max(tl.abs(latent.to(tl.float32)), 1))
        tl.store(target + index, e4m3_codes(latent, scale[:, None]), mask=inside)
        number = tl.arange(0, blocks)
        tl.store((target + rank).to(tl.pointer_type(tl.float32)) + number, scale, mask=number < scales)
        rope = (target + rank + 4 * scales).to(tl.pointer_type(tl.bfloat16))
        tl.store(rope + pair, first_out.to(tl.bfloat16), mask=paired)
        tl.store(rope + half + pair, second_out.to(tl.bfloat16), mask=paired)
    else:
        values = target.to(tl.pointer_type(latent.dtype))
        tl.store(values + index, latent, mask=inside)
        tl.store(values + rank + pair, first_out, mask=paired)
        tl.store(values + rank + half + pair, second_out, mask=paired)
    if row_bytes < stride_bytes:  # fewer than ROW_ALIGN bytes
        spare = row_bytes + tl.arange(0, _ROW_ALIGN)
        tl.store(target + spare, tl.zeros([_ROW_ALIGN], tl.uint8), mask=spare < stride_bytes)


@triton.jit  # type: ignore[untyped-decorator]
def e4m3_scale(largest: tl.tensor) -> tl.tensor:
    """The scale of a block whose largest value is `largest`. Divided, not multiplied: to the last bit as on a CPU."""
    return tl.maximum(tl.div_rn(largest, tl.full(largest.shape, _E4M3_LARGEST, tl.float32)), _SMALLEST_SCALE)


@triton.jit  # type: ignore[untyped-decorator]
def e4m3_codes(values: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Nearest e4m3, ties to even, as bytes. No value exceeds the largest code: its own block's scale sees to that."""
    wide, each = tl.broadcast(values.to(tl.float32), scale)
    return tl.div_rn(wide, each).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
