"""Numbers of the host, sent to the device without waiting for it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def uploaded(numbers: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`numbers` as a tensor on `device`, ready for work queued on the current stream from now on."""
    # From pageable memory the copy would wait until the stream is empty.
    staged = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return staged.to(device, non_blocking=True)
