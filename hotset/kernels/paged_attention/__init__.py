"""paged_attention: full causal attention with grouped heads, over contexts found through page tables.

Decoding (one query row per context) on a GPU goes by the device's table, seats and positions alone, so it can be
captured in a graph; a padded query row (seat EMPTY) gets zeros. Everything else goes by the host's runs of pages.
"""

from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels.fast_path import has_fast_path, kernels_of
from hotset.kernels.paged_attention import reference
from hotset.kernels.rows import PagedRows
from hotset.kernels.segments import Segments

MAX_FAST_DIM = 256
MAX_FAST_GROUP = 64


def paged_attention(
    q: Tensor,  # [rows, heads, head_dim]
    context: PagedRows,  # rows of [K of every head | V of every head], this step's own rows already appended
    segments: Segments,
    kv_heads: int,
    scale: float,
) -> Tensor:  # [rows, heads, head_dim]
    """Each query row attends to the positions of its own context up to and including its own.

    Raises ConfigError before launch for heads that the fast path cannot serve.
    """
    heads, head_dim = q.shape[1:]
    assert heads % kv_heads == 0, f"{heads} heads cannot share {kv_heads} KV heads"
    assert context.layout.width == 2 * kv_heads * head_dim, f"row width {context.layout.width} is not K + V"
    if not (has_fast_path(q) and segments.decoding):
        return reference.paged_attention(q, context, segments, kv_heads, scale)
    if head_dim > MAX_FAST_DIM or head_dim % 8:
        raise ConfigError(f"heads of {head_dim} values: a GPU decodes multiples of 8 up to {MAX_FAST_DIM}")
    if heads // kv_heads > MAX_FAST_GROUP:
        raise ConfigError(f"{heads // kv_heads} heads share a KV head: a GPU decodes up to {MAX_FAST_GROUP}")
    out: Tensor = kernels_of("paged_attention").decode(q, context, segments.positions, kv_heads, scale)
    return out
