"""Copies between host and device that make neither side wait."""

from array import array
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

_TYPECODES = {torch.int32: "i", torch.int64: "q"}


def list_to_device(
    numbers: Sequence[int] | Sequence[float] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns `numbers` as a tensor on `device`, for work queued on the current stream after this call."""
    typecode = _TYPECODES.get(dtype)
    if typecode is not None and numbers and isinstance(numbers[0], int):
        # Faster than torch.tensor: 1.1 instead of 4.1 ms for 32k numbers (one busy Neoverse-N1 core, 2026-11-16).
        return to_device(torch.frombuffer(array(typecode, cast(Sequence[int], numbers)), dtype=dtype), device)
    return to_device(torch.tensor(numbers, dtype=dtype), device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to `device`. Work queued on the current stream after this call can use the copy.

    If the device is a CPU, returns the tensor itself.
    """
    if device.type != "cuda":
        return tensor
    # A copy from pageable memory would wait until the stream is empty.
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host_async(tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Starts a copy to the host. Returns the copy and a function that waits until the copy is complete.

    That function waits for the work queued on the current stream before this call, but not for work queued later.
    If the tensor is on a CPU, it is returned itself.
    """
    if tensor.device.type != "cuda":
        return tensor, lambda: None
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    on_host.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return on_host, arrived.synchronize
