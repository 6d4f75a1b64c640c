"""The specification of save_last_topk."""

from torch import Tensor

from hotset.kernels import EMPTY


def save_last_topk(last_topk: Tensor, seat_of: Tensor, positions: Tensor) -> None:
    real = seat_of != EMPTY
    last_topk[seat_of[real]] = positions[real].int()
