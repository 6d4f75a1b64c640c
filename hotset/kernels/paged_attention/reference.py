"""The specification of paged_attention: torch's scaled_dot_product_attention, one request at a time."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels.rows import PagedRows
from hotset.kernels.segments import Segments


def paged_attention(q: Tensor, context: PagedRows, segments: Segments, kv_heads: int, scale: float) -> Tensor:
    heads, head_dim = q.shape[1:]
    out = torch.empty_like(q)
    for segment, first, last, length in segments:
        rows = context.gather(segment, length).unflatten(1, (2, kv_heads, head_dim))
        k, v = rows[:, 0].transpose(0, 1), rows[:, 1].transpose(0, 1)  # [kv_heads, length, head_dim]
        if last - first == 1:
            # The heads that share a KV head are passed as queries of one head, so that K and V are read once for them.
            grouped = q[first].view(kv_heads, heads // kv_heads, head_dim)
            out[first] = F.scaled_dot_product_attention(grouped[None], k[None], v[None], scale=scale)[0].reshape(
                heads, head_dim
            )
        else:
            out[first:last] = _prefill(q[first:last], k, v, scale)
    return out


def _prefill(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    count, length = q.shape[0], k.shape[1]
    seen = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(length - count)
    result = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=seen, scale=scale, enable_gqa=True
    )
    return result[0].transpose(0, 1)
