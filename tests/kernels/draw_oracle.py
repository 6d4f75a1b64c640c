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


def token_of(row: Tensor, rule: Rule) -> int:
    """Returns the token that is drawn from one request's logits [vocab]."""
    x = row.tolist()
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if x[order[0]] == -math.inf:
        return 0
    distances = (row[order[0]] - row).tolist()  # rounded to the dtype of the logits
    survivors = order[: rule.top_k]
    weights = [weight_of(distances[token], rule.temperature) for token in survivors]
    base = sum(weights)
    nucleus = base if rule.top_p >= 1.0 else min(base, math.ceil(rule.top_p * base))
    mass = 0  # of the tokens that are kept
    for weight in weights:
        if mass >= nucleus or weight < rule.min_weight:
            break
        mass += weight
    target = min(int(rule.uniform * mass), mass - 1)
    for token, weight in zip(survivors, weights, strict=True):
        target -= weight
        if target < 0:
            return token
    raise AssertionError("the target is less than the mass of the survivors")


def draw_rules(rules: list[Rule], vocab: int, device: str = "cpu") -> tuple[DrawRules, Tensor]:
    """Returns the arguments `rules` and `uniform` of the op."""

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    columns = DrawRules(
        temperature=column([rule.temperature for rule in rules], torch.float64),
        top_k=column([min(rule.top_k or vocab, vocab) for rule in rules], torch.int64),
        top_p=column([rule.top_p for rule in rules], torch.float64),
        min_weight=column([rule.min_weight for rule in rules], torch.int64),
    )
    return columns, column([rule.uniform for rule in rules], torch.float64)
