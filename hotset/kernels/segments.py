"""Where the query rows of one step stand: plain geometry that every attention op shares."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hotset.kernels.device_copies import to_device


class Span(NamedTuple):
    """Segment number `segment`: query rows [first, last) of the batch, at the end of a context of `length` rows."""

    segment: int
    first: int
    last: int
    length: int


@dataclass(frozen=True, slots=True)
class Segments:
    """The query rows of one step, one segment per request, laid end to end in a flat batch.

    Segment i has `counts[i]` query rows; they are the newest rows of a context of `lengths[i]` rows, so query row j of
    the segment stands at position `lengths[i] - counts[i] + j` and may see the positions up to its own. Where a graph
    is captured, the host knows no lengths.
    """

    counts: Sequence[int]
    lengths: Sequence[int]
    positions: Tensor  # [rows] int64, on the device: position of each query row in its own context
    segment_of: Tensor  # [rows] int64, on the device: segment of each query row

    @property
    def decoding(self) -> bool:
        """Every segment has exactly one query row."""
        return len(self.counts) == self.positions.shape[0]

    def __iter__(self) -> Iterator[Span]:
        first = 0
        for segment, (count, length) in enumerate(zip(self.counts, self.lengths, strict=True)):
            yield Span(segment, first, first + count, length)
            first += count


def make_segments(starts: Sequence[int], counts: Sequence[int], device: torch.device) -> Segments:
    """Segments whose query rows begin at position `starts[i]` of their context and number `counts[i]`."""
    first = torch.tensor(starts, dtype=torch.int64)
    each = torch.tensor(counts, dtype=torch.int64)
    segment_of = torch.arange(len(counts))
    if max(counts, default=1) == 1:
        positions = first
    else:
        segment_of = torch.repeat_interleave(segment_of, each)
        offset_in_batch = torch.cumsum(each, 0) - each
        positions = torch.arange(segment_of.shape[0]) - offset_in_batch[segment_of] + first[segment_of]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    return Segments(counts, lengths, to_device(positions, device), to_device(segment_of, device))
