"""save_last_topk against plain Python: the reference, the kernel under the interpreter, and the kernel on a GPU."""

import pytest
import torch
from interpreted import INTERPRETED, triton_impl
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.save_last_topk import reference, save_last_topk

SEATS, GROUPS, GROUP = 400, 3, 1
UNTOUCHED = 77


def case(rows: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of one group among others, padded query rows among the seats, positions that are not contiguous."""
    seat_of = torch.randperm(SEATS)[:rows]
    seat_of[rows // 2 :: 3] = EMPTY
    return torch.full((SEATS, GROUPS, k), UNTOUCHED, dtype=torch.int32), seat_of, torch.randint(-1, 2**31, (k, rows)).T


def expected(kept: Tensor, seat_of: Tensor, positions: Tensor) -> list[list[list[int]]]:
    lists: list[list[list[int]]] = kept.tolist()
    for seat, row in zip(seat_of.tolist(), positions.tolist(), strict=True):
        if seat != EMPTY:
            lists[seat][GROUP] = row
    return lists


@pytest.mark.parametrize(("rows", "k"), [(1, 1), (7, 3), (3, 1100)])
def test_seats_keep_what_they_selected_and_others_what_they_had(rows: int, k: int) -> None:
    kept, seat_of, positions = case(rows, k)
    wanted = expected(kept, seat_of, positions)
    op = triton_impl("save_last_topk") if INTERPRETED else reference
    op.save_last_topk(kept[:, GROUP], seat_of, positions)
    assert kept.tolist() == wanted


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (128, 2048), (300, 513)])
def test_on_a_gpu_as_well(rows: int, k: int) -> None:
    kept, seat_of, positions = case(rows, k)
    wanted = expected(kept, seat_of, positions)
    on_gpu = kept.cuda()
    save_last_topk(on_gpu[:, GROUP], seat_of.cuda(), positions.cuda())
    assert on_gpu.tolist() == wanted
