"""slice_pack and slice_unpack: copy slices of the rows of one context, in all layers, to and from one buffer."""

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from hotset.base.errors import ConfigError, InternalError
from hotset.kernels.fast_path import kernels_of
from hotset.kernels.slice_pack import reference
from hotset.kernels.slice_pack.reference import RowSlices

__all__ = ["RowSlices", "slice_pack", "slice_unpack"]


def slice_pack(
    stores: Sequence[Tensor],  # one per layer: [pages, page rows, row bytes] uint8, with equal strides
    pages: Tensor | Sequence[int],  # int64: all pages of the context, in order
    first: int,
    last: int,
    slices: RowSlices,
    out: Tensor,  # [layers * (last - first) * slices.nbytes] uint8: [layer][row][slices] without gaps
) -> None:
    """Copies the slices of the rows at positions [first, last) of a context to `out`.

    Writes all of `out` and nothing else. In every layer, position p is row p % page_rows of page
    `pages[p // page_rows]`. The bytes of a row must be adjacent. The strides of rows and pages may exceed their sizes.

    If `out` or a store is on a GPU, the copy is asynchronous, on the current stream. Host memory that it reads or
    writes must be pinned and must not change until the copy is complete. The exception is `pages`: it may be in
    pageable memory, and may then change after the call. A graph can capture the call if `pages` is on the device and an
    earlier call had the same stores, the same slices and the same alignment of `out`. If `out` and the stores are on
    the host, the copy is complete on return.

    Raises ConfigError before anything is written if slices exceed the row, or if the stores differ in shape or strides
    or are not uint8. Page numbers are checked, by an assertion, if they are on the host.
    """
    op = _checked_op(stores, pages, first, last, slices, out)
    op.copy(stores, pages, first, last, slices, out, unpack=False)


def slice_unpack(
    packed: Tensor, stores: Sequence[Tensor], pages: Tensor | Sequence[int], first: int, last: int, slices: RowSlices
) -> None:
    """Copies `packed`, in the format of `out` of `slice_pack`, into the slices of the rows. The rules are the same.

    The pages of positions [first, last) must be distinct.
    """
    op = _checked_op(stores, pages, first, last, slices, packed)
    op.copy(stores, pages, first, last, slices, packed, unpack=True)


def _checked_op(
    stores: Sequence[Tensor], pages: Tensor | Sequence[int], first: int, last: int, slices: RowSlices, packed: Tensor
) -> ModuleType:
    """Checks the arguments and returns the implementation for them."""
    if not stores:
        raise InternalError("there are no stores")
    shape, strides = stores[0].shape, stores[0].stride()
    for store in stores:
        if store.shape != shape or store.stride() != strides or store.dtype != torch.uint8:
            raise ConfigError(
                f"the stores differ: one has {tuple(shape)} bytes with strides {strides}, "
                f"another has {tuple(store.shape)} of {store.dtype} with strides {store.stride()}"
            )
    if not (len(shape) == 3 and strides[2] == 1):
        raise InternalError(f"stores of shape {tuple(shape)} with strides {strides}")
    count, page_rows, row_bytes = shape
    if slices.end > row_bytes:
        raise ConfigError(f"slices {slices.spans} exceed a row of {row_bytes} bytes")
    if not 0 <= first <= last <= len(pages) * page_rows:
        raise InternalError(f"rows [{first}, {last}) of {len(pages)} pages of {page_rows}")
    nbytes = len(stores) * (last - first) * slices.nbytes
    if packed.dtype != torch.uint8:
        raise InternalError(f"the packed buffer must be uint8, not {packed.dtype}")
    if not (packed.dim() == 1 and packed.is_contiguous()):
        raise InternalError(f"the packed buffer has strides {packed.stride()}")
    if packed.numel() != nbytes:
        raise InternalError(f"{nbytes} packed bytes in a buffer of {packed.numel()}")
    if not (isinstance(pages, Tensor) and pages.is_cuda):
        used = np.asarray(pages[first // page_rows : -(-last // page_rows)])
        if len(used) and not (used.min() >= 0 and used.max() < count):
            raise InternalError(f"pages {pages} of {count}")
    if packed.is_cuda or any(store.is_cuda for store in stores):
        return kernels_of("slice_pack")
    return reference
