"""The specification of route."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels import EMPTY
from hotset.kernels.route.rule import Routes, RoutingRule
from hotset.kernels.stable_topk import stable_topk

SMALLEST_SUM = 1e-20  # added to the sum of a row's weights, which may all be 0


def route(x: Tensor, router: Tensor, correction: Tensor, rule: RoutingRule, seats: Tensor | None) -> Routes:
    return choose(F.linear(x.to(router.dtype), router), correction, rule, seats)


def choose(
    logits: Tensor,  # [rows, experts]
    correction: Tensor,
    rule: RoutingRule,
    seats: Tensor | None,
) -> Routes:
    scores = torch.sigmoid(logits)
    corrected = scores + correction
    if rule.groups > 1:
        by_group = corrected.view(-1, rule.groups, rule.experts // rule.groups)
        group_scores = by_group.topk(2, dim=-1).values.sum(-1)
        best_groups = stable_topk(group_scores, rule.chosen_groups)
        barred = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best_groups, False)
        corrected = by_group.masked_fill(barred[:, :, None], float("-inf")).view_as(corrected)
    chosen = stable_topk(corrected, rule.chosen)
    weights = scores.gather(1, chosen.clamp_min(0)).masked_fill(chosen == EMPTY, 0.0)
    if rule.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
    weights = weights * rule.scale
    if seats is None:
        return Routes(chosen, weights)
    padded = (seats == EMPTY)[:, None]
    return Routes(chosen.masked_fill(padded, EMPTY), weights.masked_fill(padded, 0.0))
