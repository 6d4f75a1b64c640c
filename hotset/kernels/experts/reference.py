"""The specification of experts: rows sorted by expert, one product per expert that has any."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels import EMPTY


def experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    order = torch.argsort(chosen.flatten(), stable=True)
    row_of = order // chosen.shape[1]
    counts = torch.bincount(chosen.flatten() - EMPTY, minlength=gate_up.shape[0] + 1).tolist()
    first = counts[0]  # EMPTY comes before every expert
    for expert, count in enumerate(counts[1:]):
        if count == 0:
            continue
        part = slice(first, first + count)
        first += count
        gate, up = F.linear(x[row_of[part]], gate_up[expert]).chunk(2, dim=-1)
        result = F.linear(F.silu(gate) * up, down[expert])
        scaled = result * weights.flatten()[order[part], None].to(result.dtype)
        out.index_add_(0, row_of[part], scaled.to(x.dtype))
    return out
