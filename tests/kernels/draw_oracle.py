"""Draws one token with Python's integers and floats and a full sort: an independent version of the op `draw`.

Its weights equal those of the specification bit by bit, so tokens can be compared without a margin.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.kernels.draw import WEIGHT_ONE, DrawRules
from hotset.kernels.draw.reference import POWER_OF_TWO


@dataclass(frozen=True)
class Rule:
    """The parameters and the random number of one request."""

    temperature: float = 1.0
    top_k: int | None = None  # None: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.5

    @property
    def min_weight(self) -> int:
        return math.ceil(self.min_p * WEIGHT_ONE)


def weight_of(distance: float, temperature: float) -> int:
    """Returns WEIGHT_ONE * exp(-distance / temperature), rounded down."""
    halvings = min(distance * (1.4426950408889634 / temperature), 63.0)
    whole = round(halvings)
    power = 0.0
    for coefficient in reversed(POWER_OF_TWO):
        power = power * (whole - halvings) + coefficient
    return int(power * WEIGHT_ONE) >> whole


def kept_tokens(row: Tensor, rule: Rule) -> dict[int, int]:
    """Returns the weights of the tokens that a rule keeps, likeliest first. There are none if all logits are -inf."""
    x = row.tolist()
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if x[order[0]] == -math.inf:
        return {}
    distances = (row[order[0]] - row).tolist()  # rounded to the dtype of the logits
    weights = {token: weight_of(distances[token], rule.temperature) for token in order[: rule.top_k]}
    base = sum(weights.values())
    nucleus = base if rule.top_p >= 1.0 else min(base, math.ceil(rule.top_p * base))
    kept: dict[int, int] = {}
    mass = 0
    for token, weight in weights.items():
        if mass >= nucleus or weight < rule.min_weight:
            break
        kept[token] = weight
        mass += weight
    return kept


def token_of(row: Tensor, rule: Rule) -> int:
    """Returns the token that is drawn from one request's logits [vocab]."""
    kept = kept_tokens(row, rule)
    return _token_at(kept, rule.uniform) if kept else 0


def verified_token_of(row: Tensor, draft_row: Tensor, draft: int, rule: Rule, accepts: float, replaces: float) -> int:
    """Returns the token in the place of `draft`, which was drawn from `draft_row`. Its random numbers are `accepts` and
    `replaces`."""
    p, q = (shares_of(kept_tokens(x, rule)) for x in (row, draft_row))
    if not p:
        return 0
    more = {token: p[token] - q.get(token, 0) for token in sorted(p) if p[token] > q.get(token, 0)}
    if accepts * q.get(draft, 0) < p.get(draft, 0) or not more:
        return draft
    return _token_at(more, replaces)


def shares_of(weights: dict[int, int]) -> dict[int, int]:
    """Returns the probabilities of tokens, in units of 2^-52."""
    total = sum(weights.values())
    return {token: int(weight * (2**52 / total)) for token, weight in weights.items()}


def _token_at(weights: dict[int, int], uniform: float) -> int:
    """Returns the token whose share of the whole contains `uniform`."""
    mass = sum(weights.values())
    target = min(int(uniform * mass), mass - 1)
    for token, weight in weights.items():
        target -= weight
        if target < 0:
            return token
    raise AssertionError("the target is less than the mass of all tokens")


def draw_rules(rules: list[Rule], vocab: int, device: str = "cpu") -> tuple[DrawRules, Tensor, Tensor]:
    """Returns the arguments of the op after the logits. Like the sampler's, they are columns of matrices."""
    numbers = [
        [min(rule.top_k or vocab, vocab), rule.min_weight, key_of(rule.uniform, position), position]
        for position, rule in enumerate(rules, start=7)
    ]
    top_k, min_weight, keys, positions = torch.tensor(numbers, dtype=torch.int64, device=device).unbind(-1)
    floats = torch.tensor([[rule.temperature, rule.top_p] for rule in rules], dtype=torch.float64, device=device)
    temperature, top_p = floats.unbind(-1)
    return DrawRules(temperature, top_k, top_p, min_weight), keys, positions


def key_of(uniform: float, position: int) -> int:
    """Returns the key with which a draw at `position` uses the given multiple of 2^-53 as its random number."""
    word = int(uniform * 2**53) << 11
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        word ^= (word >> shift) ^ (word >> 2 * shift)  # inverts word ^= word >> shift
        word = word * pow(factor, -1, 1 << 64) & ((1 << 64) - 1)
    key = (word - position * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    return key - (key >> 63 << 64)
