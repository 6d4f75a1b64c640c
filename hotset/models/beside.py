"""Runs kernels of a captured step beside others, on a second stream. In steps that are not captured, they run in order.

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
    """The result of work that may still be running on the second stream."""

    _result: T
    _done: torch.cuda.Event | None = None  # None if the work was launched on the caller's stream

    def join(self) -> T:
        """Returns the result. What the caller launches from now on runs after the work.

        This must be called before the tensors that the work reads are freed."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        return self._result


def beside(work: Callable[[], T], device: torch.device) -> Beside[T]:
    """Launches the kernels of `work`. In a captured step, they run after all kernels that the caller has launched so
    far, and beside those that it launches before it calls `join`. Several works run one after the other.

    Only later work reuses the memory of the result, and later work waits for all kernels that the caller launched
    before it. So the result is not overwritten while the caller's kernels read it, if the caller stays on its stream.
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
