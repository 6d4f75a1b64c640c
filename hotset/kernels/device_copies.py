"""Numbers that pass between host and device without either waiting for the other."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def list_to_device(numbers: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`numbers` as a tensor on `device`, ready for work queued on the current stream from now on."""
    return to_device(torch.tensor(numbers, dtype=dtype), device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`, ready for work queued on the current stream from now on."""
    if device.type != "cuda":
        return tensor
    # From pageable memory the copy would wait until the stream is empty.
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host_async(tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """A copy on the host, and what waits until it has arrived: for the work queued so far, not for what comes after."""
    if tensor.device.type != "cuda":
        return tensor, lambda: None
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    on_host.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return on_host, arrived.synchronize
