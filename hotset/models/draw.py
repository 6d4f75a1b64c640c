"""The draw: from adjusted logits to one token per row.

Probabilities are whole numbers here: a token's weight is its probability relative to the row's likeliest token, in
units of 1 / WEIGHT_ONE. Sums of whole numbers do not depend on the order of addition, so a row's draw is the same
alone and in a batch, and the same whichever kernel adds up.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT_ONE = 1 << 40  # a vocabulary of 2^22 tokens still sums to less than 2^63
LISTED = 512  # most draws end among so few leading tokens, and finding them is far cheaper than sorting all


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_STRIDE = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def _mixed(words: Tensor) -> Tensor:
    """The finaliser of SplitMix64 over int64 words, with wrap-around and logical shifts."""
    for shift, factor in _ROUNDS:
        words = (words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return words ^ ((words >> 31) & ((1 << 33) - 1))


def draw_key(seed: int) -> int:
    """The word that stands for a seed in `uniforms`: neighbouring seeds get unrelated words."""
    return int(_mixed(torch.tensor([seed], dtype=torch.int64)).item())


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) per row, [n] float64, a function of key and position only: the same on every device."""
    words = _mixed(keys + positions * _STRIDE)
    return ((words >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class DrawRules:
    """What narrows each row's draw. A greedy row has temperature 1 and top_k 1."""

    temperature: Tensor  # [n] float64, above 0
    top_k: Tensor  # [n] int64, in [1, vocab]
    top_p: Tensor  # [n] float64, in (0, 1]
    least_weight: Tensor  # [n] int64: min_p in units of 1 / WEIGHT_ONE, rounded up

    def rows(self, index: Tensor) -> "DrawRules":
        return DrawRules(self.temperature[index], self.top_k[index], self.top_p[index], self.least_weight[index])


@dataclass(frozen=True, slots=True)
class _Listing:
    """The first tokens of each row by descending logit, ties by ascending id: a prefix of the stable sort."""

    values: Tensor  # [n, listed]
    ids: Tensor  # [n, listed] int64


def leading(x: Tensor, count: int) -> _Listing:
    """The first `count` columns of a stable descending sort of `x` [n, vocab], without sorting all of it. No NaN."""
    n, vocab = x.shape
    if count >= vocab:
        ordered = x.sort(dim=-1, descending=True, stable=True)
        return _Listing(ordered.values, ordered.indices)
    # topk fixes the values, but among equals at the cut it may take any: there the lowest ids fill the places left.
    cut = x.topk(count, dim=-1).values[:, -1:]
    above, level = x > cut, x == cut
    places = count - above.sum(dim=-1, keepdim=True)
    taken = above | (level & (level.cumsum(dim=-1) <= places))
    ids = torch.nonzero_static(taken, size=n * count)[:, 1].view(n, count)  # ascending in each row
    ordered = x.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return _Listing(ordered.values, ids.gather(-1, ordered.indices))


def _weights(values: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    # The difference comes before the division: a small temperature then overflows to -inf, never to inf or NaN.
    # A row without any finite logit has a top of -inf; against the least number all its weights are 0.
    scaled = (values - top.clamp(min=torch.finfo(values.dtype).min)) / temperature.unsqueeze(-1).to(values.dtype)
    return (scaled.exp() * WEIGHT_ONE).to(torch.int64)


def _choose(
    listing: _Listing, rules: DrawRules, uniform: Tensor, vocab: int, total: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Tokens [n] and whether each is certain [n] bool. `total` [n, 1]: weight of the whole row; None: all that counts
    is listed.

    top_k, top_p and min_p each keep a prefix of the sorted tokens, so together they keep the shortest. A draw is
    uncertain when top_k cuts, that prefix ends, or the token drawn lies, beyond the listing.
    """
    weights = _weights(listing.values, listing.values[:, :1], rules.temperature)
    mass = weights.cumsum(dim=-1)  # [n, listed]
    listed = mass.shape[-1]
    top_k, top_p = rules.top_k.unsqueeze(-1), rules.top_p.unsqueeze(-1)
    whole = mass[:, -1:] if total is None else total
    base = torch.where(top_k <= listed, mass.gather(-1, top_k.clamp(max=listed) - 1), whole)
    # At most base, so that top_k's cut is in it; float64 may round a large base up or down.
    nucleus = torch.where(top_p >= 1.0, base, (top_p * base).ceil().to(torch.int64).minimum(base))
    kept = (mass - weights < nucleus) & (weights >= rules.least_weight.unsqueeze(-1))
    survivors = kept.sum(dim=-1, keepdim=True).clamp(min=1)
    closed = (survivors < listed) | (top_k <= listed)
    kept_mass = torch.where(closed, mass.gather(-1, survivors - 1), base)
    target = (uniform.unsqueeze(-1) * kept_mass).to(torch.int64).minimum(kept_mass - 1)
    place = torch.searchsorted(mass, target, right=True)
    tokens = listing.ids.gather(-1, place.clamp(max=listed - 1))
    untruncated = (top_k >= vocab) & (top_p >= 1.0) & (rules.least_weight.unsqueeze(-1) == 0)
    base_known = (top_k <= listed) | (top_k >= vocab)
    certain = base_known & (closed | (untruncated & (place < listed)))
    return tokens.squeeze(-1), certain.squeeze(-1)


def draw(x: Tensor, rules: DrawRules, uniform: Tensor, *, narrow: bool) -> Tensor:
    """One token per row of `x` [n, vocab]: inverse CDF at `uniform` [n] over the surviving tokens, likeliest first.

    `narrow` promises that every top_k is at most LISTED. No NaN and no inf in `x`; a row of -inf alone gives token 0.
    A CUDA device never waits for the host: there rows that are not narrow are sorted whole.
    """
    vocab = x.shape[-1]
    if vocab <= LISTED or (x.is_cuda and not narrow):
        return _choose(leading(x, vocab), rules, uniform, vocab, None)[0]
    listing = leading(x, LISTED)
    if narrow:
        return _choose(listing, rules, uniform, vocab, None)[0]
    total = _weights(x, listing.values[:, :1], rules.temperature).sum(dim=-1, keepdim=True)
    tokens, certain = _choose(listing, rules, uniform, vocab, total)
    if bool(certain.all()):
        return tokens
    late = (~certain).nonzero().squeeze(-1)
    tokens[late] = _choose(leading(x[late], vocab), rules.rows(late), uniform[late], vocab, None)[0]
    return tokens
