"""swap_in: before attention, the rows that an index group chose are brought to the device.

`plan` runs once per index group and step, and copies the rows of the group's first layer if it is given them; `copy`
runs for each other layer of the group, with the copies of the same `Swap`.
"""

import torch
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels.fast_path import kernels_of
from hotset.kernels.swap_in import reference
from hotset.kernels.swap_in.tables import Copies, SeatTables, Swap

__all__ = ["MAX_SLOTS", "Copies", "SeatTables", "Swap", "copy", "plan"]

MAX_SLOTS = 32_767  # slot numbers are int16 in the maps


def plan(
    positions: Tensor,  # [batch, k] int64, EMPTY-padded anywhere, in any order, duplicates allowed
    seats: Tensor,  # [batch] int64; EMPTY: a padded batch row. A tiered seat occurs at most once, a resident one freely
    stamps: Tensor,  # [batch] int64: position of the newest row, below 2**31, never below any in that seat's maps
    tables: SeatTables,
    words: Tensor,  # [device pages * words_per_page] int32: the map pages of this index group
    words_per_page: int,
    counts: Tensor,  # [2] int64: positions looked up in slots (duplicates count), misses (unique); added to
    *,
    ignore_tail: bool = False,  # look every position up in slots, as if none were in the tail
    host_rows: Tensor | None = None,  # both or none: as for `copy`, which is then done for this layer
    device_rows: Tensor | None = None,
) -> Swap:
    """Finds the device row of every position; misses take the least recently used slots (of equals the lower slot).

    Resident seats are looked up in `row_pages`; of a tiered seat, the page that holds its newest row and the one before
    it are in the tail, and positions there touch no map. For the rest of a tiered seat's positions the maps in `words`
    are updated in place as if the copies were done already, so the caller owes `copy` in every layer of the group
    before the next `plan` for that seat. Padded batch rows touch nothing.
    The missing positions, in the order of their first occurrence, get the victims in ascending order. To plan and copy
    in one call is quicker than in two. Raises ConfigError before anything is touched if the slots cannot hold k
    positions or cannot be numbered, or if rows of the two tiers are not alike.
    """
    batch, k = positions.shape
    if k > tables.slots:
        raise ConfigError(f"{k} positions cannot be held in {tables.slots} slots; there must be at least as many")
    if tables.slots > MAX_SLOTS:
        raise ConfigError(f"{tables.slots} slots are more than the {MAX_SLOTS} that the maps can number")
    if tables.page_rows < 1:
        raise ConfigError(f"a page of {tables.page_rows} rows holds nothing; page_rows must be at least 1")
    for name, each in (("seats", seats), ("stamps", stamps)):
        assert each.shape == (batch,), f"{name} {tuple(each.shape)} for a batch of {batch}"
    assert words.dim() == 1 and words.dtype == torch.int32, f"map words are {words.dtype} {tuple(words.shape)}"
    assert (host_rows is None) == (device_rows is None), "rows of one tier only"
    if host_rows is not None and device_rows is not None:
        _check_rows(host_rows, device_rows)
    op = kernels_of("swap_in", "cuda_impl") if positions.is_cuda else reference
    maps = (tables, words, words_per_page)
    options = {"ignore_tail": ignore_tail, "host_rows": host_rows, "device_rows": device_rows}
    swap: Swap = op.plan(positions, seats, stamps, *maps, counts, **options)
    return swap


def copy(
    copies: Copies,
    host_rows: Tensor,  # [host rows, width]: one layer of the host store; pinned where the device is a GPU
    device_rows: Tensor,  # [device rows, width]: the same layer of the device pool
) -> None:
    """Copies the rows of one layer into their slots, byte for byte; nothing else is written.

    Values within a row are adjacent; rows may lie further apart than their width. Raises ConfigError before anything is
    written if rows of the two tiers are not alike.
    """
    _check_rows(host_rows, device_rows)
    op = kernels_of("swap_in", "cuda_impl") if device_rows.is_cuda else reference
    op.copy(copies, host_rows, device_rows)


def _check_rows(host_rows: Tensor, device_rows: Tensor) -> None:
    if host_rows.dtype != device_rows.dtype:
        raise ConfigError(f"host rows of {host_rows.dtype} cannot be copied to device rows of {device_rows.dtype}")
    if host_rows.shape[1] != device_rows.shape[1]:
        raise ConfigError(f"host rows of {host_rows.shape[1]} values, device rows of {device_rows.shape[1]}")
    for name, rows in (("host", host_rows), ("device", device_rows)):
        assert rows.stride(1) == 1, f"the values of a {name} row are {rows.stride(1)} apart"
