"""An independent sampler for one request, with lists and `math`, written from the docstring of `SamplingParams`.

It computes the same random numbers as `hotset.kernels.draw`.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hotset.base.sampling import SamplingParams

WORD_MASK = (1 << 64) - 1


def splitmix64(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD_MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD_MASK
    return word ^ (word >> 31)


def uniform(seed: int, position: int) -> float:
    return (splitmix64((splitmix64(seed & WORD_MASK) + position * 0x9E3779B97F4A7C15) & WORD_MASK) >> 11) / (1 << 53)


@dataclass(frozen=True)
class OracleToken:
    token: int
    # The smallest difference between two compared numbers, except between equal logits. If rounding errors are smaller,
    # they cannot change the token.
    margin: float


def adjusted(
    logits: Sequence[float],
    params: SamplingParams,
    token_ids: Sequence[int],
    prompt_length: int,
    stop_ids: frozenset[int],
) -> list[float]:
    """Returns the logits after bias, penalties and banned stop tokens."""
    x = [-math.inf if math.isnan(value) else value for value in logits]
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    answer = list(token_ids[prompt_length:])
    for token in set(token_ids):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(answer):
        x[token] -= params.presence_penalty + params.frequency_penalty * answer.count(token)
    if len(answer) < params.min_tokens:
        for token in stop_ids:
            x[token] = -math.inf
    return x


def choose(
    logits: Sequence[float],
    params: SamplingParams,
    token_ids: Sequence[int],
    prompt_length: int,
    stop_ids: frozenset[int],
) -> OracleToken:
    x = adjusted(logits, params, token_ids, prompt_length, stop_ids)
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    top = x[order[0]]
    gaps = [abs(x[a] - x[b]) for a, b in itertools.pairwise(order) if x[a] != x[b]]
    margin = min(gaps, default=math.inf)
    if top == -math.inf:
        return OracleToken(0, math.inf)
    if params.temperature == 0.0:
        return OracleToken(order[0], margin)
    assert params.seed is not None
    survivors = order[: params.top_k] if params.top_k else order
    weights = [math.exp((x[token] - top) / params.temperature) for token in survivors]
    total = sum(weights)
    kept, mass_before = [], 0.0
    for weight in weights:
        margin = min(margin, abs(mass_before / total - params.top_p) if params.top_p < 1.0 else math.inf)
        if kept and params.top_p < 1.0 and mass_before / total >= params.top_p:
            break
        margin = min(margin, abs(weight - params.min_p) if params.min_p > 0.0 and kept else math.inf)
        mass_before += weight
        if weight >= params.min_p:
            kept.append(weight)
    target = uniform(params.seed, len(token_ids)) * sum(kept)
    mass = 0.0
    for token, weight in zip(survivors, kept, strict=False):
        mass += weight
        margin = min(margin, abs(mass - target) / sum(kept))
        if mass > target:
            return OracleToken(token, margin)
    return OracleToken(survivors[len(kept) - 1], 0.0)
