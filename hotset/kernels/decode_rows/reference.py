"""The specification of decode_rows."""

from torch import Tensor

from hotset.kernels.rows import RowLayout


def decode_rows(rows: Tensor, row_ids: Tensor, layout: RowLayout) -> Tensor:
    return layout.decode(rows[row_ids])
