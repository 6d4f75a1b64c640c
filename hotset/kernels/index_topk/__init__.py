"""index_topk: scores the index keys of each query's context and selects the top-k positions."""

import torch
from torch import Tensor

from hotset.base.errors import ConfigError, InternalError
from hotset.kernels.fast_path import kernels_of
from hotset.kernels.index_topk import cpu_impl, reference
from hotset.kernels.rows import PagedRows
from hotset.kernels.segments import Segments

FAST_DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (32, 64, 128)  # these and the two maxima below are the limits of the fast path
MAX_HEADS = 128
MAX_TOPK = 4096


def index_topk(
    q: Tensor,  # [queries, index heads, head_dim]
    weights: Tensor,  # [queries, index heads], accumulation dtype
    keys: PagedRows,  # index keys of one index group, including those of this step
    segments: Segments,
    k: int,
    scale: float,
) -> Tensor:  # [queries, k] int64 positions in ascending order, then EMPTY
    """Selects the k best positions of each query's context by `sum_h weights[h] * relu(scale * q[h] . key)`.

    Ties at the boundary go to the earlier position. A query that sees at most k positions selects them all.
    On a GPU, 16-bit queries use the fast path. It reads only device tensors (`keys.table`, `keys.seat_of`,
    `segments.positions`), so it can be captured in a graph. On this path, a padding query (seat EMPTY) selects nothing.
    Raises ConfigError before any launch if the fast path does not support one of the sizes or dtypes.
    """
    if k <= 0:
        raise InternalError(f"the top-k must be positive, not {k}")
    if not scale > 0:
        raise InternalError(f"the scale of the scores must be positive, not {scale}")
    if q.device.type == "cpu":
        return cpu_impl.index_topk(q, weights, keys, segments, k, scale)
    if q.dtype not in FAST_DTYPES:
        return reference.index_topk(q, weights, keys, segments, k, scale)
    _check_sizes(q, keys, k)
    selected: Tensor = kernels_of("index_topk").index_topk(q, weights, keys, segments, k, scale)
    return selected


def _check_sizes(q: Tensor, keys: PagedRows, k: int) -> None:
    _, heads, head_dim = q.shape
    layout = keys.layout
    if head_dim != layout.width:
        raise InternalError(f"queries have {head_dim} values, but index keys have {layout.width}")
    if head_dim not in HEAD_DIMS:
        raise ConfigError(f"an index_head_dim of {head_dim} is not supported on a GPU; it must be one of {HEAD_DIMS}")
    if heads > MAX_HEADS:
        raise ConfigError(f"{heads} index heads are not supported on a GPU; the maximum is {MAX_HEADS}")
    if k > MAX_TOPK:
        raise ConfigError(f"a top-k of {k} is not supported on a GPU; the maximum is {MAX_TOPK}")
    if layout.quantised not in (0, head_dim) or (not layout.quantised and layout.dtype not in FAST_DTYPES):
        raise ConfigError(
            f"index keys of {layout.dtype}, {layout.quantised} of {head_dim} values in fp8, are not supported on a GPU"
        )
