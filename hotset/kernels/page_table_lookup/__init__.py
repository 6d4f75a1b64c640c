"""page_table_lookup: positions of resident contexts become device rows through the page table."""

from torch import Tensor

from hotset.kernels.fast_path import kernels_of
from hotset.kernels.page_table_lookup import reference


def page_table_lookup(
    positions: Tensor,  # [query rows, n] int64, EMPTY-padded anywhere
    seat_of: Tensor,  # [query rows] int64; EMPTY: a padded query row
    table: Tensor,  # [seats, pages] int64: device page of each page of a seat's context
    page_rows: int,
) -> Tensor:  # [query rows, n] int64: rows within a layer; EMPTY where there is no position or no seat
    assert seat_of.shape[0] == positions.shape[0], f"{seat_of.shape[0]} seats for {positions.shape[0]} query rows"
    op = kernels_of("page_table_lookup") if positions.is_cuda else reference
    rows: Tensor = op.page_table_lookup(positions, seat_of, table, page_rows)
    return rows
