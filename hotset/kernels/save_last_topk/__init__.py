"""save_last_topk: saves the selection of the last token of every seat in the batch."""

from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels.fast_path import kernels_of
from hotset.kernels.save_last_topk import reference


def save_last_topk(
    last_topk: Tensor,  # [seats, k] int32, written; any strides
    seat_of: Tensor,  # [tokens] int64, tokens of a seat are adjacent; EMPTY: a padding token, which is not saved
    positions: Tensor,  # [tokens, k] int64, EMPTY-padded anywhere
) -> None:
    if positions.shape != (seat_of.shape[0], last_topk.shape[1]):
        raise InternalError(
            f"positions {tuple(positions.shape)} for {seat_of.shape[0]} tokens and a top-k of {last_topk.shape[1]}"
        )
    op = kernels_of("save_last_topk") if positions.is_cuda else reference
    op.save_last_topk(last_topk, seat_of, positions)
