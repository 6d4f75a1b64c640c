"""The view on a step that may mix resident, tiered and streamed requests."""

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.device_copies import list_to_device
from hotset.kernels.rows import PagedRows
from hotset.kernels.segments import Span
from hotset.kernels.swap_in import Swap
from hotset.memory.batch import Batch
from hotset.memory.device_pool import DevicePool
from hotset.memory.resident import ResidentView
from hotset.memory.tables import PageTables
from hotset.memory.view import NewRows, Selected
from hotset.tiers.hot_buffers import HotBuffers
from hotset.tiers.mirror import Mirror, TokenRange


class Stream:
    """One segment whose prefix passes through a workspace, layer by layer."""

    def __init__(self, pool: DevicePool, tables: PageTables, mirror: Mirror, seat: int, span: Span) -> None:
        layers, page_rows = pool.geometry.layers, pool.geometry.page_rows
        self.rows = slice(span.first, span.last)  # query rows of the batch
        self.start = span.length - (span.last - span.first)
        # Block b of the workspace is layer part b % layers of its page b // layers.
        work = tables.work_pages[seat]
        blocks = [b % layers * pool.pages + work[b // layers] for b in range(pool.geometry.row_pages(span.length))]
        self.prefix = mirror.row_pieces(TokenRange(seat, 0, self.start), blocks)
        self.new = mirror.row_pieces(TokenRange(seat, self.start, span.length), blocks, own=True)
        positions = torch.arange(span.length, device=pool.device)
        in_block = list_to_device(blocks, torch.int64, pool.device)[positions // page_rows]
        self.row_ids = in_block * page_rows + positions % page_rows  # of all positions, in the pool's flat rows


class TieredView(ResidentView):
    """Implements `View`. Tiered segments have one query row each; streamed ones lie in one workspace each.

    Where no segment streams, the device alone knows which requests are tiered and where their rows are: the work of
    one such step, captured, serves any other of as many rows.
    """

    def __init__(
        self, pool: DevicePool, tables: PageTables, hot: HotBuffers, mirror: Mirror, batch: Batch, swapping: bool
    ) -> None:
        """`swapping`: there may be tiered requests in the batch."""
        super().__init__(pool, tables, batch)
        self._hot, self._mirror, self._swapping = hot, mirror, swapping
        self._chosen: Tensor | None = None  # of the index group whose layers are being computed
        self._swap: Swap | None = None
        seat_of, positions = batch.seat_of, batch.segments.positions
        if swapping:
            seats = seat_of.clamp_min(0)
            tiered = tables.tiered[seats] & (seat_of != EMPTY)
            self._new_rows = torch.where(tiered, tables.tail_at(seats, positions), self._new_rows)
        self._streams: list[Stream] = []
        self._newest: Tensor | None = None  # the last query row of each segment; None: every row is one
        if not batch.segments.decoding or any(tables.work_pages[seat] for seat in batch.seats):
            self._sort_rows()

    def _sort_rows(self) -> None:
        """Finds the segments that stream, and each segment's newest row."""
        pool, tables, segments = self._pool, self._tables, self.segments
        newest: list[int] = []
        for span in segments:
            seat = self._batch.seats[span.segment]
            newest.append(span.last - 1)
            one_row = span.last - span.first == 1
            assert one_row or seat not in tables.tiered_seats, "a tiered request computes one row a step"
            if tables.work_pages[seat]:
                self._streams.append(Stream(pool, tables, self._mirror, seat, span))
        self._newest = list_to_device(newest, torch.int64, pool.device)

    def new_rows(self, layer: int) -> NewRows:
        if not self._streams:
            return super().new_rows(layer)
        # A workspace uses every layer's part of its pages, so rows are numbered over all layers.
        row_ids = self._new_rows + layer * self._pool.layer_rows
        for stream in self._streams:
            self._mirror.stream_in(layer, stream.prefix)
            row_ids[stream.rows] = stream.row_ids[stream.start :]
        return NewRows(self._pool.flat_rows, row_ids, self._pool.shape.row)

    def context(self, layer: int) -> PagedRows:
        assert not self._swapping and not self._streams, "only resident contexts can be read whole"
        return super().context(layer)

    def select(self, layer: int, positions: Tensor) -> Selected:
        shape = self._pool.shape
        group = shape.group_of(layer)
        if layer == shape.key_layers[group]:
            self._save_last_topk(group, positions)
            self._choose(group, positions)
            if self._swap is not None:
                self._hot.copy_ahead(shape.layers_of(group)[1:], self._swap)
        elif self._swap is not None:
            self._hot.wait_for(layer)
        assert self._chosen is not None, "a layer that shares a selection came before the one that makes it"
        if not self._streams:
            return Selected(self._pool.rows[layer], self._chosen, shape.row)
        chosen = torch.where(self._chosen == EMPTY, EMPTY, self._chosen + layer * self._pool.layer_rows)
        for stream in self._streams:
            self._mirror.stream_out(layer, stream.new)
            wanted = positions[stream.rows]
            chosen[stream.rows] = torch.where(wanted == EMPTY, EMPTY, stream.row_ids[wanted.clamp_min(0)])
        return Selected(self._pool.flat_rows, chosen, shape.row)

    def _choose(self, group: int, positions: Tensor) -> None:
        """Finds the rows of a group's selection, the same within each of its layers, and what must be copied first: in
        the first layer that is done."""
        if self._swapping:
            self._swap = self._hot.plan(group, self.seat_of, positions, self.segments.positions)
            self._chosen = self._swap.rows
        else:
            self._chosen = self._find(positions)

    def _save_last_topk(self, group: int, positions: Tensor) -> None:
        """Keeps the newest selection of every request."""
        seats, newest = self.seat_of, positions
        if self._newest is not None:
            seats, newest = seats[self._newest], positions[self._newest]
        self._hot.save_last_topk(group, seats, newest)
