"""decode_rows: decodes stored rows, for ops that read each row many times."""

import torch
from torch import Tensor

from hotset.kernels.decode_rows import reference
from hotset.kernels.fast_path import kernels_of
from hotset.kernels.rows import RowLayout


def decode_rows(
    rows: Tensor,  # [device rows, stored width], as `layout` stores them
    row_ids: Tensor,  # [n] int64, none of them EMPTY
    layout: RowLayout,
) -> Tensor:  # [n, width] in the layout's dtype
    """Returns the values of the rows with these ids. bfloat16 rows with fp8 values have a fast path on a GPU."""
    fast = rows.is_cuda and layout.quantised > 0 and layout.dtype == torch.bfloat16
    op = kernels_of("decode_rows") if fast else reference
    values: Tensor = op.decode_rows(rows, row_ids, layout)
    return values
