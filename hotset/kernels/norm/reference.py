"""The specification of norm."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels.rows import accumulation_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    accumulate = accumulation_dtype(weight.dtype)
    if x.dtype == accumulate:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.to(accumulate)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + delta
    return total, rms_norm(total, weight, eps)
