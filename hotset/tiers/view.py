"""The view on a batch that mixes resident, tiered and streamed requests."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.rows import PagedRows
from hotset.kernels.segments import Segments, make_segments
from hotset.kernels.swap_in import Swap
from hotset.memory.device_pool import DevicePool
from hotset.memory.resident import KeyWindow
from hotset.memory.tables import PageTables
from hotset.memory.view import Selected
from hotset.tiers.hot_buffers import HotBuffers
from hotset.tiers.mirror import Mirror


class Stream:
    """One segment whose prefix passes through a workspace, layer by layer."""

    def __init__(self, pool: DevicePool, tables: PageTables, seat: int, start: int, first: int, last: int) -> None:
        self.seat, self.start = seat, start
        self.rows = slice(first, last)  # query rows of the batch
        geometry = pool.geometry
        length = start + last - first
        # Block b of the workspace is layer part b % layers of its page b // layers.
        blocks = torch.arange(geometry.row_pages(length), device=pool.device)
        pages = torch.tensor(tables.work_pages[seat], dtype=torch.int64, device=pool.device)
        block_of = blocks % geometry.layers * pool.pages + pages[blocks // geometry.layers]
        positions = torch.arange(length, device=pool.device)
        self.places = block_of[positions // geometry.page_rows] * geometry.page_rows + positions % geometry.page_rows


class TieredView:
    """Implements `View`. Tiered segments have one query row each; streamed ones lie in one workspace each.

    Rows chosen are numbers in the pool's flat rows, all layers together, since a workspace uses every layer's part.
    """

    def __init__(
        self,
        pool: DevicePool,
        tables: PageTables,
        hot: HotBuffers,
        mirror: Mirror,
        seats: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        self._pool, self._tables, self._hot, self._mirror, self._starts = pool, tables, hot, mirror, starts
        self._segments = make_segments(starts, counts, pool.device)
        seats_on_device = torch.tensor(seats, dtype=torch.int64, device=pool.device)
        self._seat_of = seats_on_device if self._segments.decoding else seats_on_device[self._segments.segment_of]
        self._keys = KeyWindow(pool, tables, seats, self._seat_of, self._segments.positions)
        self._runs = [tables.row_runs[seat] for seat in seats]
        self._group_of = {layer: g for g in range(pool.shape.groups) for layer in pool.shape.layers_of(g)}
        self._sort_rows(seats)
        self._swap: Swap | None = None

    def _sort_rows(self, seats: Sequence[int]) -> None:
        tables, positions = self._tables, self._segments.positions
        tiered: list[int] = []
        self._streams: list[Stream] = []
        newest: list[int] = []  # the last query row of each segment, whose selection is remembered
        for segment, first, last, length in self._segments:
            seat = seats[segment]
            newest.append(last - 1)
            if tables.is_tiered[seat]:
                assert last - first == 1, "a tiered request computes one row a step"
                tiered.append(first)
            elif tables.work_pages[seat]:
                start = length - (last - first)
                self._streams.append(Stream(self._pool, tables, seat, start, first, last))
        device = self._pool.device
        self._newest = None if self._segments.decoding else torch.tensor(newest, device=device)
        self._new_rows = tables.rows_at(self._seat_of, positions)  # [query rows], within a layer
        self._tiered = torch.tensor(tiered, dtype=torch.int64, device=device) if tiered else None
        if self._tiered is not None:
            seat_of, at = self._seat_of[self._tiered], positions[self._tiered]
            self._new_rows[self._tiered] = tables.tail_at(seat_of, at)
        self._kept: Tensor | None = None  # query rows that do not stream; None: all of them
        if self._streams:
            streams = torch.zeros(positions.shape[0], dtype=torch.bool, device=device)
            for stream in self._streams:
                streams[stream.rows] = True
            self._kept = torch.nonzero(~streams)[:, 0]

    @property
    def segments(self) -> Segments:
        return self._segments

    @property
    def seat_of(self) -> Tensor:
        """[query rows] int64: the seat of each query row."""
        return self._seat_of

    def append(self, layer: int, rows: Tensor) -> None:
        stored = self._pool.shape.row.encode(rows)
        if self._kept is None:
            self._pool.rows[layer].index_copy_(0, self._new_rows, stored)
            return
        self._pool.rows[layer].index_copy_(0, self._new_rows[self._kept], stored[self._kept])
        for stream in self._streams:
            self._mirror.stream_in(layer, stream.seat, stream.start, stream.places)
            new = stored[stream.rows]
            self._pool.flat_rows.index_copy_(0, stream.places[stream.start :], new)
            self._mirror.stream_out(layer, stream.seat, stream.start, new)

    def append_keys(self, group: int, keys: Tensor) -> None:
        self._keys.append(group, keys)

    def context(self, layer: int) -> PagedRows:
        assert self._tiered is None and self._kept is None, "only resident contexts can be read whole"
        return PagedRows(self._pool.row_blocks[layer : layer + 1], self._runs, self._pool.shape.row)

    def keys(self, group: int) -> PagedRows:
        return self._keys.read(group)

    def select(self, layer: int, positions: Tensor) -> Selected:
        group = self._group_of[layer]
        first_of_group = layer == self._pool.shape.key_layers[group]
        if first_of_group:
            self._remember(group, positions)
        offset = layer * self._pool.layer_rows
        rows = self._tables.rows_at(self._seat_of[:, None], positions.clamp_min(0)) + offset
        if self._tiered is not None:
            if first_of_group:
                at = self._segments.positions[self._tiered]
                self._swap = self._hot.plan(group, self._seat_of[self._tiered], positions[self._tiered], at)
            assert self._swap is not None, "a layer that shares a selection came before the one that makes it"
            self._hot.copy(layer, self._swap)
            rows[self._tiered] = self._swap.rows + offset
        for stream in self._streams:
            rows[stream.rows] = stream.places[positions[stream.rows].clamp_min(0)]
        chosen = torch.where(positions == EMPTY, EMPTY, rows)
        return Selected(self._pool.flat_rows, chosen, self._pool.shape.row)

    def roll_back(self, kept: Sequence[int]) -> list[int]:
        for count, keep in zip(self._segments.counts, kept, strict=True):
            assert 0 <= keep <= count, f"{keep} of {count} rows cannot be kept"
        return [start + keep for start, keep in zip(self._starts, kept, strict=True)]

    def _remember(self, group: int, positions: Tensor) -> None:
        """Keeps the newest selection of every request, with which its slots would be seeded."""
        assert positions.shape[1] == self._pool.shape.topk, f"{positions.shape[1]} positions, not top-k"
        newest = positions if self._newest is None else positions[self._newest]
        seats = self._seat_of if self._newest is None else self._seat_of[self._newest]
        self._hot.last_selected[seats, group] = newest.int()
