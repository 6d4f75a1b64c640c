"""head_product: each head's values through that head's own matrix."""

from torch import Tensor

from hotset.kernels.head_product import reference
from hotset.kernels.head_product.batched import head_product_into

__all__ = ["head_product", "head_product_into"]


def head_product(
    x: Tensor,  # [rows, heads, in]; heads may lie apart
    weight: Tensor,  # [heads, in, out]
) -> Tensor:  # [rows, heads, out]
    """out[r, h] = x[r, h] @ weight[h]. On a GPU the result is contiguous, so that its heads can be joined for free."""
    if x.is_cuda:
        out = x.new_empty(x.shape[0], weight.shape[0], weight.shape[2])
        head_product_into(out, x, weight)
        return out
    return reference.head_product(x, weight)
