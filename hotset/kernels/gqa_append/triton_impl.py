"""gqa_append in Triton, with one program per token and head."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels import EMPTY
from hotset.kernels.gqa_append.reference import HeadNorms
from hotset.kernels.norm.triton_impl import rms_normed
from hotset.kernels.rope import Rotation
from hotset.kernels.rope.triton_impl import rotated_first, rotated_second
from hotset.kernels.rows import ROW_ALIGN, RowLayout

WARPS = 1
OPTIONS = {"enable_fp_fusion": False}  # each product is rounded as torch rounds it

_EMPTY = tl.constexpr(EMPTY)
_ROW_ALIGN = tl.constexpr(ROW_ALIGN)


def gqa_append(
    qkv: Tensor,
    kv_heads: int,
    norms: HeadNorms | None,
    rotation: Rotation,
    layout: RowLayout,
    device_rows: Tensor,
    new_rows: Tensor,
) -> Tensor:
    tokens, all_heads, dim = qkv.shape
    heads = all_heads - 2 * kv_heads
    cos, sin = rotation.cos, rotation.sin
    if not (qkv.stride(2) == device_rows.stride(1) == 1 and new_rows.is_contiguous()):
        raise InternalError("the values of a head and new_rows must be adjacent")
    q = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    q_gain, k_gain, eps = (qkv, qkv, 0.0) if norms is None else (norms.q, norms.k, norms.eps)
    _append_kernel[(tokens, all_heads)](
        qkv=qkv,
        q_gain=q_gain,
        k_gain=k_gain,
        cos=cos,
        sin=sin,
        q=q,
        device_rows=device_rows,
        new_rows=new_rows,
        token_stride=qkv.stride(0),
        head_stride=qkv.stride(1),
        angle_stride=cos.stride(0),
        device_stride=device_rows.stride(0),
        eps=eps,
        heads=heads,
        kv_heads=kv_heads,
        half=dim // 2,
        padding=layout.stored_width - layout.width,
        normed=norms is not None,
        block_half=triton.next_power_of_2(dim // 2),
        num_warps=WARPS,
        **OPTIONS,
    )
    return q


@triton.jit  # type: ignore[untyped-decorator]
def _append_kernel(
    qkv: tl.tensor,
    q_gain: tl.tensor,
    k_gain: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q: tl.tensor,
    device_rows: tl.tensor,
    new_rows: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    angle_stride: tl.tensor,
    device_stride: tl.tensor,
    eps: tl.tensor,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    padding: tl.constexpr,
    normed: tl.constexpr,
    block_half: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, block_half)
    inside = pair < half
    dim: tl.constexpr = 2 * half
    source = qkv + token * token_stride + head * head_stride + pair
    first = tl.load(source, mask=inside, other=0)
    second = tl.load(source + half, mask=inside, other=0)
    device_row = tl.load(new_rows + token)
    if head < heads + kv_heads:
        c = tl.load(cos + token * angle_stride + pair, mask=inside, other=0)
        s = tl.load(sin + token * angle_stride + pair, mask=inside, other=0)
        if normed:
            gain = (q_gain if head < heads else k_gain) + pair
            first_gain = tl.load(gain, mask=inside, other=0)
            second_gain = tl.load(gain + half, mask=inside, other=0)
            first_wide, second_wide = first.to(tl.float32), second.to(tl.float32)
            squares = tl.sum(first_wide * first_wide + second_wide * second_wide, 0)
            first = rms_normed(first_wide, squares, first_gain, eps, dim)
            second = rms_normed(second_wide, squares, second_gain, eps, dim)
        first, second = rotated_first(first, second, c, s), rotated_second(first, second, c, s)
    if head < heads:
        target = q + (token * heads + head) * dim + pair
        tl.store(target, first, mask=inside)
        tl.store(target + half, second, mask=inside)
    elif device_row != _EMPTY:
        target = device_rows + device_row * device_stride + (head - heads) * dim + pair
        tl.store(target, first, mask=inside)
        tl.store(target + half, second, mask=inside)
        if padding > 0:
            value = tl.arange(0, _ROW_ALIGN)
            end = device_rows + device_row * device_stride + 2 * kv_heads * dim
            count = tl.where(head == heads + 2 * kv_heads - 1, padding, 0)  # the last head writes the padding
            tl.store(end + value, tl.zeros([_ROW_ALIGN], device_rows.dtype.element_ty), mask=value < count)
