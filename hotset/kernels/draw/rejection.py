"""The specification of accept_or_replace: rejection sampling.

Drafts are drawn from the drafting layer's distribution q. A draft is accepted with probability min(1, p / q), where p
is the model's distribution. Otherwise its token is drawn from what p has more than q. The share of accepted drafts is
sum(min(p, q)), and no method can accept more without changing p.

Probabilities are integers, like the weights of `draw` and for the same reason.
"""

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.draw.random_numbers import uniforms
from hotset.kernels.draw.reference import DrawRules, kept_weights

# Added to positions, so that drafts, their acceptance and their replacements have independent random numbers.
DRAWS_DRAFT, ACCEPTS, REPLACES = (number << 40 for number in (1, 2, 3))
SHARE_ONE = 1 << 52  # probabilities are in units of 1 / SHARE_ONE


def accept_or_replace(
    x: Tensor, draft_logits: Tensor, drafts: Tensor, rules: DrawRules, keys: Tensor, positions: Tensor, truncated: bool
) -> Tensor:
    """See the op."""
    p, q = (_shares(kept_weights(logits, rules, truncated=truncated)) for logits in (x, draft_logits))
    of_draft = drafts.clamp_min(0)[:, None]
    p_of_draft, q_of_draft = (shares.gather(1, of_draft)[:, 0].to(torch.float64) for shares in (p, q))
    more_of_p = (p - q).clamp_min_(0).cumsum(1)
    total = more_of_p[:, -1]
    accepted = (uniforms(keys, positions + ACCEPTS) * q_of_draft < p_of_draft) | (total == 0)
    target = (uniforms(keys, positions + REPLACES) * total).to(torch.int64).minimum(total - 1)
    replaced = torch.searchsorted(more_of_p, target[:, None], right=True)[:, 0].clamp_max(x.shape[1] - 1)
    tokens = torch.where(accepted, drafts, replaced)
    return torch.where((p.amax(1) == 0) & (drafts != EMPTY), 0, tokens)


def _shares(weights: Tensor) -> Tensor:
    """Returns the probabilities of tokens, rounded down, [n, vocab] int64."""
    shares_per_weight = SHARE_ONE / weights.sum(1, keepdim=True).clamp_min(1).to(torch.float64)
    return weights.to(torch.float64).mul_(shares_per_weight).to(torch.int64)
