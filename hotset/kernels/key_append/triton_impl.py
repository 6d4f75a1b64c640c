"""key_append in Triton: one program per key.

A key is held in three pieces, the two of each pair that turns and the values that stay, so that no value has to move
between threads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.mla_append.triton_impl import e4m3_codes, e4m3_scale
from hotset.kernels.rope.rotation import Rotation
from hotset.kernels.rope.triton_impl import first_of, second_of, turned_first, turned_second
from hotset.kernels.rows import PagedRows

WARPS = 1
OPTIONS = {"enable_fp_fusion": False}  # each product is rounded as torch rounds it

_EMPTY = tl.constexpr(EMPTY)
_MOST_SPARE = tl.constexpr(8)  # bytes between a key and the next: fewer than the alignment of keys


def key_append(
    key: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    rotation: Rotation,
    interleaved: bool,
    keys: PagedRows,
    positions: Tensor,
) -> None:
    rows, dim = key.shape
    cos, sin, blocks, layout = rotation.cos, rotation.sin, keys.blocks, keys.layout
    assert key.stride(1) == cos.stride(2) == blocks.stride(3) == keys.table.stride(1) == 1, "values must be adjacent"
    assert cos.stride() == sin.stride() and weight.is_contiguous() and bias.is_contiguous()
    assert keys.seat_of.is_contiguous() and positions.is_contiguous() and keys.seat_of.shape == positions.shape
    assert layout.align <= _MOST_SPARE.value, f"keys aligned to {layout.align} bytes"
    if rows == 0:
        return
    half, plain = rotation.dim // 2, dim - rotation.dim
    _append_kernel[(rows,)](
        *(key, weight, bias, cos, sin, blocks.view(torch.uint8), keys.table, keys.seat_of, positions),
        *(key.stride(0), cos.stride(0), *(stride * blocks.element_size() for stride in blocks.stride()[:3])),
        *(keys.table.stride(0), eps),
        parts=blocks.shape[0],
        per_block=blocks.shape[2],
        half=half,
        plain=plain,
        interleaved=interleaved,
        row_bytes=layout.row_bytes,
        stride_bytes=layout.stride_bytes,
        fp8=layout.quantised > 0,
        block_half=triton.next_power_of_2(half),
        block_plain=triton.next_power_of_2(max(1, plain)),
        num_warps=WARPS,
        **OPTIONS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _append_kernel(
    key: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    blocks: tl.tensor,  # bytes
    table: tl.tensor,
    seat_of: tl.tensor,
    positions: tl.tensor,
    key_stride: tl.tensor,
    angle_stride: tl.tensor,
    part_stride: tl.tensor,  # in bytes, as the next two
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    table_stride: tl.tensor,
    eps: tl.tensor,
    parts: tl.constexpr,
    per_block: tl.constexpr,
    half: tl.constexpr,
    plain: tl.constexpr,
    interleaved: tl.constexpr,
    row_bytes: tl.constexpr,
    stride_bytes: tl.constexpr,
    fp8: tl.constexpr,
    block_half: tl.constexpr,
    block_plain: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seat_of + row)
    if seat == _EMPTY:
        return
    position = tl.load(positions + row)
    per_page: tl.constexpr = parts * per_block
    page = tl.load(table + seat * table_stride + position // per_page)
    within = position % per_page
    target = blocks + within // per_block * part_stride + page * page_stride + within % per_block * row_stride

    source = key + row * key_stride
    pair = tl.arange(0, block_half)
    paired = pair < half
    rest = tl.arange(0, block_plain)
    kept = rest < plain
    first = tl.load(first_of(source, pair, interleaved), mask=paired, other=0)
    second = tl.load(second_of(source, pair, half, interleaved), mask=paired, other=0)
    third = tl.load(source + 2 * half + rest, mask=kept, other=0)
    c = tl.load(cos + row * angle_stride + pair, mask=paired, other=0)
    s = tl.load(sin + row * angle_stride + pair, mask=paired, other=0)
    first_gain = tl.load(first_of(weight, pair, interleaved), mask=paired, other=0)
    second_gain = tl.load(second_of(weight, pair, half, interleaved), mask=paired, other=0)
    third_gain = tl.load(weight + 2 * half + rest, mask=kept, other=0)
    first_bias = tl.load(first_of(bias, pair, interleaved), mask=paired, other=0)
    second_bias = tl.load(second_of(bias, pair, half, interleaved), mask=paired, other=0)
    third_bias = tl.load(bias + 2 * half + rest, mask=kept, other=0)

    dim: tl.constexpr = 2 * half + plain
    first_wide, second_wide, third_wide = first.to(tl.float32), second.to(tl.float32), third.to(tl.float32)
    mean = (tl.sum(first_wide + second_wide, 0) + tl.sum(third_wide, 0)) * (1.0 / dim)
    first_off = tl.where(paired, first_wide - mean, 0)
    second_off = tl.where(paired, second_wide - mean, 0)
    third_off = tl.where(kept, third_wide - mean, 0)
    squares = tl.sum(first_off * first_off + second_off * second_off, 0) + tl.sum(third_off * third_off, 0)
    spread = tl.rsqrt(squares * (1.0 / dim) + eps)
    first = _scaled(first_off * spread, first_gain, first_bias)
    second = _scaled(second_off * spread, second_gain, second_bias)
    third = _scaled(third_off * spread, third_gain, third_bias)
    first_out, second_out = turned_first(first, second, c, s), turned_second(first, second, c, s)

    if fp8:
        turned = tl.maximum(tl.abs(first_out.to(tl.float32)), tl.abs(second_out.to(tl.float32)))
        largest = tl.maximum(tl.max(turned, 0), tl.max(tl.abs(third.to(tl.float32)), 0))
        scale = e4m3_scale(largest)
        tl.store(target + pair, e4m3_codes(first_out, scale), mask=paired)
        tl.store(target + half + pair, e4m3_codes(second_out, scale), mask=paired)
        tl.store(target + 2 * half + rest, e4m3_codes(third, scale), mask=kept)
        tl.store((target + dim).to(tl.pointer_type(tl.float32)), scale)
    else:
        values = target.to(tl.pointer_type(first_out.dtype))
        tl.store(values + pair, first_out, mask=paired)
        tl.store(values + half + pair, second_out, mask=paired)
        tl.store(values + 2 * half + rest, third, mask=kept)
    if row_bytes < stride_bytes:
        spare = row_bytes + tl.arange(0, _MOST_SPARE)
        tl.store(target + spare, tl.zeros([_MOST_SPARE], tl.uint8), mask=spare < stride_bytes)


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(normed: tl.tensor, gain: tl.tensor, bias: tl.tensor) -> tl.tensor:
    """Layer norm rounds once, at the end."""
    return (normed * gain.to(tl.float32) + bias.to(tl.float32)).to(gain.dtype)
