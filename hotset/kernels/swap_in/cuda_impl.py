"""swap_in in CUDA C++: constants and launch shapes. The sizes of a step are arguments."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels import cuda_source
from hotset.kernels.cuda_source import LaunchShape
from hotset.kernels.swap_in.tables import Copies, SeatTables, Swap

PLAN, COPY = (Path(__file__).with_name(name) for name in ("plan.cu", "copy.cu"))
UNITS = (16, 8, 4, 2, 1)  # bytes that one access of a copy may span
MAX_UNITS = 4  # of rows that one lane of the planning kernel holds: more would not fit its registers
HISTOGRAM_BYTES = (1024 + 22 * 64) * 4
ROOMY_TABLE = 4096  # up to this size the hash table has twice as many places as it may need
LINE = 128  # bytes
MAX_POSITIONS = 8_192  # of one batch row: lists of them lie in shared memory
CLUSTERS_SINCE = 9  # compute capability, major


@dataclass(frozen=True, slots=True)
class Cluster:
    """Blocks that plan and copy for one batch row, all in one launch."""

    blocks: int  # at most 8
    threads: int = 512  # of a block
    rows_at_once: int = 2  # of each warp


@dataclass(frozen=True, slots=True)
class SwapInTuning:
    """What was found best by `benchmarks/swap_in.py --sweep`."""

    plan_threads: int = 512  # where plan and copy are two launches
    # By batch, up to and including: None: plan and copy are two launches. The last serves larger batches as well.
    clusters: tuple[tuple[int, Cluster | None], ...] = (
        (16, Cluster(8, threads=1024)),
        (132, Cluster(2)),
    )
    lists_at_once: int = 16  # of a batch, whose rows are copied at the same time
    copy_blocks: int = 132  # at most: a copy leaves the rest of the GPU to others
    copy_threads: int = 256
    rows_at_once: int = 2  # of each warp of a copy

    def cluster(self, batch: int) -> Cluster | None:
        return next((cluster for most, cluster in self.clusters if batch <= most), self.clusters[-1][1])


TUNED = SwapInTuning()


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
    host_rows: Tensor | None = None,
    device_rows: Tensor | None = None,
    tuning: SwapInTuning = TUNED,
) -> Swap:
    batch, k = positions.shape
    if k > MAX_POSITIONS:
        raise ConfigError(f"top-{k} is more than the {MAX_POSITIONS} positions that a plan on a GPU can take")
    device = positions.device
    pages = (tables.row_pages, tables.host_pages, tables.slot_pages, tables.tail_pages, tables.map_pages)
    for table in pages:
        assert table.stride(1) == 1, f"the pages of a seat are {table.stride(1)} apart"
    rows, from_host, to_device = (torch.empty(batch, k, dtype=torch.int64, device=device) for _ in range(3))
    copies = Copies(from_host, to_device, torch.empty(batch, dtype=torch.int32, device=device))
    layer = _Layer(host_rows, device_rows) if host_rows is not None and device_rows is not None else None
    cluster = tuning.cluster(batch) if layer is not None and _has_clusters(device) else None
    threads = tuning.plan_threads if cluster is None else cluster.threads
    constants = _plan_constants(k, tables, words, words_per_page, threads)
    constants |= _cluster_constants(cluster, layer, tuning.lists_at_once if batch > tuning.lists_at_once else 0)
    copied = layer.arguments() if layer is not None and cluster is not None else (0,) * 5
    kernel = cuda_source.kernel(PLAN, "plan", **constants)
    kernel.launch(
        LaunchShape(batch * constants["CLUSTER"], threads, constants["SHARED_BYTES"]),
        positions.contiguous(),
        seats.contiguous(),
        stamps.contiguous(),
        tables.tiered.contiguous(),
        *pages,
        *(table.stride(0) for table in pages),
        words,
        counts,
        k,
        tables.slot_pages.shape[1],
        tables.map_pages.shape[1],
        int(ignore_tail),
        rows,
        from_host,
        to_device,
        copies.counts,
        _turns(device),
        *copied,
    )
    if layer is not None and cluster is None:
        _launch_copy(copies, layer, early=True, tuning=tuning)
    return Swap(rows, copies)


def copy(copies: Copies, host_rows: Tensor, device_rows: Tensor, *, tuning: SwapInTuning = TUNED) -> None:
    _launch_copy(copies, _Layer(host_rows, device_rows), early=False, tuning=tuning)


def _launch_copy(copies: Copies, layer: "_Layer", *, early: bool, tuning: SwapInTuning) -> None:
    """`early`: the launch before it is the plan that made `copies`."""
    batch, most = copies.host_rows.shape
    teams, warps = max(1, min(batch, tuning.lists_at_once)), tuning.copy_threads // 32
    team = max(1, min(tuning.copy_blocks // teams, -(-most // warps)))  # blocks
    kernel = cuda_source.kernel(
        COPY, "copy_rows", THREADS=tuning.copy_threads, **layer.constants(), ROWS_AT_ONCE=tuning.rows_at_once
    )
    kernel.launch(
        LaunchShape(teams * team, tuning.copy_threads, dependent_launch=early),
        copies.host_rows.contiguous(),
        copies.device_rows.contiguous(),
        copies.counts.contiguous(),
        batch,
        most,
        team,
        *layer.arguments(),
    )


class _Layer:
    """One layer's rows in both tiers, as bytes."""

    def __init__(self, host_rows: Tensor, device_rows: Tensor) -> None:
        self._host, self._device = host_rows.view(torch.uint8), device_rows.view(torch.uint8)

    def constants(self) -> dict[str, int]:
        """How such rows are best read."""
        tiers = (self._host, self._device)
        addresses = [address for rows in tiers for address in (rows.data_ptr(), rows.stride(0))]
        unit = next(unit for unit in UNITS if all(address % unit == 0 for address in addresses))
        # A row that begins within a line of host memory may reach into one line more.
        return {"UNIT": unit, "LOADS": min(4, -(-(self._host.shape[1] + LINE - unit) // (32 * unit)))}

    def arguments(self) -> tuple[Tensor | int, ...]:
        return (self._host, self._host.stride(0), self._device, self._device.stride(0), self._host.shape[1])


def _has_clusters(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= CLUSTERS_SINCE


def _plan_constants(k: int, tables: SeatTables, words: Tensor, words_per_page: int, threads: int) -> dict[str, int]:
    entries, table = _power_of_2(-(-k // threads)), max(_power_of_2(k), min(2 * _power_of_2(k), ROOMY_TABLE))
    wide = tables.slots % 4 == 0 and words_per_page % 4 == 0 and words.data_ptr() % 16 == 0
    held = -(-tables.slots // threads)
    held = -(-held // 4) * 4 if wide else held
    # Of `Shared` in plan.cu: pages, the hash table, lists, ages, marks, sums and counts.
    shared_bytes = 4 * threads + 8 * table + 8 * threads * entries + max(HISTOGRAM_BYTES, 2 * threads * entries) + 8
    shared_bytes += threads * held + 33 * 4 + 8
    return {
        "THREADS": threads,
        "ENTRIES": entries,
        "SLOTS_HELD": held,
        "TABLE": table,
        "SHARED_BYTES": shared_bytes,
        "SLOTS": tables.slots,
        "PAGE_ROWS": tables.page_rows,
        "WORDS_PER_PAGE": words_per_page,
        "WIDE": int(wide),
    }


@cache
def _turns(device: torch.device) -> Tensor:
    """The turns that all plans of a device take. Made with the first of them, before any graph is captured."""
    return torch.zeros(2, dtype=torch.int32, device=device)


def _cluster_constants(cluster: Cluster | None, layer: _Layer | None, lists_at_once: int) -> dict[str, int]:
    if cluster is None or layer is None:
        return {"COPIES": 0, "CLUSTER": 1}
    reading = layer.constants()
    return {
        "COPIES": 1,
        "CLUSTER": cluster.blocks,
        "LISTS_AT_ONCE": lists_at_once,
        "ROWS_AT_ONCE": max(1, min(cluster.rows_at_once, MAX_UNITS // reading["LOADS"])),
    } | reading


def _power_of_2(number: int) -> int:
    """The least that is no smaller."""
    return 1 << max(0, number - 1).bit_length()
