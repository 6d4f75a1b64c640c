"""The specification of experts: pairs (token, expert) are sorted by expert; each expert in use is applied once."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels import EMPTY
from hotset.kernels.fp8 import Fp8Weight, Weight
from hotset.kernels.linear.reference import fp8_linear, linear


def experts(x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    out = torch.zeros_like(x)
    order = torch.argsort(expert_ids.flatten(), stable=True)
    token_of = order // expert_ids.shape[1]
    counts = torch.bincount(expert_ids.flatten() - EMPTY, minlength=gate_up.shape[0] + 1).tolist()
    first = counts[0]  # EMPTY is sorted before every expert
    for expert, count in enumerate(counts[1:]):
        if count == 0:
            continue
        part = slice(first, first + count)
        first += count
        gate, up = _product(x[token_of[part]], gate_up[expert]).chunk(2, dim=-1)
        result = _product(F.silu(gate) * up, down[expert])
        scaled = result * weights.flatten()[order[part], None].to(result.dtype)
        out.index_add_(0, token_of[part], scaled.to(x.dtype))
    return out


def _product(x: Tensor, weight: Weight) -> Tensor:
    return fp8_linear(x, weight, None) if isinstance(weight, Fp8Weight) else linear(x, weight, None)
