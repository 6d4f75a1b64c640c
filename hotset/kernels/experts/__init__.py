"""experts: a gated MLP per routed expert, for each row the weighted sum over the experts it chose."""

from torch import Tensor

from hotset.kernels.experts import reference


def experts(
    x: Tensor,  # [rows, hidden]
    chosen: Tensor,  # [rows, k] int64 expert ids, distinct within a row
    weights: Tensor,  # [rows, k]
    gate_up: Tensor,  # [experts, 2 * width, hidden]: gate above up
    down: Tensor,  # [experts, hidden, width]
) -> Tensor:  # [rows, hidden]
    """sum_j weights[j] * down[e_j] @ (silu(gate[e_j] @ x) * (up[e_j] @ x)), reading chosen experts only."""
    assert chosen.shape == weights.shape, f"{tuple(chosen.shape)} experts with {tuple(weights.shape)} weights"
    return reference.experts(x, chosen, weights, gate_up, down)
