"""swap_in in CUDA C++: constants and launch shapes of the two kernels. The sizes of a step are arguments."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels import cuda_source
from hotset.kernels.cuda_source import Kernel, LaunchShape
from hotset.kernels.swap_in.tables import Copies, SeatTables, Swap

PLAN, COPY = (Path(__file__).with_name(name) for name in ("plan.cu", "copy.cu"))
UNITS = (16, 8, 4, 2, 1)  # bytes that one access of a copy may span
HISTOGRAM_BYTES = 27 * 64 * 4
ROOMY_TABLE = 4096  # up to this size the hash table has twice as many places as it may need
LINE = 128  # bytes
MOST_POSITIONS = 16_384  # of one batch row: lists of them lie in shared memory


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was found best by `benchmarks/swap_in.py --sweep`."""

    plan_threads: int = 512
    copy_blocks: int = 132  # at most: a copy leaves the rest of the GPU to others
    copy_threads: int = 256
    rows_at_once: int = 2  # of each warp


TUNED = Tuning()


def plan(
    positions: Tensor,
    seats: Tensor,
    stamps: Tensor,
    tables: SeatTables,
    words: Tensor,
    words_per_page: int,
    counts: Tensor,
    *,
    ignore_tail: bool = False,
    tuning: Tuning = TUNED,
) -> Swap:
    batch, k = positions.shape
    if k > MOST_POSITIONS:
        raise ConfigError(f"top-{k} is more than the {MOST_POSITIONS} positions that a plan on a GPU can take")
    device = positions.device
    rows, host_rows, device_rows = (torch.empty(batch, k, dtype=torch.int64, device=device) for _ in range(3))
    copies = Copies(host_rows, device_rows, torch.empty(batch, dtype=torch.int32, device=device))
    pages = (tables.row_pages, tables.host_pages, tables.slot_pages, tables.tail_pages, tables.map_pages)
    for table in pages:
        assert table.stride(1) == 1, f"the pages of a seat are {table.stride(1)} apart"
    entries = _power_of_2(-(-k // tuning.plan_threads))
    wide = tables.slots % 4 == 0 and words_per_page % 4 == 0 and words.data_ptr() % 16 == 0
    held = -(-tables.slots // tuning.plan_threads)
    held = -(-held // 4) * 4 if wide else held
    shared_bytes = _shared_bytes(k, tuning.plan_threads, entries, held)
    kernel = cuda_source.kernel(
        PLAN,
        "plan",
        THREADS=tuning.plan_threads,
        ENTRIES=entries,
        SLOTS_HELD=held,
        TABLE=_table(k),
        SHARED_BYTES=shared_bytes,
        SLOTS=tables.slots,
        PAGE_ROWS=tables.page_rows,
        WORDS_PER_PAGE=words_per_page,
        WIDE=int(wide),
    )
    kernel.launch(
        LaunchShape(batch, tuning.plan_threads, shared_bytes),
        *(positions.contiguous(), seats.contiguous(), stamps.contiguous(), tables.tiered.contiguous()),
        *pages,
        *(table.stride(0) for table in pages),
        *(words, counts, k, tables.slot_pages.shape[1], tables.map_pages.shape[1], int(ignore_tail)),
        *(rows, copies.host_rows, copies.device_rows, copies.counts),
    )
    return Swap(rows, copies)


def copy(
    copies: Copies, host_rows: Tensor, device_rows: Tensor, *, after_plan: bool = False, tuning: Tuning = TUNED
) -> None:
    host, device = host_rows.view(torch.uint8), device_rows.view(torch.uint8)
    batch, most = copies.host_rows.shape
    warps = tuning.copy_threads // 32
    kernel = copy_kernel(host, device, tuning)
    kernel.launch(
        LaunchShape(max(1, min(tuning.copy_blocks, -(-batch * most // warps))), tuning.copy_threads, early=after_plan),
        *(copies.host_rows.contiguous(), copies.device_rows.contiguous(), copies.counts.contiguous(), batch, most),
        *(host, host.stride(0), device, device.stride(0), host.shape[1]),
    )


def copy_kernel(host: Tensor, device: Tensor, tuning: Tuning) -> Kernel:
    """The copy of such rows, of bytes."""
    addresses = (host.data_ptr(), host.stride(0), device.data_ptr(), device.stride(0))
    unit = next(unit for unit in UNITS if all(address % unit == 0 for address in addresses))
    # A row that begins within a line of host memory may reach into one line more.
    loads = min(4, -(-(host.shape[1] + LINE - unit) // (32 * unit)))
    return cuda_source.kernel(
        COPY, "copy_rows", THREADS=tuning.copy_threads, UNIT=unit, LOADS=loads, ROWS_AT_ONCE=tuning.rows_at_once
    )


def _power_of_2(number: int) -> int:
    """The least that is no smaller."""
    return 1 << max(0, number - 1).bit_length()


def _table(k: int) -> int:
    return max(_power_of_2(k), min(2 * _power_of_2(k), ROOMY_TABLE))


def _shared_bytes(k: int, threads: int, entries: int, held: int) -> int:
    """Of `Shared` in plan.cu."""
    slot_pages, misses, totals = 4 * threads, 2 * threads * entries, 3 * 32 * 4
    return slot_pages + 4 * _table(k) + max(HISTOGRAM_BYTES, misses) + misses + threads * held + totals + 3 * 4
