"""page_table_lookup: translates positions of resident contexts into device rows through the page table."""

from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels.fast_path import kernels_of
from hotset.kernels.page_table_lookup import reference


def page_table_lookup(
    positions: Tensor,  # [tokens, n] int64, EMPTY-padded anywhere
    seat_of: Tensor,  # [tokens] int64; EMPTY: a padding token
    table: Tensor,  # [seats, pages] int64: the device page of each page of a seat's context
    page_rows: int,
) -> Tensor:  # [tokens, n] int64: rows within a layer; EMPTY if the position or the seat is EMPTY
    if seat_of.shape[0] != positions.shape[0]:
        raise InternalError(f"{seat_of.shape[0]} seats for {positions.shape[0]} tokens")
    op = kernels_of("page_table_lookup") if positions.is_cuda else reference
    rows: Tensor = op.page_table_lookup(positions, seat_of, table, page_rows)
    return rows
