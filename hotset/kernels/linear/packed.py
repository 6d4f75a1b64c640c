"""linear on a CPU from a weight that oneDNN has put into blocked order once, at load time."""

import torch
from torch import Tensor

ROWS_HINT = 8  # the batch for which the blocked order is chosen; other batches run from the same order
MAX_ROWS = 64  # beyond this BLAS amortises its own packing


def usable(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.dim() == 2
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def pays(x: Tensor) -> bool:
    return 2 <= x.shape[0] <= MAX_ROWS


def pack(weight: Tensor) -> Tensor:
    """An opaque copy of the weight; only `linear` below can read it."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    return packed


def linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
