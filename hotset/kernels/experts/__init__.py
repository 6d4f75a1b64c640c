"""experts: a gated MLP per routed expert. The output of a token is the weighted sum over its experts."""

import torch
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels.experts import reference
from hotset.kernels.fast_path import has_fast_path, kernels_of
from hotset.kernels.fp8 import Fp8Weight, Weight

MAX_EXPERTS = 512  # limit of the fast path: each program of its sort holds one counter per expert


def experts(
    x: Tensor,  # [tokens, hidden]
    expert_ids: Tensor,  # [tokens, k] int64, distinct for a token; EMPTY: no expert
    weights: Tensor,  # [tokens, k]
    gate_up: Weight,  # [experts, 2 * width, hidden]: gate, then up
    down: Weight,  # [experts, hidden, width]
) -> Tensor:  # [tokens, hidden]
    """Returns sum_j weights[j] * down[e_j] @ (silu(gate[e_j] @ x) * (up[e_j] @ x)). Reads only the experts in use.

    Weights in fp8 are multiplied as `fp8_linear` does. On a GPU, calls in bfloat16 and float32 can be captured in a
    graph; other dtypes use the reference. Raises ConfigError before anything runs if x, gate_up and down differ in
    dtype, or if the fast path would get more than MAX_EXPERTS experts.
    """
    assert expert_ids.shape == weights.shape, (
        f"expert_ids {tuple(expert_ids.shape)} and weights {tuple(weights.shape)} differ in shape"
    )
    tokens, (_, hidden, width) = expert_ids.shape[0], down.shape
    shapes = (tuple(x.shape), tuple(gate_up.shape), tuple(down.shape))
    assert x.shape == (tokens, hidden), f"x {shapes[0]} does not match {tokens} tokens and down {shapes[2]}"
    assert gate_up.shape == (down.shape[0], 2 * width, hidden), f"gate_up {shapes[1]} does not match down {shapes[2]}"
    if isinstance(gate_up, Fp8Weight) or isinstance(down, Fp8Weight):
        return reference.experts(x, expert_ids, weights, gate_up, down)
    if not x.dtype == gate_up.dtype == down.dtype:
        raise ConfigError(f"x is {x.dtype}, but the experts are {gate_up.dtype} and {down.dtype}: all must be the same")
    if not has_fast_path(x):
        return reference.experts(x, expert_ids, weights, gate_up, down)
    if gate_up.shape[0] > MAX_EXPERTS:
        raise ConfigError(f"{gate_up.shape[0]} experts are more than the {MAX_EXPERTS} that can be served on a GPU")
    if expert_ids.numel() == 0:
        return torch.zeros_like(x)
    out: Tensor = kernels_of("experts").experts(x, expert_ids, weights, gate_up, down)
    return out
