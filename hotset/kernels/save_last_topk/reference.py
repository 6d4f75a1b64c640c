"""The specification of save_last_topk."""

import torch
from torch import Tensor

from hotset.kernels import EMPTY


def save_last_topk(last_topk: Tensor, seat_of: Tensor, positions: Tensor) -> None:
    last = torch.ones_like(seat_of, dtype=torch.bool)
    last[:-1] = seat_of[:-1] != seat_of[1:]
    saved = last & (seat_of != EMPTY)
    last_topk[seat_of[saved]] = positions[saved].int()
