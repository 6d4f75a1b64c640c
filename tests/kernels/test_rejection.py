"""Rejection sampling: tokens have the model's distribution, and as many drafts are accepted as that allows."""

import pytest
import torch
from torch import Tensor

from hotset.kernels.draw import DRAWS_DRAFT, WEIGHT_ONE, DrawRules, accept_or_replace, draw, draw_key
from hotset.kernels.draw.reference import draw as draw_by
from hotset.kernels.draw.reference import kept_weights

RULES = {  # temperature, top_k, top_p, min_p
    "all tokens": (1.0, 12, 1.0, 0.0),
    "low temperature": (0.4, 12, 1.0, 0.0),
    "top_k": (1.0, 5, 1.0, 0.0),
    "top_p": (1.3, 12, 0.7, 0.0),
    "min_p": (1.0, 12, 1.0, 0.1),
    "all of them": (0.8, 6, 0.9, 0.02),
}
VOCAB = 12
with_each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
Rule = tuple[float, int, float, float]


def rules_of(rule: Rule, rows: int) -> DrawRules:
    temperature, top_k, top_p, min_p = rule
    whole, floats = torch.ones(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.float64)
    return DrawRules(floats * temperature, whole * top_k, floats * top_p, whole * int(min_p * WEIGHT_ONE))


def truncates(rule: Rule) -> bool:
    return rule[1:] != (VOCAB, 1.0, 0.0)


def random_logits(seed: int) -> Tensor:
    logits = 1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[4] = logits[7]  # tied
    return logits


@with_each_rule
def test_kept_weights_are_those_with_which_tokens_are_drawn(rule: Rule) -> None:
    """Each token with a weight is drawn by a random number in the middle of its share, and their sum is the whole."""
    x = random_logits(3)
    (weights,) = kept_weights(x[None], rules_of(rule, 1), truncated=truncates(rule))
    order = sorted(range(VOCAB), key=lambda token: (-x[token], token))
    before, total = 0, int(weights.sum())
    for token in order:
        weight = int(weights[token])
        if weight:
            uniform = torch.tensor([(before + weight / 2) / total], dtype=torch.float64)
            assert int(draw_by(x[None], rules_of(rule, 1), uniform)) == token
        before += weight
    grid = torch.linspace(0, 1 - 1e-9, 4000, dtype=torch.float64)
    drawn = draw_by(x.expand(4000, -1), rules_of(rule, 4000), grid)
    assert {*drawn.tolist()} <= {token for token in range(VOCAB) if weights[token] > 0}


@with_each_rule
def test_tokens_have_the_distribution_of_the_model(rule: Rule) -> None:
    n = 200_000
    p_logits, q_logits = random_logits(1), random_logits(2)
    rules = rules_of(rule, n)
    keys = torch.tensor([draw_key(5)]) + torch.arange(n) * 7919
    positions = torch.arange(n) % 100
    drafts = draw(q_logits.expand(n, -1), rules, keys, positions + DRAWS_DRAFT)
    tokens = accept_or_replace(
        p_logits.expand(n, -1), q_logits.expand(n, -1), drafts, rules, keys, positions, truncated=truncates(rule)
    )
    p, q = (
        weights[0] / weights.sum()
        for weights in (kept_weights(x[None], rules_of(rule, 1), truncated=True) for x in (p_logits, q_logits))
    )
    for counted, expected in ((tokens, p), (drafts, q)):
        share = torch.bincount(counted, minlength=VOCAB) / n
        deviation = (expected * (1 - expected) / n).sqrt()
        assert ((share - expected).abs() <= 5 * deviation + 1e-12).all(), (share, expected)
    most = float(torch.minimum(p, q).sum())
    accepted = float((tokens == drafts).double().mean())
    assert abs(accepted - most) <= 5 * (most * (1 - most) / n) ** 0.5, (accepted, most)
