"""The prefill and decode processes of staging.py, without a model.

Each process splits the heads of a GQA model over its own number of ranks.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch
from landing_workers import PAGE_ROWS, POISON, AgentWorker, child_process, page_order, query

from hotset.base.paged_span import PagedSpan
from hotset.base.units import ceil_div
from hotset.fleet.handoff.deliveries import Sources
from hotset.fleet.handoff.layout import head_shards
from hotset.fleet.handoff.messages import (
    ModelIdentity,
    Store,
)
from hotset.fleet.handoff.packing import StagingMemory
from hotset.fleet.handoff.receiver import Receiver
from hotset.fleet.handoff.sender import Sender
from hotset.fleet.handoff.staging import ReceiverStaging
from hotset.fleet.transfer.api import MemoryKind, Region
from hotset.fleet.transfer.lanes import Lanes

HEADS, HEAD_BYTES = 8, 128 * 2  # bf16
ROW_BYTES = 2 * HEADS * HEAD_BYTES
TIMEOUT_S = 900.0  # without staging, a landing takes minutes
SHIFT = 4099  # bytes by which the pattern of a layer is shifted against that of the previous layer


@dataclass(frozen=True, slots=True)
class StagingCase:
    """One combination that is measured."""

    engine: str
    tokens: int
    layers: int
    source_ranks: int
    target_ranks: int
    staging_bytes: int  # on each side; 0 disables staging
    chunk: int
    device: str = "cpu"  # where rows and staging memory are

    @property
    def nbytes(self) -> int:
        return self.tokens * self.layers * ROW_BYTES

    @property
    def pages(self) -> int:
        return ceil_div(self.tokens, PAGE_ROWS)


class ShardedRows:
    """The rows of one side, split by heads into one allocation per rank: [rank][layer, page, row, bytes]."""

    def __init__(self, case: StagingCase, ranks: int) -> None:
        shape = (case.layers, case.pages + 1, PAGE_ROWS, ROW_BYTES // ranks)  # an unused page separates the layers
        self.device = torch.device(case.device)
        self.rows = [torch.full(shape, POISON, dtype=torch.uint8, device=self.device) for _ in range(ranks)]
        spans = [
            PagedSpan(tuple((layer.data_ptr(),) for layer in rank), PAGE_ROWS * shape[3], PAGE_ROWS, shape[3])
            for rank in self.rows
        ]
        self.kind = MemoryKind.DEVICE if case.device == "cuda" else MemoryKind.HOST
        self.store = Store(head_shards(spans, HEADS, HEAD_BYTES), None, memory=self.kind.value)
        self._pages = case.pages
        longest = case.pages * PAGE_ROWS * ROW_BYTES + case.layers * SHIFT
        self._pattern = np.frombuffer(np.random.default_rng(0).bytes(longest), np.uint8)

    def register(self, transfer: Lanes) -> None:
        for rank in self.rows:
            transfer.register(Region(rank.data_ptr(), rank.nbytes, self.kind))

    def fill(self, pages: tuple[int, ...]) -> None:
        """Stores a context in these pages."""
        for layer in range(len(self.rows[0])):
            for rank, expected in zip(self.rows, self._expected(layer), strict=True):
                rank[layer, list(pages)] = torch.from_numpy(expected).to(self.device)
        self.synchronize()

    def check(self, pages: tuple[int, ...], tokens: int) -> None:
        """Fails unless these pages hold every byte of the context."""
        for layer in range(len(self.rows[0])):
            for rank, expected in zip(self.rows, self._expected(layer), strict=True):
                landed = rank[layer, list(pages)].cpu().numpy().reshape(-1, rank.shape[-1])
                source = expected.reshape(landed.shape)
                assert np.array_equal(landed[:tokens], source[:tokens]), f"rows of layer {layer} differ"

    def poison(self) -> None:
        for rank in self.rows:
            rank.fill_(POISON)
        self.synchronize()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _expected(self, layer: int) -> list[np.ndarray]:
        """Returns the context's bytes [page, row, bytes] for each rank."""
        size = self._pages * PAGE_ROWS * ROW_BYTES
        whole = self._pattern[layer * SHIFT :][:size].reshape(self._pages, PAGE_ROWS, ROW_BYTES)
        return [
            np.concatenate([whole[..., first : first + nbytes] for first, nbytes in shard.slices], axis=-1)
            for shard in self.store.shards
        ]


class Worker(AgentWorker):
    """The stores, staging memory, transfer engine and handoff agent of one process."""

    def __init__(self, case: StagingCase, prefill: bool) -> None:
        super().__init__(case.engine, prefill=prefill, deadline_s=TIMEOUT_S, timeout_s=TIMEOUT_S)
        self.case = case
        self.memory = memory = ShardedRows(case, case.source_ranks if prefill else case.target_ranks)
        memory.register(self.transfer)
        store = memory.store
        self._staging = None  # keeps the memory alive
        if case.staging_bytes:
            self._staging = StagingMemory(case.staging_bytes, memory.device, memory.kind)
            self.transfer.register(self._staging.region)
            store = self._staging.beside(store)
        model = ModelIdentity("synthetic", case.layers, f"{ROW_BYTES} bytes", None, 0, "")
        machine: Sender | Receiver
        if prefill:
            machine = Sender(Sources(store), write_limit=TIMEOUT_S)
        else:
            machine = Receiver(staging=ReceiverStaging({"host": store}) if self._staging else None)
        self.start_agent(machine, store, model, memory.device)


class PrefillWorker(Worker):
    """Sends the same rows to all requests."""

    def __init__(self, case: StagingCase) -> None:
        super().__init__(case, prefill=True)
        pages = page_order(case.pages, "shuffled", seed=1)
        self.memory.fill(pages)
        self.announce_prompts(case.chunk, lambda request: pages)


class DecodeWorker(Worker):
    """Requests contexts from the prefill worker and checks their bytes."""

    def __init__(self, case: StagingCase) -> None:
        super().__init__(case, prefill=False)
        self._pages = page_order(case.pages, "shuffled", seed=2)

    def land(self, peer: str, requests: int = 1) -> float:
        """Requests `requests` contexts at once, all with the same bytes and pages. Returns the seconds until all have
        landed."""
        return self.fetch(peer, "staged", self.case.tokens, self._pages, (), requests)

    def check(self) -> None:
        self.memory.check(self._pages, self.case.tokens)


def serve_prefill(case: StagingCase, pipe: Connection) -> None:
    """Runs the prefill worker in its own process. The reply to a message is the number of writes that were posted since
    the previous message. The message None ends the process."""
    torch.set_num_threads(1)  # as in the decode process: threads that wait for each other distort the times
    worker = PrefillWorker(case)
    pipe.send(worker.hello.control)
    while pipe.recv() is not None:
        pipe.send(sum(map(len, worker.backend.posted)))
        worker.backend.posted.clear()
    worker.close()


def prefill_process(case: StagingCase) -> AbstractContextManager[Connection]:
    return child_process(serve_prefill, case, TIMEOUT_S)


def count_writes(pipe: Connection) -> int:
    """Returns the number of writes that the prefill process has posted since the previous call."""
    count: int = query(pipe, "writes", TIMEOUT_S)
    return count
