"""The specification of sparse_attention: gather rows, compute scores and softmax, sum the latents."""

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.rows import RowLayout, accumulation_dtype

BLOCK_VALUES = 1 << 24  # gathered values held at once; this bounds the memory of a long prefill chunk


def sparse_attention(q: Tensor, rows: Tensor, row_ids: Tensor, layout: RowLayout, rank: int, scale: float) -> Tensor:
    out = q.new_empty(*q.shape[:2], rank)
    block = max(1, BLOCK_VALUES // (row_ids.shape[1] * layout.width))
    for first in range(0, q.shape[0], block):
        part = slice(first, first + block)
        out[part] = _attend(q[part], rows, row_ids[part], layout, rank, scale)
    return out


def _attend(q: Tensor, rows: Tensor, row_ids: Tensor, layout: RowLayout, rank: int, scale: float) -> Tensor:
    accumulate = accumulation_dtype(q.dtype)
    empty = row_ids == EMPTY
    # An EMPTY entry reads one of the query's rows, with weight 0. Any other row might hold NaN, and 0 * NaN is NaN.
    readable = torch.where(empty, row_ids.amax(-1, keepdim=True).clamp_min(0), row_ids)
    gathered = layout.decode(rows[readable], accumulate)  # [queries, k, rank + rope]
    scores = torch.matmul(q.to(accumulate), gathered.transpose(1, 2)) * scale
    weights = torch.softmax(scores.masked_fill_(empty[:, None, :], float("-inf")), dim=-1)
    sums = torch.matmul(weights, gathered[:, :, :rank]).to(q.dtype)
    return sums.masked_fill_(empty.all(-1)[:, None, None], 0)
