"""fp32_linear: rows of the model's dtype through a weight that is kept in the accumulation dtype, never rounded."""

import torch
from torch import Tensor

from hotset.kernels.fast_path import kernels_of, served_fast
from hotset.kernels.fp32_linear import reference

MAX_FAST_ROWS = 256  # beyond, torch's product is better than one that reads the weight once for a few rows


def fp32_linear(
    x: Tensor,  # [rows, in]; rows may lie apart
    weight: Tensor,  # [out, in], accumulation dtype; for a few dozen outputs
    scale: float,
) -> Tensor:  # [rows, out], accumulation dtype
    """scale * x @ weight.T, each product and sum in the accumulation dtype."""
    if served_fast(x) and weight.dtype == torch.float32 and x.shape[0] <= MAX_FAST_ROWS:
        out: Tensor = kernels_of("fp32_linear").fp32_linear(x, weight, scale)
        return out
    return reference.fp32_linear(x, weight, scale)
