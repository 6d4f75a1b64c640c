"""The specification of look_up."""

import torch
from torch import Tensor

from hotset.kernels import EMPTY


def look_up(positions: Tensor, seat_of: Tensor, table: Tensor, page_rows: int) -> Tensor:
    there = (positions != EMPTY) & (seat_of != EMPTY)[:, None]
    at = positions.clamp_min(0)
    rows = table[seat_of.clamp_min(0)[:, None], at // page_rows] * page_rows + at % page_rows
    return torch.where(there, rows, EMPTY)
