"""Two processes between which contexts of a production model land, without the model: stores, agents, transfer."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from far_process import answer, far_process

from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.base.units import ceil_div
from hotset.engine.stores import host_stores, landing_stores, regions
from hotset.engine.workers.executor import whole_host_store
from hotset.handoff.agent import HandoffAgent, open_channel
from hotset.handoff.layout import plan_writes
from hotset.handoff.messages import (
    Fetch,
    FetchFailed,
    FirstTokenSampled,
    HandoffKey,
    HandoffRequest,
    Hello,
    Landed,
    Landing,
    ModelIdentity,
    RowsComputed,
    StartPrefill,
    Store,
)
from hotset.handoff.receiver import Receiver
from hotset.handoff.sender import Sender
from hotset.kernels.rows import index_key_row, mla_row
from hotset.memory.device_pool import DevicePool, KvShape
from hotset.memory.host_store import HostStore
from hotset.tiers.kv_memory import KvMemory
from hotset.tiers.ledger import LAND_ANYWHERE
from hotset.transfer.api import Region, Writes, WriteState
from hotset.transfer.engines import DEADLINE_S, LANES
from hotset.transfer.lanes import Backend, Lanes
from hotset.transfer.mooncake_engine import MooncakeBackend
from hotset.transfer.nixl_engine import NixlBackend
from hotset.transfer.regions import Regions, decode_description, split_writes

CPU = torch.device("cpu")
HOST = "127.0.0.1"
PAGE_ROWS = 64
POISON = 0xAB
SPARE_PAGES = 1  # that no context has: one layer must not go on where the one before ends, as in no real store it does
SHIFT = 4099  # bytes by which the pattern of one layer is ahead of that of the layer before
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    engine: str
    tokens: int
    layers: int
    chunk: int
    keys: str  # where they land: 'device' or 'host'

    @property
    def shape(self) -> KvShape:
        row, key = mla_row(512, 64, torch.bfloat16, fp8=True), index_key_row(128, torch.bfloat16, fp8=True)
        return KvShape(self.layers, row, tuple(range(self.layers)), key, topk=2048)

    @property
    def nbytes(self) -> int:
        return self.tokens * self.shape.token_bytes

    @property
    def pages(self) -> int:
        return ceil_div(self.tokens, PAGE_ROWS)

    @property
    def key_pages(self) -> int:
        return self.pages if self.keys == "host" else self.shape.geometry(PAGE_ROWS).key_pages(self.tokens)


def order(pages: int, pool: str, seed: int) -> tuple[int, ...]:
    """The pages of a context, from its first."""
    if pool == "fresh":
        return tuple(range(pages))
    return tuple(np.random.default_rng(seed).permutation(pages).tolist())


class Pattern:
    """What lies in the store of the prefill side: of any two layers different bytes at each place."""

    def __init__(self, case: Case) -> None:
        self._rows = (case.pages + SPARE_PAGES) * PAGE_ROWS
        longest = self._rows * case.shape.row.stride_bytes + case.layers * SHIFT
        self._bytes = np.frombuffer(np.random.default_rng(0).bytes(longest), np.uint8)

    def of(self, unit: int, width: int) -> np.ndarray:
        """[pages of the store, rows, width]: of one layer's rows, or one group's keys."""
        taken = self._bytes[unit * SHIFT :][: self._rows * width]
        return taken.reshape(-1, PAGE_ROWS, width)


class Noted:
    """A backend that notes what is posted."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.name, self.limits = backend, backend.name, backend.limits
        self.posted: list[Writes] = []

    def register(self, region: Region) -> None:
        self._backend.register(region)

    def describe(self) -> bytes:
        return self._backend.describe()

    def connect(self, native: bytes, regions: Regions) -> Any:
        return self._backend.connect(native, regions)

    def disconnect(self, remote: Any) -> None:
        self._backend.disconnect(remote)

    def post(self, remote: Any, writes: Writes) -> Any:
        self.posted.append(writes)
        return self._backend.post(remote, writes)

    def check(self, handle: Any) -> WriteState:
        return self._backend.check(handle)

    def transport(self) -> str:
        return self._backend.transport()

    def close(self) -> None:
        self._backend.close()


class Worker:
    """One process's stores, transfer engine and handoff agent."""

    def __init__(self, case: Case, prefill: bool) -> None:
        self.case = case
        shape = case.shape
        geometry = shape.geometry(PAGE_ROWS)
        key_pages = 0 if prefill or case.keys == "host" else case.key_pages
        pool = DevicePool(shape, geometry, key_pages + SPARE_PAGES, CPU)
        host = HostStore(shape, case.pages + SPARE_PAGES, PAGE_ROWS, CPU)
        self.memory = KvMemory(pool, host, 1, case.tokens)
        self.backend = Noted(NixlBackend(HOST, LANES) if case.engine == "nixl" else MooncakeBackend(HOST, "tcp"))
        self.transfer = Lanes(self.backend, LANES, DEADLINE_S)
        for region in regions(whole_host_store(self.memory), None if prefill else self.memory.pool):
            self.transfer.register(region)
        channel = open_channel(f"{HOST}:0")
        source = host_stores(whole_host_store(self.memory))["host"]
        assert shape.key is not None
        model = ModelIdentity("stand-in", case.layers, shape.row.description, shape.key.description, shape.groups, "")
        in_host = prefill or case.keys == "host"
        stores: Mapping[Landing, Store] = (
            {"host": source}
            if in_host
            else landing_stores(whole_host_store(self.memory), self.memory.pool, LAND_ANYWHERE)
        )
        self.hello = Hello(channel.address, model, stores, case.engine, self.transfer.describe())
        self.news = threading.Event()
        machine = Sender(source) if prefill else Receiver()
        self.agent = HandoffAgent(machine, self.hello, channel, self.transfer, wake=self.news.set)
        self.agent.start()

    @property
    def rows(self) -> torch.Tensor:  # [layers, rows, bytes]
        assert self.memory.host is not None
        return self.memory.host.rows

    def close(self) -> None:
        self.agent.close(1.0)
        self.transfer.close()


class PrefillWorker(Worker):
    """Has computed everything already: a prompt's chunks are announced at once."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, prefill=True)
        self._fill(Pattern(case))
        self._remote: Any = None
        threading.Thread(target=self._serve, daemon=True).start()

    def raw(self, hello: Hello, address: int, nbytes: int) -> float:
        """Seconds in which `nbytes` reach the peer's memory from `address` on, in the largest writes."""
        if self._remote is None:
            found = decode_description(hello.description, self.case.engine)
            self._remote = self.backend.connect(found.native, found.regions)
        return self._push(
            split_writes(np.array([[self.rows.data_ptr(), address, nbytes]]), self.backend.limits.write_nbytes)
        )

    def again(self) -> tuple[int, float]:
        """The writes of the last landing once more, from memory to memory and nothing else: how many, and seconds."""
        posted, self.backend.posted = np.concatenate(self.backend.posted), []
        seconds = self._push(posted)
        self.backend.posted.clear()
        return len(posted), seconds

    def _push(self, pieces: Writes) -> float:
        limits, under_way = self.backend.limits, deque[tuple[Any, int]]()
        batch = np.maximum(np.cumsum(pieces[:, 2]) // limits.nbytes, np.arange(len(pieces)) // limits.writes)
        begun = time.perf_counter()
        for part in np.split(pieces, np.flatnonzero(np.diff(batch)) + 1):
            while under_way and sum(count for _, count in under_way) + len(part) > limits.in_flight:
                self._await(under_way.popleft()[0])
            under_way.append((self.backend.post(self._remote, part), len(part)))
        for handle, _ in under_way:
            self._await(handle)
        return time.perf_counter() - begun

    def _await(self, handle: Any) -> None:
        while (state := self.backend.check(handle)) is WriteState.PENDING:
            time.sleep(0.0001)
        assert state is WriteState.DONE, state

    def _fill(self, pattern: Pattern) -> None:
        host = self.memory.host
        assert host is not None and host.keys is not None
        for tensor in (host.rows, host.keys):
            for unit, stored in enumerate(tensor.numpy()):
                stored.reshape(-1, PAGE_ROWS, stored.shape[-1])[:] = pattern.of(unit, stored.shape[-1])

    def _serve(self) -> None:
        while True:
            self.news.wait()
            self.news.clear()
            for fact in self.agent.take_events():
                if isinstance(fact, StartPrefill):
                    self._announce(fact)

    def _announce(self, asked: StartPrefill) -> None:
        tokens = len(asked.prompt)
        pages = order(self.case.pages, asked.key.request_id.split()[0], seed=1)
        for first in range(0, tokens, self.case.chunk):
            last = min(first + self.case.chunk, tokens)
            self.agent.put(RowsComputed(asked.peer, asked.key, first, last, pages, None))
        self.agent.put(FirstTokenSampled(asked.peer, asked.key, 0, None))


class DecodeWorker(Worker):
    def __init__(self, case: Case) -> None:
        super().__init__(case, prefill=False)
        self._pattern = Pattern(case)
        self._asked = 0

    def land(self, peer: str, pool: str) -> float:
        """Seconds until a context is there."""
        case = self.case
        rows, keys = order(case.pages, pool, seed=2), order(case.key_pages, pool, seed=3)
        self._asked += 1
        key = HandoffKey(f"{pool} {self._asked}", 0)
        ask = HandoffRequest(key, PromptSpec((7,) * case.tokens, SamplingParams()), "host", rows, keys)
        begun = time.perf_counter()
        self.agent.put(Fetch(peer, ask))
        while True:
            assert self.news.wait(PATIENCE_S), "a context does not land"
            self.news.clear()
            for fact in self.agent.take_events():
                assert not isinstance(fact, FetchFailed), fact
                if isinstance(fact, Landed):
                    return time.perf_counter() - begun

    def poison(self) -> None:
        self.rows.fill_(POISON)
        self._key_pages.fill(POISON)

    @property
    def _key_pages(self) -> np.ndarray:  # [groups, pages, keys, bytes]
        host, pool = self.memory.host, self.memory.pool
        assert host is not None and host.keys is not None and pool.key_blocks is not None
        if self.case.keys == "device":
            return pool.key_blocks.numpy()
        return host.keys.numpy().reshape(self.case.layers, -1, PAGE_ROWS, host.keys.shape[-1])

    def check(self, pool: str) -> None:
        """Every byte of the context that has landed is that of its source."""
        case, shape = self.case, self.memory.pool.shape
        source, rows = list(order(case.pages, pool, seed=1)), list(order(case.pages, pool, seed=2))
        keys = list(order(case.key_pages, pool, seed=3))
        assert shape.key is not None
        width, key_width = shape.row.stride_bytes, shape.key.stride_bytes
        for unit in range(case.layers):
            landed = self.rows[unit].numpy().reshape(-1, PAGE_ROWS, width)[rows].reshape(-1, width)
            sent = self._pattern.of(unit, width)[source].reshape(-1, width)
            assert np.array_equal(landed[: case.tokens], sent[: case.tokens]), f"rows of layer {unit} differ"
            blocks = self._key_pages[unit][keys].reshape(-1, key_width)
            sent = self._pattern.of(unit, key_width)[source].reshape(-1, key_width)
            assert np.array_equal(blocks[: case.tokens], sent[: case.tokens]), f"index keys of group {unit} differ"

    def unmerged(self) -> int:
        """Writes of a context if no page followed another."""
        case, source, target = self.case, host_stores(whole_host_store(self.memory))["host"], self.hello.stores["host"]
        apart = tuple(reversed(range(case.pages)))
        assert source.keys is not None and target.keys is not None
        keys = plan_writes(source.keys, apart, target.keys, apart, 0, case.tokens)
        return len(
            plan_writes(source.shards[0].span, apart, target.shards[0].span, range(case.pages), 0, case.tokens)
        ) + len(keys)


def serve(case: Case, pipe: Connection) -> None:
    """The prefill side's process."""
    worker = PrefillWorker(case)
    pipe.send(worker.hello.control)
    while (asked := pipe.recv()) is not None:
        match asked:
            case "writing":
                worker.backend.posted.clear()
                pipe.send(worker.transfer.throughput().seconds)
            case "written":
                pipe.send((worker.transfer.throughput().seconds, *worker.again()))
            case _:
                pipe.send(worker.raw(*asked))
    worker.close()


def prefill_process(case: Case) -> AbstractContextManager[Connection]:
    return far_process(serve, case, PATIENCE_S)


def ask(pipe: Connection, question: Any) -> Any:
    return answer(pipe, question, PATIENCE_S)
