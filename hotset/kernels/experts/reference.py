"""The specification of experts: pairs (token, expert) are sorted by expert; each expert in use is applied once.

If the weights are quantised, the outputs of gate and up and their activation are computed in the accumulation dtype.
The activation is rounded to the dtype of x, and multiplied with down as `quantised_linear` does. The result is rounded
to the dtype of x.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from hotset.kernels import EMPTY
from hotset.kernels.linear.reference import linear, quantised_linear
from hotset.kernels.rows import accumulation_dtype
from hotset.kernels.weights import QuantisedWeight, Weight


def experts(
    x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Weight, down: Weight, first_expert: int = 0
) -> Tensor:
    local_ids = expert_ids - first_expert
    expert_ids = torch.where((local_ids >= 0) & (local_ids < gate_up.shape[0]), local_ids, EMPTY)
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
        result = _gated_mlp(x[token_of[part]], gate_up[expert], down[expert])
        scaled = result * weights.flatten()[order[part], None].to(result.dtype)
        out.index_add_(0, token_of[part], scaled.to(x.dtype))
    return out


def _gated_mlp(x: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    if isinstance(gate_up, QuantisedWeight):
        assert isinstance(down, QuantisedWeight), "both weights or neither must be quantised"
        gate, up = quantised_linear(x.to(accumulation_dtype(x.dtype)), gate_up, None).chunk(2, dim=-1)
        return quantised_linear((F.silu(gate) * up).to(x.dtype), down, None)
    assert isinstance(down, Tensor), "both weights or neither must be quantised"
    gate, up = linear(x, gate_up, None).chunk(2, dim=-1)
    return linear(F.silu(gate) * up, down, None)
