"""draw: draws one token for each request from its logits, by temperature, top-k, top-p and min-p."""

import torch
from torch import Tensor

from hotset.kernels.draw import reference
from hotset.kernels.draw.random_numbers import draw_key, uniforms
from hotset.kernels.draw.reference import SHORTLIST_TOKENS, WEIGHT_ONE, DrawRules, leading

__all__ = ["SHORTLIST_TOKENS", "WEIGHT_ONE", "DrawRules", "draw", "draw_key", "leading", "uniforms"]

MAX_VOCAB = 1 << 22  # the weights of this many tokens sum to less than 2^63


def draw(
    x: Tensor,  # [n, vocab] logits, float32 or float64, without NaN and inf; -inf: the token is never drawn
    rules: DrawRules,
    uniform: Tensor,  # [n] float64, in [0, 1)
    *,
    in_shortlist: bool,
) -> Tensor:  # [n] int64
    """Draws one token per request: the inverse CDF at `uniform` over the surviving tokens, likeliest first.

    Equally likely tokens are ordered by id. `top_k`, then `top_p`, then `min_p` each keep a prefix of this order, and
    at least one token. If all logits of a request are -inf, its token is 0. The token depends only on the request's own
    logits, rule and number: not on the batch, and not on the device.
    `in_shortlist` promises that every top_k is at most SHORTLIST_TOKENS.
    """
    n, vocab = x.shape
    assert 1 <= vocab <= MAX_VOCAB, f"a vocabulary of {vocab} tokens; it must have 1 to {MAX_VOCAB}"
    assert x.dtype in (torch.float32, torch.float64), f"logits must be float32 or float64, not {x.dtype}"
    assert uniform.shape == (n,) and uniform.dtype == torch.float64, (
        f"{n} requests need as many float64 numbers, not {tuple(uniform.shape)} of {uniform.dtype}"
    )
    return reference.draw(x, rules, uniform, in_shortlist=in_shortlist)
