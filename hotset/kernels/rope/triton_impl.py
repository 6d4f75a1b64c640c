"""rope in Triton. A program rotates some heads of one token; it reads and writes each value once."""

import triton
import triton.language as tl
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels.early_launch.triton_launch import EARLY_LAUNCH, wait_for_previous_launch
from hotset.kernels.rope.reference import Rotation

HEADS_PER_PROGRAM = 8
WARPS = 2
OPTIONS = {"enable_fp_fusion": False} | EARLY_LAUNCH  # each product is rounded as torch rounds it


def rotate_pairs_into(out: Tensor, x: Tensor, rotation: Rotation) -> None:
    """Writes the result of `reference.rotate_pairs` to `out`: it may be a slice of a wider tensor but must not share
    memory with x."""
    tokens, heads, _ = x.shape
    cos, sin = rotation.cos, rotation.sin
    if not x.stride(2) == out.stride(2) == 1:
        raise InternalError("the values of a head must be adjacent")
    if cos.shape[0] != tokens:
        raise InternalError(f"there are angles for {cos.shape[0]} tokens, but x has {tokens}")
    if x.numel() == 0:
        return
    half = rotation.dim // 2
    block_heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(heads))
    _rotate_kernel[(tokens, triton.cdiv(heads, block_heads))](
        x=x,
        cos=cos,
        sin=sin,
        out=out,
        heads=heads,
        token_stride=x.stride(0),
        head_stride=x.stride(1),
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        angle_stride=cos.stride(0),
        half=half,
        block_heads=block_heads,
        block_half=triton.next_power_of_2(half),
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
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    angle_stride: tl.tensor,
    half: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
) -> None:
    wait_for_previous_launch()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)[:, None]
    rotate_heads(
        source=x + token * token_stride + head * head_stride,
        cos=cos + token * angle_stride,
        sin=sin + token * angle_stride,
        target=out + token * out_token_stride + head * out_head_stride,
        inside=head < heads,
        half=half,
        plain=0,
        interleaved=True,
        block_half=block_half,
        block_plain=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def rotate_heads(
    source: tl.tensor,  # [heads, 1] addresses
    cos: tl.tensor,  # of the token
    sin: tl.tensor,
    target: tl.tensor,  # [heads, 1] addresses
    inside: tl.tensor,  # [heads, 1]: whether the head exists
    half: tl.constexpr,
    plain: tl.constexpr,
    interleaved: tl.constexpr,
    block_half: tl.constexpr,
    block_plain: tl.constexpr,
) -> None:
    """Rotates some heads of one token and copies the values that are not rotated."""
    pair = tl.arange(0, block_half)[None, :]
    in_pairs = inside & (pair < half)
    c = tl.load(cos + pair, mask=pair < half, other=0)
    s = tl.load(sin + pair, mask=pair < half, other=0)
    first = tl.load(first_of_pair(source, pair, interleaved), mask=in_pairs, other=0)
    second = tl.load(second_of_pair(source, pair, half, interleaved), mask=in_pairs, other=0)
    tl.store(target + pair, rotated_first(first, second, c, s), mask=in_pairs)
    tl.store(target + half + pair, rotated_second(first, second, c, s), mask=in_pairs)
    if plain > 0:
        value = tl.arange(0, block_plain)[None, :]
        in_rest = inside & (value < plain)
        tl.store(target + 2 * half + value, tl.load(source + 2 * half + value, mask=in_rest, other=0), mask=in_rest)


@triton.jit  # type: ignore[untyped-decorator]
def first_of_pair(head: tl.tensor, pair: tl.tensor, interleaved: tl.constexpr) -> tl.tensor:
    """Returns the address of the first value of each pair, given the address of the head."""
    return head + (2 * pair if interleaved else pair)


@triton.jit  # type: ignore[untyped-decorator]
def second_of_pair(head: tl.tensor, pair: tl.tensor, half: tl.constexpr, interleaved: tl.constexpr) -> tl.tensor:
    return head + (2 * pair + 1 if interleaved else half + pair)


@triton.jit  # type: ignore[untyped-decorator]
def rotated_first(first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tl.tensor:
    """Returns the first values of the rotated pairs. Rounds both products and their difference to the values' dtype."""
    dtype: tl.constexpr = first.dtype
    a = (first.to(tl.float32) * cos.to(tl.float32)).to(dtype)
    b = (second.to(tl.float32) * sin.to(tl.float32)).to(dtype)
    return (a.to(tl.float32) - b.to(tl.float32)).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def rotated_second(first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tl.tensor:
    """Returns the second values of the rotated pairs. Rounds both products and their sum to the values' dtype."""
    dtype: tl.constexpr = first.dtype
    a = (second.to(tl.float32) * cos.to(tl.float32)).to(dtype)
    b = (first.to(tl.float32) * sin.to(tl.float32)).to(dtype)
    return (a.to(tl.float32) + b.to(tl.float32)).to(dtype)
