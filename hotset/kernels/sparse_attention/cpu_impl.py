"""sparse_attention on a CPU: computes the products of the reference, but reads and decodes rows with less work."""

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.rows import RowLayout, accumulation_dtype

BLOCK_VALUES = 1 << 22  # gathered values held at once, which fit into a last-level cache: 16 MiB of float32


def sparse_attention(q: Tensor, rows: Tensor, row_ids: Tensor, layout: RowLayout, rank: int, scale: float) -> Tensor:
    accumulate = accumulation_dtype(q.dtype)
    rows, row_ids, layout = _decoded_once(rows, row_ids, layout, accumulate)
    queries, heads, width = q.shape
    k = row_ids.shape[1]
    out = q.new_empty(queries, heads, rank)
    block = max(1, min(queries, BLOCK_VALUES // (k * width)))
    memory = rows.new_empty(block * k, rows.shape[1])  # reused by every block, because new memory is slow
    for first in range(0, queries, block):
        part = slice(first, min(first + block, queries))
        readable, empty = row_ids[part], row_ids[part] == EMPTY
        some_empty = bool(empty.any())
        if some_empty:
            # An EMPTY entry reads one of the query's rows with weight 0. Other rows might hold NaN, and 0 * NaN is NaN.
            readable = torch.where(empty, readable.amax(-1, keepdim=True).clamp_min(0), readable)
        stored = torch.index_select(rows, 0, readable.flatten(), out=memory[: readable.numel()])
        gathered = layout.decode(stored, accumulate).view(-1, k, width)
        scores = torch.bmm(q[part].to(accumulate), gathered.transpose(1, 2)).mul_(scale)
        if some_empty:
            scores.masked_fill_(empty[:, None, :], float("-inf"))
        out[part] = torch.bmm(torch.softmax(scores, dim=-1), gathered[:, :, :rank])
        if some_empty:
            out[part].masked_fill_(empty.all(-1)[:, None, None], 0)
    return out


def _decoded_once(
    rows: Tensor, row_ids: Tensor, layout: RowLayout, accumulate: torch.dtype
) -> tuple[Tensor, Tensor, RowLayout]:
    """Decodes every selected row once, if that saves time. Returns (decoded rows, row ids in these, their layout).

    It saves time if queries share many rows, as in a prompt. The criterion is that there are more entries than rows
    between the lowest and the highest row id. Otherwise, and if rows are stored in the accumulation dtype, the
    arguments are returned unchanged.
    """
    if layout.dtype == accumulate and not layout.quantised:
        return rows, row_ids, layout
    lowest = int(torch.where(row_ids == EMPTY, rows.shape[0], row_ids).min())
    span = int(row_ids.max()) + 1 - lowest  # not positive if every entry is EMPTY
    if not 0 < span < row_ids.numel():
        return rows, row_ids, layout
    entries = torch.where(row_ids == EMPTY, span, row_ids - lowest)
    used = torch.zeros(span + 1, dtype=torch.bool)
    used[entries] = True
    used[span] = False
    distinct = used.nonzero()[:, 0]
    decoded_id = torch.full((span + 1,), EMPTY)
    decoded_id[distinct] = torch.arange(len(distinct))
    decoded = layout.decode(rows.index_select(0, distinct + lowest), accumulate)
    return decoded, decoded_id[entries], RowLayout(layout.width, accumulate)
