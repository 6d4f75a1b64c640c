"""The specification of slice_pack and slice_unpack. On a CPU it is also the implementation."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
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
    runs, strips, packed_bytes = _runs(stores[0], pages, first, last), _strips(slices), _storage_bytes(packed)
    for unit, store, num_stores, store_stride in _equidistant(stores):
        stored_bytes = _storage_bytes(store)
        for row, rows, offset in runs:
            begin_packed = packed.storage_offset() + unit * store_packed_stride + row * packed_stride
            for begin, count, step, nbytes in strips:
                shape = num_stores, rows, count, nbytes
                begin_stored, strides = store.storage_offset() + offset + begin, (store_stride, row_stride, step, 1)
                stored = np.ndarray(shape, np.uint8, stored_bytes, begin_stored, strides)
                strides = store_packed_stride, packed_stride, nbytes, 1
                flat = np.ndarray(shape, np.uint8, packed_bytes, begin_packed, strides)
                if unpack:
                    stored[...] = flat
                else:
                    flat[...] = stored
                begin_packed += count * nbytes


def _storage_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Returns the memory of which a tensor is a view, as the base of numpy's views of it."""
    flat: NDArray[np.uint8] = tensor.as_strided((tensor.untyped_storage().nbytes(),), (1,), 0).numpy()
    return flat


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


def _runs(store: Tensor, pages: Tensor | Sequence[int], first: int, last: int) -> list[tuple[int, int, int]]:
    """Divides the rows into ranges that are consecutive in memory.

    Returns (first row, counted from `first`; number of rows; byte offset in a store) of each range.
    """
    page_rows, (page_stride, row_stride, _) = store.shape[1], store.stride()
    numbers = range(first // page_rows, -(-last // page_rows))
    used = np.asarray(pages[numbers.start : numbers.stop], np.int64).tolist()
    runs: list[tuple[int, int, int]] = []
    end = None  # where the rows of the page before end
    for number, page in zip(numbers, used, strict=True):
        begins = max(first, number * page_rows)
        rows = min(last, (number + 1) * page_rows) - begins
        offset = page * page_stride + begins % page_rows * row_stride
        if offset == end:
            row, before, start = runs.pop()
            runs.append((row, before + rows, start))
        else:
            runs.append((begins - first, rows, offset))
        end = offset + rows * row_stride
    return runs
