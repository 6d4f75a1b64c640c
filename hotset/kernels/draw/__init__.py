"""draw: draws one token for each request from its logits, by temperature, top-k, top-p and min-p.

`accept_or_replace` verifies drafts that were drawn from other logits. `leading` lists the likeliest tokens, for
log-probabilities.
"""

import torch
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels.draw import reference, rejection
from hotset.kernels.draw.random_numbers import draw_key, uniforms
from hotset.kernels.draw.reference import WEIGHT_ONE, DrawRules
from hotset.kernels.draw.rejection import DRAWS_DRAFT
from hotset.kernels.fast_path import kernels_of

__all__ = ["DRAWS_DRAFT", "WEIGHT_ONE", "DrawRules", "accept_or_replace", "draw", "draw_key", "leading"]

MAX_LEADING = 512  # tokens that `leading` can list on a GPU
MAX_VOCAB = 1 << 22  # the weights of this many tokens sum to less than 2^63


def draw(
    x: Tensor,  # [n, vocab] logits, float32 or float64, without NaN and inf; -inf: the token is never drawn
    rules: DrawRules,
    keys: Tensor,  # [n] int64: the results of `draw_key`
    positions: Tensor,  # [n] int64: the positions of the tokens to draw
) -> Tensor:  # [n] int64
    """Draws one token per request: the inverse CDF at its random number over the surviving tokens, likeliest first.

    Equally likely tokens are ordered by id. `top_k`, then `top_p`, then `min_p` each keep a prefix of this order, and
    at least one token. If all logits of a request are -inf, its token is 0. The token depends only on the request's own
    logits, rule, key and position: not on the batch, and not on the device.
    On a GPU, float32 logits use a kernel that sorts nothing, needs no memory but its result, and never makes the host
    wait; a graph can capture it after a first call.
    """
    n, vocab = x.shape
    if not 1 <= vocab <= MAX_VOCAB:
        raise InternalError(f"a vocabulary of {vocab} tokens; it must have 1 to {MAX_VOCAB}")
    if x.dtype not in (torch.float32, torch.float64):
        raise InternalError(f"logits must be float32 or float64, not {x.dtype}")
    for name, column in (("keys", keys), ("positions", positions)):
        if not (column.shape == (n,) and column.dtype == torch.int64):
            raise InternalError(f"{n} requests need as many int64 {name}, not {tuple(column.shape)} of {column.dtype}")
    if _has_fast_path(x):
        tokens: Tensor = kernels_of("draw", "cuda_impl").draw(x, rules, keys, positions)
        return tokens
    return reference.draw(x, rules, uniforms(keys, positions))


def accept_or_replace(
    x: Tensor,  # [n, vocab]: the model's logits, as for `draw`
    draft_logits: Tensor,  # [n, vocab]: the logits from which drafts were drawn, at positions + DRAWS_DRAFT
    drafts: Tensor,  # [n] int64
    rules: DrawRules,  # of both draws
    keys: Tensor,
    positions: Tensor,  # of the tokens, not of the drafts' random numbers
    *,
    truncated: bool,  # see `kept_weights`
) -> Tensor:  # [n] int64
    """Returns the drafts that are accepted, and replacements of the others. The tokens have the distribution of the
    model's logits, and as many drafts are accepted as this allows. The token of a draft that is EMPTY has no meaning.
    If all logits of a request are -inf, its token is 0.

    Like the tokens of `draw`, they depend neither on the batch nor on the device. On a GPU, float32 logits use a
    kernel.
    """
    if _has_fast_path(x) and _has_fast_path(draft_logits):
        kernels = kernels_of("draw", "cuda_impl")
        tokens: Tensor = kernels.accept_or_replace(x, draft_logits, drafts, rules, keys, positions)
        return tokens
    return rejection.accept_or_replace(x, draft_logits, drafts, rules, keys, positions, truncated)


def leading(
    x: Tensor,  # [n, vocab] logits without NaN
    count: int,
) -> Tensor:  # [n, count] int64
    """Returns the ids of the `count` likeliest tokens of each request, likeliest first, equal ones by ascending id."""
    vocab = x.shape[1]
    if not 1 <= count <= vocab <= MAX_VOCAB:
        raise InternalError(f"the first {count} tokens of a vocabulary of {vocab}")
    if _has_fast_path(x) and count <= MAX_LEADING:
        token_ids: Tensor = kernels_of("draw", "cuda_impl").leading(x, count)
        return token_ids
    return reference.leading(x, count).ids


def _has_fast_path(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.float32 and x.stride(1) == 1
