"""The view on requests all of whose rows are on the device: positions become rows through the page tables."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.rows import PagedRows
from hotset.kernels.segments import Segments, make_segments
from hotset.memory.device_pool import DevicePool
from hotset.memory.tables import PageTables
from hotset.memory.view import Selected


class KeyWindow:
    """The index keys of one step's contexts: on the device whatever tier their rows are in."""

    def __init__(
        self, pool: DevicePool, tables: PageTables, seats: Sequence[int], seat_of: Tensor, positions: Tensor
    ) -> None:
        self._pool = pool
        self._runs = [tables.key_runs[seat] for seat in seats]
        if pool.key_blocks is not None:
            place = key_places(pool, tables, seat_of, positions)
            self._part, self._page, self._key = place

    def append(self, group: int, keys: Tensor) -> None:
        layout = self._pool.shape.key
        assert layout is not None, "this model has no index keys"
        self._pool.keys_of(group)[self._part, self._page, self._key] = layout.encode(keys)

    def read(self, group: int) -> PagedRows:
        layout = self._pool.shape.key
        assert layout is not None, "this model has no index keys"
        return PagedRows(self._pool.keys_of(group), self._runs, layout)


def key_places(pool: DevicePool, tables: PageTables, seats: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(part, page, key) of each position's index key in `pool.keys_of(group)`, the same for every group."""
    assert pool.key_blocks is not None, "this model has no index keys"
    per_page, per_block = pool.geometry.keys_per_page, pool.key_blocks.shape[2]
    within = positions % per_page
    return within // per_block, tables.keys[seats, positions // per_page], within % per_block


class ResidentView:
    """Implements `View` over one device pool.

    Rolling back undoes nothing: a view reads only [0, start + count) of each context and writes [start, start + count)
    before it reads, so rows past a length are dead as soon as the next view begins there.
    """

    def __init__(
        self, pool: DevicePool, tables: PageTables, seats: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> None:
        self._pool = pool
        self._starts = starts
        self._tables = tables
        self._segments = make_segments(starts, counts, pool.device)
        seats_on_device = torch.tensor(seats, dtype=torch.int64, device=pool.device)
        self._seat_of = seats_on_device if self._segments.decoding else seats_on_device[self._segments.segment_of]
        self._runs = [tables.row_runs[seat] for seat in seats]
        self._new_rows = tables.rows_at(self._seat_of, self._segments.positions)  # [query rows]
        self._keys = KeyWindow(pool, tables, seats, self._seat_of, self._segments.positions)

    @property
    def segments(self) -> Segments:
        return self._segments

    @property
    def seat_of(self) -> Tensor:
        """[query rows] int64: the seat of each query row."""
        return self._seat_of

    def append(self, layer: int, rows: Tensor) -> None:
        self._pool.rows[layer].index_copy_(0, self._new_rows, self._pool.shape.row.encode(rows))

    def append_keys(self, group: int, keys: Tensor) -> None:
        self._keys.append(group, keys)

    def context(self, layer: int) -> PagedRows:
        return PagedRows(self._pool.row_blocks[layer : layer + 1], self._runs, self._pool.shape.row)

    def keys(self, group: int) -> PagedRows:
        return self._keys.read(group)

    def select(self, layer: int, positions: Tensor) -> Selected:
        rows = self._tables.rows_at(self._seat_of[:, None], positions.clamp_min(0))
        return Selected(self._pool.rows[layer], torch.where(positions == EMPTY, EMPTY, rows), self._pool.shape.row)

    def roll_back(self, kept: Sequence[int]) -> list[int]:
        for count, keep in zip(self._segments.counts, kept, strict=True):
            assert 0 <= keep <= count, f"{keep} of {count} rows cannot be kept"
        return [start + keep for start, keep in zip(self._starts, kept, strict=True)]
