"""paged_attention: full causal attention with grouped heads, over contexts found through page tables."""

from torch import Tensor

from hotset.kernels.paged_attention import reference
from hotset.kernels.rows import PagedRows
from hotset.kernels.segments import Segments


def paged_attention(
    q: Tensor,  # [rows, heads, head_dim]
    context: PagedRows,  # rows of [K of every head | V of every head], this step's own rows already appended
    segments: Segments,
    kv_heads: int,
    scale: float,
) -> Tensor:  # [rows, heads, head_dim]
    """Each query row attends to the positions of its own context up to and including its own."""
    heads, head_dim = q.shape[1:]
    assert heads % kv_heads == 0, f"{heads} heads cannot share {kv_heads} KV heads"
    assert context.layout.width == 2 * kv_heads * head_dim, f"row width {context.layout.width} is not K + V"
    return reference.paged_attention(q, context, segments, kv_heads, scale)
