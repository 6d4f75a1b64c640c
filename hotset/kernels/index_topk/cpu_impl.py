"""index_topk on a CPU: computes the scores of the reference, up to rounding, in fewer passes.

Queries that see at most k positions are not scored. The others are scored in blocks. A block reads the context up to
the position of its last query, so only the newest few columns have to be masked.
"""

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.fp8 import round_to_fp8
from hotset.kernels.rows import PagedRows, accumulation_dtype
from hotset.kernels.segments import Segments
from hotset.kernels.stable_topk import stable_topk

BLOCK_SCORES = 1 << 21  # scores held at once (queries x heads x positions), unless one query has more
GROUP = 4  # positions that share one maximum
MIN_GROUPED_CONTEXT = 24  # from this many times k positions on, contexts are searched by groups; must be at least GROUP


def index_topk(q: Tensor, weights: Tensor, keys: PagedRows, segments: Segments, k: int, scale: float) -> Tensor:
    out = torch.empty(q.shape[0], k, dtype=torch.int64)
    accumulation = accumulation_dtype(q.dtype)
    q = round_to_fp8(q) if keys.layout.quantised else q
    for segment, first, last, length in segments:
        start = length - (last - first)  # position of the first query
        scored = min(last, first + max(0, k - start))  # queries [first, scored) see at most k positions
        _select_all(out[first:scored], start)
        if scored == last:
            continue
        context = keys.gather(segment, length, accumulation)
        block = max(1, BLOCK_SCORES // (q.shape[1] * length))
        memory = context.new_empty(min(block, last - scored) * q.shape[1] * length)
        for begin in range(scored, last, block):
            part = slice(begin, min(begin + block, last))
            newest = start + begin - first  # position of the first query of the block
            seen = context[: newest + part.stop - begin]
            scores = index_scores(q[part], weights[part], seen, newest, scale, memory)
            out[part] = topk_positions(scores, k)
    return out


def _select_all(out: Tensor, start: int) -> None:
    """Writes for query j all positions that it sees, [0, start + j], then EMPTY."""
    queries, k = out.shape
    positions = torch.arange(k).expand(queries, k)
    out.copy_(positions.masked_fill(positions > torch.arange(start, start + queries)[:, None], EMPTY))


def index_scores(q: Tensor, weights: Tensor, seen: Tensor, newest: int, scale: float, memory: Tensor) -> Tensor:
    """Returns [queries, positions] scores. Query j is at position `newest + j`; later positions score -inf.

    Overwrites `memory` with the scores of all heads, because allocating memory for them would take longer than
    computing them.
    """
    queries, heads, dim = q.shape
    positions = seen.shape[0]
    head_scores = memory[: queries * heads * positions].view(queries * heads, positions)
    torch.mm(q.reshape(-1, dim).to(seen.dtype), seen.T, out=head_scores).relu_()
    # The scale is positive, so it can be applied after relu, with the weights.
    scaled_weights = (weights.to(seen.dtype) * scale)[:, None]
    scores = torch.bmm(scaled_weights, head_scores.view(queries, heads, positions))[:, 0]
    unseen = torch.ones(queries, queries - 1, dtype=torch.bool).triu()  # column c is position newest + 1 + c
    scores[:, newest + 1 :].masked_fill_(unseen, float("-inf"))
    return scores


def topk_positions(scores: Tensor, k: int) -> Tensor:
    """Returns the same as `stable_topk`, for scores of more than k positions.

    If the k-th largest value of a query exceeds the (k + 1)-th, only one set of positions has the k largest. For other
    queries, and for those with a score of NaN, which torch ranks first, this function calls `stable_topk`.
    """
    values, positions = _largest(scores, k + 1)
    topk = positions[:, :k].sort(-1).values
    ambiguous = ~(values[:, k - 1] > values[:, k]) | values[:, 0].isnan()
    if bool(ambiguous.any()):
        topk[ambiguous] = stable_topk(scores[ambiguous], k)
    return topk


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest values of each query, descending, and their positions. Ties are broken arbitrarily.

    In a long context, the positions g, g + groups, g + 2 * groups, ... form group g. The k groups with the largest
    maxima contain k values that no value of another group exceeds, so only their members are candidates. The last
    positions, which are in no group, are candidates too.
    """
    length = scores.shape[1]
    if length < MIN_GROUPED_CONTEXT * k:
        return torch.topk(scores, k)
    groups = length // GROUP
    grouped = scores[:, : GROUP * groups].unflatten(1, (GROUP, groups))
    best_groups = torch.topk(grouped.amax(1), k, sorted=False).indices
    members = (best_groups[:, None] + torch.arange(0, GROUP * groups, groups)[:, None]).flatten(1)
    left_over = torch.arange(GROUP * groups, length).expand(scores.shape[0], -1)
    candidates = torch.cat((members, left_over), dim=1)
    best = torch.topk(scores.gather(1, candidates), k)
    return best.values, candidates.gather(1, best.indices)
