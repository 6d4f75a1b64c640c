"""rope in Triton: a program turns some heads of one row, reading and writing each value once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.kernels.rope.rotation import Rotation

HEADS_AT_ONCE = 8
WARPS = 2
OPTIONS = {"enable_fp_fusion": False}  # each product is rounded as torch rounds it


def rotate(x: Tensor, rotation: Rotation, interleaved: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotate_into(out, x, rotation, interleaved)
    return out


def rotate_into(out: Tensor, x: Tensor, rotation: Rotation, interleaved: bool) -> None:
    """Writes the result to `out`, which may be a slice of something wider but must not share memory with x."""
    rows, heads, dim = x.shape
    cos, sin = rotation.cos, rotation.sin
    assert x.stride(2) == out.stride(2) == cos.stride(2) == 1, "the values of a head must be adjacent"
    assert cos.shape[0] == rows and cos.stride() == sin.stride(), f"angles of {cos.shape[0]} rows for {rows}"
    if x.numel() == 0:
        return
    half, plain = rotation.dim // 2, dim - rotation.dim
    at_once = min(HEADS_AT_ONCE, triton.next_power_of_2(heads))
    _rotate_kernel[(rows, triton.cdiv(heads, at_once))](
        *(x, cos, sin, out, heads, x.stride(0), x.stride(1), out.stride(0), out.stride(1), cos.stride(0)),
        half=half,
        plain=plain,
        interleaved=interleaved,
        block_heads=at_once,
        block_half=triton.next_power_of_2(half),
        block_plain=triton.next_power_of_2(max(1, plain)),
        num_warps=WARPS,
        **OPTIONS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    out_row_stride: tl.tensor,
    out_head_stride: tl.tensor,
    angle_stride: tl.tensor,
    half: tl.constexpr,
    plain: tl.constexpr,
    interleaved: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
    block_plain: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)[:, None]
    source = x + row * row_stride + head * head_stride
    target = out + row * out_row_stride + head * out_head_stride
    pair = tl.arange(0, block_half)[None, :]
    inside = (head < heads) & (pair < half)
    c = tl.load(cos + row * angle_stride + pair, mask=pair < half, other=0)
    s = tl.load(sin + row * angle_stride + pair, mask=pair < half, other=0)
    first = tl.load(first_of(source, pair, interleaved), mask=inside, other=0)
    second = tl.load(second_of(source, pair, half, interleaved), mask=inside, other=0)
    tl.store(target + pair, turned_first(first, second, c, s), mask=inside)
    tl.store(target + half + pair, turned_second(first, second, c, s), mask=inside)
    if plain > 0:
        value = tl.arange(0, block_plain)[None, :]
        there = (head < heads) & (value < plain)
        carried = tl.load(source + 2 * half + value, mask=there, other=0)
        tl.store(target + 2 * half + value, carried, mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def first_of(head: tl.tensor, pair: tl.tensor, interleaved: tl.constexpr) -> tl.tensor:
    """Where the first value of each pair lies."""
    return head + (2 * pair if interleaved else pair)


@triton.jit  # type: ignore[untyped-decorator]
def second_of(head: tl.tensor, pair: tl.tensor, half: tl.constexpr, interleaved: tl.constexpr) -> tl.tensor:
    return head + (2 * pair + 1 if interleaved else half + pair)


@triton.jit  # type: ignore[untyped-decorator]
def turned_first(first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tl.tensor:
    """The products and their difference, each rounded to the values' own dtype."""
    kind: tl.constexpr = first.dtype
    a = (first.to(tl.float32) * cos.to(tl.float32)).to(kind)
    b = (second.to(tl.float32) * sin.to(tl.float32)).to(kind)
    return (a.to(tl.float32) - b.to(tl.float32)).to(kind)


@triton.jit  # type: ignore[untyped-decorator]
def turned_second(first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tl.tensor:
    kind: tl.constexpr = first.dtype
    a = (second.to(tl.float32) * cos.to(tl.float32)).to(kind)
    b = (first.to(tl.float32) * sin.to(tl.float32)).to(kind)
    return (a.to(tl.float32) + b.to(tl.float32)).to(kind)
