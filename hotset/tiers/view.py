"""The view of a step that may mix resident, tiered and streamed requests."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels import EMPTY
from hotset.kernels.device_copies import list_to_device
from hotset.kernels.rows import PagedRows
from hotset.kernels.segments import SegmentSpan
from hotset.kernels.swap_in import SwapPlan
from hotset.memory.device_pool import DevicePool
from hotset.memory.resident import Batch, ResidentView
from hotset.memory.tables import PageTables
from hotset.memory.view import Contexts, NewRows, Selected
from hotset.tiers.hot_buffers import HotBuffers
from hotset.tiers.mirror import Mirror, TokenRange


class StreamedSegment:
    """One segment whose rows pass through a workspace, layer by layer."""

    def __init__(
        self, pool: DevicePool, tables: PageTables, mirror: Mirror, seat: int, span: SegmentSpan, first_row: int
    ) -> None:
        """`first_row` is the number of rows in the contexts of all segments before this one."""
        layers, page_rows = pool.geometry.layers, pool.geometry.page_rows
        self.tokens = slice(span.first, span.last)  # this segment's tokens in the batch
        self.context = slice(first_row, first_row + span.length)  # this segment's rows in the contexts of the batch
        self.start = span.length - (span.last - span.first)
        # A workspace page has room for `layers` context pages. Context page b is in workspace page b // layers, where
        # layer b % layers would be.
        work = tables.work_pages[seat]
        blocks = [b % layers * pool.pages + work[b // layers] for b in range(pool.geometry.row_pages(span.length))]
        self.prefix = mirror.row_runs(TokenRange(seat, 0, self.start), blocks)
        self.new = mirror.row_runs(TokenRange(seat, self.start, span.length), blocks, own=True)
        positions = torch.arange(span.length, device=pool.device)
        in_block = list_to_device(blocks, torch.int64, pool.device)[positions // page_rows]
        # The index into `pool.flat_rows` of the row of each position.
        self.row_ids = in_block * page_rows + positions % page_rows


class TieredSegments:
    """The segments of tiered requests in a step that verifies drafts of some of them.

    Each is planned as one query for the union of its tokens' selections, so that a row which several of them select is
    copied once, and none of them evicts a row that another one needs.
    """

    def __init__(self, spans: Sequence[SegmentSpan], seats: Sequence[int], device: torch.device) -> None:
        width = max(span.last - span.first for span in spans)
        tokens = [[*range(span.first, span.last), *[EMPTY] * (width - span.last + span.first)] for span in spans]
        self._tokens = list_to_device(tokens, torch.int64, device)  # [segments, width], EMPTY-padded
        self._seats = list_to_device([seats[span.segment] for span in spans], torch.int64, device)
        self._starts = list_to_device([span.length - span.last + span.first for span in spans], torch.int64, device)
        self._valid = self._tokens != EMPTY

    def plan(self, hot: HotBuffers, group: int, positions: Tensor, rows: Tensor) -> SwapPlan:
        """Plans the swap-in of the selections `positions` [tokens, k], and writes their rows to `rows` [tokens, k]."""
        selected = torch.where(self._valid[:, :, None], positions[self._tokens.clamp_min(0)], EMPTY)
        swap = hot.plan(group, self._seats, selected.flatten(1), self._starts)
        rows[self._tokens[self._valid]] = swap.rows.view_as(selected)[self._valid]
        return swap


class TieredView(ResidentView):
    """Implements `View`. A segment of a tiered request has one token, or several if some are drafts; a streamed segment
    has its own workspace.

    If no segment is streamed, device tensors tell the kernels which requests are tiered and where their rows are. A
    decode step can therefore be captured once and replayed for other decode steps with the same number of tokens.
    """

    def __init__(
        self, pool: DevicePool, tables: PageTables, hot: HotBuffers, mirror: Mirror, batch: Batch, has_tiered: bool
    ) -> None:
        """If not `has_tiered`, no request of the batch may be tiered."""
        super().__init__(pool, tables, batch)
        self._hot, self._mirror, self._has_tiered = hot, mirror, has_tiered
        self._selected: Tensor | None = None  # rows selected by the index group whose layers are being computed
        self._swap: SwapPlan | None = None
        seat_of, positions = batch.seat_of, batch.segments.positions
        if has_tiered:
            seats = seat_of.clamp_min(0)
            tiered = tables.tiered[seats] & (seat_of != EMPTY)
            self._new_rows = torch.where(tiered, tables.tail_at(seats, positions), self._new_rows)
        self._streamed: list[StreamedSegment] = []
        self._newest: Tensor | None = None  # index of each segment's last token; None: each segment has one token
        self._verified: TieredSegments | None = None  # None: each tiered segment has one token
        if not batch.segments.decoding or any(tables.work_pages[seat] for seat in batch.seats):
            self._inspect_segments()

    def _inspect_segments(self) -> None:
        """Finds the streamed segments, those of tiered requests with drafts, and the last token of each segment."""
        pool, tables, segments = self._pool, self._tables, self.segments
        tiered = [span for span in segments if self._batch.seats[span.segment] in tables.tiered_seats]
        if any(span.last - span.first > 1 for span in tiered):
            self._verified = TieredSegments(tiered, self._batch.seats, pool.device)
        newest: list[int] = []
        first_row = 0
        for span in segments:
            seat = self._batch.seats[span.segment]
            newest.append(span.last - 1)
            if tables.work_pages[seat]:
                self._streamed.append(StreamedSegment(pool, tables, self._mirror, seat, span, first_row))
            first_row += span.length
        self._newest = list_to_device(newest, torch.int64, pool.device)

    def new_rows(self, layer: int) -> NewRows:
        if not self._streamed:
            return super().new_rows(layer)
        # A workspace uses all layers of its pages, so row ids are indices into the rows of all layers.
        row_ids = self._new_rows + layer * self._pool.layer_rows
        for stream in self._streamed:
            self._mirror.stream_in(layer, stream.prefix)
            row_ids[stream.tokens] = stream.row_ids[stream.start :]
        return NewRows(self._pool.flat_rows, row_ids, self._pool.shape.row)

    def context(self, layer: int) -> PagedRows:
        if self._has_tiered or self._streamed:
            raise InternalError("only the contexts of resident requests can be read as a whole")
        return super().context(layer)

    def select(self, layer: int, positions: Tensor) -> Selected:
        shape = self._pool.shape
        group = shape.group_of(layer)
        if layer == shape.key_layers[group]:
            self._save_last_topk(group, positions)
            self._find_selected(group, positions)
            if self._swap is not None:
                self._hot.prefetch(shape.layers_of(group)[1:], self._swap)
        elif self._swap is not None:
            self._hot.wait_for_prefetch(layer)
        assert self._selected is not None, "a layer that shares a selection was computed before the layer that selects"
        if not self._streamed:
            return Selected(self._pool.rows[layer], self._selected, shape.row)
        row_ids = torch.where(self._selected == EMPTY, EMPTY, self._selected + layer * self._pool.layer_rows)
        for stream in self._streamed:
            self._mirror.stream_out(layer, stream.new)
            selected = positions[stream.tokens]
            row_ids[stream.tokens] = torch.where(selected == EMPTY, EMPTY, stream.row_ids[selected.clamp_min(0)])
        return Selected(self._pool.flat_rows, row_ids, shape.row)

    def short_contexts(self, layer: int) -> Contexts | None:
        contexts = None if self._has_tiered else super().short_contexts(layer)
        if contexts is None or not self._streamed:
            return contexts
        row_ids = contexts.row_ids + layer * self._pool.layer_rows
        for stream in self._streamed:
            row_ids[stream.context] = stream.row_ids
        return replace(contexts, rows=self._pool.flat_rows, row_ids=row_ids)

    def _find_selected(self, group: int, positions: Tensor) -> None:
        """Finds the rows of a group's selection. Their ids are the same in each layer of the group.

        Missing rows of tiered requests are copied into the group's first layer; `_swap` lists them for later layers.
        """
        if self._verified is not None:
            self._selected = self._find(positions)
            self._swap = self._verified.plan(self._hot, group, positions, self._selected)
        elif self._has_tiered:
            self._swap = self._hot.plan(group, self.seat_of, positions, self.segments.positions)
            self._selected = self._swap.rows
        else:
            self._selected = self._find(positions)

    def _save_last_topk(self, group: int, positions: Tensor) -> None:
        """Saves the selection of each segment's last token."""
        seats, newest = self.seat_of, positions
        if self._newest is not None:
            seats, newest = seats[self._newest], positions[self._newest]
        self._hot.save_last_topk(group, seats, newest)
