"""linear on a CPU, with a weight that oneDNN has packed into blocked order once, at load time.

The ops are private to torch. `is_available` therefore tries them, and without them nothing is packed.
"""

from functools import cache

import torch
from torch import Tensor

TOKENS_HINT = 8  # the batch size for which oneDNN chooses the blocked order; the order works for every batch size
MAX_TOKENS = 64  # larger batches amortise the packing of BLAS


def supports(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.dim() == 2 and is_available()


@cache
def is_available() -> bool:
    """Returns True if this build of torch has the ops, and they take these arguments and multiply correctly."""
    x, weight = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[1.0, 0.0], [2.0, -1.0]])
    try:
        return torch.backends.mkldnn.is_available() and torch.equal(linear(x, pack(weight), None), x @ weight.T)
    except (AttributeError, RuntimeError, TypeError):  # the op does not exist, or has other arguments
        return False


def is_faster(x: Tensor) -> bool:
    return 2 <= x.shape[0] <= MAX_TOKENS


def pack(weight: Tensor) -> Tensor:
    """Returns an opaque copy of the weight, which only `linear` below can read."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, TOKENS_HINT)
    return packed


def linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
