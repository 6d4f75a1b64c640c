"""slice_pack, slice_unpack: slices of the rows of one context, of many pages and layers, in one stretch of memory."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels.fast_path import kernels_of
from hotset.kernels.slice_pack import reference
from hotset.kernels.slice_pack.reference import RowSlices

__all__ = ["RowSlices", "slice_pack", "slice_unpack"]


def slice_pack(
    stores: Sequence[Tensor],  # of each unit (a layer): [pages, page rows, row bytes] uint8, strided alike
    pages: Tensor | Sequence[int],  # int64: the context's pages, from its first
    first: int,
    last: int,
    slices: RowSlices,
    out: Tensor,  # [units * (last - first) * slices.nbytes] uint8: [unit][row][slices], no gaps
) -> None:
    """Gathers the slices of the rows at positions [first, last) of a context; writes all of `out` and nothing else.

    Position p is row p % page_rows of page `pages[p // page_rows]`, in every unit. The bytes of a row are adjacent;
    rows and pages may lie further apart than they are long. If `out` or a store is on a GPU, a kernel is queued on the
    current stream, and memory of the host that it reads or writes must be pinned and left alone until it is done; but
    pages given on the host may be changed at once. (A graph can capture the call if pages are on the device and the
    same stores and slices came before.) Otherwise the copy is done on return.

    Raises ConfigError, before anything is written, for slices that leave the row and for units that are not alike.
    Page numbers are checked where they are on the host.
    """
    _checked(stores, pages, first, last, slices, out).copy(stores, pages, first, last, slices, out, unpack=False)


def slice_unpack(
    packed: Tensor, stores: Sequence[Tensor], pages: Tensor | Sequence[int], first: int, last: int, slices: RowSlices
) -> None:
    """The way back, into those slices of those rows; arguments and rules are those of `slice_pack`.

    No page may stand twice among those of [first, last).
    """
    _checked(stores, pages, first, last, slices, packed).copy(stores, pages, first, last, slices, packed, unpack=True)


def _checked(
    stores: Sequence[Tensor], pages: Tensor | Sequence[int], first: int, last: int, slices: RowSlices, packed: Tensor
) -> ModuleType:
    """What does the copy."""
    assert len(stores) > 0, "no units"
    shape, strides = stores[0].shape, stores[0].stride()
    for store in stores:
        if store.shape != shape or store.stride() != strides or store.dtype != torch.uint8:
            raise ConfigError(
                f"units that are not alike: {tuple(shape)} bytes, {strides} apart, and "
                f"{tuple(store.shape)} of {store.dtype}, {store.stride()} apart"
            )
    assert len(shape) == 3 and strides[2] == 1, f"a unit of {tuple(shape)} bytes, {strides} apart"
    count, page_rows, row_bytes = shape
    if slices.end > row_bytes:
        raise ConfigError(f"slices {slices.spans} leave a row of {row_bytes} bytes")
    assert 0 <= first <= last <= len(pages) * page_rows, f"rows [{first}, {last}) of {len(pages)} pages of {page_rows}"
    wanted = len(stores) * (last - first) * slices.nbytes
    assert packed.dtype == torch.uint8 and packed.dim() == 1 and packed.is_contiguous(), f"packed into {packed.dtype}"
    assert packed.numel() == wanted, f"{wanted} packed bytes in a buffer of {packed.numel()}"
    if not (isinstance(pages, Tensor) and pages.is_cuda):
        used = torch.as_tensor(pages)[first // page_rows : -(-last // page_rows)]
        assert not len(used) or (int(used.min()) >= 0 and int(used.max()) < count), f"pages {pages} of {count}"
    if packed.is_cuda or any(store.is_cuda for store in stores):
        return kernels_of("slice_pack")
    return reference
