"""Kernels of a captured step that run beside others, on a stream of their own. All other steps run in order.

One request leaves most of a GPU idle: a layer is a chain of small kernels. In a CUDA graph, kernels that do not need
each other's results need not wait for each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Beside(Generic[T]):
    """Work that may still be running, or was launched in order."""

    _result: T
    _done: torch.cuda.Event | None = None  # None: launched in order

    def join(self) -> T:
        """Returns the result. What the caller launches from now on runs after the work.

        This must be called before the tensors that the work reads are freed."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        return self._result


def beside(work: Callable[[], T], device: torch.device) -> Beside[T]:
    """Launches the kernels of `work`. In a captured step, they run after all that the caller has launched so far, and
    beside what it launches until it joins them. Later work runs after earlier work.

    The memory of the result is reused only by later work, which waits for all that the caller launched before it. So it
    is not overwritten while the caller's kernels still read it, if the caller stays on its stream.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return Beside(work())
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return Beside(work(), stream.record_event())


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
