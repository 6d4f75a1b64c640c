"""page_copy: copies consecutive rows between the device pool and the host store, in all layers at once."""

from types import ModuleType

import torch
from torch import Tensor

from hotset.base.errors import InternalError
from hotset.kernels.fast_path import kernels_of
from hotset.kernels.page_copy import reference
from hotset.kernels.rows import check_tiers_match

__all__ = ["to_device", "to_host"]


def to_host(
    pieces: Tensor,  # [n, 3] int64: first device row, first host row, number of consecutive rows (may be 0)
    device_rows: Tensor,  # [layers, device rows, width]
    host_rows: Tensor,  # [layers, host rows, width]; pinned if the device is a GPU
) -> None:
    """Copies the rows of every piece in every layer from the device to the host. Writes nothing else.

    The values of a row must be adjacent. The strides of rows and layers may exceed their sizes. Memory that does not
    consist of rows can be copied as words: pass a view [layers, words, 1], and pieces that count words. The target
    rows of pieces must not overlap. On a GPU, the copy is asynchronous: `pieces` must be in device memory or pinned
    memory and must not change until the copy is complete. Before reading the target rows on the host, wait for an event
    recorded after this call. Raises ConfigError before anything is written if device rows and host rows differ in width
    or dtype.
    """
    _checked_op(pieces, device_rows, host_rows).copy(pieces, device_rows, host_rows, to_host=True)


def to_device(pieces: Tensor, device_rows: Tensor, host_rows: Tensor) -> None:
    """Copies from the host to the device, with the arguments and rules of `to_host`."""
    _checked_op(pieces, device_rows, host_rows).copy(pieces, device_rows, host_rows, to_host=False)


def _checked_op(pieces: Tensor, device_rows: Tensor, host_rows: Tensor) -> ModuleType:
    """Checks the arguments and returns the implementation for them."""
    check_tiers_match(host_rows, device_rows)
    if host_rows.shape[0] != device_rows.shape[0]:
        raise InternalError(f"host rows have {host_rows.shape[0]} layers, but device rows have {device_rows.shape[0]}")
    if not (pieces.dim() == 2 and pieces.shape[1] == 3):
        raise InternalError(f"pieces must have the shape [n, 3], not {tuple(pieces.shape)}")
    if not (pieces.dtype == torch.int64 and pieces.is_contiguous()):
        raise InternalError(f"pieces must be contiguous int64, not {pieces.dtype} with strides {pieces.stride()}")
    return kernels_of("page_copy", "cuda_impl") if device_rows.is_cuda else reference
