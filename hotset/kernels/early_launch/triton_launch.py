"""Early launches of Triton kernels: options of the launch, and what the kernels call."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

EARLY_SINCE = 9  # major compute capability of the first GPUs with dependent launches


def _is_early() -> bool:
    interpreted = triton.knobs.runtime.interpret  # the interpreter runs one kernel at a time
    return not interpreted and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= EARLY_SINCE


EARLY = tl.constexpr(_is_early())
EARLY_LAUNCH: dict[str, Any] = {"launch_pdl": True} if EARLY.value else {}  # options of a launch


@triton.jit  # type: ignore[untyped-decorator]
def let_next_launch_start() -> None:
    """Lets the next launch start early, as soon as all programs of this one have called this or ended."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_previous_launch() -> None:
    """Waits until all earlier launches have ended, and lets the next one start early."""
    let_next_launch_start()
    if EARLY:
        gdc_wait()
