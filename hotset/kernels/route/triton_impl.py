"""route in Triton: the product with the router, cut along `hidden`; then a program per row adds it up and chooses.

The router is float32. Each factor is cut into two tf32 parts, whose products are as exact as float32's own. The cut of
`hidden` depends on nothing else, so a row gets the same bits in every batch up to `MAX_ROWS`; above, torch multiplies.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels import EMPTY
from hotset.kernels.route.reference import SMALLEST_SUM
from hotset.kernels.route.rule import Routes, RoutingRule

MAX_ROWS = 1024  # for which the product is made here
PARTS = 32  # that `hidden` is cut into, at most
TILE_ROWS, TILE_EXPERTS, TILE_IN = 16, 64, 64  # what one program of the product makes, so many terms at a time
SUMS_PER_WARP = 2048  # partial sums that a warp of the second kernel holds: 64 registers
OPTIONS = {"enable_fp_fusion": True}  # Triton 3.9 warns where this is left open

_EMPTY = tl.constexpr(EMPTY)
_SMALLEST_SUM = tl.constexpr(SMALLEST_SUM)


def route(x: Tensor, router: Tensor, correction: Tensor, rule: RoutingRule, seats: Tensor | None) -> Routes:
    if x.shape[0] > MAX_ROWS:
        return choose(F.linear(x.to(router.dtype), router)[None], correction, rule, seats)
    return choose(partial_logits(x, router), correction, rule, seats)


def partial_logits(x: Tensor, router: Tensor) -> Tensor:  # [parts, rows, experts] float32: their sum is the logits
    (rows, hidden), experts = x.shape, router.shape[0]
    part = triton.cdiv(triton.cdiv(hidden, PARTS), TILE_IN) * TILE_IN
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(triton.cdiv(hidden, part), rows, experts, dtype=torch.float32, device=x.device)
    tile_experts = min(TILE_EXPERTS, max(16, triton.next_power_of_2(experts)))
    _product_kernel[(triton.cdiv(rows, TILE_ROWS), out.shape[0], triton.cdiv(experts, tile_experts))](
        *(x, router.contiguous(), out, x.stride(0), rows),
        hidden=hidden,
        part=part,
        experts=experts,
        tile_rows=TILE_ROWS,
        tile_experts=tile_experts,
        tile_in=TILE_IN,
        num_warps=4,
        **OPTIONS,
    )
    return out


def choose(
    partial: Tensor,  # [parts, rows, experts]
    correction: Tensor,
    rule: RoutingRule,
    seats: Tensor | None,
) -> Routes:
    parts, rows, experts = partial.shape
    chosen = torch.empty(rows, rule.chosen, dtype=torch.int64, device=partial.device)
    weights = torch.empty(rows, rule.chosen, dtype=torch.float32, device=partial.device)
    group_size = experts // rule.groups
    tile = triton.next_power_of_2(rule.groups), triton.next_power_of_2(group_size)
    tile_parts = triton.next_power_of_2(parts)
    _choose_kernel[(rows,)](
        *(partial.contiguous(), correction.contiguous(), chosen if seats is None else seats.contiguous()),
        *(chosen, weights, rows, rule.scale),
        parts=parts,
        groups=rule.groups,
        group_size=group_size,
        chosen_groups=rule.chosen_groups,
        count=rule.chosen,
        normalise=rule.normalise,
        with_seats=seats is not None,
        tile_parts=tile_parts,
        tile_groups=tile[0],
        tile_size=tile[1],
        num_warps=min(8, max(1, tile_parts * tile[0] * tile[1] // SUMS_PER_WARP)),
        **OPTIONS,
    )
    return Routes(chosen, weights)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _product_kernel(
    x: tl.tensor,
    router: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    rows: tl.tensor,
    hidden: tl.constexpr,
    part: tl.constexpr,
    experts: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_experts: tl.constexpr,
    tile_in: tl.constexpr,
) -> None:
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    expert = tl.program_id(2) * tile_experts + tl.arange(0, tile_experts)
    first = tl.program_id(1) * part
    total = tl.zeros([tile_rows, tile_experts], tl.float32)
    for start in range(0, part, tile_in):
        entry = first + start + tl.arange(0, tile_in)
        x_there = (row < rows)[:, None] & (entry < hidden)[None, :]
        router_there = (expert < experts)[:, None] & (entry < hidden)[None, :]
        x_part = tl.load(x + row.to(tl.int64)[:, None] * x_stride + entry[None, :], mask=x_there, other=0)
        router_part = tl.load(router + expert[:, None] * hidden + entry[None, :], mask=router_there, other=0)
        total = tl.dot(x_part.to(tl.float32), tl.trans(router_part), total, input_precision="tf32x3")
    at = out + (tl.program_id(1) * rows + row.to(tl.int64))[:, None] * experts + expert[None, :]
    tl.store(at, total, mask=(row < rows)[:, None] & (expert < experts)[None, :])


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _choose_kernel(
    partial: tl.tensor,
    correction: tl.tensor,
    seats: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    rows: tl.tensor,
    scale: tl.tensor,
    parts: tl.constexpr,
    groups: tl.constexpr,
    group_size: tl.constexpr,
    chosen_groups: tl.constexpr,
    count: tl.constexpr,
    normalise: tl.constexpr,
    with_seats: tl.constexpr,
    tile_parts: tl.constexpr,
    tile_groups: tl.constexpr,
    tile_size: tl.constexpr,
) -> None:
    """Experts lie in a tile of groups x experts of a group, each padded to a power of two: flat, they ascend by id."""
    row = tl.program_id(0).to(tl.int64)
    flat = tl.arange(0, tile_groups * tile_size)
    group, member = flat // tile_size, flat % tile_size
    expert = group * group_size + member
    real = (group < groups) & (member < group_size)
    part = tl.arange(0, tile_parts)[:, None]
    at = partial + (part * rows + row) * (groups * group_size) + expert[None, :]
    logits = tl.sum(tl.load(at, mask=(part < parts) & real[None, :], other=0), 0)
    score = tl.sigmoid(logits)
    corrected = tl.where(real, score + tl.load(correction + expert, mask=real, other=0), float("-inf"))
    if groups > 1:
        by_group = tl.reshape(corrected, [tile_groups, tile_size])
        best = tl.max(by_group, 1)
        first_best = _first_of(by_group == best[:, None], tl.arange(0, tile_size)[None, :], tile_size, 1)
        others = tl.where(tl.arange(0, tile_size)[None, :] == first_best[:, None], float("-inf"), by_group)
        allowed = _best(best + tl.max(others, 1), chosen_groups, tile_groups)
        by_group = tl.where(allowed[:, None], by_group, float("-inf"))
        corrected = tl.reshape(by_group, [tile_groups * tile_size])
    if with_seats:
        corrected = tl.where(tl.load(seats + row) == _EMPTY, float("-inf"), corrected)
    taken = _best(corrected, count, tile_groups * tile_size) & (corrected > float("-inf"))
    weight = tl.where(taken, score, 0)
    if normalise:
        weight = weight / (tl.sum(weight, 0) + _SMALLEST_SUM)
    column = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(chosen + row * count + column, expert.to(tl.int64), mask=taken)
    tl.store(weights + row * count + column, weight * scale, mask=taken)
    # A padded row takes none; nor does one whose scores are no numbers.
    left = (flat >= tl.sum(taken.to(tl.int32), 0)) & (flat < count)
    tl.store(chosen + row * count + flat, tl.full([tile_groups * tile_size], _EMPTY, tl.int64), mask=left)
    tl.store(weights + row * count + flat, tl.zeros([tile_groups * tile_size], tl.float32), mask=left)


@triton.jit  # type: ignore[untyped-decorator]
def _best(scores: tl.tensor, count: tl.constexpr, size: tl.constexpr) -> tl.tensor:
    """Whether each of `size` scores is among the `count` largest; of equals the earlier."""
    index = tl.arange(0, size)
    taken = index < 0
    for _ in range(count):
        left = tl.where(taken, float("-inf"), scores)
        taken = taken | (index == _first_of(left == tl.max(left, 0), index, size, 0))
    return taken


@triton.jit  # type: ignore[untyped-decorator]
def _first_of(which: tl.tensor, index: tl.tensor, size: tl.constexpr, axis: tl.constexpr) -> tl.tensor:
    return tl.min(tl.where(which, index, size), axis)
