"""The positions of one step's tokens in their contexts, in the form that all attention ops share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hotset.kernels.device_copies import to_device


class SegmentSpan(NamedTuple):
    """One segment: tokens [first, last) of the batch, which are the newest tokens of a context of `length` tokens."""

    segment: int
    first: int
    last: int
    length: int


@dataclass(frozen=True, slots=True)
class Segments:
    """The tokens of one step: one segment per request, concatenated into a flat batch.

    Segment i has `counts[i]` tokens, the newest ones of a context of `lengths[i]` tokens. So token j of the segment has
    position `lengths[i] - counts[i] + j`, and it attends to the positions up to and including its own. In a captured
    graph, `lengths` is empty.
    """

    counts: Sequence[int]
    lengths: Sequence[int]
    positions: Tensor  # [tokens] int64, on the device: the position of each token in its context
    segment_of: Tensor  # [tokens] int64, on the device: the segment of each token

    @property
    def decoding(self) -> bool:
        """Whether every segment has exactly one token."""
        return len(self.counts) == self.positions.shape[0]

    def __iter__(self) -> Iterator[SegmentSpan]:
        first = 0
        for segment, (count, length) in enumerate(zip(self.counts, self.lengths, strict=True)):
            yield SegmentSpan(segment, first, first + count, length)
            first += count


def make_segments(starts: Sequence[int], counts: Sequence[int], device: torch.device) -> Segments:
    """Returns segments of `counts[i]` tokens, the first of which has position `starts[i]` in its context."""
    start_of = torch.tensor(starts, dtype=torch.int64)
    count_of = torch.tensor(counts, dtype=torch.int64)
    segment_of = torch.arange(len(counts))
    if max(counts, default=1) == 1:
        positions = start_of
    else:
        segment_of = torch.repeat_interleave(segment_of, count_of)
        offset_in_batch = torch.cumsum(count_of, 0) - count_of
        positions = torch.arange(segment_of.shape[0]) - offset_in_batch[segment_of] + start_of[segment_of]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    return Segments(counts, lengths, to_device(positions, device), to_device(segment_of, device))
