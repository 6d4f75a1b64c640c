"""Block-scaled fp8 weights: each block of a matrix carries one fp32 factor (`weight_scale_inv`).

Equivalent: `out[i, j] = weight[i, j] * scale[i // block_rows, j // block_columns]`. Blocks at the lower and right edge
may be partial.
"""

import torch

from hotset.base.units import ceil_div

DEFAULT_BLOCK = (128, 128)


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the factors of a weight of `shape`; matrices only."""
    rows, columns = shape
    return ceil_div(rows, block[0]), ceil_div(columns, block[1])


def dequantise_blocks(
    weight: torch.Tensor,  # [rows, columns] float8_e4m3fn
    scale: torch.Tensor,  # [row blocks, column blocks] float32
    block: tuple[int, int],
    out: torch.Tensor,  # [rows, columns], any float dtype
) -> torch.Tensor:
    """Writes the values into `out`, one row of blocks at a time: the fp32 products never exist all at once."""
    assert tuple(scale.shape) == scale_shape(tuple(weight.shape), block), "scale and weight do not fit: caller's bug"
    per_column = scale.float().repeat_interleave(block[1], dim=1)[:, : weight.shape[1]]
    for index in range(scale.shape[0]):
        rows = slice(index * block[0], (index + 1) * block[0])
        out[rows].copy_(weight[rows].float() * per_column[index])
    return out
