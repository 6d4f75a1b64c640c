"""index_append in Triton. For each token, one program appends the key, and others rotate some heads of the query.

A program holds its key in three vectors: the first values of all rotated pairs, their second values, and the values
that are not rotated. Therefore no value has to move between threads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels import EMPTY
from hotset.kernels.early_launch.triton_launch import EARLY_LAUNCH, wait_for_previous_launch
from hotset.kernels.mla_append.triton_impl import e4m3_codes
from hotset.kernels.quantise.triton_impl import e4m3_scale
from hotset.kernels.rope import Rotation
from hotset.kernels.rope.triton_impl import (
    HEADS_PER_PROGRAM,
    first_of_pair,
    rotate_heads,
    rotated_first,
    rotated_second,
    second_of_pair,
)
from hotset.kernels.rows import PagedRows

WARPS = 2
OPTIONS = {"enable_fp_fusion": False} | EARLY_LAUNCH  # each product is rounded as torch rounds it

_EMPTY = tl.constexpr(EMPTY)
_MAX_ALIGN = tl.constexpr(8)  # bytes; the padding after a key is shorter than the alignment of keys


def index_append(
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    rotation: Rotation,
    interleaved: bool,
    keys: PagedRows,
    positions: Tensor,
) -> Tensor:
    tokens, heads, dim = query.shape
    cos, sin, blocks, layout = rotation.cos, rotation.sin, keys.blocks, keys.layout
    if not query.stride(2) == key.stride(1) == blocks.stride(3) == keys.table.stride(1) == 1:
        raise InternalError("values must be adjacent")
    if not (weight.is_contiguous() and bias.is_contiguous()):
        raise InternalError("weight and bias must be contiguous")
    for name, column in (("seats", keys.seat_of), ("positions", positions)):
        if not (column.shape == (tokens,) and column.is_contiguous()):
            raise InternalError(f"{name} of shape {tuple(column.shape)} for {tokens} tokens; they must be contiguous")
    if cos.shape[0] != tokens:
        raise InternalError(f"the angles of {cos.shape[0]} tokens for {tokens} tokens")
    if layout.align > _MAX_ALIGN.value:
        raise InternalError(f"keys aligned to {layout.align} bytes: the maximum is {_MAX_ALIGN.value}")
    rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if tokens == 0:
        return rotated
    half, plain = rotation.dim // 2, dim - rotation.dim
    part_stride, page_stride, row_stride, _ = (stride * blocks.element_size() for stride in blocks.stride())
    block_heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(heads))
    _append_kernel[(tokens, 1 + triton.cdiv(heads, block_heads))](
        query=query,
        rotated=rotated,
        key=key,
        weight=weight,
        bias=bias,
        cos=cos,
        sin=sin,
        blocks=blocks.view(torch.uint8),
        table=keys.table,
        seat_of=keys.seat_of,
        positions=positions,
        query_stride=query.stride(0),
        head_stride=query.stride(1),
        heads=heads,
        key_stride=key.stride(0),
        angle_stride=cos.stride(0),
        part_stride=part_stride,
        page_stride=page_stride,
        row_stride=row_stride,
        table_stride=keys.table.stride(0),
        eps=eps,
        first_part=keys.first_part,
        step=keys.step,
        parts=blocks.shape[0],
        block_rows=blocks.shape[2],
        half=half,
        plain=plain,
        interleaved=interleaved,
        row_bytes=layout.row_bytes,
        stride_bytes=layout.stride_bytes,
        fp8=layout.quantised > 0,
        block_heads=block_heads,
        block_half=triton.next_power_of_2(half),
        block_plain=triton.next_power_of_2(max(1, plain)),
        num_warps=WARPS,
        **OPTIONS,
    )
    return rotated


@triton.jit(do_not_specialize=["first_part"])  # type: ignore[untyped-decorator]
def _append_kernel(
    query: tl.tensor,
    rotated: tl.tensor,  # contiguous
    key: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    blocks: tl.tensor,  # bytes
    table: tl.tensor,
    seat_of: tl.tensor,
    positions: tl.tensor,
    query_stride: tl.tensor,
    head_stride: tl.tensor,
    heads: tl.constexpr,
    key_stride: tl.tensor,
    angle_stride: tl.tensor,
    part_stride: tl.tensor,  # in bytes, like page_stride and row_stride
    page_stride: tl.tensor,
    row_stride: tl.tensor,
    table_stride: tl.tensor,
    eps: tl.tensor,
    first_part: tl.tensor,
    step: tl.constexpr,
    parts: tl.constexpr,
    block_rows: tl.constexpr,
    half: tl.constexpr,
    plain: tl.constexpr,
    interleaved: tl.constexpr,
    row_bytes: tl.constexpr,
    stride_bytes: tl.constexpr,
    fp8: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
    block_plain: tl.constexpr,
) -> None:
    wait_for_previous_launch()
    token = tl.program_id(0).to(tl.int64)
    dim: tl.constexpr = 2 * half + plain
    if tl.program_id(1) > 0:
        head = (tl.program_id(1) - 1) * block_heads + tl.arange(0, block_heads)[:, None]
        rotate_heads(
            source=query + token * query_stride + head * head_stride,
            cos=cos + token * angle_stride,
            sin=sin + token * angle_stride,
            target=rotated + (token * heads + head) * dim,
            inside=head < heads,
            half=half,
            plain=plain,
            interleaved=interleaved,
            block_half=block_half,
            block_plain=block_plain,
        )
        return
    seat = tl.load(seat_of + token)
    if seat == _EMPTY:
        return
    position = tl.load(positions + token)
    part = position // block_rows * step + first_part
    page = tl.load(table + seat * table_stride + part // parts)
    target = blocks + part % parts * part_stride + page * page_stride + position % block_rows * row_stride

    source = key + token * key_stride
    pair = tl.arange(0, block_half)
    in_pairs = pair < half
    rest = tl.arange(0, block_plain)
    in_rest = rest < plain
    first = tl.load(first_of_pair(source, pair, interleaved), mask=in_pairs, other=0)
    second = tl.load(second_of_pair(source, pair, half, interleaved), mask=in_pairs, other=0)
    third = tl.load(source + 2 * half + rest, mask=in_rest, other=0)
    c = tl.load(cos + token * angle_stride + pair, mask=in_pairs, other=0)
    s = tl.load(sin + token * angle_stride + pair, mask=in_pairs, other=0)
    first_gain = tl.load(first_of_pair(weight, pair, interleaved), mask=in_pairs, other=0)
    second_gain = tl.load(second_of_pair(weight, pair, half, interleaved), mask=in_pairs, other=0)
    third_gain = tl.load(weight + 2 * half + rest, mask=in_rest, other=0)
    first_bias = tl.load(first_of_pair(bias, pair, interleaved), mask=in_pairs, other=0)
    second_bias = tl.load(second_of_pair(bias, pair, half, interleaved), mask=in_pairs, other=0)
    third_bias = tl.load(bias + 2 * half + rest, mask=in_rest, other=0)

    first_wide, second_wide, third_wide = first.to(tl.float32), second.to(tl.float32), third.to(tl.float32)
    mean = (tl.sum(first_wide + second_wide, 0) + tl.sum(third_wide, 0)) * (1.0 / dim)
    first_off = tl.where(in_pairs, first_wide - mean, 0)
    second_off = tl.where(in_pairs, second_wide - mean, 0)
    third_off = tl.where(in_rest, third_wide - mean, 0)
    squares = tl.sum(first_off * first_off + second_off * second_off, 0) + tl.sum(third_off * third_off, 0)
    inverse_std = tl.rsqrt(squares * (1.0 / dim) + eps)
    first = _gain_and_bias(first_off * inverse_std, first_gain, first_bias)
    second = _gain_and_bias(second_off * inverse_std, second_gain, second_bias)
    third = _gain_and_bias(third_off * inverse_std, third_gain, third_bias)
    first_out, second_out = rotated_first(first, second, c, s), rotated_second(first, second, c, s)

    if fp8:
        larger_of_pair = tl.maximum(tl.abs(first_out.to(tl.float32)), tl.abs(second_out.to(tl.float32)))
        largest = tl.maximum(tl.max(larger_of_pair, 0), tl.max(tl.abs(third.to(tl.float32)), 0))
        scale = e4m3_scale(largest)
        tl.store(target + pair, e4m3_codes(first_out, scale), mask=in_pairs)
        tl.store(target + half + pair, e4m3_codes(second_out, scale), mask=in_pairs)
        tl.store(target + 2 * half + rest, e4m3_codes(third, scale), mask=in_rest)
        tl.store((target + dim).to(tl.pointer_type(tl.float32)), scale)
    else:
        values = target.to(tl.pointer_type(first_out.dtype))
        tl.store(values + pair, first_out, mask=in_pairs)
        tl.store(values + half + pair, second_out, mask=in_pairs)
        tl.store(values + 2 * half + rest, third, mask=in_rest)
    if row_bytes < stride_bytes:
        padding = row_bytes + tl.arange(0, _MAX_ALIGN)
        tl.store(target + padding, tl.zeros([_MAX_ALIGN], tl.uint8), mask=padding < stride_bytes)


@triton.jit  # type: ignore[untyped-decorator]
def _gain_and_bias(normed: tl.tensor, gain: tl.tensor, bias: tl.tensor) -> tl.tensor:
    """Applies the gain and bias of the layer norm in float32 and rounds the result. Nothing is rounded before."""
    return (normed * gain.to(tl.float32) + bias.to(tl.float32)).to(gain.dtype)
