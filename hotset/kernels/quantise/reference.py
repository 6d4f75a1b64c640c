"""The specification of quantise: the codes and scales of `fp8.quantise`, in the memory layout of the op."""

import torch
from torch import Tensor

from hotset.kernels import fp8


def quantise(x: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    tokens, width = x.shape
    codes, scales = fp8.quantise(x)
    padded_codes = torch.empty(padded, width, dtype=codes.dtype, device=x.device)
    padded_codes[:tokens] = codes
    padded_scales = torch.empty(scales.shape[1], padded, dtype=scales.dtype, device=x.device).t()
    padded_scales[:tokens] = scales
    return padded_codes, padded_scales
