"""The seam between models and memory: what a decoder may ask of its request's rows during one step.

Top-k is known only inside a layer, but finding rows is the memory's work. A model calls this protocol; memory (and,
above it, the tiers) implements it; the runner joins them; neither imports the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hotset.kernels.rows import PagedRows, RowLayout
from hotset.kernels.segments import Segments


@dataclass(frozen=True, slots=True)
class Selected:
    """Where attention finds the rows that it chose."""

    rows: Tensor  # [device rows, stored width]
    chosen: Tensor  # [query rows, k] int64 indices into `rows`, EMPTY-padded
    layout: RowLayout  # how `rows` are stored


class View(Protocol):
    """One step's window on memory. Several query rows per request; rows are appended layer by layer, then read."""

    @property
    def segments(self) -> Segments:
        """Which query rows belong to which context, and where they stand in it."""

    def append(self, layer: int, rows: Tensor) -> None:
        """Writes this step's rows [query rows, width] at their positions."""

    def append_keys(self, group: int, keys: Tensor) -> None:
        """Writes this step's index keys [query rows, key width] at their positions."""

    def context(self, layer: int) -> PagedRows:
        """All rows of every context, this step's included: for attention without selection."""

    def keys(self, group: int) -> PagedRows:
        """All index keys of every context, this step's included."""

    def select(self, layer: int, positions: Tensor) -> Selected:
        """The rows at `positions` [query rows, k] (int64, EMPTY-padded) of each query row's own context."""

    def roll_back(self, kept: Sequence[int]) -> list[int]:
        """Keeps only the first `kept[i]` of this step's rows of segment i; returns where each context now ends.

        A later view that begins there writes over the rows that were dropped.
        """
