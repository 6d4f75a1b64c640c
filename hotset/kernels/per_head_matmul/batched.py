"""per_head_matmul by torch's batched product, which can write where the result is wanted.

cuBLAS takes any distance between the matrices of a batch and between the rows of a matrix; here the matrices of the
result are interleaved, head by head within a row. So it needs neither a transposed copy nor a concatenation after it.
"""

import torch
from torch import Tensor


def per_head_matmul_into(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Writes the product to `out` [rows, heads, out], which may be a slice of something wider."""
    assert out.stride(2) == 1, f"the values of a head are {out.stride(2)} apart"
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
