"""slice_pack: copies slices of the rows of one context, in all layers, to or from one packed piece."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hotset.base.errors import ConfigError, InternalError
from hotset.kernels.fast_path import kernels_of
from hotset.kernels.slice_pack import reference
from hotset.kernels.slice_pack.reference import RowSlices, SlicedRows

__all__ = ["RowSlices", "SlicedRows", "copy_slices"]


def copy_slices(
    blocks: Sequence[SlicedRows],
    pages: Tensor | Sequence[int],  # all pages of the context, in order; a tensor must be int64 on the device
    first: int,
    last: int,
    packed: int,  # address of the piece
    device: torch.device,
    *,
    unpack: bool,  # False: from the rows to the piece; True: from the piece to the rows
) -> None:
    """Copies the slices of the rows at positions [first, last) of a context to or from a packed piece.

    Writes the slices, or the parts of the piece that belong to `blocks`, and nothing else. All memory is given by
    addresses of this process. The caller must own it: only the number of pages is checked. To unpack, the pages of
    these positions must be distinct.

    On a GPU, one kernel copies the blocks of equal geometry, asynchronously on the current stream. Host memory that it
    reads or writes must be pinned and must not change until the copy is complete. A graph can capture the call if
    `pages` is on the device and an earlier call had the same blocks and the same alignment of `packed`. On a CPU, the
    copy is complete on return.

    Raises ConfigError before anything is written if slices exceed the row.
    """
    for block in blocks:
        span = block.span
        if block.slices.end > span.row_bytes:
            raise ConfigError(f"slices {block.slices.spans} exceed a row of {span.row_bytes} bytes")
        if not 0 <= first <= last or span.pages_for(last) > len(pages):
            raise InternalError(f"rows [{first}, {last}) of {len(pages)} pages with parts of {span.part_rows}")
    if device.type == "cuda":
        kernels_of("slice_pack").copy(blocks, pages, first, last, packed, device, unpack=unpack)
    elif isinstance(pages, Tensor):
        raise InternalError("a CPU needs the pages as a list")
    else:
        reference.copy(blocks, pages, first, last, packed, unpack=unpack)
