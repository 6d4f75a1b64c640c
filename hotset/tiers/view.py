"""The view of a step that may mix resident, tiered and streamed requests."""

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

    Each segment is planned as one query for the union of its tokens' selections. A row that several tokens select is
    therefore copied once, and no token evicts a row that another token needs. The segments are found on the device, so
    that a captured graph finds the segments of each replay.
    """

    def __init__(self, seat_of: Tensor, stamps: Tensor, tiered: Tensor, num_segments: int, width: int) -> None:
        """The tensors have an entry per token; `tiered` says whether its request is tiered. The stamp of a segment is
        the stamp of its first token. There are at most `num_segments` segments, counting all padding as one. A segment
        of a tiered request has at most `width` tokens."""
        tokens = torch.arange(seat_of.shape[0], device=seat_of.device)
        begins = torch.ones_like(tiered)
        begins[1:] = seat_of[1:] != seat_of[:-1]
        first = torch.where(begins, tokens, 0).cummax(0).values  # of the token's segment
        place = (begins.cumsum(0) - 1) * width + tokens - first
        unread = num_segments * width  # the tokens of other requests are written here
        self._tiered, self._place = tiered[:, None], torch.where(tiered, place, unread)
        table = tokens.new_full((unread + 1,), EMPTY).scatter(0, self._place, tokens)[:-1].view(-1, width)
        self._valid, self._tokens = (table != EMPTY)[:, :, None], table.clamp_min(0)  # [segments, width]
        first_tokens = self._tokens[:, 0]
        self._seats = torch.where(self._valid[:, 0, 0], seat_of[first_tokens], EMPTY)
        self._stamps = stamps[first_tokens]

    def plan(self, hot: HotBuffers, group: int, positions: Tensor, rows: Tensor) -> tuple[SwapPlan, Tensor]:
        """Plans the swap-in of the selections `positions` [tokens, k]. Returns the plan, and `rows` [tokens, k] with
        the rows of tiered requests."""
        selected = torch.where(self._valid, positions[self._tokens], EMPTY)
        swap = hot.plan(group, self._seats, selected.flatten(1), self._stamps)
        found = swap.rows.view(-1, positions.shape[1])
        return swap, torch.where(self._tiered, found[self._place.clamp_max(found.shape[0] - 1)], rows)


class TieredView(ResidentView):
    """Implements `View`. A segment of a tiered request has one token, or several if some are drafts; a streamed segment
    has its own workspace.

    If no segment is streamed, device tensors tell the kernels which requests are tiered and where their rows are. A
    decode step can therefore be captured once and replayed for other decode steps with the same number of tokens.
    """

    def __init__(
        self,
        pool: DevicePool,
        tables: PageTables,
        hot: HotBuffers,
        mirror: Mirror,
        batch: Batch,
        tiered_tokens: int,
    ) -> None:
        """A tiered request has at most `tiered_tokens` tokens in the batch. 0: no request is tiered."""
        super().__init__(pool, tables, batch)
        self._hot, self._mirror, self._has_tiered = hot, mirror, tiered_tokens > 0
        self._found: Tensor | None = None  # the rows of the index group whose layers are being computed
        self._swap: SwapPlan | None = None  # of this group; kept because copies for its later layers still read it
        self._arrived: dict[int, torch.cuda.Event | None] = {}  # by later layer of the group
        seat_of, positions = batch.seat_of, batch.segments.positions
        self._stamps = positions if batch.stamps is None else batch.stamps
        self._verified: TieredSegments | None = None  # None: each tiered segment has one token
        if tiered_tokens > 0:
            seats = seat_of.clamp_min(0)
            tiered = tables.tiered[seats] & (seat_of != EMPTY)
            self._new_rows = torch.where(tiered, tables.tail_at(seats, positions), self._new_rows)
            if tiered_tokens > 1:
                num_segments = min(seat_of.shape[0], tables.tiered.shape[0] + 1)
                self._verified = TieredSegments(seat_of, self._stamps, tiered, num_segments, tiered_tokens)
        self._streamed: list[StreamedSegment] = []
        self._newest: Tensor | None = None  # index of each segment's last token; None: each segment has one token
        if not batch.segments.decoding or any(tables.work_pages[seat] for seat in batch.seats):
            self._inspect_segments()

    def _inspect_segments(self) -> None:
        """Finds the streamed segments, and the last token of each segment."""
        pool, tables, segments = self._pool, self._tables, self.segments
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
            self._found = self._find_of_group(group, positions)
        found = self._found
        if found is None:
            raise InternalError("a layer that shares a selection was computed before the layer that selects")
        arrived = self._arrived.pop(layer, None)
        if not self._streamed:
            return Selected(self._pool.rows[layer], found, shape.row, arrived)
        row_ids = torch.where(found == EMPTY, EMPTY, found + layer * self._pool.layer_rows)
        for stream in self._streamed:
            self._mirror.stream_out(layer, stream.new)
            selected = positions[stream.tokens]
            row_ids[stream.tokens] = torch.where(selected == EMPTY, EMPTY, stream.row_ids[selected.clamp_min(0)])
        return Selected(self._pool.flat_rows, row_ids, shape.row, arrived)

    def short_contexts(self, layer: int) -> Contexts | None:
        contexts = None if self._has_tiered else super().short_contexts(layer)
        if contexts is None or not self._streamed:
            return contexts
        row_ids = contexts.row_ids + layer * self._pool.layer_rows
        for stream in self._streamed:
            row_ids[stream.context] = stream.row_ids
        return replace(contexts, rows=self._pool.flat_rows, row_ids=row_ids)

    def _find_of_group(self, group: int, positions: Tensor) -> Tensor:
        """Returns the rows of a group's selection. Their ids are the same in each layer of the group. Missing rows of
        tiered requests are copied into its first layer, and copies into its other layers are started."""
        self._save_last_topk(group, positions)
        if not self._has_tiered:
            return self._find(positions)
        if self._verified is not None:
            self._swap, found = self._verified.plan(self._hot, group, positions, self._find(positions))
        else:
            self._swap = self._hot.plan(group, self.seat_of, positions, self._stamps)
            found = self._swap.rows
        for layer in self._pool.shape.layers_of(group)[1:]:
            self._arrived[layer] = self._hot.prefetch(layer, self._swap)
        return found

    def _save_last_topk(self, group: int, positions: Tensor) -> None:
        """Saves the selection of each segment's last token."""
        seats, newest = self.seat_of, positions
        if self._newest is not None:
            seats, newest = seats[self._newest], positions[self._newest]
        self._hot.save_last_topk(group, seats, newest)
