"""swap_in: brings the rows that an index group selected to the device, before attention reads them.

`plan` runs once per index group and step. If it receives the memory of one layer, it also copies the missing rows
of that layer. `copy` runs for every other layer of the group, with the copies of the same `SwapPlan`.
"""

import torch
from torch import Tensor

from hotset.base.errors import ConfigError, InternalError
from hotset.kernels.fast_path import kernels_of
from hotset.kernels.rows import check_tiers_match
from hotset.kernels.swap_in import reference
from hotset.kernels.swap_in.tables import RowCopies, SeatTables, SwapPlan

__all__ = ["MAX_SLOTS", "RowCopies", "SeatTables", "SwapPlan", "copy", "plan"]

MAX_SLOTS = 32_767  # slot numbers are int16 in the maps


def plan(
    positions: Tensor,  # [batch, k] int64, EMPTY-padded anywhere, in any order, duplicates allowed
    seats: Tensor,  # [batch] int64; EMPTY: a padding query. A tiered seat occurs at most once; others may repeat
    stamps: Tensor,  # [batch] int64: position of the step's first token, below 2**31, not below any stamp in its maps
    tables: SeatTables,
    words: Tensor,  # [device pages * words_per_page] int32: the map pages of this index group
    words_per_page: int,
    counts: Tensor,  # [2] int64, incremented: positions looked up in slots (with duplicates), misses (without)
    *,
    ignore_tail: bool = False,  # True: all positions are looked up in slots, as if none were in the tail
    host_rows: Tensor | None = None,  # pass both or neither: the arguments of `copy` for a layer to copy
    device_rows: Tensor | None = None,
) -> SwapPlan:
    """Finds the device row of every position. Misses evict the least recently used slots; ties evict the lower slot.

    Positions of resident seats are looked up in `row_pages`. Of a tiered seat, the page of the stamp, the page before
    it and all later pages are in the tail; positions in these pages use no map. For all other positions of a tiered
    seat, the maps in `words` are updated in place as if the copies were complete. Therefore the caller must call `copy`
    for every layer of the group that this call does not copy, before the next `plan` for that seat. Padding queries
    change nothing.

    The missing positions, in the order of their first occurrence, get the evicted slots in ascending order. On a
    GPU, planning and copying in one call is faster than in two. Raises ConfigError before anything is written if the
    slots cannot hold k positions, if there are too many slots for the maps, if `page_rows` is below 1, if host rows and
    device rows differ in width or dtype, or, on a GPU, if k exceeds `MAX_POSITIONS`.
    """
    batch, k = positions.shape
    if k > tables.slots:
        raise ConfigError(f"{k} positions cannot be held in {tables.slots} slots; there must be at least {k} slots")
    if tables.slots > MAX_SLOTS:
        raise ConfigError(f"{tables.slots} slots are more than the {MAX_SLOTS} that the maps support")
    if tables.page_rows < 1:
        raise ConfigError(f"a page of {tables.page_rows} rows is not possible; page_rows must be at least 1")
    for name, column in (("seats", seats), ("stamps", stamps)):
        if column.shape != (batch,):
            raise InternalError(f"{name} have shape {tuple(column.shape)}, but the batch is {batch}")
    if not (words.dim() == 1 and words.dtype == torch.int32):
        raise InternalError(f"the map words must be a vector of int32, not {tuple(words.shape)} of {words.dtype}")
    if (host_rows is None) != (device_rows is None):
        raise InternalError("pass both host_rows and device_rows, or neither")
    if host_rows is not None and device_rows is not None:
        check_tiers_match(host_rows, device_rows)
    op = kernels_of("swap_in", "cuda_impl") if positions.is_cuda else reference
    swap: SwapPlan = op.plan(
        positions=positions,
        seats=seats,
        stamps=stamps,
        tables=tables,
        words=words,
        words_per_page=words_per_page,
        counts=counts,
        ignore_tail=ignore_tail,
        host_rows=host_rows,
        device_rows=device_rows,
    )
    return swap


def copy(
    copies: RowCopies,
    host_rows: Tensor,  # [host rows, width]: one layer of the host store; pinned if the device is a GPU
    device_rows: Tensor,  # [device rows, width]: the same layer of the device pool
) -> None:
    """Copies the listed rows of one layer into their slots. Writes nothing else.

    The values of a row must be adjacent; the stride of rows may exceed their width. Raises ConfigError before anything
    is written if host rows and device rows differ in width or dtype.
    """
    check_tiers_match(host_rows, device_rows)
    op = kernels_of("swap_in", "cuda_impl") if device_rows.is_cuda else reference
    op.copy(copies, host_rows, device_rows)
