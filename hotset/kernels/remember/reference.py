"""The specification of remember."""

from torch import Tensor

from hotset.kernels import EMPTY


def remember(kept: Tensor, seat_of: Tensor, positions: Tensor) -> None:
    there = seat_of != EMPTY
    kept[seat_of[there]] = positions[there].int()
