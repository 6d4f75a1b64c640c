"""The query rows of one step: whose they are and where they stand, for the host and for the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.kernels.device_copies import list_to_device
from hotset.kernels.segments import Segments, make_segments


@dataclass(frozen=True, slots=True)
class Batch:
    """Segment i belongs to the request on `seats[i]`.

    Where a graph is captured, the host does not know who will sit there: `seats` is empty, and everything goes by
    `seat_of` and the segments' positions.
    """

    seats: Sequence[int]
    segments: Segments
    seat_of: Tensor  # [query rows] int64: the seat of each query row; EMPTY: a padded one, of no request


def make_batch(seats: Sequence[int], starts: Sequence[int], counts: Sequence[int], device: torch.device) -> Batch:
    """Rows [starts[i], starts[i] + counts[i]) of `seats[i]`."""
    segments = make_segments(starts, counts, device)
    on_device = list_to_device(seats, torch.int64, device)
    return Batch(seats, segments, on_device if segments.decoding else on_device[segments.segment_of])


def blank_batch(seat_of: Tensor, positions: Tensor) -> Batch:
    """One query row for each seat, known to the device alone."""
    rows = seat_of.shape[0]
    segment_of = torch.arange(rows, device=seat_of.device)
    return Batch((), Segments((1,) * rows, (), positions, segment_of), seat_of)
