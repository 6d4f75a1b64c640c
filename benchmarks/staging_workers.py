"""Two processes whose stores divide the heads of a GQA model differently, without the model: staging and all else."""

import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from far_process import answer, far_process
from landing_workers import HOST, PAGE_ROWS, POISON, Noted, order

from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.base.units import ceil_div
from hotset.handoff.agent import HandoffAgent, open_channel
from hotset.handoff.layout import head_shards
from hotset.handoff.messages import (
    Fetch,
    FetchFailed,
    FirstTokenSampled,
    HandoffKey,
    HandoffRequest,
    Hello,
    Landed,
    ModelIdentity,
    PagedSpan,
    RowsComputed,
    StartPrefill,
    Store,
)
from hotset.handoff.packing import StagingMemory
from hotset.handoff.receiver import Receiver
from hotset.handoff.sender import Sender
from hotset.handoff.staging import ReceiverStaging
from hotset.transfer.api import Region
from hotset.transfer.engines import LANES
from hotset.transfer.lanes import Lanes
from hotset.transfer.mooncake_engine import MooncakeBackend
from hotset.transfer.nixl_engine import NixlBackend

HEADS, HEAD_BYTES = 8, 128 * 2  # in bf16
ROW_BYTES = 2 * HEADS * HEAD_BYTES
PATIENCE_S = 900.0  # writes one by one take long
SHIFT = 4099  # bytes by which the pattern of one layer is ahead of that of the layer before


@dataclass(frozen=True, slots=True)
class Case:
    engine: str
    tokens: int
    layers: int
    source_ranks: int
    target_ranks: int
    staging_bytes: int  # on each side; 0: none
    chunk: int

    @property
    def nbytes(self) -> int:
        return self.tokens * self.layers * ROW_BYTES

    @property
    def pages(self) -> int:
        return ceil_div(self.tokens, PAGE_ROWS)


class Divided:
    """One side's rows, by ranks: [rank][layer, page, row, bytes], each rank's at a place of its own."""

    def __init__(self, case: Case, ranks: int) -> None:
        shape = (case.layers, case.pages + 1, PAGE_ROWS, ROW_BYTES // ranks)  # one page more: layers do not touch
        self.rows = [np.full(shape, POISON, np.uint8) for _ in range(ranks)]
        spans = [
            PagedSpan(
                tuple((layer.ctypes.data,) for layer in rank), PAGE_ROWS * shape[3], PAGE_ROWS, PAGE_ROWS, shape[3]
            )
            for rank in self.rows
        ]
        self.store = Store(head_shards(spans, HEADS, HEAD_BYTES), None)
        self._pages = case.pages
        longest = case.pages * PAGE_ROWS * ROW_BYTES + case.layers * SHIFT
        self._pattern = np.frombuffer(np.random.default_rng(0).bytes(longest), np.uint8)

    def register(self, transfer: Lanes) -> None:
        for rank in self.rows:
            transfer.register(Region(rank.ctypes.data, rank.nbytes))

    def fill(self, pages: tuple[int, ...]) -> None:
        """As if a context had been computed into these pages."""
        for layer in range(len(self.rows[0])):
            for rank, part in zip(self.rows, self._parts(layer), strict=True):
                rank[layer, list(pages)] = part

    def check(self, pages: tuple[int, ...], tokens: int) -> None:
        """Every byte of the context is here."""
        for layer in range(len(self.rows[0])):
            for rank, part in zip(self.rows, self._parts(layer), strict=True):
                found = rank[layer, list(pages)].reshape(-1, rank.shape[-1])
                assert np.array_equal(found[:tokens], part.reshape(found.shape)[:tokens]), f"layer {layer} differs"

    def poison(self) -> None:
        for rank in self.rows:
            rank.fill(POISON)

    def _parts(self, layer: int) -> list[np.ndarray]:
        """[page, row, bytes] of each rank."""
        size = self._pages * PAGE_ROWS * ROW_BYTES
        whole = self._pattern[layer * SHIFT :][:size].reshape(self._pages, PAGE_ROWS, ROW_BYTES)
        return [
            np.concatenate([whole[..., first : first + nbytes] for first, nbytes in shard.slices], axis=-1)
            for shard in self.store.shards
        ]


class Worker:
    """One process's stores, staging memory, transfer engine and handoff agent."""

    def __init__(self, case: Case, prefill: bool) -> None:
        self.case = case
        self.memory = Divided(case, case.source_ranks if prefill else case.target_ranks)
        self.backend = Noted(NixlBackend(HOST, LANES) if case.engine == "nixl" else MooncakeBackend(HOST, "tcp"))
        self.transfer = Lanes(self.backend, LANES, PATIENCE_S)
        self.memory.register(self.transfer)
        staging = StagingMemory(case.staging_bytes) if case.staging_bytes else None
        if staging is not None:
            self.transfer.register(staging.region)
        self._staging = staging
        channel = open_channel(f"{HOST}:0")
        stores = {"host": self.memory.store}
        ring = None if prefill or staging is None else staging.memory_range
        model = ModelIdentity("stand-in", case.layers, f"{ROW_BYTES} bytes", None, 0, "")
        self.hello = Hello(channel.address, model, stores, case.engine, self.transfer.describe(), ring)
        self.news = threading.Event()
        machine: Sender | Receiver
        if prefill:
            buffers = () if staging is None else staging.buffers
            machine = Sender(self.memory.store, buffers=buffers, write_limit=PATIENCE_S)
        else:
            machine = Receiver(staging=None if ring is None else ReceiverStaging(ring, stores))
        self.agent = HandoffAgent(machine, self.hello, channel, self.transfer, wake=self.news.set)
        self.agent.start()

    def close(self) -> None:
        self.agent.close(1.0)
        self.transfer.close()


class PrefillWorker(Worker):
    """Has computed a context already, the same for everybody who asks: its chunks are announced at once."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, prefill=True)
        self._pages = order(case.pages, "shuffled", seed=1)
        self.memory.fill(self._pages)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.news.wait()
            self.news.clear()
            for fact in self.agent.take_events():
                if isinstance(fact, StartPrefill):
                    self._announce(fact)

    def _announce(self, asked: StartPrefill) -> None:
        tokens = len(asked.prompt)
        for first in range(0, tokens, self.case.chunk):
            last = min(first + self.case.chunk, tokens)
            self.agent.put(RowsComputed(asked.peer, asked.key, first, last, self._pages, None))
        self.agent.put(FirstTokenSampled(asked.peer, asked.key, 0, None))


class DecodeWorker(Worker):
    def __init__(self, case: Case) -> None:
        super().__init__(case, prefill=False)
        self._pages = order(case.pages, "shuffled", seed=2)
        self._asked = 0

    def land(self, peer: str, requests: int = 1) -> float:
        """Seconds until so many contexts, asked for at once, are there. All have the same bytes, and the same pages."""
        begun = time.perf_counter()
        for _ in range(requests):
            self._asked += 1
            prompt = PromptSpec((7,) * self.case.tokens, SamplingParams())
            ask = HandoffRequest(HandoffKey(str(self._asked), 0), prompt, "host", self._pages, ())
            self.agent.put(Fetch(peer, ask))
        while requests:
            assert self.news.wait(PATIENCE_S), "a context does not land"
            self.news.clear()
            for fact in self.agent.take_events():
                assert not isinstance(fact, FetchFailed), fact
                requests -= isinstance(fact, Landed)
        return time.perf_counter() - begun

    def check(self) -> None:
        self.memory.check(self._pages, self.case.tokens)


def serve(case: Case, pipe: Connection) -> None:
    """The prefill side's process: tells how many writes it has posted since it was asked last."""
    worker = PrefillWorker(case)
    pipe.send(worker.hello.control)
    while pipe.recv() is not None:
        pipe.send(sum(map(len, worker.backend.posted)))
        worker.backend.posted.clear()
    worker.close()


def prefill_process(case: Case) -> AbstractContextManager[Connection]:
    return far_process(serve, case, PATIENCE_S)


def ask(pipe: Connection, question: Any) -> Any:
    return answer(pipe, question, PATIENCE_S)
