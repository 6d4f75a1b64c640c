"""save_last_topk: every seat's newest selection is kept."""

from torch import Tensor

from hotset.kernels.fast_path import kernels_of
from hotset.kernels.save_last_topk import reference


def save_last_topk(
    kept: Tensor,  # [seats, k] int32, written; rows may lie apart
    seat_of: Tensor,  # [query rows] int64, no seat twice; EMPTY: a padded query row, which is not kept
    positions: Tensor,  # [query rows, k] int64, EMPTY-padded anywhere
) -> None:
    assert positions.shape == (seat_of.shape[0], kept.shape[1]), (
        f"{positions.shape} for {kept.shape} and {seat_of.shape}"
    )
    op = kernels_of("save_last_topk") if positions.is_cuda else reference
    op.save_last_topk(kept, seat_of, positions)
