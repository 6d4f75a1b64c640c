"""The specification of per_head_matmul."""

import torch
from torch import Tensor


def per_head_matmul(x: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(x.transpose(0, 1), weight).transpose(0, 1)
