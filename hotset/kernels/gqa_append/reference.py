"""The specification of gqa_append, except for padding tokens, which occur only in captured graphs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.kernels.norm.reference import rms_norm
from hotset.kernels.rope.reference import Rotation, rotate_halves
from hotset.kernels.rows import RowLayout


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The RMS norms that some models apply to each head of Q and K."""

    q: Tensor  # [dim]
    k: Tensor  # [dim]
    eps: float


def gqa_append(
    qkv: Tensor,
    kv_heads: int,
    norms: HeadNorms | None,
    rotation: Rotation,
    layout: RowLayout,
    device_rows: Tensor,
    new_rows: Tensor,
) -> Tensor:
    q, rows = gqa_rows(qkv, kv_heads, norms, rotation)
    device_rows.index_copy_(0, new_rows, layout.encode(rows))
    return q


def gqa_rows(qkv: Tensor, kv_heads: int, norms: HeadNorms | None, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Returns the queries [tokens, heads, dim] and the rows [tokens, width], which are not encoded yet."""
    heads = qkv.shape[1] - 2 * kv_heads
    if norms is None:
        q, k = rotate_halves(qkv[:, : heads + kv_heads], rotation).split([heads, kv_heads], dim=1)
    else:
        q = rotate_halves(rms_norm(qkv[:, :heads], norms.q, norms.eps), rotation)
        k = rotate_halves(rms_norm(qkv[:, heads : heads + kv_heads], norms.k, norms.eps), rotation)
    return q, torch.cat((k, qkv[:, heads + kv_heads :]), dim=1).flatten(1)
