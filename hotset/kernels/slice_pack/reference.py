"""The specification of copy_slices. On a CPU it is also the implementation."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hotset.base.errors import ConfigError
from hotset.base.paged_span import PagedSpan
from hotset.base.units import ceil_div

Strip = tuple[int, int, int, int]  # slices of a row: first byte in the row, number, stride in bytes, bytes of each


@dataclass(frozen=True, slots=True)
class RowSlices:
    """The slices of each row to copy: `spans[i]` is (first byte in the stored row, bytes). They are packed in order.

    Raises ConfigError for spans that are empty, begin before the row or overlap.
    """

    spans: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        end = 0
        for first, nbytes in sorted(self.spans):
            if nbytes < 1 or first < end:
                raise ConfigError(f"slices {self.spans} of a row must not be empty and must not overlap")
            end = first + nbytes

    @property
    def nbytes(self) -> int:
        """The bytes of one packed row."""
        return sum(nbytes for _, nbytes in self.spans)

    @property
    def end(self) -> int:
        """The minimum size of a stored row, in bytes."""
        return max((first + nbytes for first, nbytes in self.spans), default=0)


@dataclass(frozen=True, slots=True)
class SlicedRows:
    """Slices of the rows in every layer of a span, and their place in a packed piece.

    A piece of R rows has, from byte R * before on, [layer][row][slices] without gaps.
    """

    span: PagedSpan  # its addresses are of this process
    slices: RowSlices
    before: int = 0  # packed bytes of one position that precede those of this block


def copy(
    blocks: Sequence[SlicedRows], pages: Sequence[int], first: int, last: int, packed: int, *, unpack: bool
) -> None:
    rows = last - first
    for block in blocks:
        span, nbytes = block.span, block.slices.nbytes
        strips = _strips(block.slices)
        for layer, num_layers, layer_stride in _equidistant(span):
            for row, count, part, offset in _runs(span, layer, pages, first, last):
                stored_at = span.bases[layer][part] + offset
                packed_at = packed + rows * (block.before + layer * nbytes) + row * nbytes
                for begin, num_slices, slice_stride, slice_bytes in strips:
                    shape = num_layers, count, num_slices, slice_bytes
                    stored = bytes_at(stored_at + begin, shape, (layer_stride, span.row_bytes, slice_stride, 1))
                    flat = bytes_at(packed_at, shape, (rows * nbytes, nbytes, slice_bytes, 1))
                    if unpack:
                        stored[...] = flat
                    else:
                        flat[...] = stored
                    packed_at += num_slices * slice_bytes


def bytes_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> NDArray[np.uint8]:
    """Returns an array over existing memory, which it does not own."""
    return np.asarray(_Memory(address, shape, strides))


class _Memory:
    """Bytes at an address, in the form that numpy accepts."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": shape,
            "strides": strides,
        }


def _equidistant(span: PagedSpan) -> list[tuple[int, int, int]]:
    """Groups layers that one strided copy can cover: pages have one part, and the layers equal distances.

    Returns (first layer, number of layers, distance in bytes) of each group.
    """
    if len(span.bases[0]) == 1:
        distances = {after - before for (before,), (after,) in pairwise(span.bases)}
        if len(distances) == 1 and min(distances) > 0:
            return [(0, len(span.bases), min(distances))]
    return [(layer, 1, 0) for layer in range(len(span.bases))]


def _strips(slices: RowSlices) -> list[Strip]:
    """Returns one strip if all slices have equal lengths and distances (as K and V of some heads), or one per slice."""
    begins, lengths = [begin for begin, _ in slices.spans], {nbytes for _, nbytes in slices.spans}
    steps = {after - before for before, after in pairwise(begins)}
    if len(lengths) == len(steps) == 1 and min(steps) > 0:
        return [(begins[0], len(begins), min(steps), min(lengths))]
    return [(begin, 1, nbytes, nbytes) for begin, nbytes in slices.spans]


def _runs(span: PagedSpan, layer: int, pages: Sequence[int], first: int, last: int) -> list[tuple[int, int, int, int]]:
    """Divides the rows of a layer into ranges that are consecutive in memory.

    Returns (first row, counted from `first`; number of rows; part of the page; byte offset from its base) of each.
    """
    runs: list[tuple[int, int, int, int]] = []
    end = None  # part and offset at which the previous run ends
    for number in range(first // span.part_rows, ceil_div(last, span.part_rows)):
        page, part = divmod(number * span.step + span.first_part(layer), len(span.bases[0]))
        begins = max(first, number * span.part_rows)
        count = min(last, (number + 1) * span.part_rows) - begins
        offset = pages[page] * span.page_bytes + begins % span.part_rows * span.row_bytes
        if (part, offset) == end:
            row, before, _, start = runs.pop()
            runs.append((row, before + count, part, start))
        else:
            runs.append((begins - first, count, part, offset))
        end = part, offset + count * span.row_bytes
    return runs
