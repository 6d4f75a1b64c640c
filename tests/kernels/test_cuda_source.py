"""Kernels in CUDA C++ that several threads use for the first time at once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hotset.kernels import cuda_source

THREADS = 4


def test_one_thread_at_a_time_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that pack contexts have imported cuda-core at the same time, and one import failed."""
    inside, most = [0], [0]
    started = threading.Barrier(THREADS)

    def compiled(*arguments: object) -> object:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.01)  # another thread would enter meanwhile
        inside[0] -= 1
        return arguments

    def use(number: int) -> object:
        started.wait(60)
        return cuda_source.kernel(Path("copy.cu"), "copy", NUMBER=number)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(cuda_source, "_compiled", compiled)
    with ThreadPoolExecutor(THREADS) as threads:
        kernels = list(threads.map(use, range(THREADS)))
    assert most == [1]
    assert kernels == [(Path("copy.cu"), "copy", (("NUMBER", number),), "sm_90a") for number in range(THREADS)]
