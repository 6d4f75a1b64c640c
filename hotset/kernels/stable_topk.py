"""The one rule for ties: among equal scores, the earlier wins. It applies to positions, experts and expert groups."""

import torch
from torch import Tensor

from hotset.kernels import EMPTY


def stable_topk(scores: Tensor, k: int) -> Tensor:
    """Returns [n, k] int64: the positions of the k largest scores of each of n vectors, ascending, EMPTY-padded.

    All scores above the k-th largest are taken; the remaining columns go to the earliest scores that equal the k-th
    largest. Scores of minus infinity and NaN are never taken.
    """
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    cut = torch.topk(scores, k, dim=-1).values[:, -1:]
    above = scores > cut
    equal = (scores == cut) & (scores > float("-inf"))
    remaining = k - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1) <= remaining))
    # The n-th position taken goes to column n - 1; positions that are not taken go to column k, which is cut off.
    column = torch.where(taken, taken.cumsum(-1) - 1, k)
    out = torch.full((scores.shape[0], k + 1), EMPTY, dtype=torch.int64, device=scores.device)
    positions = torch.arange(scores.shape[1], device=scores.device).expand_as(column)
    return out.scatter_(1, column, positions)[:, :k]
