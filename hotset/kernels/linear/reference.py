"""The specification of linear.

`fp8_linear` is the arithmetic of DeepSeek's fp8 checkpoints: activations are quantised per token in groups of
SCALE_BLOCK inputs. The products of codes are exact. Their sum over a group is multiplied by the scales of activation
and weight, and these sums are added, all in the accumulation dtype.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels.fp8 import SCALE_BLOCK, Fp8Weight, quantise
from hotset.kernels.rows import accumulation_dtype
from hotset.kernels.weights import QuantisedWeight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def quantised_linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    """Multiplies x by a quantised weight. A format without arithmetic of its own uses the dequantised weight."""
    if isinstance(weight, Fp8Weight):
        return fp8_linear(x, weight, bias)
    return linear(x, weight.dequantised(x.dtype), bias)


def fp8_linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    codes, scales = quantise(x)
    dtype = accumulation_dtype(x.dtype)
    weight_scales = weight.output_scales()
    out = torch.zeros(codes.shape[0], weight.shape[0], dtype=dtype, device=codes.device)
    groups = zip(codes.split(SCALE_BLOCK, 1), weight.codes.split(SCALE_BLOCK, 1), strict=True)
    for group, (x_codes, weight_codes) in enumerate(groups):
        product = F.linear(x_codes.to(dtype), weight_codes.to(dtype))
        out += product * scales[:, group, None] * weight_scales[:, group]
    return (out if bias is None else out + bias).to(x.dtype)


def fp32_linear(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    return F.linear(x.to(weight.dtype), weight) * scale


def per_head_matmul(x: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(x.transpose(0, 1), weight).transpose(0, 1)
