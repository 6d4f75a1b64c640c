"""The prefill and decode processes of landing.py: stores, handoff agents and transfer engines, but no model."""

import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from hotset.base.engine_settings import DEFAULT_STAGING_MIB
from hotset.base.listeners import LOOPBACK_INTERFACE
from hotset.base.paged_span import PagedSpan
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.base.units import MIB, ceil_div
from hotset.engine.workers.executor import HostShard
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.agent import HandoffAgent, open_channel
from hotset.fleet.handoff.decode_agent import DecodeAgent
from hotset.fleet.handoff.deliveries import Sources
from hotset.fleet.handoff.layout import whole_rows
from hotset.fleet.handoff.links import Endpoints
from hotset.fleet.handoff.packing import EngineCopies, StagingMemory
from hotset.fleet.handoff.prefill_agent import PrefillAgent
from hotset.fleet.handoff.receiver import Receiver
from hotset.fleet.handoff.routes import PROBE_BYTES
from hotset.fleet.handoff.sender import Sender
from hotset.fleet.handoff.staging import ReceiverStaging
from hotset.fleet.handoff.stores import (
    TransferMemory,
    host_shards,
    landing_store_name,
    landing_stores,
    pool_shards,
    regions,
)
from hotset.fleet.transfer.api import MemoryKind, Region, Writes, WriteState
from hotset.fleet.transfer.engines import DEADLINE_S, LANES
from hotset.fleet.transfer.lanes import Backend, Lanes
from hotset.fleet.transfer.mooncake_backend import MooncakeBackend
from hotset.fleet.transfer.nixl_backend import NixlBackend
from hotset.fleet.transfer.regions import Regions, decode_description, split_writes
from hotset.kernels.rows import index_key_row, mla_row
from hotset.memory.device_pool import DevicePool, KvShape
from hotset.memory.host_store import HostStore
from hotset.schedule.handoffs import FirstTokenSampled, HandoffKey, RowsComputed

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # without a GPU, the device is ordinary memory
HOST = "127.0.0.1"
PAGE_ROWS = 64
POISON = 0xAB
# Pages that no context uses. As in a real store, the rows of a context in one layer must not be adjacent to its rows in
# the next layer.
SPARE_PAGES = 1
STAGING_BYTES = DEFAULT_STAGING_MIB * MIB
SHIFT = 4099  # bytes by which the pattern of a layer is shifted against that of the previous layer
TIMEOUT_S = 60.0


@contextmanager
def child_process(serve: Callable[[Any, Connection], None], case: Any, timeout_s: float) -> Iterator[Connection]:
    """Runs `serve(case, pipe)` in a child process and yields the other end of the pipe.

    At the end of the block, None is sent over the pipe, and the child has `timeout_s` to exit before it is killed. If
    the block raises an exception, the child is killed at once.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(case, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
        ours.send(None)
        process.join(timeout_s)
    finally:
        process.kill()


def query(pipe: Connection, message: Any, timeout_s: float = TIMEOUT_S) -> Any:
    """Sends a message to the child process and returns the reply."""
    pipe.send(message)
    return reply(pipe, timeout_s)


def reply(pipe: Connection, timeout_s: float = TIMEOUT_S) -> Any:
    """Returns the next reply of the child process."""
    assert pipe.poll(timeout_s), f"no reply from the child process within {timeout_s:g} s"
    return pipe.recv()


@dataclass(frozen=True, slots=True)
class LandingCase:
    """One combination that is measured."""

    engine: str
    tokens: int
    layers: int
    chunk: int
    keys: str  # where index keys land: 'device' or 'host'
    source: str = "host"  # memory from which contexts are read
    target: str = "host"  # memory in which rows land; with 'device', index keys land there, too

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


def page_order(pages: int, pool: str, seed: int) -> tuple[int, ...]:
    """Returns the page ids of a context: consecutive in a 'fresh' pool, otherwise shuffled."""
    if pool == "fresh":
        return tuple(range(pages))
    return tuple(np.random.default_rng(seed).permutation(pages).tolist())


class Pattern:
    """The contents of the prefill side's store. No two layers have the same bytes."""

    def __init__(self, case: LandingCase) -> None:
        self._rows = (case.pages + SPARE_PAGES) * PAGE_ROWS
        longest = self._rows * case.shape.row.stride_bytes + case.layers * SHIFT
        self._bytes = np.frombuffer(np.random.default_rng(0).bytes(longest), np.uint8)

    def pages(self, index: int, width: int) -> np.ndarray:
        """Returns [pages of the store, rows, width] for the rows of layer `index`, or the keys of group `index`."""
        return self._bytes[index * SHIFT :][: self._rows * width].reshape(-1, PAGE_ROWS, width)


class RecordingBackend:
    """Forwards to another backend and records the posted writes."""

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


def open_backend(engine: str, lanes: int) -> Backend:
    if engine == "nixl":
        return NixlBackend(LOOPBACK_INTERFACE, lanes)
    return MooncakeBackend(HOST, LOOPBACK_INTERFACE, "tcp")


class AgentWorker:
    """The transfer engine and the handoff agent of one process, on the prefill side or on the decode side."""

    def __init__(self, engine: str, *, prefill: bool, deadline_s: float, timeout_s: float) -> None:
        self._engine, self._timeout_s, self._num_requests = engine, timeout_s, 0
        lanes = LANES if prefill else 1  # as in an engine: a decode worker writes nothing
        self.backend = RecordingBackend(open_backend(engine, lanes))
        self.transfer = Lanes(self.backend, lanes, deadline_s)
        self.has_events, self.closed = threading.Event(), False

    def start_agent(
        self,
        machine: Sender | Receiver,
        store: msg.Store,
        model: msg.ModelIdentity,
        device: torch.device,
        probes: dict[str, Any] | None = None,
    ) -> None:
        channel = open_channel(f"{HOST}:0")
        stores, described = {"host": store}, self.transfer.describe()
        self.hello = msg.Hello(channel.address, model, stores, self._engine, described, probes=probes or {})
        sends = isinstance(machine, Sender)
        transfer = self.transfer if sends else Endpoints(lambda: self.transfer)
        role: Any = PrefillAgent if sends else DecodeAgent
        copies = EngineCopies(device, ())
        self.agent: HandoffAgent = role(machine, self.hello, channel, transfer, wake=self.has_events.set, copies=copies)
        self.agent.start()

    def announce_prompts(self, chunk: int, pages_of: Callable[[msg.StartPrefill], tuple[int, ...]]) -> None:
        """Answers requests in a thread: announces all chunks of a prompt at once, as if they had been computed before
        the request arrived."""

        def announce(request: msg.StartPrefill) -> None:
            tokens = len(request.prompt)
            for first in range(0, tokens, chunk):
                last = min(first + chunk, tokens)
                self.agent.put(RowsComputed(request.peer, request.key, first, last, pages_of(request), None))
            self.agent.put(FirstTokenSampled(request.peer, request.key, 0, None))

        def serve() -> None:
            while not self.closed:
                self.has_events.wait()
                self.has_events.clear()
                for event in self.agent.take_events():
                    if isinstance(event, msg.StartPrefill):
                        announce(event)

        threading.Thread(target=serve, daemon=True).start()

    def fetch(
        self, peer: str, name: str, tokens: int, pages: tuple[int, ...], key_pages: tuple[int, ...], requests: int = 1
    ) -> float:
        """Requests `requests` contexts at once, into the same pages. Returns the seconds until all have landed."""
        start = time.perf_counter()
        for _ in range(requests):
            self._num_requests += 1
            key = HandoffKey(f"{name} {self._num_requests}", 0)
            prompt = PromptSpec((7,) * tokens, SamplingParams())
            self.agent.put(msg.Fetch(peer, msg.HandoffRequest(key, prompt, "host", pages, key_pages)))
        pending = requests
        while pending:
            assert self.has_events.wait(self._timeout_s), f"a context did not land within {self._timeout_s:g} s"
            self.has_events.clear()
            for event in self.agent.take_events():
                assert not isinstance(event, msg.FetchFailed), event
                pending -= isinstance(event, msg.Landed)
        return time.perf_counter() - start

    def close(self) -> None:
        self.closed = True
        self.has_events.set()
        self.agent.close(1.0)
        self.transfer.close()


class Worker(AgentWorker):
    """The stores, transfer engine and handoff agent of one process."""

    def __init__(self, case: LandingCase, prefill: bool) -> None:
        super().__init__(case.engine, prefill=prefill, deadline_s=DEADLINE_S, timeout_s=TIMEOUT_S)
        self.case, self.shape = case, case.shape
        self.host: HostStore | None = None  # None if everything is on the device
        self.pool: DevicePool | None = None
        on_device = (case.source if prefill else case.target) == "device"
        kinds = {device_kind(): GPU} if on_device else {MemoryKind.HOST: torch.device("cpu")}
        self.staging = TransferMemory(STAGING_BYTES, kinds)
        self.probe = StagingMemory(PROBE_BYTES, *((GPU, device_kind()) if on_device else ()))
        for region in (*self.staging.regions, self.probe.region):
            self.transfer.register(region)
        self.store = store = self._open_source() if prefill else self._open_target()
        assert self.shape.key is not None
        row, key = self.shape.row.description, self.shape.key.description
        model = msg.ModelIdentity("synthetic", case.layers, row, key, self.shape.groups, "")
        receiver_staging = ReceiverStaging({"host": store}) if store.staging else None
        machine = Sender(Sources(store)) if prefill else Receiver(staging=receiver_staging)
        self.start_agent(machine, store, model, GPU, {store.memory: self.probe.memory_range})

    def _open_source(self) -> msg.Store:
        """Allocates and registers the memory of contexts, in the layout of a host store."""
        if self.case.source == "host":
            return self._open_host(None)["host"]
        assert self.shape.key is not None
        count, kind = (self.case.pages + SPARE_PAGES) * PAGE_ROWS, device_kind()
        spans = []
        self.tensors = []
        for layers, row in ((self.shape.layers, self.shape.row), (self.shape.groups, self.shape.key)):
            tensor = torch.empty(layers, count, row.stride_bytes, dtype=torch.uint8, device=GPU)
            self.transfer.register(Region(tensor.data_ptr(), tensor.nbytes, kind, 0))
            bases = tuple((layer.data_ptr(),) for layer in tensor)
            spans.append(PagedSpan(bases, PAGE_ROWS * row.stride_bytes, PAGE_ROWS, row.stride_bytes))
            self.tensors.append(tensor)
        staging = (self.staging.ranges[kind],)
        return msg.Store(whole_rows(spans[0]), spans[1], memory=kind.value, staging=staging)

    def _open_target(self) -> msg.Store:
        case = self.case
        geometry = self.shape.geometry(PAGE_ROWS)
        if case.target == "device":
            self.pool = DevicePool(self.shape, geometry, case.pages + case.key_pages + SPARE_PAGES, GPU)
            for region in regions([], self.pool):
                self.transfer.register(region)
            return landing_stores([], pool_shards(self.pool, (), self.staging))["device"]
        if case.keys == "device":
            self.pool = DevicePool(self.shape, geometry, case.key_pages + SPARE_PAGES, GPU)
        stores = self._open_host(self.pool)
        return stores[landing_store_name(0, on_device=False, keys_on_host=self.pool is None)]

    def _open_host(self, pool: DevicePool | None) -> dict[str, msg.Store]:
        self.host = HostStore(self.shape, self.case.pages + SPARE_PAGES, PAGE_ROWS, GPU)
        self.tensors = [tensor for tensor in (self.host.rows, self.host.keys) if tensor is not None]
        shards = [HostShard(0, 0, self.shape, 1, self.host)]
        for region in regions([self.host], pool):
            self.transfer.register(region)
        return landing_stores(host_shards(shards, (), self.staging), pool_shards(pool, (), self.staging))

    @property
    def memory(self) -> torch.Tensor:
        """The memory from which rows are read, or in which they land, as contiguous bytes."""
        tensor = self.pool.bytes if self.host is None and self.pool is not None else self.tensors[0]
        return tensor.view(torch.uint8).flatten()

    def close(self) -> None:
        super().close()
        if self.host is not None:
            self.host.close()


def device_kind() -> MemoryKind:
    return MemoryKind.DEVICE if GPU.type == "cuda" else MemoryKind.HOST


class PrefillWorker(Worker):
    """Announces all chunks of a prompt at once, as if they had been computed before the request arrived."""

    def __init__(self, case: LandingCase) -> None:
        super().__init__(case, prefill=True)
        self._fill(Pattern(case))
        self._remote: Any = None
        pages = self.case.pages
        self.announce_prompts(case.chunk, lambda request: page_order(pages, request.key.request_id.split()[0], seed=1))

    def raw_write(self, hello: msg.Hello, address: int, nbytes: int) -> float:
        """Writes `nbytes` bytes to the peer's memory at `address`, in writes of the maximum size. Returns the seconds.

        The first call also connects to the peer; connecting is not timed.
        """
        if self._remote is None:
            description = decode_description(hello.description, self.case.engine)
            self._remote = self.backend.connect(description.native, description.regions)
        return self._write(
            split_writes(np.array([[self.memory.data_ptr(), address, nbytes]]), self.backend.limits.write_nbytes)
        )

    def repeat_writes(self) -> tuple[int, float]:
        """Repeats the recorded writes without control messages. Returns their number and the seconds.

        `raw_write` must have been called before, because it connects to the peer.
        """
        posted, self.backend.posted = np.concatenate(self.backend.posted), []
        seconds = self._write(posted)
        self.backend.posted.clear()
        return len(posted), seconds

    def _write(self, writes: Writes) -> float:
        limits, in_flight = self.backend.limits, deque[tuple[Any, int]]()
        batch = np.maximum(np.cumsum(writes[:, 2]) // limits.nbytes, np.arange(len(writes)) // limits.writes)
        start = time.perf_counter()
        for posted in np.split(writes, np.flatnonzero(np.diff(batch)) + 1):
            while in_flight and sum(count for _, count in in_flight) + len(posted) > limits.in_flight:
                self._wait(in_flight.popleft()[0])
            in_flight.append((self.backend.post(self._remote, posted), len(posted)))
        for handle, _ in in_flight:
            self._wait(handle)
        return time.perf_counter() - start

    def _wait(self, handle: Any) -> None:
        while (state := self.backend.check(handle)) is WriteState.PENDING:
            time.sleep(0.0001)
        assert state is WriteState.DONE, state

    def _fill(self, pattern: Pattern) -> None:
        for tensor in self.tensors:
            for index, stored in enumerate(tensor.view(torch.uint8)):
                stored.copy_(torch.tensor(pattern.pages(index, stored.shape[-1])).flatten(0, 1))
        if GPU.type == "cuda":
            torch.cuda.synchronize()


class DecodeWorker(Worker):
    """Requests contexts from the prefill worker and checks their bytes."""

    def __init__(self, case: LandingCase) -> None:
        super().__init__(case, prefill=False)
        self._pattern = Pattern(case)

    def land(self, peer: str, pool: str) -> float:
        """Requests a context and returns the seconds until it has landed."""
        return self.fetch(peer, pool, self.case.tokens, *self._pages(pool))

    def _pages(self, pool: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the pages of a context's rows, and of its index keys. On the device they are in the same pool."""
        first_key_page = self.case.pages if self.case.target == "device" else 0
        keys = page_order(self.case.key_pages, pool, seed=3)
        return page_order(self.case.pages, pool, seed=2), tuple(first_key_page + page for page in keys)

    def poison(self) -> None:
        for tensor in (*([] if self.host is None else self.tensors), *([] if self.pool is None else [self.pool.bytes])):
            tensor.view(torch.uint8).fill_(POISON)
        if GPU.type == "cuda":
            torch.cuda.synchronize()

    def check(self, pool: str) -> None:
        """Fails unless every byte of the landed context equals its source."""
        case, shape = self.case, self.shape
        assert shape.key is not None
        source = list(page_order(case.pages, pool, seed=1))
        rows, keys = (list(pages) for pages in self._pages(pool))
        width, key_width = shape.row.stride_bytes, shape.key.stride_bytes
        for index in range(case.layers):
            tensor = self.pool.bytes if self.host is None and self.pool is not None else self.tensors[0]
            layer = tensor[index].view(torch.uint8).cpu().numpy()
            landed = layer.reshape(-1, PAGE_ROWS, width)[rows].reshape(-1, width)
            sent = self._pattern.pages(index, width)[source].reshape(-1, width)
            assert np.array_equal(landed[: case.tokens], sent[: case.tokens]), f"rows of layer {index} differ"
            if self.pool is not None:
                assert self.pool.key_blocks is not None
                landed = self.pool.key_blocks[index].view(torch.uint8).cpu().numpy()[keys].reshape(-1, key_width)
            else:
                layer = self.tensors[1][index].view(torch.uint8).numpy()
                landed = layer.reshape(-1, PAGE_ROWS, key_width)[keys].reshape(-1, key_width)
            sent = self._pattern.pages(index, key_width)[source].reshape(-1, key_width)
            assert np.array_equal(landed[: case.tokens], sent[: case.tokens]), f"index keys of group {index} differ"


def serve_prefill(_: None, pipe: Connection) -> None:
    """Runs prefill workers in their own process, one after the other, and answers the messages of the decode process.

    A case: closes the worker of the case before. The reply is the control address of the new worker.
    "bytes": the reply is the size of the memory that `raw_write` reads.
    "start": deletes the recorded writes. The reply is the total number of seconds in which writes were in flight.
    "writes": the reply is this total, and the result of `repeat_writes`.
    The arguments of `raw_write`: the reply is its result.
    None: the process ends.
    """
    worker: PrefillWorker | None = None
    while (message := pipe.recv()) is not None:
        if isinstance(message, LandingCase):
            if worker is not None:
                worker.close()
            worker = PrefillWorker(message)
            pipe.send(worker.hello.control)
            continue
        assert worker is not None, "the first message must be a case"
        match message:
            case "bytes":
                pipe.send(worker.memory.nbytes)
            case "start":
                worker.backend.posted.clear()
                pipe.send(worker.transfer.throughput().seconds)
            case "writes":
                pipe.send((worker.transfer.throughput().seconds, *worker.repeat_writes()))
            case _:
                pipe.send(worker.raw_write(*message))
    if worker is not None:
        worker.close()


def prefill_process() -> AbstractContextManager[Connection]:
    return child_process(serve_prefill, None, TIMEOUT_S)
