"""The specification of rope_query."""

import torch
from torch import Tensor

from hotset.kernels.per_head_matmul import reference as per_head_matmul
from hotset.kernels.rope.reference import rotate_pairs
from hotset.kernels.rope.rotation import Rotation


def rope_query(q: Tensor, key_up: Tensor, rotation: Rotation) -> Tensor:
    nope = key_up.shape[1]
    absorbed = per_head_matmul.per_head_matmul(q[..., :nope], key_up)
    return torch.cat((absorbed, rotate_pairs(q[..., nope:], rotation)), dim=-1)
