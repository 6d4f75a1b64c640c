"""Compares page_table_lookup with plain Python. Tests the reference, the interpreted kernel and the kernel on a GPU."""

import pytest
import torch
from interpreted import INTERPRETED, triton_impl
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.page_table_lookup import page_table_lookup, reference

PAGE_ROWS, SEATS, PAGES = 5, 4, 6


def case(queries: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draws positions and seats, some of which are EMPTY, and a page table. `positions` is not contiguous."""
    positions = torch.randint(-1, PAGE_ROWS * PAGES, (n, queries)).T
    seat_of = torch.randint(-1, SEATS, (queries,))
    return positions, seat_of, torch.randperm(1000)[: SEATS * PAGES].view(SEATS, PAGES)


def expected(positions: Tensor, seat_of: Tensor, table: Tensor) -> list[list[int]]:
    def row(seat: int, position: int) -> int:
        if EMPTY in (seat, position):
            return EMPTY
        return int(table[seat, position // PAGE_ROWS]) * PAGE_ROWS + position % PAGE_ROWS

    pairs = zip(seat_of.tolist(), positions.tolist(), strict=True)
    return [[row(seat, position) for position in query] for seat, query in pairs]


@pytest.mark.parametrize(("queries", "n"), [(1, 1), (7, 3), (3, 700)])
def test_positions_become_rows_and_padding_stays_empty(queries: int, n: int) -> None:
    positions, seat_of, table = case(queries, n)
    op = triton_impl("page_table_lookup") if INTERPRETED else reference
    assert op.page_table_lookup(positions, seat_of, table, PAGE_ROWS).tolist() == expected(positions, seat_of, table)


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "n"), [(1, 1), (128, 2048), (300, 513)])
def test_on_a_gpu_positions_become_rows_and_padding_stays_empty(queries: int, n: int) -> None:
    positions, seat_of, table = case(queries, n)
    rows = page_table_lookup(positions.cuda(), seat_of.cuda(), table.cuda(), PAGE_ROWS)
    assert rows.tolist() == expected(positions, seat_of, table)
