"""Tests that CUDA kernels (swap_in, page_copy, draw, collectives) compile for sm_90 with the constants of their ops.

The tests need no GPU. They are skipped if there is neither `nvcc` nor cuda-core.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
import torch
from matrix import slow_if
from nvcc import NVCC, compile_with_nvcc
from torch import Tensor

from hotset.kernels import cuda_source
from hotset.kernels.collectives import cuda_impl as collectives_cuda
from hotset.kernels.cuda_source import LaunchShape
from hotset.kernels.draw import DrawRules
from hotset.kernels.draw import cuda_impl as draw_cuda
from hotset.kernels.page_copy import cuda_impl as page_copy_cuda
from hotset.kernels.swap_in import RowCopies, SeatTables
from hotset.kernels.swap_in import cuda_impl as swap_in_cuda

HAS_CUDA_CORE = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.core") is not None
pytestmark = pytest.mark.skipif(NVCC is None and not HAS_CUDA_CORE, reason="neither nvcc nor cuda-core")


@dataclass
class Recorder:
    """Replaces a kernel. Records the source and constants to compile, and the shape of the launch."""

    source: Path = Path()
    constants: dict[str, int] = field(default_factory=dict)
    shape: LaunchShape | None = None

    def kernel(self, source: Path, name: str, **constants: int) -> "Recorder":
        self.source, self.constants = source, constants
        return self

    def launch(self, shape: LaunchShape, *arguments: Tensor | int) -> None:
        self.shape = shape


def record_plan(k: int, slots: int, words_per_page: int, batch: int = 1, row_bytes: int = 0) -> Recorder:
    """Records a plan. If `row_bytes` is not 0, rows of this size are copied in the same launch."""
    pages, zeros = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64)
    tables = SeatTables(pages, pages, pages, pages, pages, torch.tensor([True]), page_rows=64, slots=slots)
    positions, words = torch.zeros(batch, k, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    counts, tiers = torch.zeros(2, dtype=torch.int64), ("host_rows", "device_rows")
    rows = {name: torch.zeros(2, row_bytes, dtype=torch.uint8) for name in tiers} if row_bytes else {}
    recorder = Recorder()
    with mock.patch.object(cuda_source, "kernel", recorder.kernel):
        swap_in_cuda.plan(positions, zeros, zeros, tables, words, words_per_page, counts, **rows)
    return recorder


def record_copy(row_bytes: int) -> Recorder:
    rows, list_of_one = torch.zeros(2, row_bytes, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.int64)
    recorder = Recorder()
    with mock.patch.object(cuda_source, "kernel", recorder.kernel):
        swap_in_cuda.copy(RowCopies(list_of_one, list_of_one, torch.ones(1, dtype=torch.int32)), rows, rows.clone())
    return recorder


def record_page_copy() -> Recorder:
    rows = torch.zeros(1, 2, 656, dtype=torch.uint8)
    recorder = Recorder()
    with mock.patch.object(cuda_source, "kernel", recorder.kernel):
        page_copy_cuda.copy(torch.tensor([[0, 0, 1]]), rows, rows.clone(), to_host=True)
    return recorder


def record_draw() -> Recorder:
    ones, temperature = torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    recorder = Recorder()
    with mock.patch.object(cuda_source, "kernel", recorder.kernel):
        draw_cuda.draw(torch.zeros(1, 4), DrawRules(temperature, ones, temperature, ones), ones, ones)
    return recorder


def record_acceptance() -> Recorder:
    ones, temperature = torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    rules, logits, recorder = DrawRules(temperature, ones, temperature, ones), torch.zeros(1, 4), Recorder()
    with mock.patch.object(cuda_source, "kernel", recorder.kernel):
        draw_cuda.accept_or_replace(logits, logits, ones, rules, ones, ones)
    return recorder


def record_leading() -> Recorder:
    recorder = Recorder()
    with mock.patch.object(cuda_source, "kernel", recorder.kernel):
        draw_cuda.leading(torch.zeros(1, 40), 20)
    return recorder


def record_collective(ranks: int, call: Callable[[collectives_cuda.Staging], object]) -> Recorder:
    """Records a launch of one collective kernel. All kernels of its file are compiled."""
    recorder = Recorder()
    with mock.patch.object(cuda_source, "kernel", recorder.kernel):
        call(collectives_cuda.Staging(torch.zeros(ranks), 0, torch.zeros(1, dtype=torch.int32)))
    return recorder


def record_sums(ranks: int, dtype: torch.dtype) -> Recorder:
    return record_collective(ranks, lambda group: collectives_cuda.all_reduce(group, torch.zeros(8, dtype=dtype)))


CASES = {  # (function that records a launch, bytes of registers that the kernel may spill; None: any number)
    "plan of 2048 of 8192 slots": (lambda: record_plan(2048, 8192, 10496), 0),
    "plan of 2048 of 4096 slots, copying 656 bytes, batch 1": (lambda: record_plan(2048, 4096, 10496, 1, 656), 0),
    "plan of 2048 of 8192 slots, copying 656 bytes, batch 32": (lambda: record_plan(2048, 8192, 10496, 32, 656), 0),
    "plan of 2048 of 8192 slots, copying 656 bytes, batch 128": (lambda: record_plan(2048, 8192, 10496, 128, 656), 0),
    "plan of 2048 of 8192 slots, copying 1152 bytes, batch 256": (lambda: record_plan(2048, 8192, 18432, 256, 1152), 0),
    "plan of 128 of 256 slots, copying 37 bytes": (lambda: record_plan(128, 256, 1152, 1, 37), 0),
    # The sizes of the next two cases are rare, so their kernels may spill.
    "plan of 5 of 11 slots": (lambda: record_plan(5, 11, 7), None),
    "plan of 8000 of 30001 slots, copying 64 bytes": (lambda: record_plan(8000, 30_001, 333, 1, 64), None),
    "copy of 656 bytes": (lambda: record_copy(656), 0),
    "copy of 1152 bytes": (lambda: record_copy(1152), 0),
    "copy of 37 bytes": (lambda: record_copy(37), 0),
    "page copy": (record_page_copy, 0),
    "draw": (record_draw, 0),
    "accept or replace": (record_acceptance, 0),
    "leading": (record_leading, 0),
    "sums over 8 ranks in bfloat16": (lambda: record_sums(8, torch.bfloat16), 0),
    "sums over 2 ranks in float32": (lambda: record_sums(2, torch.float32), 0),
    "sums over 16 ranks in float64": (lambda: record_sums(16, torch.float64), None),
    "gathers": (lambda: record_collective(8, collectives_cuda.barrier), 0),
    "transfers": (lambda: record_collective(4, lambda group: collectives_cuda.send(group, torch.zeros(8), 1)), 0),
}


def spilled_bytes(recorder: Recorder, folder: Path) -> int:
    """Compiles for sm_90. Returns the bytes of registers that are spilled. Without nvcc they are unknown: returns 0."""
    if NVCC is None:
        assert len(cuda_source.compile_source(recorder.source, recorder.constants, "sm_90").code) > 0
        return 0
    return compile_with_nvcc(recorder.source, recorder.constants, folder, arch="90").spilled_bytes


# The sizes of these cases lie between those of other cases, or their kernels resemble those of others.
SLOW = {
    "plan of 2048 of 4096 slots, copying 656 bytes, batch 1",
    "plan of 2048 of 8192 slots, copying 656 bytes, batch 32",
    "copy of 1152 bytes",
    "leading",
    "plan of 2048 of 8192 slots",
    "plan of 2048 of 8192 slots, copying 1152 bytes, batch 256",
    "plan of 128 of 256 slots, copying 37 bytes",
    "plan of 5 of 11 slots",
    "copy of 37 bytes",
    "accept or replace",
    "gathers",
    "sums over 2 ranks in float32",
    "sums over 16 ranks in float64",
    "transfers",
}


@pytest.mark.parametrize("name", slow_if(CASES, SLOW))
def test_kernel_compiles_for_sm_90_without_spilling(name: str, tmp_path: Path) -> None:
    record, max_spilled = CASES[name]
    recorder = record()
    spilled = spilled_bytes(recorder, tmp_path)
    assert max_spilled is None or spilled <= max_spilled
    assert recorder.shape is not None and recorder.shape.shared_bytes <= 227 << 10


def test_two_blocks_of_a_typical_plan_fit_on_a_multiprocessor() -> None:
    for slots in (4096, 8192):
        shape = record_plan(2048, slots, 10496, 128, 656).shape
        # Each block occupies 1 KiB of shared memory more than it requests.
        assert shape is not None and 2 * (shape.shared_bytes + 1024) <= 228 << 10


def test_plans_without_copies_use_one_kernel_whatever_the_batch() -> None:
    """Start-up compiles it for one request. Requests that leave their tails together must not wait for a compiler."""
    assert record_plan(2048, 4096, 10496).constants == record_plan(2048, 4096, 10496, batch=64).constants
