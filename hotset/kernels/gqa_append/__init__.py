"""gqa_append: this step's K and V rows of grouped heads to their places on the device, and the queries beside them."""

from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels.fast_path import kernels_of, served_fast
from hotset.kernels.gqa_append import reference
from hotset.kernels.gqa_append.norms import HeadNorms
from hotset.kernels.rope.rotation import Rotation
from hotset.kernels.rows import RowLayout

__all__ = ["HeadNorms", "gqa_append"]

MAX_FAST_DIM = 512  # one program holds a head in registers


def gqa_append(
    qkv: Tensor,  # [rows, heads + 2 * kv_heads, dim]: queries | K | V; heads may lie apart
    kv_heads: int,
    norms: HeadNorms | None,  # on Q and K, before they turn
    rotation: Rotation,  # of all dim values; pairs (i, i + dim / 2)
    layout: RowLayout,  # plain: [K of every head | V of every head]
    device_rows: Tensor,  # [device rows, stored width]
    new_rows: Tensor,  # [rows] int64: where each row goes, all different; EMPTY: nowhere
) -> Tensor:  # [rows, heads, dim]: the queries, normed and turned
    """Stores K, normed and turned, and V into `device_rows`; nothing else is written. `qkv` is not changed.

    Raises ConfigError before launch for a layout that the fast path cannot write.
    """
    dim = qkv.shape[2]
    assert layout.width == 2 * kv_heads * dim, f"rows of {layout.width} values for {kv_heads} heads of {dim}"
    assert rotation.dim == dim, f"{rotation.dim} values of {dim} turn"
    if not served_fast(qkv):
        return reference.gqa_append(qkv, kv_heads, norms, rotation, layout, device_rows, new_rows)
    if layout.quantised:
        raise ConfigError(f"{layout.quantised} values of a row in fp8: rows of grouped heads are stored plain")
    if dim > MAX_FAST_DIM:
        raise ConfigError(f"heads of {dim} values are more than the {MAX_FAST_DIM} that a GPU appends")
    q: Tensor = kernels_of("gqa_append").gqa_append(qkv, kv_heads, norms, rotation, layout, device_rows, new_rows)
    return q
