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
