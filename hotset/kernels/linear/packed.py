"""linear on a CPU, with a weight that oneDNN has packed into blocked order once, at load time."""

import torch
from torch import Tensor

TOKENS_HINT = 8  # the batch size for which oneDNN chooses the blocked order; the order works for every batch size
MAX_TOKENS = 64  # larger batches amortise the packing of BLAS


def supports(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.dim() == 2
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def is_faster(x: Tensor) -> bool:
    return 2 <= x.shape[0] <= MAX_TOKENS


def pack(weight: Tensor) -> Tensor:
    """Returns an opaque copy of the weight, which only `linear` below can read."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, TOKENS_HINT)
    return packed


def linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
