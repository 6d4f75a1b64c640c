"""The tokens of one step, and the view of requests whose rows are all on the device.

The view translates positions to device rows through the page tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hotset.kernels.device_copies import list_to_device, to_device
from hotset.kernels.page_table_lookup import page_table_lookup
from hotset.kernels.rows import PagedRows
from hotset.kernels.segments import Segments, make_segments
from hotset.memory.device_pool import DevicePool
from hotset.memory.tables import PageTables
from hotset.memory.view import Contexts, NewRows, Selected

# Limits of `short_contexts`: rows per token of the step (decoding a row takes about a thousandth of the time that it
# saves each token), and rows in all (300 MB of decoded MLA rows).
MAX_ROWS_PER_TOKEN, MAX_CONTEXT_ROWS = 256, 1 << 18


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step. Segment i belongs to the request on `seats[i]`.

    A batch for the capture of a graph has no `seats`, because the requests of later replays are not known yet. Its view
    uses only `seat_of` and the segments' positions, which are device tensors.
    """

    seats: Sequence[int]
    segments: Segments
    seat_of: Tensor  # [tokens] int64: the seat of each token; EMPTY for padding
    # [tokens] int64: the stamp of the step whose tail and slots the token uses, which is the first position at which
    # that step could begin. All tokens before it are final. None: the position of the first token of the seat
    stamps: Tensor | None = None


def make_batch(seats: Sequence[int], starts: Sequence[int], counts: Sequence[int], device: torch.device) -> Batch:
    """Makes the batch that computes tokens [starts[i], starts[i] + counts[i]) of `seats[i]`."""
    segments = make_segments(starts, counts, device)
    on_device = list_to_device(seats, torch.int64, device)
    return Batch(seats, segments, on_device if segments.decoding else on_device[segments.segment_of])


def make_captured_batch(seat_of: Tensor, positions: Tensor, stamps: Tensor | None = None) -> Batch:
    """Makes a batch for capture, in which each token is a segment of its own, even if several belong to one seat. Seats
    and positions are read from device memory at replay."""
    tokens = seat_of.shape[0]
    segment_of = torch.arange(tokens, device=seat_of.device)
    return Batch((), Segments((1,) * tokens, (), positions, segment_of), seat_of, stamps)


class ResidentView:
    """Implements `View` over one device pool.

    A view reads only [0, start + count) of each context and writes [start, start + count) before it reads. Rows past
    the end of a context are therefore never read, and a later view can overwrite them.
    """

    def __init__(self, pool: DevicePool, tables: PageTables, batch: Batch) -> None:
        self._pool, self._tables, self._batch = pool, tables, batch
        self._new_rows = self._find(batch.segments.positions[:, None])[:, 0]  # [tokens], within a layer
        self._row_runs = [tables.row_runs[seat] for seat in batch.seats]
        self._key_runs = [tables.key_runs[seat] for seat in batch.seats]

    @property
    def segments(self) -> Segments:
        return self._batch.segments

    @property
    def seat_of(self) -> Tensor:
        """[tokens] int64: the seat of each token; EMPTY for padding."""
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
        return PagedRows(
            self._pool.keys_of(group),
            self._key_runs,
            layout,
            self._tables.keys,
            self._batch.seat_of,
            step=self._pool.shape.key_step,
            first_part=self._pool.shape.key_first_part(group),
        )

    def select(self, layer: int, positions: Tensor) -> Selected:
        return Selected(self._pool.rows[layer], self._find(positions), self._pool.shape.row)

    def short_contexts(self, layer: int) -> Contexts | None:
        if self._contexts is None:
            return None
        row_ids, first = self._contexts
        return Contexts(self._pool.rows[layer], row_ids, first, self._pool.shape.row)

    @cached_property
    def _contexts(self) -> tuple[Tensor, Tensor] | None:
        """`Contexts.row_ids` within a layer, and `Contexts.first`. None if the contexts have too many rows."""
        segments, device = self.segments, self._pool.device
        rows, tokens = sum(segments.lengths), segments.positions.shape[0]
        if segments.decoding or rows > min(MAX_CONTEXT_ROWS, MAX_ROWS_PER_TOKEN * tokens):
            return None
        lengths = torch.tensor(segments.lengths)
        starts = torch.cumsum(lengths, 0) - lengths
        positions = torch.arange(rows) - starts.repeat_interleave(lengths)
        seats = torch.tensor(self._batch.seats).repeat_interleave(lengths)
        row_ids = page_table_lookup(
            to_device(positions, device)[:, None],
            to_device(seats, device),
            self._tables.rows,
            self._pool.geometry.page_rows,
        )[:, 0]
        return row_ids, to_device(starts, device)[segments.segment_of]

    def _find(self, positions: Tensor) -> Tensor:
        """Returns the device rows, within a layer, of `positions` [tokens, n] of each token's own context."""
        return page_table_lookup(positions, self._batch.seat_of, self._tables.rows, self._pool.geometry.page_rows)
