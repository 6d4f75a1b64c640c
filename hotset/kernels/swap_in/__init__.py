"""swap_in: before attention, the rows that an index group chose are brought to the device.

`plan` runs once per index group and step, `copy` once for each layer of the group with the same `Swap`.
"""

from types import ModuleType

import torch
from torch import Tensor

from hotset.base.errors import ConfigError, MissingDependency
from hotset.kernels.swap_in import reference
from hotset.kernels.swap_in.tables import SeatTables, Swap

__all__ = ["MOST_SLOTS", "SeatTables", "Swap", "copy", "plan"]

MOST_SLOTS = 32_767  # slot numbers are int16 in the maps


def plan(
    positions: Tensor,  # [batch, k] int64, EMPTY-padded anywhere, in any order, duplicates allowed
    seats: Tensor,  # [batch] int64; EMPTY: a padded batch row. A tiered seat occurs at most once, a resident one freely
    stamps: Tensor,  # [batch] int64: this step's stamp, below 2**31, never smaller than any in that seat's maps
    tail_first: Tensor,  # [batch] int64: positions from here on are in the tail, the others in slots or on the host
    tables: SeatTables,
    words: Tensor,  # [device pages * words_per_page] int32: the map pages of this index group
    words_per_page: int,
    counts: Tensor,  # [2] int64: positions looked up in slots (duplicates count), misses (unique); added to
) -> Swap:
    """Finds the device row of every position; misses take the least recently used slots (of equals the lower slot).

    Resident seats are looked up in `row_pages`; positions in a tail touch no map. For the rest of a tiered seat's
    positions the maps in `words` are updated in place as if the copies were done already, so the caller owes `copy`
    in every layer of the group before the next `plan` for that seat. Padded batch rows touch nothing.
    The missing positions, in the order of their first occurrence, get the victims in ascending order; the first
    occurrence carries the copy, all occurrences the row. Raises ConfigError before anything is touched if the slots
    cannot hold k positions or cannot be numbered.
    """
    batch, k = positions.shape
    if k > tables.slots:
        raise ConfigError(f"{k} positions cannot be held in {tables.slots} slots; there must be at least as many")
    if tables.slots > MOST_SLOTS:
        raise ConfigError(f"{tables.slots} slots are more than the {MOST_SLOTS} that the maps can number")
    if tables.page_rows < 1:
        raise ConfigError(f"a page of {tables.page_rows} rows holds nothing; page_rows must be at least 1")
    for name, each in (("seats", seats), ("stamps", stamps), ("tail_first", tail_first)):
        assert each.shape == (batch,), f"{name} {tuple(each.shape)} for a batch of {batch}"
    assert words.dim() == 1 and words.dtype == torch.int32, f"map words are {words.dtype} {tuple(words.shape)}"
    op = _fast_path() if positions.is_cuda else reference
    swap: Swap = op.plan(positions, seats, stamps, tail_first, tables, words, words_per_page, counts)
    return swap


def copy(
    swap: Swap,
    host_rows: Tensor,  # [host rows, width]: one layer of the host store; pinned where the device is a GPU
    device_rows: Tensor,  # [device rows, width]: the same layer of the device pool
) -> None:
    """Copies the missing rows of one layer into their slots, byte for byte; nothing else is written.

    Values within a row are adjacent; rows may lie further apart than their width. Raises ConfigError before anything
    is written if rows of the two tiers are not alike.
    """
    if host_rows.dtype != device_rows.dtype:
        raise ConfigError(f"host rows of {host_rows.dtype} cannot be copied to device rows of {device_rows.dtype}")
    if host_rows.shape[1] != device_rows.shape[1]:
        raise ConfigError(f"host rows of {host_rows.shape[1]} values, device rows of {device_rows.shape[1]}")
    for name, rows in (("host", host_rows), ("device", device_rows)):
        assert rows.stride(1) == 1, f"the values of a {name} row are {rows.stride(1)} apart"
    op = _fast_path() if device_rows.is_cuda else reference
    op.copy(swap, host_rows, device_rows)


def _fast_path() -> ModuleType:
    """Imported on first use: a machine without a GPU needs no Triton."""
    try:
        from hotset.kernels.swap_in import triton_impl
    except ModuleNotFoundError as error:
        raise MissingDependency(f'swap-in on a GPU needs {error.name}: pip install "hotset[cuda]"') from error
    return triton_impl
