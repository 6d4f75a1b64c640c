"""Random states of tiered requests for swap_in.py, created on the GPU, and their pinned host rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.swap_in import RowCopies, SeatTables, SwapPlan, cuda_impl

TOP_K = 2048
CONTEXT = 131_072
PAGE_ROWS = 64
MAX_AGE = 1000  # a slot was last used fewer than this many steps before the previous step
STAMP = CONTEXT - 1
TAIL_FIRST = (STAMP // PAGE_ROWS - 1) * PAGE_ROWS  # first position in the tail
PIN_BYTES = 1 << 30  # per call of cudaHostRegister


@dataclass(frozen=True, slots=True)
class PinnedRows:
    """Host memory that holds the rows of all contexts."""

    memory: Tensor  # [bytes] uint8, pinned

    @property
    def gib(self) -> float:
        return self.memory.nbytes / 2**30

    def rows(self, row_bytes: int) -> Tensor:
        """Returns the memory as rows [rows, row_bytes], in whole pages."""
        count = self.memory.nbytes // row_bytes // PAGE_ROWS * PAGE_ROWS
        return self.memory[: count * row_bytes].view(count, row_bytes)


@contextmanager
def pinned_host_rows(bytes_per_position: int) -> Iterator[PinnedRows]:
    """Allocates random pinned rows. At the end, unpins them.

    `bytes_per_position` is the size of one row, multiplied by the number of contexts.
    """
    memory = torch.empty(CONTEXT * bytes_per_position, dtype=torch.uint8)
    cudart, pinned = torch.cuda.cudart(), []
    random = torch.randint(0, 256, (PIN_BYTES,), dtype=torch.uint8, device="cuda")
    try:
        for first in range(0, memory.nbytes, PIN_BYTES):
            block = memory[first : first + PIN_BYTES]
            failure = int(cudart.cudaHostRegister(block.data_ptr(), block.nbytes, 0))
            if failure:
                gib = f"{memory.nbytes / 2**30:.1f}"
                raise SystemExit(f"error: {gib} GiB of host memory cannot be pinned (CUDA error {failure})")
            pinned.append(block.data_ptr())
            block.copy_(random[: block.nbytes], non_blocking=True)
        torch.cuda.synchronize()
        yield PinnedRows(memory)
    finally:
        torch.cuda.synchronize()
        for address in reversed(pinned):
            cudart.cudaHostUnregister(address)


@dataclass(frozen=True, slots=True)
class SwapInState:
    """A batch of tiered requests before a step. States share device rows if they have the same number and size."""

    tables: SeatTables
    words: Tensor  # the map pages, which a step changes
    words_before: Tensor  # the contents of `words` before the step
    words_per_page: int
    positions: Tensor
    seats: Tensor
    stamps: Tensor
    counts: Tensor
    host_rows: Tensor
    device_rows: Tensor
    missing: int  # missing rows per request

    def restore(self) -> None:
        self.words.copy_(self.words_before)

    def swap_in(self, tuning: cuda_impl.SwapInTuning) -> SwapPlan:
        return cuda_impl.plan(
            self.positions,
            self.seats,
            self.stamps,
            self.tables,
            self.words,
            self.words_per_page,
            self.counts,
            host_rows=self.host_rows,
            device_rows=self.device_rows,
            tuning=tuning,
        )

    def check(self, tuning: cuda_impl.SwapInTuning) -> None:
        """Fails unless each request has `missing` misses and every copied row equals its host row."""
        self.restore()
        self.device_rows.zero_()
        copies = self.swap_in(tuning).copies
        assert copies.counts.tolist() == [self.missing] * self.seats.shape[0]
        flat = self.flat(copies)
        copied = self.device_rows[flat.device_rows[0]].cpu()
        assert torch.equal(copied, self.host_rows[flat.host_rows[0].cpu()]), "copied rows differ from the host rows"

    def flat(self, copies: RowCopies) -> RowCopies:
        """Returns all copies as one list."""
        lists = (copies.host_rows[:, : self.missing], copies.device_rows[:, : self.missing])
        host_rows, device_rows = (rows.reshape(1, -1).contiguous() for rows in lists)
        return RowCopies(host_rows, device_rows, torch.tensor([host_rows.shape[1]], dtype=torch.int32, device="cuda"))


_pools: dict[tuple[int, int], Tensor] = {}


def _device_rows(rows: int, row_bytes: int) -> Tensor:
    """Returns the shared device rows of this number and size. Frees rows of another number or size."""
    if (rows, row_bytes) not in _pools:
        _pools.clear()
        _pools[rows, row_bytes] = torch.zeros(rows, row_bytes, dtype=torch.uint8, device="cuda")
    return _pools[rows, row_bytes]


def make_state(slots: int, batch: int, misses: float, host_rows: Tensor, seed: int) -> SwapInState:
    torch.manual_seed(seed)
    row_bytes = host_rows.shape[1]
    missing = round(misses * TOP_K)
    order = torch.rand(batch, TAIL_FIRST, device="cuda").argsort(dim=1)  # positions outside the tail, in random order
    held = order[:, :slots]
    hits = held.gather(1, torch.rand(batch, slots, device="cuda").argsort(dim=1)[:, : TOP_K - missing])
    chosen = torch.cat([hits, order[:, slots : slots + missing]], dim=1)
    chosen = chosen.gather(1, torch.rand(batch, TOP_K, device="cuda").argsort(dim=1))
    words_per_page = PAGE_ROWS * row_bytes // 4
    logical = _maps(held, words_per_page)
    map_pages = torch.randperm(logical.shape[0] * logical.shape[1], device="cuda").view(logical.shape[:2])
    words = torch.empty(map_pages.numel(), words_per_page, dtype=torch.int32, device="cuda")
    words[map_pages.flatten()] = logical.flatten(0, 1)
    slot_page_count = slots // PAGE_ROWS
    device_pages = torch.randperm(batch * (slot_page_count + 2), device="cuda").view(batch, -1)
    context_pages = CONTEXT // PAGE_ROWS
    seats = torch.randperm(batch, device="cuda")
    host_pages = torch.arange(batch * context_pages, device="cuda") % (host_rows.shape[0] // PAGE_ROWS)
    tables = SeatTables(
        row_pages=torch.full((batch, context_pages), EMPTY, device="cuda"),
        host_pages=host_pages.view(batch, context_pages),
        slot_pages=device_pages[:, 2:].contiguous(),
        tail_pages=device_pages[:, :2].contiguous(),
        map_pages=map_pages,
        tiered=torch.ones(batch, dtype=torch.bool, device="cuda"),
        page_rows=PAGE_ROWS,
        slots=slots,
    )
    return SwapInState(
        tables=tables,
        words=words.flatten(),
        words_before=words.flatten().clone(),
        words_per_page=words_per_page,
        positions=chosen[seats],
        seats=seats,
        stamps=torch.full((batch,), STAMP, device="cuda"),
        counts=torch.zeros(2, dtype=torch.int64, device="cuda"),
        host_rows=host_rows,
        device_rows=_device_rows(device_pages.numel() * PAGE_ROWS, row_bytes),
        missing=missing,
    )


def _maps(held: Tensor, words_per_page: int) -> Tensor:
    """Returns the maps [seats, map pages, words] int32 of slots that hold the positions `held` [seats, slots]."""
    batch, slots = held.shape
    pages = -(-(2 * slots + CONTEXT // 2) // words_per_page)
    words = torch.zeros(batch, pages * words_per_page, dtype=torch.int32, device="cuda")
    words[:, :slots] = held.int()
    words[:, slots : 2 * slots] = STAMP - 1 - torch.randint(0, MAX_AGE, (batch, slots), device="cuda").int()
    slot_of = words.view(torch.int16)[:, 4 * slots : 4 * slots + CONTEXT]
    slot_of.fill_(EMPTY)
    slot_of.scatter_(1, held, torch.arange(slots, device="cuda").short().expand(batch, -1))
    return words.view(batch, pages, words_per_page)
