"""The seam between models and memory: what a decoder may ask of its request's rows during one step.

Top-k is known only inside a layer, but finding rows is the memory's work. A model calls this protocol; memory (and,
above it, the tiers) implements it; the runner joins them; neither imports the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.rows import PagedRows, RowLayout
from hotset.kernels.segments import Segments


@dataclass(frozen=True, slots=True)
class Selected:
    """Where attention finds the rows that it chose."""

    rows: Tensor  # [device rows, stored width]
    chosen: Tensor  # [query rows, k] int64 indices into `rows`, EMPTY-padded
    layout: RowLayout  # how `rows` are stored


@dataclass(frozen=True, slots=True)
class NewRows:
    """Where a step's rows of one layer go."""

    rows: Tensor  # [device rows, stored width]
    row_ids: Tensor  # [query rows] int64, distinct indices into `rows`; EMPTY: a padded query row's, dropped
    layout: RowLayout  # how `rows` are stored

    def store(self, values: Tensor) -> None:
        """Writes `values` [query rows, width]."""
        there = self.row_ids != EMPTY
        self.rows.index_copy_(0, self.row_ids[there], self.layout.encode(values)[there])


class View(Protocol):
    """One step's window on memory. Several query rows per request; layer by layer rows are written, then read."""

    @property
    def segments(self) -> Segments:
        """Which query rows belong to which context, and where they stand in it."""

    @property
    def padded_seats(self) -> Tensor | None:
        """[query rows] int64: seats, EMPTY where the batch was filled up. None: every query row is a request's."""

    def new_rows(self, layer: int) -> NewRows:
        """Where this step's rows go: to be written before any of the layer's rows are read."""

    def keys(self, group: int) -> PagedRows:
        """All index keys of every context. This step's own go there as well, before any are read."""

    def context(self, layer: int) -> PagedRows:
        """All rows of every context, this step's included: for attention without selection."""

    def select(self, layer: int, positions: Tensor) -> Selected:
        """The rows at `positions` [query rows, k] (int64, EMPTY-padded) of each query row's own context."""

    def roll_back(self, kept: Sequence[int]) -> list[int]:
        """Keeps only the first `kept[i]` of this step's rows of segment i; returns where each context now ends.

        A later view that begins there writes over the rows that were dropped.
        """
