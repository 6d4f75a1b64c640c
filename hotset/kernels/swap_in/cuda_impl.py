"""swap_in in CUDA C++: constants and launch shapes. The sizes of a step are arguments of the kernels."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hotset.base.errors import ConfigError, InternalError
from hotset.base.units import next_power_of_2
from hotset.kernels import MAX_POSITIONS, cuda_source
from hotset.kernels.cuda_source import LaunchShape
from hotset.kernels.swap_in.tables import RowCopies, SeatTables, SwapPlan

PLAN, COPY = (Path(__file__).with_name(name) for name in ("plan.cu", "copy.cu"))
UNITS = (16, 8, 4, 2, 1)  # bytes per access of a copy
MAX_UNITS = 4  # units that one lane of the planning kernel holds; more would not fit into its registers
HISTOGRAM_BYTES = (1024 + 22 * 64) * 4  # of ages: BUCKETS words in victims.cu
ROOMY_TABLE = 4096  # up to this size, the hash table has twice the entries that it needs
LINE = 128  # bytes of a cache line
CLUSTERS_SINCE = 9  # major compute capability of the first GPUs with clusters


@dataclass(frozen=True, slots=True)
class BlockCluster:
    """The blocks that plan and copy for one query, in one launch."""

    blocks: int  # at most 8
    threads: int = 512  # per block
    rows_at_once: int = 2  # in flight per warp


@dataclass(frozen=True, slots=True)
class SwapInTuning:
    """The parameters of the launches. The defaults were the best in `benchmarks/swap_in.py --sweep`."""

    plan_threads: int = 512  # per block, if plan and copy are two launches
    # (largest batch, cluster); None: plan and copy are two launches. The last entry is also used for larger batches.
    clusters: tuple[tuple[int, BlockCluster | None], ...] = (
        (16, BlockCluster(8, threads=1024)),
        (44, BlockCluster(6)),
        (88, BlockCluster(3)),
        (132, BlockCluster(2)),
    )
    # In larger batches, queries take turns: lists_at_once of them copy their rows at the same time, or more of them if
    # they have fewer than turn_rows missing rows together.
    max_batch_without_turns: int = 16
    lists_at_once: int = 6
    turn_rows: int = 640
    # A copy in a launch of its own. 16 blocks of 128 threads keep a PCIe 5 bus busy if they copy the rows of few
    # queries at a time. More of them slow down the kernels that run beside the copy.
    copy_blocks: int = 16
    copy_threads: int = 128
    copy_lists_at_once: int = 4
    rows_at_once: int = 2  # in flight per warp of a copy

    def turns(self, batch: int) -> dict[str, int]:
        """Returns the constants that determine which queries wait for their turn."""
        lists = self.lists_at_once if batch > self.max_batch_without_turns else 0
        return {"LISTS_AT_ONCE": lists, "TURN_ROWS": self.turn_rows}

    def cluster(self, batch: int) -> BlockCluster | None:
        return next((cluster for max_batch, cluster in self.clusters if batch <= max_batch), self.clusters[-1][1])


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
) -> SwapPlan:
    batch, k = positions.shape
    if k > MAX_POSITIONS:
        raise ConfigError(f"top-{k} is more than the {MAX_POSITIONS} positions that a plan on a GPU supports")
    device = positions.device
    pages = (tables.row_pages, tables.host_pages, tables.slot_pages, tables.tail_pages, tables.map_pages)
    for table in pages:
        if table.stride(1) != 1:
            raise InternalError(f"the pages of a seat must be adjacent, but their stride is {table.stride(1)}")
    rows, from_host, to_device = (torch.empty(batch, k, dtype=torch.int64, device=device) for _ in range(3))
    copies = RowCopies(from_host, to_device, torch.empty(batch, dtype=torch.int32, device=device))
    layer = _LayerRows(host_rows, device_rows) if host_rows is not None and device_rows is not None else None
    cluster = tuning.cluster(batch) if layer is not None and _has_clusters(device) else None
    threads = tuning.plan_threads if cluster is None else cluster.threads
    constants = _plan_constants(k, tables, words, words_per_page, threads)
    constants |= _cluster_constants(cluster, layer, tuning.turns(batch))
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
    return SwapPlan(rows, copies)


def copy(copies: RowCopies, host_rows: Tensor, device_rows: Tensor, *, tuning: SwapInTuning = TUNED) -> None:
    _launch_copy(copies, _LayerRows(host_rows, device_rows), early=False, tuning=tuning)


def _launch_copy(copies: RowCopies, layer: "_LayerRows", *, early: bool, tuning: SwapInTuning) -> None:
    """Launches the copy. `early`: the previous launch is the plan that wrote `copies`, and the copy waits for it."""
    batch, list_length = copies.host_rows.shape
    teams, warps = max(1, min(batch, tuning.copy_lists_at_once)), tuning.copy_threads // 32
    team_blocks = max(1, min(tuning.copy_blocks // teams, -(-list_length // warps)))
    kernel = cuda_source.kernel(
        COPY, "copy_rows", THREADS=tuning.copy_threads, **layer.constants(), ROWS_AT_ONCE=tuning.rows_at_once
    )
    kernel.launch(
        LaunchShape(teams * team_blocks, tuning.copy_threads, dependent_launch=early),
        copies.host_rows.contiguous(),
        copies.device_rows.contiguous(),
        copies.counts.contiguous(),
        batch,
        list_length,
        team_blocks,
        *layer.arguments(),
    )


class _LayerRows:
    """The rows of one layer on the host and on the device, as bytes."""

    def __init__(self, host_rows: Tensor, device_rows: Tensor) -> None:
        self._host, self._device = host_rows.view(torch.uint8), device_rows.view(torch.uint8)

    def constants(self) -> dict[str, int]:
        """Returns the widest unit that all rows are aligned to, and the loads per lane that a row needs (at most 4)."""
        tiers = (self._host, self._device)
        addresses = [address for rows in tiers for address in (rows.data_ptr(), rows.stride(0))]
        unit = next(unit for unit in UNITS if all(address % unit == 0 for address in addresses))
        # A row that does not begin at the start of a cache line may extend into one more line.
        return {"UNIT": unit, "LOADS": min(4, -(-(self._host.shape[1] + LINE - unit) // (32 * unit)))}

    def arguments(self) -> tuple[Tensor | int, ...]:
        return (self._host, self._host.stride(0), self._device, self._device.stride(0), self._host.shape[1])


def _has_clusters(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= CLUSTERS_SINCE


def _plan_constants(k: int, tables: SeatTables, words: Tensor, words_per_page: int, threads: int) -> dict[str, int]:
    entries = next_power_of_2(-(-k // threads))
    hash_entries = max(next_power_of_2(k), min(2 * next_power_of_2(k), ROOMY_TABLE))
    wide = tables.slots % 4 == 0 and words_per_page % 4 == 0 and words.data_ptr() % 16 == 0
    slots_held = -(-tables.slots // threads)
    slots_held = -(-slots_held // 4) * 4 if wide else slots_held
    # The size of `Shared` in plan.cu: pages, the hash table, lists, ages, marks, sums and counts.
    shared_bytes = 4 * threads + 8 * hash_entries + 8 * threads * entries
    shared_bytes += max(HISTOGRAM_BYTES, 2 * threads * entries) + 8
    shared_bytes += threads * slots_held + 33 * 4 + 8
    return {
        "THREADS": threads,
        "ENTRIES": entries,
        "SLOTS_HELD": slots_held,
        "TABLE": hash_entries,
        "SHARED_BYTES": shared_bytes,
        "SLOTS": tables.slots,
        "PAGE_ROWS": tables.page_rows,
        "TAIL_PAGES": tables.tail_pages.shape[1],
        "WORDS_PER_PAGE": words_per_page,
        "WIDE": int(wide),
    }


@cache
def _turns(device: torch.device) -> Tensor:
    """Returns the ticket counters that all plans of a device share. The first plan creates them, before any capture."""
    return torch.zeros(2, dtype=torch.int32, device=device)


def _cluster_constants(cluster: BlockCluster | None, layer: _LayerRows | None, turns: dict[str, int]) -> dict[str, int]:
    if cluster is None or layer is None:
        return {"COPIES": 0, "CLUSTER": 1}
    reading = layer.constants()
    sizes = {"COPIES": 1, "CLUSTER": cluster.blocks}
    sizes["ROWS_AT_ONCE"] = max(1, min(cluster.rows_at_once, MAX_UNITS // reading["LOADS"]))
    return sizes | turns | reading
