"""An independent sampler for one request in plain Python, written from the docstring of `SamplingParams`.

It computes the same random numbers and weights as `hotset.kernels.draw`, so tokens can be compared without a margin.
"""

import math
from collections.abc import Sequence

import torch
from kernels.draw_oracle import Rule, token_of

from hotset.base.sampling import SamplingParams

WORD_MASK = (1 << 64) - 1


def splitmix64(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD_MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD_MASK
    return word ^ (word >> 31)


def uniform(seed: int, position: int) -> float:
    return (splitmix64((splitmix64(seed & WORD_MASK) + position * 0x9E3779B97F4A7C15) & WORD_MASK) >> 11) / (1 << 53)


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
) -> int:
    x = torch.tensor(adjusted(logits, params, token_ids, prompt_length, stop_ids), dtype=torch.float64)
    if params.temperature == 0.0:
        return int(x.argmax())
    assert params.seed is not None
    number = uniform(params.seed, len(token_ids))
    return token_of(x, Rule(params.temperature, params.top_k or None, params.top_p, params.min_p, number))
