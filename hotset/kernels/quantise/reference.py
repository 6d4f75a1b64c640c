"""The specification of quantise: the codes and scales of `fp8.quantise`, in the memory layout of the op."""

import torch
from torch import Tensor

from hotset.kernels import fp8
from hotset.kernels.norm import reference as norm
from hotset.kernels.swiglu import reference as swiglu


def quantise(x: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    tokens, width = x.shape
    codes, scales = fp8.quantise(x)
    padded_codes = torch.empty(padded, width, dtype=codes.dtype, device=x.device)
    padded_codes[:tokens] = codes
    padded_scales = torch.empty(scales.shape[1], padded, dtype=scales.dtype, device=x.device).t()
    padded_scales[:tokens] = scales
    return padded_codes, padded_scales


def swiglu_quantise(gate_up: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    return quantise(swiglu.swiglu(gate_up), padded)


def add_rms_norm_quantise(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, padded: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, normed = norm.add_rms_norm(x, delta, weight, eps)
    return total, normed, *quantise(normed, padded)
