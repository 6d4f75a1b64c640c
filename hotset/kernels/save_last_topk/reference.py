"""The specification of save_last_topk."""

from torch import Tensor

from hotset.kernels import EMPTY


def save_last_topk(kept: Tensor, seat_of: Tensor, positions: Tensor) -> None:
    there = seat_of != EMPTY
    kept[seat_of[there]] = positions[there].int()
