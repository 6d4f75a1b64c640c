"""The one rule for ties: of equal scores the earlier position wins. Positions, experts and groups are chosen by it."""

import torch
from torch import Tensor

from hotset.kernels import EMPTY


def stable_topk(scores: Tensor, k: int) -> Tensor:
    """[rows, k] positions of the k largest finite scores, ascending, then EMPTY; at the cut the earlier of equals win.

    Everything above the k-th value is taken; the places left are filled with the earliest of those equal to it.
    """
    cut = torch.topk(scores, k, dim=-1).values[:, -1:]
    above = scores > cut
    equal = (scores == cut) & (scores > float("-inf"))
    places_left = k - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1) <= places_left))
    # The n-th position taken goes to column n - 1; what is not taken goes to a column that is cut off.
    column = torch.where(taken, taken.cumsum(-1) - 1, k)
    out = torch.full((scores.shape[0], k + 1), EMPTY, dtype=torch.int64, device=scores.device)
    positions = torch.arange(scores.shape[1], device=scores.device).expand_as(column)
    return out.scatter_(1, column, positions)[:, :k]
