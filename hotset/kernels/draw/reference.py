"""The specification of draw.

Probabilities are represented by integers: the weight of a token is its probability relative to the request's likeliest
token, in units of 1 / WEIGHT_ONE. Sums of integers do not depend on the order of addition, which differs between batch
sizes and devices. The exponential function is our own, in operations that IEEE 754 rounds correctly, because those of
libraries differ. Therefore a request's draw depends neither on its batch nor on the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT_ONE = 1 << 40
MAX_HALVINGS = 63.0  # a weight is 0 from 41 halvings on
LOG2_E = 1.4426950408889634
# ln(2)^i / i!: the Taylor coefficients of 2^r. For r in [-0.5, 0.5] the relative error of the sum is at most 3e-10.
POWER_OF_TWO = (
    1.0,
    0.6931471805599453,
    0.24022650695910072,
    0.05550410866482158,
    0.009618129107628477,
    0.0013333558146428443,
    0.0001540353039338161,
    1.5252733804059841e-05,
    1.321548679014431e-06,
)
SHORTLIST_TOKENS = 512  # most draws end within these leading tokens, and finding them is far cheaper than a full sort


@dataclass(frozen=True, slots=True)
class DrawRules:
    """The sampling parameters of each request. A greedy request has temperature 1 and top_k 1."""

    temperature: Tensor  # [n] float64, above 0
    top_k: Tensor  # [n] int64, in [1, vocab]
    top_p: Tensor  # [n] float64, in (0, 1]
    min_weight: Tensor  # [n] int64: min_p in units of 1 / WEIGHT_ONE, rounded up

    @property
    def columns(self) -> tuple[Tensor, ...]:
        return self.temperature, self.top_k, self.top_p, self.min_weight

    def of(self, index: Tensor) -> "DrawRules":
        return DrawRules(*(column[index] for column in self.columns))


@dataclass(frozen=True, slots=True)
class _Shortlist:
    """The leading tokens of each request by descending logit, ties by ascending id: a prefix of the stable sort."""

    values: Tensor  # [n, length]
    ids: Tensor  # [n, length] int64


def leading(x: Tensor, count: int) -> _Shortlist:
    """Returns the first `count` columns of a stable descending sort of `x`, without sorting all of it.

    `x` contains no NaN.
    """
    n, vocab = x.shape
    if count >= vocab:
        ordered = x.sort(dim=-1, descending=True, stable=True)
        return _Shortlist(ordered.values, ordered.indices)
    # topk may return any of the tokens that are tied at the threshold. The lowest ids among them must fill the places
    # that remain.
    threshold = x.topk(count, dim=-1).values[:, -1:]
    above, tied = x > threshold, x == threshold
    remaining = count - above.sum(dim=-1, keepdim=True)
    is_leading = above | (tied & (tied.cumsum(dim=-1) <= remaining))
    ids = torch.nonzero_static(is_leading, size=n * count)[:, 1].view(n, count)  # ascending for each request
    ordered = x.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return _Shortlist(ordered.values, ids.gather(-1, ordered.indices))


def weights_of(values: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Returns WEIGHT_ONE * exp((values - top) / temperature), rounded down, [n, m] int64.

    `top` [n, 1] is the largest logit of a request. Its weight is WEIGHT_ONE. A smaller float32 logit never has a larger
    weight. If all logits of a request are -inf, all weights are 0.
    """
    # A small temperature can make a number of halvings inf, but never NaN.
    distance = top.clamp(min=torch.finfo(values.dtype).min) - values
    halvings = distance.to(torch.float64).mul_((LOG2_E / temperature).unsqueeze(-1)).clamp_(max=MAX_HALVINGS)
    whole = halvings.round()
    rest = halvings.neg_().add_(whole)  # in [-0.5, 0.5], exact
    power = torch.full_like(rest, POWER_OF_TWO[-1])
    for coefficient in reversed(POWER_OF_TWO[:-1]):
        power.mul_(rest).add_(coefficient)
    return power.mul_(WEIGHT_ONE).to(torch.int64).bitwise_right_shift_(whole.to(torch.int64))


def _nucleus(top_k_weight: Tensor, top_p: Tensor) -> Tensor:
    """Returns the weight that top_p keeps of the weight of the top_k tokens."""
    # float64 may round the product to more than that weight, which would keep tokens beyond top_k.
    kept = (top_p * top_k_weight).ceil().to(torch.int64).minimum(top_k_weight)
    return torch.where(top_p >= 1.0, top_k_weight, kept)


def kept_weights(x: Tensor, rules: DrawRules, *, truncated: bool) -> Tensor:
    """Returns the weights with which `draw` draws each token, [n, vocab] int64: 0 for those that the rules exclude.

    If not `truncated`, top_k, top_p and min_p exclude nothing, and nothing is sorted.
    """
    if not truncated:
        return weights_of(x, x.amax(-1, keepdim=True), rules.temperature)
    ordered = x.sort(dim=-1, descending=True, stable=True)
    weights = weights_of(ordered.values, ordered.values[:, :1], rules.temperature)
    mass = weights.cumsum(dim=-1)
    nucleus = _nucleus(mass.gather(-1, rules.top_k.unsqueeze(-1) - 1), rules.top_p.unsqueeze(-1))
    kept = (mass - weights < nucleus) & (weights >= rules.min_weight.unsqueeze(-1))
    kept[:, 0] = True
    return torch.zeros_like(weights).scatter_(-1, ordered.indices, weights * kept)


def _choose(
    shortlist: _Shortlist, rules: DrawRules, uniform: Tensor, vocab: int, total: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns tokens [n] and whether each is surely the right one, [n] bool.

    `total` [n, 1] is the weight of all tokens of a request; None means that the shortlist holds every token that can be
    drawn. top_k, top_p and min_p each keep a prefix of the sorted tokens, so together they keep the shortest of these
    prefixes. A draw is unsure if the shortlist is too short to determine the weight of the top_k tokens, the end of
    the kept prefix, or the drawn token.
    """
    weights = weights_of(shortlist.values, shortlist.values[:, :1], rules.temperature)
    mass = weights.cumsum(dim=-1)  # [n, length]
    length = mass.shape[-1]
    top_k, top_p = rules.top_k.unsqueeze(-1), rules.top_p.unsqueeze(-1)
    vocab_weight = mass[:, -1:] if total is None else total
    top_k_weight = torch.where(top_k <= length, mass.gather(-1, top_k.clamp(max=length) - 1), vocab_weight)
    nucleus = _nucleus(top_k_weight, top_p)
    kept = (mass - weights < nucleus) & (weights >= rules.min_weight.unsqueeze(-1))
    survivors = kept.sum(dim=-1, keepdim=True).clamp(min=1)
    has_all_kept = (survivors < length) | (top_k <= length)  # the kept prefix ends within the shortlist
    kept_mass = torch.where(has_all_kept, mass.gather(-1, survivors - 1), top_k_weight)
    target = (uniform.unsqueeze(-1) * kept_mass).to(torch.int64).minimum(kept_mass - 1)
    place = torch.searchsorted(mass, target, right=True)
    tokens = shortlist.ids.gather(-1, place.clamp(max=length - 1))
    untruncated = (top_k >= vocab) & (top_p >= 1.0) & (rules.min_weight.unsqueeze(-1) == 0)
    knows_top_k_weight = (top_k <= length) | (top_k >= vocab)
    is_sure = knows_top_k_weight & (has_all_kept | (untruncated & (place < length)))
    return tokens.squeeze(-1), is_sure.squeeze(-1)


def draw(x: Tensor, rules: DrawRules, uniform: Tensor) -> Tensor:
    """Draws from shortlists where that is sure. On a CUDA device, sorts all logits instead: to test whether a draw is
    sure, the host would have to wait for the device."""
    vocab = x.shape[-1]
    if vocab <= SHORTLIST_TOKENS or x.is_cuda:
        return _choose(leading(x, vocab), rules, uniform, vocab, None)[0]
    shortlist = leading(x, SHORTLIST_TOKENS)
    if bool((rules.top_k <= SHORTLIST_TOKENS).all()):
        return _choose(shortlist, rules, uniform, vocab, None)[0]
    total = weights_of(x, shortlist.values[:, :1], rules.temperature).sum(dim=-1, keepdim=True)
    tokens, is_sure = _choose(shortlist, rules, uniform, vocab, total)
    if bool(is_sure.all()):
        return tokens
    unsure = (~is_sure).nonzero().squeeze(-1)
    tokens[unsure] = _choose(leading(x[unsure], vocab), rules.of(unsure), uniform[unsure], vocab, None)[0]
    return tokens
