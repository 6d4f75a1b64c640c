"""experts: a gated MLP per routed expert. The output of a token is the weighted sum over its experts."""

import torch
from torch import Tensor

from hotset.base.errors import ConfigError, InternalError
from hotset.base.units import ceil_div
from hotset.kernels.experts import reference
from hotset.kernels.fast_path import has_fast_path, kernels_of
from hotset.kernels.weights import QuantisedWeight, Weight

MAX_EXPERTS = 512  # limit of the fast path: each program of its sort holds one counter per expert
# The fast path keeps vectors for this many pairs of a token and an expert at a time: 3 GB with 7168 inputs, a width of
# 2048 and fp8. EMPTY pairs count, because a host that does not wait for the GPU cannot know how many there are.
MAX_PAIRS = 1 << 17


def experts(
    x: Tensor,  # [tokens, hidden]
    expert_ids: Tensor,  # [tokens, k] int64, those of a token are distinct; EMPTY: no expert
    weights: Tensor,  # [tokens, k]
    gate_up: Weight,  # [experts, 2 * width, hidden]: gate, then up
    down: Weight,  # [experts, hidden, width]
    routed_experts: int | None = None,  # the number of experts that tokens were routed to; None: those given here
    first_expert: int = 0,  # the id of the first expert given here
) -> Tensor:  # [tokens, hidden]
    """Returns sum_j weights[j] * down[e_j] @ (silu(gate[e_j] @ x) * (up[e_j] @ x)). Reads only the experts in use.

    Quantised weights are multiplied as `quantised_linear` does. On a GPU, calls in bfloat16 and float32 can be captured
    in a graph; other dtypes use the reference. If other ranks hold a part of the experts, ids of their experts count as
    EMPTY, and `routed_experts` counts all ranks' experts: the kernels expect tokens to be spread evenly over this
    number. It affects the speed and the order of additions, but not which products are computed.

    gate_up and down must be in one format, and plain weights in the dtype of x. Raises ConfigError before anything runs
    if the fast path would get more than MAX_EXPERTS experts.
    """
    if expert_ids.shape != weights.shape:
        raise InternalError(f"expert_ids {tuple(expert_ids.shape)} and weights {tuple(weights.shape)} differ in shape")
    tokens, (count, hidden, width) = expert_ids.shape[0], down.shape
    shapes = (tuple(x.shape), tuple(gate_up.shape), tuple(down.shape))
    if x.shape != (tokens, hidden):
        raise InternalError(f"x {shapes[0]} does not match {tokens} tokens and down {shapes[2]}")
    if gate_up.shape != (count, 2 * width, hidden):
        raise InternalError(f"gate_up {shapes[1]} does not match down {shapes[2]}")
    module = _kernels_for(x, gate_up, down)
    if not has_fast_path(x):
        return reference.experts(x, expert_ids, weights, gate_up, down, first_expert)
    if count > MAX_EXPERTS:
        raise ConfigError(f"{count} experts are more than the {MAX_EXPERTS} that can be served on a GPU")
    if expert_ids.numel() == 0:
        return torch.zeros_like(x)
    kernels, max_tokens = kernels_of("experts", module), max(1, MAX_PAIRS // expert_ids.shape[1])
    parts = []
    for some in zip(x.split(max_tokens), expert_ids.split(max_tokens), weights.split(max_tokens), strict=True):
        pairs_per_expert = ceil_div(some[1].numel(), routed_experts or count)
        parts.append(kernels.experts(*some, gate_up, down, pairs_per_expert, first_expert))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _kernels_for(x: Tensor, gate_up: Weight, down: Weight) -> str:
    """Returns the module with the GPU kernels for these weights."""
    if isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        if not x.dtype == gate_up.dtype == down.dtype:
            raise InternalError(f"x is {x.dtype}, but the experts are {gate_up.dtype} and {down.dtype}")
        return "triton_impl"
    if isinstance(gate_up, QuantisedWeight) and isinstance(down, QuantisedWeight) and gate_up.kernels == down.kernels:
        return gate_up.kernels
    raise InternalError("gate_up and down are in different formats")
