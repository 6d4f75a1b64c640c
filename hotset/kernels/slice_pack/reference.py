"""The specification of slice_pack and slice_unpack. On a CPU it is also the implementation."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hotset.base.errors import ConfigError

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


def copy(
    stores: Sequence[Tensor],
    pages: Tensor | Sequence[int],
    first: int,
    last: int,
    slices: RowSlices,
    packed: Tensor,
    *,
    unpack: bool,
) -> None:
    row_stride, packed_stride = stores[0].stride(1), slices.nbytes
    store_packed_stride = (last - first) * packed_stride
    runs, strips = _runs(stores[0], torch.as_tensor(pages, dtype=torch.int64), first, last), _strips(slices)
    for unit, store, num_stores, store_stride in _equidistant(stores):
        for row, rows, offset in runs:
            begin_packed = packed.storage_offset() + unit * store_packed_stride + row * packed_stride
            for begin, count, step, nbytes in strips:
                shape = num_stores, rows, count, nbytes
                begin_stored = store.storage_offset() + offset + begin
                stored = store.as_strided(shape, (store_stride, row_stride, step, 1), begin_stored)
                flat = packed.as_strided(shape, (store_packed_stride, packed_stride, nbytes, 1), begin_packed)
                if unpack:
                    stored.copy_(flat)
                else:
                    flat.copy_(stored)
                begin_packed += count * nbytes


def _equidistant(stores: Sequence[Tensor]) -> list[tuple[int, Tensor, int, int]]:
    """Groups stores that one strided copy can cover: they share their memory, and have equal distances.

    Returns (number of the first store, first store, number of stores, distance in bytes) of each group.
    """
    offsets = [int(store.storage_offset()) for store in stores]
    distances = {after - before for before, after in pairwise(offsets)}
    if (
        len({store.untyped_storage().data_ptr() for store in stores}) == 1
        and len(distances) == 1
        and min(distances) > 0
    ):
        return [(0, stores[0], len(stores), min(distances))]
    return [(number, store, 1, 0) for number, store in enumerate(stores)]


def _strips(slices: RowSlices) -> list[Strip]:
    """Returns one strip if all slices have equal lengths and distances (as K and V of some heads), or one per slice."""
    begins, lengths = [begin for begin, _ in slices.spans], {nbytes for _, nbytes in slices.spans}
    steps = {after - before for before, after in pairwise(begins)}
    if len(lengths) == len(steps) == 1 and min(steps) > 0:
        return [(begins[0], len(begins), min(steps), min(lengths))]
    return [(begin, 1, nbytes, nbytes) for begin, nbytes in slices.spans]


def _runs(store: Tensor, pages: Tensor, first: int, last: int) -> list[tuple[int, int, int]]:
    """Divides the rows into ranges that are consecutive in memory.

    Returns (first row, counted from `first`; number of rows; byte offset in a store) of each range.
    """
    page_rows, (page_stride, row_stride, _) = store.shape[1], store.stride()
    positions = torch.arange(first, last)
    offsets = pages[positions // page_rows] * page_stride + positions % page_rows * row_stride
    new = torch.ones(len(positions), dtype=torch.bool)
    new[1:] = offsets.diff() != row_stride
    starts = new.nonzero()[:, 0]
    counts = torch.cat((starts, torch.tensor([len(positions)]))).diff()
    return list(zip(starts.tolist(), counts.tolist(), offsets[starts].tolist(), strict=True))
