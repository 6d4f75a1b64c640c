"""per_head_matmul: each head's values through that head's own matrix."""

from torch import Tensor

from hotset.kernels.per_head_matmul import reference
from hotset.kernels.per_head_matmul.batched import per_head_matmul_into

__all__ = ["per_head_matmul", "per_head_matmul_into"]


def per_head_matmul(
    x: Tensor,  # [rows, heads, in]; heads may lie apart
    weight: Tensor,  # [heads, in, out]
) -> Tensor:  # [rows, heads, out]
    """out[r, h] = x[r, h] @ weight[h]. On a GPU the result is contiguous, so that its heads can be joined for free."""
    if x.is_cuda:
        out = x.new_empty(x.shape[0], weight.shape[0], weight.shape[2])
        per_head_matmul_into(out, x, weight)
        return out
    return reference.per_head_matmul(x, weight)
