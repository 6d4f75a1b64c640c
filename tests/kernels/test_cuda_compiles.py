"""Tests that CUDA kernels (swap_in, page_copy, draw, collectives) compile for sm_90 with the constants of their ops.

The tests need no GPU. They are skipped if there is neither `nvcc` nor cuda-core.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from matrix import slow_if
from nvcc import NVCC, compile_with_nvcc, recorded

from hotset.kernels import cuda_source
from hotset.kernels.collectives import cuda_impl as collectives_cuda
from hotset.kernels.draw import DrawRules
from hotset.kernels.draw import cuda_impl as draw_cuda
from hotset.kernels.page_copy import cuda_impl as page_copy_cuda
from hotset.kernels.swap_in import RowCopies, SeatTables
from hotset.kernels.swap_in import cuda_impl as swap_in_cuda

HAS_CUDA_CORE = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.core") is not None
pytestmark = pytest.mark.skipif(NVCC is None and not HAS_CUDA_CORE, reason="neither nvcc nor cuda-core is installed")


def plan(k: int, slots: int, words_per_page: int, batch: int = 1, row_bytes: int = 0) -> None:
    """Plans the swap-in of `k` positions. If `row_bytes` is not 0, the same launch copies rows of this size."""
    pages, zeros = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64)
    tables = SeatTables(pages, pages, pages, pages, pages, torch.tensor([True]), page_rows=64, slots=slots)
    positions, words = torch.zeros(batch, k, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    counts, tiers = torch.zeros(2, dtype=torch.int64), ("host_rows", "device_rows")
    rows = {name: torch.zeros(2, row_bytes, dtype=torch.uint8) for name in tiers} if row_bytes else {}
    swap_in_cuda.plan(positions, zeros, zeros, tables, words, words_per_page, counts, **rows)


def copy(row_bytes: int) -> None:
    rows, list_of_one = torch.zeros(2, row_bytes, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.int64)
    swap_in_cuda.copy(RowCopies(list_of_one, list_of_one, torch.ones(1, dtype=torch.int32)), rows, rows.clone())


def copy_pages() -> None:
    rows = torch.zeros(1, 2, 656, dtype=torch.uint8)
    page_copy_cuda.copy(torch.tensor([[0, 0, 1]]), rows, rows.clone(), to_host=True)


ONES, TEMPERATURE = torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
LOGITS, RULES = torch.zeros(1, 40), DrawRules(TEMPERATURE, ONES, TEMPERATURE, ONES)


def group(ranks: int) -> collectives_cuda.Staging:
    return collectives_cuda.Staging(torch.zeros(ranks), 0, torch.zeros(1, dtype=torch.int32))


def reduce(ranks: int, dtype: torch.dtype) -> None:
    collectives_cuda.all_reduce(group(ranks), torch.zeros(8, dtype=dtype))


# A call that launches a kernel, and how many bytes of registers this kernel may spill (None: any number). All kernels
# of its file are compiled.
CASES: dict[str, tuple[Callable[[], object], int | None]] = {
    "plan and copy: 2048 positions, 8192 slots, 656 bytes, batch 128": (lambda: plan(2048, 8192, 10496, 128, 656), 0),
    "copy: 656 bytes": (lambda: copy(656), 0),
    "page copy": (copy_pages, 0),
    "draw": (lambda: draw_cuda.draw(LOGITS, RULES, ONES, ONES), 0),
    "sums over 8 ranks in bfloat16": (lambda: reduce(8, torch.bfloat16), 0),
}
# Cases that add little: their sizes lie between the sizes of other cases, or their kernels resemble other kernels.
SLOW_CASES: dict[str, tuple[Callable[[], object], int | None]] = {
    "plan: 2048 positions, 8192 slots": (lambda: plan(2048, 8192, 10496), 0),
    "plan and copy: 2048 positions, 4096 slots, 656 bytes, batch 1": (lambda: plan(2048, 4096, 10496, 1, 656), 0),
    "plan and copy: 2048 positions, 8192 slots, 656 bytes, batch 32": (lambda: plan(2048, 8192, 10496, 32, 656), 0),
    "plan and copy: 2048 positions, 8192 slots, 1152 bytes, batch 256": (lambda: plan(2048, 8192, 18432, 256, 1152), 0),
    "plan and copy: 128 positions, 256 slots, 37 bytes": (lambda: plan(128, 256, 1152, 1, 37), 0),
    "plan: 5 positions, 11 slots": (lambda: plan(5, 11, 7), None),
    "plan and copy: 8000 positions, 30001 slots, 64 bytes": (lambda: plan(8000, 30_001, 333, 1, 64), None),
    "copy: 1152 bytes": (lambda: copy(1152), 0),
    "copy: 37 bytes": (lambda: copy(37), 0),
    "accept or replace": (lambda: draw_cuda.accept_or_replace(LOGITS, LOGITS, ONES, RULES, ONES, ONES), 0),
    "leading": (lambda: draw_cuda.leading(LOGITS, 20), 0),
    "sums over 2 ranks in float32": (lambda: reduce(2, torch.float32), 0),
    "sums over 16 ranks in float64": (lambda: reduce(16, torch.float64), None),
    "gathers": (lambda: collectives_cuda.barrier(group(8)), 0),
    "transfers": (lambda: collectives_cuda.send(group(4), torch.zeros(8), 1), 0),
}


@pytest.mark.parametrize("name", slow_if([*CASES, *SLOW_CASES], SLOW_CASES))
def test_kernel_compiles_for_sm_90_without_spilling(name: str, tmp_path: Path) -> None:
    call, max_spilled = (CASES | SLOW_CASES)[name]
    source, constants, shape = recorded(call)
    assert shape.shared_bytes <= 227 << 10
    if NVCC is None:
        assert len(cuda_source.compile_source(source, constants, "sm_90").code) > 0
    else:
        spilled = compile_with_nvcc(source, constants, tmp_path, arch="90").spilled_bytes
        assert max_spilled is None or spilled <= max_spilled


def test_two_blocks_of_a_typical_plan_fit_on_a_multiprocessor() -> None:
    for slots in (4096, 8192):
        _, _, shape = recorded(lambda slots=slots: plan(2048, slots, 10496, 128, 656))
        # Each block takes 1 KiB of shared memory more than it requests.
        assert 2 * (shape.shared_bytes + 1024) <= 228 << 10


def test_plans_without_copies_use_one_kernel_whatever_the_batch() -> None:
    """Start-up compiles it for one request. If rows of several requests leave their tails in one step, the batch is
    larger, and this step must not wait for a compiler."""
    constants = [recorded(lambda batch=batch: plan(2048, 4096, 10496, batch))[1] for batch in (1, 64)]
    assert constants[0] == constants[1]
