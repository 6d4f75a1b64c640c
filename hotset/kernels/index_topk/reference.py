"""The specification of index_topk.

Where index keys are in fp8, queries are too: each head of a query has its own scale. The products of codes are summed
in float32, and the scales are applied to the sum. This module multiplies the values instead (code * scale), which is
the same up to rounding.
"""

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.fp8 import round_to_fp8
from hotset.kernels.rows import PagedRows, accumulation_dtype
from hotset.kernels.segments import Segments
from hotset.kernels.stable_topk import stable_topk

BLOCK_SCORES = 1 << 23  # scores held at once (queries x heads x positions), unless one query has more


def index_topk(q: Tensor, weights: Tensor, keys: PagedRows, segments: Segments, k: int, scale: float) -> Tensor:
    out = torch.empty(q.shape[0], k, dtype=torch.int64, device=q.device)
    accumulation = accumulation_dtype(q.dtype)
    q = round_to_fp8(q) if keys.layout.quantised else q
    for segment, first, last, length in segments:
        if length <= k:  # every query selects all positions that it sees
            positions = torch.arange(k, device=q.device).expand(last - first, k)
            out[first:last] = positions.masked_fill(positions > segments.positions[first:last, None], EMPTY)
            continue
        context = keys.gather(segment, length, accumulation)
        block = max(1, BLOCK_SCORES // (q.shape[1] * length))
        for start in range(first, last, block):
            part = slice(start, min(start + block, last))
            scores = index_scores(q[part], weights[part], context, segments.positions[part], scale)
            out[part] = stable_topk(scores, k)
    return out


def index_scores(q: Tensor, weights: Tensor, context: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Returns [queries, length] scores. Positions that a query must not see score -inf."""
    head_scores = torch.relu(torch.matmul(q.to(context.dtype), context.T) * scale)  # [queries, heads, length]
    scores = torch.matmul(weights.to(context.dtype)[:, None, :], head_scores)[:, 0]
    unseen = torch.arange(context.shape[0], device=q.device) > positions[:, None]
    return scores.masked_fill_(unseen, float("-inf"))
