"""The interface between models and memory: how a decoder reads and writes rows during one step.

The top-k positions are known only inside a layer, and only the memory can locate their rows. Models call this
protocol, `memory` and `tiers` implement it, and the runner passes a view to the model. Models do not import an
implementation, and `memory` and `tiers` do not import models.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.decode_rows import decode_rows
from hotset.kernels.rows import PagedRows, RowLayout
from hotset.kernels.segments import Segments


@dataclass(frozen=True, slots=True)
class Selected:
    """The rows that attention reads in one layer. Every caller of `View.select` must call `wait`, even one that reads
    no rows: later steps assume that the copies have ended."""

    rows: Tensor  # [device rows, stored width]
    row_ids: Tensor  # [tokens, k] int64 indices into `rows`, EMPTY-padded
    layout: RowLayout  # how `rows` are stored
    arrived: torch.cuda.Event | None = None  # None: the rows are there already

    def wait(self) -> None:
        """Makes the current stream wait until the rows are on the device."""
        if self.arrived is not None:
            torch.cuda.current_stream(self.rows.device).wait_event(self.arrived)


@dataclass(frozen=True, slots=True)
class Contexts:
    """All rows of the contexts of a step in one layer, one context after another."""

    rows: Tensor  # [device rows, stored width]
    row_ids: Tensor  # [n] int64 indices into `rows`
    first: Tensor  # [tokens] int64: where the context of each token begins in `row_ids`
    layout: RowLayout  # how `rows` are stored

    def decoded(self, positions: Tensor) -> Selected:
        """Returns the rows at `positions` [tokens, k] (int64, EMPTY-padded) of each token's own context, decoded.

        Every row is decoded once, however many tokens read it.
        """
        values = decode_rows(self.rows, self.row_ids, self.layout)
        row_ids = torch.where(positions == EMPTY, EMPTY, positions + self.first[:, None])
        return Selected(values, row_ids, RowLayout(self.layout.width, self.layout.dtype))


@dataclass(frozen=True, slots=True)
class NewRows:
    """Where a step's new rows are stored in one layer."""

    rows: Tensor  # [device rows, stored width]
    row_ids: Tensor  # [tokens] int64, distinct indices into `rows`; EMPTY for padding, whose rows are dropped
    layout: RowLayout  # how `rows` are stored

    def store(self, values: Tensor) -> None:
        """Writes `values` [tokens, width], except those of padding."""
        kept = self.row_ids != EMPTY
        self.rows.index_copy_(0, self.row_ids[kept], self.layout.encode(values)[kept])


class View(Protocol):
    """One step's access to memory. In each layer, new rows are written first, then rows are read."""

    @property
    def segments(self) -> Segments:
        """The tokens of the step, grouped by context, with their positions in it."""

    @property
    def padded_seats(self) -> Tensor | None:
        """[tokens] int64: seats, EMPTY for padding. None: no token is padding."""

    def new_rows(self, layer: int) -> NewRows:
        """Returns where this step's rows are stored. They must be written before any row of the layer is read."""

    def keys(self, group: int) -> PagedRows:
        """Returns all index keys of every context. This step's keys must be written to it before any key is read."""

    def context(self, layer: int) -> PagedRows:
        """Returns all rows of every context, including this step's, for attention without selection."""

    def select(self, layer: int, positions: Tensor) -> Selected:
        """Returns the rows at `positions` [tokens, k] (int64, EMPTY-padded) of each token's own context."""

    def short_contexts(self, layer: int) -> Contexts | None:
        """Returns all rows of all contexts if the step has many tokens per row, as prompts have. Else None.

        It must be called after `select` of the same layer.
        """
