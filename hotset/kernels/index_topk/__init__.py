"""index_topk: the indexer's scores over each query row's context, and the top-k positions among them."""

from torch import Tensor

from hotset.kernels.index_topk import reference
from hotset.kernels.rows import PagedRows
from hotset.kernels.segments import Segments


def index_topk(
    q: Tensor,  # [rows, index heads, head_dim]
    weights: Tensor,  # [rows, index heads], accumulation dtype
    keys: PagedRows,  # index keys of one index group, this step's own already appended
    segments: Segments,
    k: int,
    scale: float,
) -> Tensor:  # [rows, k] int64 positions in ascending order, then EMPTY
    """The k best positions of each query row's context, by `sum_h weights[h] * relu(scale * q[h] . key)`.

    Ties at the boundary go to the earlier position. A row with fewer than k positions behind it selects them all.
    """
    assert k > 0, f"top-k of {k}"
    return reference.index_topk(q, weights, keys, segments, k, scale)
