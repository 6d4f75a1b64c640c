"""The view on requests all of whose rows are on the device: positions become rows through the page tables."""

from collections.abc import Sequence

from torch import Tensor

from hotset.kernels.page_table_lookup import page_table_lookup
from hotset.kernels.rows import PagedRows
from hotset.kernels.segments import Segments
from hotset.memory.batch import Batch
from hotset.memory.device_pool import DevicePool
from hotset.memory.tables import PageTables
from hotset.memory.view import NewRows, Selected


class ResidentView:
    """Implements `View` over one device pool.

    Rolling back undoes nothing: a view reads only [0, start + count) of each context and writes [start, start + count)
    before it reads, so rows past a length are dead as soon as the next view begins there.
    """

    def __init__(self, pool: DevicePool, tables: PageTables, batch: Batch) -> None:
        self._pool, self._tables, self._batch = pool, tables, batch
        self._new_rows = self._find(batch.segments.positions[:, None])[:, 0]  # [query rows], within a layer
        self._row_runs = [tables.row_runs[seat] for seat in batch.seats]
        self._key_runs = [tables.key_runs[seat] for seat in batch.seats]

    @property
    def segments(self) -> Segments:
        return self._batch.segments

    @property
    def seat_of(self) -> Tensor:
        """[query rows] int64: the seat of each query row."""
        return self._batch.seat_of

    @property
    def padded_seats(self) -> Tensor | None:
        return None if self._batch.seats else self._batch.seat_of

    def new_rows(self, layer: int) -> NewRows:
        return NewRows(self._pool.rows[layer], self._new_rows, self._pool.shape.row)

    def context(self, layer: int) -> PagedRows:
        blocks, row = self._pool.row_blocks[layer : layer + 1], self._pool.shape.row
        return PagedRows(blocks, self._row_runs, row, self._tables.rows, self._batch.seat_of)

    def keys(self, group: int) -> PagedRows:
        layout = self._pool.shape.key
        assert layout is not None, "this model has no index keys"
        blocks = self._pool.keys_of(group)
        return PagedRows(blocks, self._key_runs, layout, self._tables.keys, self._batch.seat_of)

    def select(self, layer: int, positions: Tensor) -> Selected:
        return Selected(self._pool.rows[layer], self._find(positions), self._pool.shape.row)

    def roll_back(self, kept: Sequence[int]) -> list[int]:
        ends = []
        for keep, count, length in zip(kept, self.segments.counts, self.segments.lengths, strict=True):
            assert 0 <= keep <= count, f"{keep} of {count} rows cannot be kept"
            ends.append(length - count + keep)
        return ends

    def _find(self, positions: Tensor) -> Tensor:
        """Device rows, within a layer, of `positions` [query rows, n] of each query row's own context."""
        return page_table_lookup(positions, self._batch.seat_of, self._tables.rows, self._pool.geometry.page_rows)
