"""experts: a gated MLP per routed expert, for each row the weighted sum over the experts it chose."""

import torch
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels.experts import reference
from hotset.kernels.fast_path import kernels_of, served_fast

MAX_EXPERTS = 512  # that the fast path counts: every program holds the rows of all


def experts(
    x: Tensor,  # [rows, hidden]
    chosen: Tensor,  # [rows, k] int64 expert ids, distinct within a row; EMPTY: none
    weights: Tensor,  # [rows, k]
    gate_up: Tensor,  # [experts, 2 * width, hidden]: gate above up
    down: Tensor,  # [experts, hidden, width]
) -> Tensor:  # [rows, hidden]
    """sum_j weights[j] * down[e_j] @ (silu(gate[e_j] @ x) * (up[e_j] @ x)), reading chosen experts only.

    On a GPU it can be captured in a graph, except in float64, which takes the reference. Raises ConfigError before
    anything runs if x and the weights differ in dtype, or if there are more experts than the fast path counts.
    """
    assert chosen.shape == weights.shape, f"{tuple(chosen.shape)} experts with {tuple(weights.shape)} weights"
    _, hidden, width = down.shape
    shapes = (tuple(x.shape), tuple(gate_up.shape), tuple(down.shape))
    assert x.shape == (chosen.shape[0], hidden), f"rows {shapes[0]} for {chosen.shape[0]} rows and down {shapes[2]}"
    assert gate_up.shape == (down.shape[0], 2 * width, hidden), f"gate_up {shapes[1]} beside down {shapes[2]}"
    if not x.dtype == gate_up.dtype == down.dtype:
        raise ConfigError(f"rows of {x.dtype} cannot meet experts of {gate_up.dtype} and {down.dtype}")
    if not served_fast(x):
        return reference.experts(x, chosen, weights, gate_up, down)
    if gate_up.shape[0] > MAX_EXPERTS:
        raise ConfigError(f"{gate_up.shape[0]} experts are more than the {MAX_EXPERTS} that can be served on a GPU")
    if chosen.numel() == 0:
        return torch.zeros_like(x)
    out: Tensor = kernels_of("experts").experts(x, chosen, weights, gate_up, down)
    return out
