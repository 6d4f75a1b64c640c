"""A kernel that lets the next launch start early, and writes what that launch reads a long time later."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

SPINS = 200  # additions to one counter, each of which takes about half a microsecond


def late_copy(target: Tensor, source: Tensor) -> None:
    """Copies `source` to `target`, both contiguous, after some hundred microseconds."""
    size = source.numel() * source.element_size()
    counter = torch.zeros(1, dtype=torch.int32, device=source.device)
    _late_copy_kernel[(1,)](
        counter, source.view(torch.uint8), target.view(torch.uint8), size, SPINS, triton.next_power_of_2(size)
    )


@triton.jit  # type: ignore[untyped-decorator]
def _late_copy_kernel(
    counter: tl.tensor, source: tl.tensor, target: tl.tensor, size: tl.tensor, spins: tl.tensor, block: tl.constexpr
) -> None:
    gdc_launch_dependents()
    waited = 0
    for _ in range(spins):
        waited += tl.atomic_add(counter, 1)
    byte = tl.arange(0, block)
    inside = (byte < size) & (waited >= 0)  # needs the last addition
    tl.store(target + byte, tl.load(source + byte, mask=inside), mask=inside)
