"""Rejection sampling: tokens have the distribution of the model's logits, although they are drafts where possible.

Drafts are drawn from the drafting layer's distribution q. A draft is accepted with probability min(1, p / q), where p
is the model's distribution. Otherwise its token is drawn from what p has more than q. The share of accepted drafts is
sum(min(p, q)), and no method can accept more without changing p.
"""

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.draw.random_numbers import uniforms
from hotset.kernels.draw.reference import DrawRules, kept_weights

# Added to positions, so that drafts, their acceptance and their replacements have independent random numbers.
DRAWS_DRAFT, ACCEPTS, REPLACES = (number << 40 for number in (1, 2, 3))


def accept_or_replace(
    x: Tensor,  # [n, vocab]: the model's logits
    draft_logits: Tensor,  # [n, vocab]: the logits from which drafts were drawn, at positions + DRAWS_DRAFT
    drafts: Tensor,  # [n] int64
    rules: DrawRules,  # of both draws
    keys: Tensor,
    positions: Tensor,  # of the tokens, not of the drafts' random numbers
    *,
    truncated: bool,  # see `kept_weights`
) -> Tensor:  # [n] int64
    """Returns the tokens: drafts that are accepted, and replacements of the others. The token of a draft that is EMPTY
    has no meaning."""
    p, q = (_probabilities(kept_weights(logits, rules, truncated=truncated)) for logits in (x, draft_logits))
    of_draft = drafts.clamp_min(0)[:, None]
    p_of_draft, q_of_draft = (probabilities.gather(1, of_draft)[:, 0] for probabilities in (p, q))
    accepted = (drafts != EMPTY) & (uniforms(keys, positions + ACCEPTS) * q_of_draft < p_of_draft)
    left = (p - q).clamp_min_(0.0).cumsum(1)
    target = uniforms(keys, positions + REPLACES)[:, None] * left[:, -1:]
    replaced = torch.searchsorted(left, target, right=True)[:, 0].clamp_max(x.shape[1] - 1)
    return torch.where(accepted, drafts, replaced)


def _probabilities(weights: Tensor) -> Tensor:
    return weights.to(torch.float64) / weights.sum(1, keepdim=True).clamp_min(1)
