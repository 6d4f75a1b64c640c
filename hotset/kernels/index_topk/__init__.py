"""index_topk: the indexer's scores over each query row's context, and the top-k positions among them."""

import torch
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels.fast_path import kernels_of
from hotset.kernels.index_topk import cpu_impl, reference
from hotset.kernels.rows import PagedRows
from hotset.kernels.segments import Segments

FAST = (torch.bfloat16, torch.float16)
HEAD_DIMS = (32, 64, 128)  # that the fast path serves
MAX_HEADS = 128
MAX_TOPK = 4096


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
    On a GPU, 16-bit queries go by the device's tensors alone (`keys.table`, `keys.seat_of`, `segments.positions`) and
    can be captured in a graph; a padded row (seat EMPTY) selects nothing. Raises ConfigError before anything runs
    where the fast path does not serve a size.
    """
    assert k > 0, f"top-k of {k}"
    assert scale > 0, f"scores scaled by {scale}"
    if q.device.type == "cpu":
        return cpu_impl.index_topk(q, weights, keys, segments, k, scale)
    if q.dtype not in FAST:
        return reference.index_topk(q, weights, keys, segments, k, scale)
    _check_sizes(q, keys, k)
    out: Tensor = kernels_of("index_topk").index_topk(q, weights, keys, segments, k, scale)
    return out


def _check_sizes(q: Tensor, keys: PagedRows, k: int) -> None:
    _, heads, head_dim = q.shape
    layout = keys.layout
    assert head_dim == layout.width, f"queries of {head_dim} values, index keys of {layout.width}"
    if head_dim not in HEAD_DIMS:
        raise ConfigError(f"an index_head_dim of {head_dim} cannot be served on a GPU; one of {HEAD_DIMS} can")
    if heads > MAX_HEADS:
        raise ConfigError(f"{heads} index heads are more than the {MAX_HEADS} that can be served on a GPU")
    if k > MAX_TOPK:
        raise ConfigError(f"a top-k of {k} is more than the {MAX_TOPK} that can be served on a GPU")
    if layout.quantised not in (0, head_dim) or (not layout.quantised and layout.dtype not in FAST):
        raise ConfigError(
            f"index keys of {layout.dtype}, {layout.quantised} of {head_dim} values in fp8, are not served"
        )
