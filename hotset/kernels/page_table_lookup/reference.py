"""The specification of page_table_lookup."""

import torch
from torch import Tensor

from hotset.kernels import EMPTY


def page_table_lookup(positions: Tensor, seat_of: Tensor, table: Tensor, page_rows: int) -> Tensor:
    exists = (positions != EMPTY) & (seat_of != EMPTY)[:, None]
    position = positions.clamp_min(0)
    rows = table[seat_of.clamp_min(0)[:, None], position // page_rows] * page_rows + position % page_rows
    return torch.where(exists, rows, EMPTY)
