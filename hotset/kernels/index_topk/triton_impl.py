"""index_topk on a GPU: `score` writes the scores of all positions to a workspace, `select` selects the best.

The launches depend only on device tensors and on shapes, so they can be captured in a graph. The workspace is bounded:
if the scores of all queries exceed WORKSPACE_BYTES, the queries are processed in several batches.
"""

import torch
from torch import Tensor

from hotset.base.units import ceil_div
from hotset.kernels import EMPTY
from hotset.kernels.index_topk import cuda_score, cuda_select, triton_score
from hotset.kernels.index_topk.scores import CONTEXT_MULTIPLE, Scores
from hotset.kernels.rows import PagedRows
from hotset.kernels.segments import Segments
from hotset.kernels.stable_topk import stable_topk

__all__ = ["Scores", "index_topk", "score", "select"]

WORKSPACE_BYTES = 256 << 20
SCORES_AT_ONCE = 1 << 20  # of a selection by torch, which needs some 40 bytes for each


def index_topk(q: Tensor, weights: Tensor, keys: PagedRows, segments: Segments, k: int, scale: float) -> Tensor:
    queries = q.shape[0]
    out = torch.empty(queries, k, dtype=torch.int64, device=q.device)
    context = ceil_div(_context(keys, segments), CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE
    at_once = max(1, WORKSPACE_BYTES // (4 * context))
    # Each query of a decode step, and therefore of a captured graph, has its own context.
    share_context = not segments.decoding and len(segments.counts) > 0
    for first in range(0, queries, at_once):
        part = slice(first, first + at_once)
        seats, positions = keys.seat_of[part], segments.positions[part]
        scores = score(q[part], weights[part], keys, seats, positions, context, k, scale, share_context=share_context)
        select(scores, seats, positions, k, out[part], keys.capacity)
    return out


def score(
    q: Tensor,
    weights: Tensor,
    keys: PagedRows,
    seats: Tensor,
    positions: Tensor,
    context: int,
    k: int,
    scale: float,
    *,
    share_context: bool = False,
) -> Scores:
    """Scores queries with the fastest kernel that supports them. The arguments are those of `triton_score.score`."""
    arguments = (q, weights, keys, seats, positions, context, k, scale)
    if not share_context and cuda_score.supports(q, keys):
        return cuda_score.score(*arguments)
    return triton_score.score(*arguments, share_context=share_context)


def select(
    scores: Scores,
    seats: Tensor,  # [queries] int64; EMPTY: a padding query, which selects nothing
    positions: Tensor,  # [queries] int64: a query has scores for the positions up to and including this one
    k: int,
    out: Tensor,  # [queries, k] int64, written: positions in ascending order, then EMPTY
    limit: int = 0,
) -> None:
    """Selects the k largest scores of each query. Ties are broken as in `stable_topk`.

    A query with at most k positions selects them all. A query with more positions never selects a score of -inf or
    NaN, so it may select fewer than k. `limit` is the length of the longest context of any call, if it is longer than
    those of this one.
    """
    limit = max(limit, scores.values.shape[1])
    if cuda_select.supports(scores.values.device, limit):
        cuda_select.select(scores, seats, positions, k, out, limit=limit)
    else:
        _select_by_torch(scores.values, torch.where(seats == EMPTY, 0, positions + 1), k, out)


def _select_by_torch(values: Tensor, lengths: Tensor, k: int, out: Tensor) -> None:
    """Selects on GPUs without a kernel for it. `lengths` are the numbers of scores of the queries."""
    position = torch.arange(values.shape[1], device=values.device)
    at_once = max(1, SCORES_AT_ONCE // values.shape[1])
    for some, length, selected in zip(values.split(at_once), lengths.split(at_once), out.split(at_once), strict=True):
        unseen = position >= length[:, None]
        best = stable_topk(some.masked_fill(unseen, float("-inf")), k)
        everything = position[:k].masked_fill(unseen[:, :k], EMPTY)
        selected.copy_(torch.where(length[:, None] <= k, everything, best))


def _context(keys: PagedRows, segments: Segments) -> int:
    """Returns the length of the longest context. In a captured graph, returns the limit of the table."""
    if segments.lengths:
        return max(segments.lengths)
    return keys.capacity
