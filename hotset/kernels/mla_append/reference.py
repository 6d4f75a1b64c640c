"""The specification of mla_append, except for padding tokens, which occur only in captured graphs."""

import torch
from torch import Tensor

from hotset.kernels.norm.reference import rms_norm
from hotset.kernels.rope.reference import Rotation, rotate_pairs
from hotset.kernels.rows import RowLayout


def mla_append(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    rotation: Rotation,
    layout: RowLayout,
    device_rows: Tensor,
    new_rows: Tensor,
) -> None:
    device_rows.index_copy_(0, new_rows, layout.encode(mla_rows(kv, weight, eps, rotation)))


def mla_rows(kv: Tensor, weight: Tensor, eps: float, rotation: Rotation) -> Tensor:  # [tokens, width], not encoded yet
    latent, rope_key = kv.split([weight.shape[0], rotation.dim], dim=-1)
    return torch.cat((rms_norm(latent, weight, eps), rotate_pairs(rope_key[:, None], rotation)[:, 0]), dim=-1)
