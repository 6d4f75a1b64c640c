"""index_topk in Triton: `score` every position into a workspace, then `select` the best of each row.

Both go by device tensors and by shapes alone, so that a graph can hold them. The workspace is bounded: query rows that
do not fit it together are served one batch after another.
"""

import torch
from torch import Tensor

from hotset.base.units import ceil_div
from hotset.kernels.index_topk.triton_score import Scores, score
from hotset.kernels.index_topk.triton_select import CONTEXT_MULTIPLE, select
from hotset.kernels.rows import PagedRows
from hotset.kernels.segments import Segments

__all__ = ["Scores", "index_topk", "score", "select"]

WORKSPACE_BYTES = 256 << 20  # of scores held at once


def index_topk(q: Tensor, weights: Tensor, keys: PagedRows, segments: Segments, k: int, scale: float) -> Tensor:
    queries = q.shape[0]
    out = torch.empty(queries, k, dtype=torch.int64, device=q.device)
    context = ceil_div(_context(keys, segments), CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE
    at_once = max(1, WORKSPACE_BYTES // (4 * context))
    # In a decode step, and in a captured graph, each query has its own context.
    share_context = not segments.decoding and len(segments.counts) > 0
    for first in range(0, queries, at_once):
        part = slice(first, first + at_once)
        seats, positions = keys.seat_of[part], segments.positions[part]
        scores = score(q[part], weights[part], keys, seats, positions, context, k, scale, share_context=share_context)
        select(scores, seats, positions, k, out[part])
    return out


def _context(keys: PagedRows, segments: Segments) -> int:
    """Positions that a row may have: the longest context where the host knows it, else all that the table can name."""
    if segments.lengths:
        return max(segments.lengths)
    parts, _, block_rows, _ = keys.blocks.shape
    return keys.table.shape[1] * parts * block_rows
