"""The view on requests all of whose rows are on the device: positions become rows through the page tables."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.rows import PagedRows, Run
from hotset.kernels.segments import Segments, make_segments
from hotset.memory.device_pool import DevicePool
from hotset.memory.pages import extend_runs
from hotset.memory.view import Selected


class PageTables:
    """Page tables of up to `seats` requests: on the device as a tensor, on the host as merged runs.

    A seat is a running request's fixed place in the worker's tensors.
    """

    def __init__(self, seats: int, context: int, page_rows: int, device: torch.device) -> None:
        self.page_rows = page_rows
        pages = -(-context // page_rows)
        self.pages = torch.full((seats, pages), EMPTY, dtype=torch.int64, device=device)
        self.runs: list[list[Run]] = [[] for _ in range(seats)]

    def clear(self, seat: int) -> None:
        """A new request takes the seat: it holds no pages yet."""
        self.pages[seat] = EMPTY
        self.runs[seat] = []

    def extend(self, seat: int, first: int, pages: Sequence[int]) -> None:
        """`pages` become the seat's pages number `first` and following."""
        self.pages[seat, first : first + len(pages)] = torch.tensor(pages, dtype=torch.int64)
        extend_runs(self.runs[seat], pages, self.page_rows)

    def rows_at(self, seats: Tensor, positions: Tensor) -> Tensor:
        """Device rows of `positions` in the contexts of `seats` (same shape, or broadcast)."""
        pages = self.pages[seats, positions // self.page_rows]
        return pages * self.page_rows + positions % self.page_rows


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
        self._segments = make_segments(starts, counts, pool.device)
        self._seats = torch.tensor(seats, dtype=torch.int64, device=pool.device)
        self._runs = [tables.runs[seat] for seat in seats]
        self._tables = tables
        self._seat_of = self._seats if self._segments.decoding else self._seats[self._segments.segment_of]
        self._new_rows = tables.rows_at(self._seat_of, self._segments.positions)  # [query rows]

    @property
    def segments(self) -> Segments:
        return self._segments

    @property
    def seat_of(self) -> Tensor:
        """[query rows] int64: the seat of each query row."""
        return self._seat_of

    def append(self, layer: int, rows: Tensor) -> None:
        self._pool.rows[layer].index_copy_(0, self._new_rows, rows)

    def append_keys(self, group: int, keys: Tensor) -> None:
        assert self._pool.keys is not None, "this model has no index keys"
        self._pool.keys[group].index_copy_(0, self._new_rows, keys)

    def context(self, layer: int) -> PagedRows:
        return self._paged(self._pool.rows[layer])

    def keys(self, group: int) -> PagedRows:
        assert self._pool.keys is not None, "this model has no index keys"
        return self._paged(self._pool.keys[group])

    def select(self, layer: int, positions: Tensor) -> Selected:
        rows = self._tables.rows_at(self._seat_of[:, None], positions.clamp_min(0))
        return Selected(self._pool.rows[layer], torch.where(positions == EMPTY, EMPTY, rows))

    def roll_back(self, kept: Sequence[int]) -> list[int]:
        for count, keep in zip(self._segments.counts, kept, strict=True):
            assert 0 <= keep <= count, f"{keep} of {count} rows cannot be kept"
        return [start + keep for start, keep in zip(self._starts, kept, strict=True)]

    def _paged(self, layer_rows: Tensor) -> PagedRows:
        return PagedRows(layer_rows, self._runs)
