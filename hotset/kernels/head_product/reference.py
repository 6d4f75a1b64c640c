"""The specification of head_product."""

import torch
from torch import Tensor


def head_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(x.transpose(0, 1), weight).transpose(0, 1)
