"""gqa_append: writes this step's rows of grouped-query attention to the device and returns the queries."""

from torch import Tensor

from hotset.base.errors import ConfigError, InternalError
from hotset.kernels.fast_path import has_fast_path, kernels_of
from hotset.kernels.gqa_append import reference
from hotset.kernels.gqa_append.reference import HeadNorms
from hotset.kernels.rope import Rotation
from hotset.kernels.rows import RowLayout

__all__ = ["HeadNorms", "gqa_append"]

MAX_FAST_DIM = 512  # one program holds a head in registers


def gqa_append(
    qkv: Tensor,  # [tokens, heads + 2 * kv_heads, dim]: queries | K | V; tokens and heads may have any stride
    kv_heads: int,
    norms: HeadNorms | None,  # of Q and K, before the rotation; None: no norms
    rotation: Rotation,  # of all dim values, in pairs (i, i + dim / 2)
    layout: RowLayout,  # plain: [K of every head | V of every head]
    device_rows: Tensor,  # [device rows, stored width]
    new_rows: Tensor,  # [tokens] int64: the device row of each token, all different; EMPTY: the row is not stored
) -> Tensor:  # [tokens, heads, dim]: the queries, normalised and rotated
    """Writes K, normalised and rotated, and V into `device_rows`, and writes nothing else. `qkv` is not changed.

    Raises ConfigError before launch if, on the fast path, rows have fp8 values or heads exceed MAX_FAST_DIM values.
    """
    dim = qkv.shape[2]
    if layout.width != 2 * kv_heads * dim:
        raise InternalError(f"rows have {layout.width} values, but K and V have 2 * {kv_heads} heads of {dim}")
    if rotation.dim != dim:
        raise InternalError(f"the rotation has {rotation.dim} values, but a head has {dim}")
    if not has_fast_path(qkv):
        return reference.gqa_append(qkv, kv_heads, norms, rotation, layout, device_rows, new_rows)
    if layout.quantised:
        raise ConfigError(f"{layout.quantised} values of a row are in fp8, but GQA rows on a GPU cannot be in fp8")
    if dim > MAX_FAST_DIM:
        raise ConfigError(f"heads have {dim} values; on a GPU, at most {MAX_FAST_DIM} are supported")
    q: Tensor = kernels_of("gqa_append").gqa_append(qkv, kv_heads, norms, rotation, layout, device_rows, new_rows)
    return q
