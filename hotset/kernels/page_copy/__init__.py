"""page_copy: stretches of rows between the device pool and the host store, in all layers at once."""

from types import ModuleType

import torch
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels.fast_path import kernels_of
from hotset.kernels.page_copy import reference

__all__ = ["to_device", "to_host"]


def to_host(
    pieces: Tensor,  # [n, 3] int64: first device row, first host row, rows (0: nothing), consecutive on both sides
    device_rows: Tensor,  # [layers, device rows, width]
    host_rows: Tensor,  # [layers, host rows, width]; pinned where the device is a GPU
) -> None:
    """Copies every piece, in every layer, from the device to the host, byte for byte; nothing else is written.

    Values within a row are adjacent; rows and layers may lie further apart than they are long. What is not made of rows
    alike can be copied as words: a view [layers, words, 1], whose pieces count words. On a GPU `pieces` may be in
    device or pinned memory, where it must stay as it is until the copy is done, and who reads the host rows waits for
    an event. Pieces may not overlap where they are written. Raises ConfigError before anything is written if the rows
    of the two tiers are not alike.
    """
    _checked(pieces, device_rows, host_rows).copy(pieces, device_rows, host_rows, to_host=True)


def to_device(pieces: Tensor, device_rows: Tensor, host_rows: Tensor) -> None:
    """The way back; arguments and rules are those of `to_host`."""
    _checked(pieces, device_rows, host_rows).copy(pieces, device_rows, host_rows, to_host=False)


def _checked(pieces: Tensor, device_rows: Tensor, host_rows: Tensor) -> ModuleType:
    """What does the copy."""
    if host_rows.dtype != device_rows.dtype:
        raise ConfigError(f"host rows of {host_rows.dtype} and device rows of {device_rows.dtype} cannot be copied")
    if host_rows.shape[2] != device_rows.shape[2]:
        raise ConfigError(f"host rows of {host_rows.shape[2]} values, device rows of {device_rows.shape[2]}")
    assert host_rows.shape[0] == device_rows.shape[0], f"{host_rows.shape[0]} and {device_rows.shape[0]} layers"
    assert pieces.dim() == 2 and pieces.shape[1] == 3, f"pieces {tuple(pieces.shape)}"
    assert pieces.dtype == torch.int64 and pieces.is_contiguous(), f"pieces of {pieces.dtype}"
    for name, rows in (("host", host_rows), ("device", device_rows)):
        assert rows.stride(2) == 1, f"the values of a {name} row are {rows.stride(2)} apart"
    return kernels_of("page_copy", "cuda_impl") if device_rows.is_cuda else reference
