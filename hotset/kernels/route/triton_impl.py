"""route in Triton. The product with the router is split along `hidden`.

Then one program per token adds up the partial sums and selects the experts.

The router is float32. Each factor is split into two tf32 parts, so the products are almost as exact as those of
float32. How `hidden` is split depends only on its size, so a token gets the same bits in every batch of up to
`MAX_TOKENS` tokens. Larger batches use torch's product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels import EMPTY
from hotset.kernels.early_launch.triton_launch import EARLY_LAUNCH, wait_for_previous_launch
from hotset.kernels.route.reference import SUM_EPSILON, Routes, RoutingRule

MAX_TOKENS = 1024  # the largest batch that uses the product below
MAX_PARTS = 32  # `hidden` is split into at most this many parts
TILE_TOKENS, TILE_EXPERTS, TILE_IN = 16, 64, 64  # of a program of the product, which adds TILE_IN terms at a time
SUMS_PER_WARP = 2048  # partial sums that a warp of `_select_kernel` holds: 64 registers per thread
OPTIONS = {"enable_fp_fusion": True} | EARLY_LAUNCH  # Triton 3.9 warns if this is not set

_EMPTY = tl.constexpr(EMPTY)
_SUM_EPSILON = tl.constexpr(SUM_EPSILON)


def route(x: Tensor, router: Tensor, correction: Tensor, rule: RoutingRule, seats: Tensor | None) -> Routes:
    if x.shape[0] > MAX_TOKENS:
        return select_experts(F.linear(x.to(router.dtype), router)[None], correction, rule, seats)
    return select_experts(partial_logits(x, router), correction, rule, seats)


def partial_logits(x: Tensor, router: Tensor) -> Tensor:
    """Returns [parts, tokens, experts] float32, whose sum over the parts is the logits."""
    (tokens, hidden), experts = x.shape, router.shape[0]
    part = triton.cdiv(triton.cdiv(hidden, MAX_PARTS), TILE_IN) * TILE_IN
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(triton.cdiv(hidden, part), tokens, experts, dtype=torch.float32, device=x.device)
    tile_experts = min(TILE_EXPERTS, max(16, triton.next_power_of_2(experts)))
    _product_kernel[(triton.cdiv(tokens, TILE_TOKENS), out.shape[0], triton.cdiv(experts, tile_experts))](
        x=x,
        router=router.contiguous(),
        out=out,
        x_stride=x.stride(0),
        tokens=tokens,
        hidden=hidden,
        part=part,
        experts=experts,
        tile_tokens=TILE_TOKENS,
        tile_experts=tile_experts,
        tile_in=TILE_IN,
        num_warps=4,
        **OPTIONS,
    )
    return out


def select_experts(
    partial: Tensor,  # [parts, tokens, experts]
    correction: Tensor,
    rule: RoutingRule,
    seats: Tensor | None,
) -> Routes:
    parts, tokens, experts = partial.shape
    expert_ids = torch.empty(tokens, rule.experts_per_token, dtype=torch.int64, device=partial.device)
    weights = torch.empty(tokens, rule.experts_per_token, dtype=torch.float32, device=partial.device)
    group_size = experts // rule.groups
    tile_groups, tile_group_size = triton.next_power_of_2(rule.groups), triton.next_power_of_2(group_size)
    tile_parts = triton.next_power_of_2(parts)
    _select_kernel[(tokens,)](
        partial=partial.contiguous(),
        correction=correction.contiguous(),
        seats=expert_ids if seats is None else seats.contiguous(),  # not read if `seats` is None
        expert_ids=expert_ids,
        weights=weights,
        tokens=tokens,
        scale=rule.scale,
        parts=parts,
        groups=rule.groups,
        group_size=group_size,
        topk_group=rule.topk_group,
        experts_per_token=rule.experts_per_token,
        normalise=rule.normalise,
        with_seats=seats is not None,
        tile_parts=tile_parts,
        tile_groups=tile_groups,
        tile_group_size=tile_group_size,
        num_warps=min(8, max(1, tile_parts * tile_groups * tile_group_size // SUMS_PER_WARP)),
        **OPTIONS,
    )
    return Routes(expert_ids, weights)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _product_kernel(
    x: tl.tensor,
    router: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    tokens: tl.tensor,
    hidden: tl.constexpr,
    part: tl.constexpr,
    experts: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_experts: tl.constexpr,
    tile_in: tl.constexpr,
) -> None:
    wait_for_previous_launch()
    token = tl.program_id(0) * tile_tokens + tl.arange(0, tile_tokens)
    expert = tl.program_id(2) * tile_experts + tl.arange(0, tile_experts)
    first = tl.program_id(1) * part
    total = tl.zeros([tile_tokens, tile_experts], tl.float32)
    for start in range(0, part, tile_in):
        entry = first + start + tl.arange(0, tile_in)
        x_inside = (token < tokens)[:, None] & (entry < hidden)[None, :]
        router_inside = (expert < experts)[:, None] & (entry < hidden)[None, :]
        x_tile = tl.load(x + token.to(tl.int64)[:, None] * x_stride + entry[None, :], mask=x_inside, other=0)
        router_tile = tl.load(router + expert[:, None] * hidden + entry[None, :], mask=router_inside, other=0)
        total = tl.dot(x_tile.to(tl.float32), tl.trans(router_tile), total, input_precision="tf32x3")
    target = out + (tl.program_id(1) * tokens + token.to(tl.int64))[:, None] * experts + expert[None, :]
    tl.store(target, total, mask=(token < tokens)[:, None] & (expert < experts)[None, :])


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _select_kernel(
    partial: tl.tensor,
    correction: tl.tensor,
    seats: tl.tensor,
    expert_ids: tl.tensor,
    weights: tl.tensor,
    tokens: tl.tensor,
    scale: tl.tensor,
    parts: tl.constexpr,
    groups: tl.constexpr,
    group_size: tl.constexpr,
    topk_group: tl.constexpr,
    experts_per_token: tl.constexpr,
    normalise: tl.constexpr,
    with_seats: tl.constexpr,
    tile_parts: tl.constexpr,
    tile_groups: tl.constexpr,
    tile_group_size: tl.constexpr,
) -> None:
    """Selects the experts of one token.

    The scores are in a tile [groups, experts of a group] with both dimensions padded to powers of two. In the flattened
    tile, the ids of real experts ascend.
    """
    wait_for_previous_launch()
    token = tl.program_id(0).to(tl.int64)
    flat = tl.arange(0, tile_groups * tile_group_size)
    group, member = flat // tile_group_size, flat % tile_group_size
    expert = group * group_size + member
    real = (group < groups) & (member < group_size)
    part = tl.arange(0, tile_parts)[:, None]
    source = partial + (part * tokens + token) * (groups * group_size) + expert[None, :]
    logits = tl.sum(tl.load(source, mask=(part < parts) & real[None, :], other=0), 0)
    score = tl.sigmoid(logits)
    corrected = tl.where(real, score + tl.load(correction + expert, mask=real, other=0), float("-inf"))
    if groups > 1:
        by_group = tl.reshape(corrected, [tile_groups, tile_group_size])
        best = tl.max(by_group, 1)
        column_in_group = tl.arange(0, tile_group_size)[None, :]
        first_best = _first_true(by_group == best[:, None], column_in_group, tile_group_size, 1)
        others = tl.where(column_in_group == first_best[:, None], float("-inf"), by_group)
        allowed = _is_in_topk(best + tl.max(others, 1), topk_group, tile_groups)
        by_group = tl.where(allowed[:, None], by_group, float("-inf"))
        corrected = tl.reshape(by_group, [tile_groups * tile_group_size])
    if with_seats:
        corrected = tl.where(tl.load(seats + token) == _EMPTY, float("-inf"), corrected)
    selected = _is_in_topk(corrected, experts_per_token, tile_groups * tile_group_size) & (corrected > float("-inf"))
    weight = tl.where(selected, score, 0)
    if normalise:
        weight = weight / (tl.sum(weight, 0) + _SUM_EPSILON)
    column = tl.cumsum(selected.to(tl.int32), 0) - 1
    tl.store(expert_ids + token * experts_per_token + column, expert.to(tl.int64), mask=selected)
    tl.store(weights + token * experts_per_token + column, weight * scale, mask=selected)
    # A padding token selects no expert, and neither does a token whose scores are all NaN.
    unused = (flat >= tl.sum(selected.to(tl.int32), 0)) & (flat < experts_per_token)
    empty = tl.full([tile_groups * tile_group_size], _EMPTY, tl.int64)
    tl.store(expert_ids + token * experts_per_token + flat, empty, mask=unused)
    zeros = tl.zeros([tile_groups * tile_group_size], tl.float32)
    tl.store(weights + token * experts_per_token + flat, zeros, mask=unused)


@triton.jit  # type: ignore[untyped-decorator]
def _is_in_topk(scores: tl.tensor, k: tl.constexpr, size: tl.constexpr) -> tl.tensor:
    """Returns for each of `size` scores whether it is among the k largest. Of equal scores, the earlier wins."""
    index = tl.arange(0, size)
    taken = index < 0
    for _ in range(k):
        remaining = tl.where(taken, float("-inf"), scores)
        taken = taken | (index == _first_true(remaining == tl.max(remaining, 0), index, size, 0))
    return taken


@triton.jit  # type: ignore[untyped-decorator]
def _first_true(condition: tl.tensor, index: tl.tensor, size: tl.constexpr, axis: tl.constexpr) -> tl.tensor:
    return tl.min(tl.where(condition, index, size), axis)
