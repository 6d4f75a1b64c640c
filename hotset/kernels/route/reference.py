"""The specification of route, and its types."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels import EMPTY
from hotset.kernels.stable_topk import stable_topk

SUM_EPSILON = 1e-20  # is added to the sum of a token's weights, because all of them may be 0


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """The rule that selects `experts_per_token` experts from the best `topk_group` of `groups` groups of equal size.

    The reader of a model's configuration checks that the numbers go together.
    """

    experts: int
    experts_per_token: int
    groups: int = 1
    topk_group: int = 1
    normalise: bool = True  # the weights of a token sum to 1 before they are scaled
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of each token and their weights."""

    expert_ids: Tensor  # [tokens, experts per token] int64, ascending, EMPTY-padded; all EMPTY for a padding token
    weights: Tensor  # [tokens, experts per token], in the router's dtype; 0 where the expert is EMPTY


def route(x: Tensor, router: Tensor, correction: Tensor, rule: RoutingRule, seats: Tensor | None) -> Routes:
    return select_experts(F.linear(x.to(router.dtype), router), correction, rule, seats)


def select_experts(
    logits: Tensor,  # [tokens, experts]
    correction: Tensor,
    rule: RoutingRule,
    seats: Tensor | None,
) -> Routes:
    scores = torch.sigmoid(logits)
    corrected = scores + correction
    corrected = corrected.masked_fill(corrected.isnan(), float("-inf"))
    if rule.groups > 1:
        by_group = corrected.view(-1, rule.groups, rule.experts // rule.groups)
        group_scores = by_group.topk(2, dim=-1).values.sum(-1)
        best_groups = stable_topk(group_scores, rule.topk_group)
        # Column 0 receives EMPTY (-1), which takes the place of groups without two finite scores.
        excluded = torch.ones(len(logits), rule.groups + 1, dtype=torch.bool, device=logits.device)
        excluded = excluded.scatter_(1, best_groups + 1, False)[:, 1:]
        corrected = by_group.masked_fill(excluded[:, :, None], float("-inf")).view_as(corrected)
    expert_ids = stable_topk(corrected, rule.experts_per_token)
    weights = scores.gather(1, expert_ids.clamp_min(0)).masked_fill(expert_ids == EMPTY, 0.0)
    if rule.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + SUM_EPSILON)
    weights = weights * rule.scale
    if seats is None:
        return Routes(expert_ids, weights)
    padding = (seats == EMPTY)[:, None]
    return Routes(expert_ids.masked_fill(padding, EMPTY), weights.masked_fill(padding, 0.0))
