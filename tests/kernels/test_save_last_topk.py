"""Compares save_last_topk with plain Python. Tests the reference, the interpreted kernel and the kernel on a GPU."""

import pytest
import torch
from interpreted import INTERPRETED, triton_impl
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.save_last_topk import reference, save_last_topk

SEATS, GROUPS, GROUP = 400, 3, 1
UNTOUCHED = 77


def case(queries: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the saved top-k of all seats and index groups, and draws seats, some of which are EMPTY, and positions.

    Some seats have several tokens, which are adjacent. The tensor of positions is not contiguous.
    """
    seats = torch.randperm(SEATS)[:queries]
    seats[torch.rand(queries) < 0.2] = EMPTY
    seat_of = seats.repeat_interleave(torch.randint(1, 4, (queries,)))[:queries]
    return (
        torch.full((SEATS, GROUPS, k), UNTOUCHED, dtype=torch.int32),
        seat_of,
        torch.randint(-1, 2**31, (k, queries)).T,
    )


def expected(kept: Tensor, seat_of: Tensor, positions: Tensor) -> list[list[list[int]]]:
    lists: list[list[list[int]]] = kept.tolist()
    for seat, row in zip(seat_of.tolist(), positions.tolist(), strict=True):
        if seat != EMPTY:
            lists[seat][GROUP] = row
    return lists


@pytest.mark.parametrize(("queries", "k"), [(1, 1), (7, 3), (3, 1100)])
def test_only_the_seats_of_the_batch_are_overwritten(queries: int, k: int) -> None:
    kept, seat_of, positions = case(queries, k)
    expected_lists = expected(kept, seat_of, positions)
    op = triton_impl("save_last_topk") if INTERPRETED else reference
    op.save_last_topk(kept[:, GROUP], seat_of, positions)
    assert kept.tolist() == expected_lists


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "k"), [(1, 1), (128, 2048), (300, 513)])
def test_on_a_gpu_only_the_seats_of_the_batch_are_overwritten(queries: int, k: int) -> None:
    kept, seat_of, positions = case(queries, k)
    expected_lists = expected(kept, seat_of, positions)
    on_gpu = kept.cuda()
    save_last_topk(on_gpu[:, GROUP], seat_of.cuda(), positions.cuda())
    assert on_gpu.tolist() == expected_lists
