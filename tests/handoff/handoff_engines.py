"""Engines without a model, for tests of the agent: they write predictable bytes, and compare what landed.

Everything around them is real: agents, state machines, sockets, a transfer that moves the bytes.
"""

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pace import scaled

from hotset.base.errors import EngineStopped
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.handoff import outgoing, receiver
from hotset.handoff.agent import ControlChannel, HandoffAgent
from hotset.handoff.layout import head_shards
from hotset.handoff.messages import (
    CancelFetch,
    Fetch,
    FetchFailed,
    FirstTokenSampled,
    HandoffKey,
    HandoffRequest,
    Hello,
    Landed,
    ModelIdentity,
    PagedSpan,
    PrefillFailed,
    Quiesced,
    ReceiverEvent,
    ReleasePages,
    RowsComputed,
    StartPrefill,
    Store,
)
from hotset.handoff.receiver import Receiver
from hotset.handoff.sender import Sender
from hotset.handoff.staging import ReceiverStaging
from hotset.handoff.timers import PeerTiming
from hotset.transfer.api import DeviceEvent, Region, Throughput, Transfer, Writes, WriteState, WriteTicket

if TYPE_CHECKING:
    from hotset.handoff.packing import StagingMemory  # imports torch, which would slow the start of processes

LAYERS, HEADS, HEAD_BYTES, GROUPS, KEY_BYTES = 2, 4, 6, 1, 16
ROW_BYTES = 2 * HEADS * HEAD_BYTES  # K and V of all heads
POISON = 0xAB
MODEL = ModelIdentity("demo", LAYERS, "48 bytes", "16 bytes", GROUPS, "00")
QUICK = PeerTiming(hello_every=0.1, ping_every=0.2, peer_timeout=1.5, poll_every=0.001)
SCALE = 0.2  # scales the timeouts of the state machines
SECONDS = 60.0  # generous: for an overloaded machine

Bytes = NDArray[np.uint8]


def until(true: Callable[[], bool], seconds: float = SECONDS) -> bool:
    """Waits until the condition holds, and returns whether it does."""
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.002)
    return true()


def contents(token_ids: Sequence[int], units: int, width: int) -> Bytes:
    """Returns what a model would have computed for this prompt: [units, positions, width]."""
    tokens = np.asarray(token_ids, np.int64)
    before = np.cumsum(tokens)[None, :, None]
    unit = np.arange(units)[:, None, None]
    return ((before * 7 + tokens[None, :, None] * 3 + unit * 31 + np.arange(width) * 11) % 251).astype(np.uint8)


def first_token(token_ids: Sequence[int]) -> int:
    return sum(token_ids) % 1009


class Memory:
    """Rows and index keys in pages, poisoned at first. Rows are sharded over ranks by heads."""

    def __init__(self, pages: int, page_rows: int, buffer: Bytes | None = None, ranks: int = 1) -> None:
        self.pages, self.page_rows = pages, page_rows
        rows_bytes = LAYERS * pages * page_rows * ROW_BYTES
        self.buffer = np.empty(self.nbytes(pages, page_rows), np.uint8) if buffer is None else buffer
        self.buffer[:] = POISON
        shape = (ranks, LAYERS, pages, page_rows, ROW_BYTES // ranks)
        self.ranks = self.buffer[:rows_bytes].reshape(shape)
        self.keys = self.buffer[rows_bytes:].reshape(GROUPS, pages, page_rows, KEY_BYTES)
        self._shards = head_shards([self._span(rank) for rank in self.ranks], HEADS, HEAD_BYTES)

    @staticmethod
    def nbytes(pages: int, page_rows: int) -> int:
        return pages * page_rows * (LAYERS * ROW_BYTES + GROUPS * KEY_BYTES)

    @property
    def region(self) -> Region:
        return Region(self.buffer.ctypes.data, self.buffer.nbytes)

    @property
    def store(self) -> Store:
        return Store(self._shards, self._span(self.keys))

    def _span(self, units: Bytes) -> PagedSpan:
        bases = tuple((unit.ctypes.data,) for unit in units)
        width = units.shape[-1]
        return PagedSpan(bases, self.page_rows * width, self.page_rows, self.page_rows, width)

    def _parts(self, rows: Bytes) -> list[Bytes]:
        """Returns each rank's shard of whole rows."""
        return [
            np.concatenate([rows[..., first : first + nbytes] for first, nbytes in shard.slices], axis=-1)
            for shard in self._shards
        ]

    def fill(self, pages: Sequence[int], token_ids: Sequence[int], first: int, last: int) -> None:
        """Computes positions [first, last)."""
        where = np.arange(first, last)
        page, row = np.asarray(pages)[where // self.page_rows], where % self.page_rows
        parts = self._parts(contents(token_ids, LAYERS, ROW_BYTES)[:, first:last])
        for rank, part in zip(self.ranks, parts, strict=True):
            rank[:, page, row] = part
        self.keys[:, page, row] = contents(token_ids, GROUPS, KEY_BYTES)[:, first:last]

    def holds(self, row_pages: Sequence[int], key_pages: Sequence[int], token_ids: Sequence[int]) -> bool:
        where = np.arange(len(token_ids))
        row, page = where % self.page_rows, np.asarray(row_pages)[where // self.page_rows]
        keys = self.keys[:, np.asarray(key_pages)[where // self.page_rows], row]
        parts = self._parts(contents(token_ids, LAYERS, ROW_BYTES))
        sound = all(np.array_equal(rank[:, page, row], part) for rank, part in zip(self.ranks, parts, strict=True))
        return sound and np.array_equal(keys, contents(token_ids, GROUPS, KEY_BYTES))

    def poison(self, row_pages: Sequence[int], key_pages: Sequence[int]) -> None:
        self.ranks[:, :, list(row_pages)] = POISON
        self.keys[:, list(key_pages)] = POISON


class StoppableClock:
    """A monotonic clock that a test can stop or advance, so that no timeout ends a phase while the test checks it."""

    def __init__(self) -> None:
        self._behind = 0.0
        self._stopped_at: float | None = None

    def __call__(self) -> float:
        return (time.monotonic() if self._stopped_at is None else self._stopped_at) - self._behind

    def stop(self) -> None:
        self._stopped_at = time.monotonic()

    def go_on(self) -> None:
        assert self._stopped_at is not None, "the clock was not stopped"
        self._behind += time.monotonic() - self._stopped_at
        self._stopped_at = None

    def advance(self, seconds: float) -> None:
        self._behind -= seconds


class _Engine(ABC):
    """What both engines have in common: an agent, memory, and a thread that handles events."""

    def __init__(
        self,
        machine: Receiver | Sender,
        memory: Memory,
        channel: ControlChannel,
        transfer: Transfer,
        timing: PeerTiming = QUICK,
        model: ModelIdentity = MODEL,
        staging: "StagingMemory | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.machine, self.memory, self.transfer, self._staging = machine, memory, transfer, staging
        transfer.register(memory.region)
        if staging is not None:
            transfer.register(staging.region)
        ring = staging.memory_range if staging is not None and isinstance(machine, Receiver) else None
        hello = Hello(channel.address, model, {"host": memory.store}, transfer.name, transfer.describe(), ring)
        self.address = channel.address
        self._news = threading.Event()
        self.agent = HandoffAgent(machine, hello, channel, transfer, wake=self._news.set, timing=timing, clock=clock)
        self.died: BaseException | None = None
        self._closing = self._stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.agent.start()
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._news.wait()
                self._news.clear()
                for event in self.agent.take_events():
                    self.handle_event(event)
        except EngineStopped as error:
            self.died = None if self._closing else error
        except BaseException as error:
            self.died = error

    @abstractmethod
    def handle_event(self, event: Any) -> None:
        """Handles an event of its agent."""

    def stands_in(self, *phases: str) -> bool:
        """Returns whether its handoffs are in exactly these phases."""
        with self.agent._lock:
            return sorted(phase.value for phase in self.machine.phases().values()) == sorted(phases)

    def close(self, drain_seconds: float = 0.0) -> None:
        self._closing = True
        self.agent.close(drain_seconds)
        self._stopped = True
        self._news.set()
        self._thread.join(SECONDS)
        self.transfer.close()


class DecodeEngine(_Engine):
    def __init__(
        self,
        memory: Memory,
        channel: ControlChannel,
        transfer: Transfer,
        *,
        scale: float = SCALE,
        staging: "StagingMemory | None" = None,
        **rest: Any,
    ) -> None:
        self.free_rows = list(range(memory.pages))
        self.free_keys = list(reversed(range(memory.pages)))
        self.quarantined: set[HandoffKey] = set()
        self.events: dict[HandoffKey, list[ReceiverEvent]] = {}
        self._requests: dict[HandoffKey, HandoffRequest] = {}
        self._lock = threading.Lock()
        self.ring = None if staging is None else ReceiverStaging(staging.memory_range, {"host": memory.store})
        machine = Receiver(scaled(receiver.RECEIVER_TIMEOUTS, scale), self.ring)
        super().__init__(machine, memory, channel, transfer, staging=staging, **rest)

    def fetch(self, peer: str, token_ids: Sequence[int], name: str, attempt: int = 0) -> HandoffKey:
        key, count = HandoffKey(name, attempt), -(-len(token_ids) // self.memory.page_rows)
        with self._lock:
            rows, self.free_rows = self.free_rows[:count], self.free_rows[count:]
            keys, self.free_keys = self.free_keys[:count], self.free_keys[count:]
            assert len(rows) == len(keys) == count, "the test asks for more pages than there are"
        self.memory.poison(rows, keys)
        request = HandoffRequest(
            key, PromptSpec(tuple(token_ids), SamplingParams(), frozenset({2})), "host", tuple(rows), tuple(keys)
        )
        self._requests[key] = request
        self.events[key] = []
        self.agent.put(Fetch(peer, request))
        return key

    def give_up(self, key: HandoffKey) -> None:
        self.agent.put(CancelFetch(key))

    def handle_event(self, event: ReceiverEvent) -> None:
        request = self._requests[event.key]
        match event:
            case Landed(key, token_id):
                assert not self.events[key], f"{event} after {self.events[key]}"
                token_ids = request.prompt.token_ids
                assert self.memory.holds(request.row_pages, request.key_pages, token_ids), (
                    f"wrong bytes landed for {key}"
                )
                assert token_id == first_token(token_ids)
                self._give_back(request)
            case FetchFailed(key, quiesced):
                assert not self.events[key], f"{event} after {self.events[key]}"
                if quiesced:
                    self._give_back(request)
                else:
                    self.quarantined.add(key)
            case Quiesced(key):
                self.quarantined.remove(key)
                self._give_back(request)
        self.events[event.key].append(event)

    def _give_back(self, request: HandoffRequest) -> None:
        with self._lock:
            self.free_rows += request.row_pages
            self.free_keys += request.key_pages

    def ended(self, key: HandoffKey, seconds: float = SECONDS) -> ReceiverEvent:
        """Waits for the handoff's terminal event and returns it."""
        assert until(lambda: bool(self.events[key]) or self.died is not None, seconds), f"{key} is stuck"
        assert self.died is None, self.died
        return self.events[key][0]

    def audit(self) -> None:
        """Asserts that every page is either free or quarantined, exactly once."""
        self.agent.audit()
        assert self.died is None, self.died
        for free, quarantined in (
            (self.free_rows, [page for key in self.quarantined for page in self._requests[key].row_pages]),
            (self.free_keys, [page for key in self.quarantined for page in self._requests[key].key_pages]),
        ):
            assert sorted([*free, *quarantined]) == list(range(self.memory.pages))


class _Later:
    """Behaves like a GPU event: the bytes, and those of `before`, are there only after it has happened."""

    def __init__(self, seconds: float, act: Callable[[], None], before: DeviceEvent | None) -> None:
        self._happened = False
        self._act, self._before = act, before
        threading.Timer(seconds, self._happen).start()

    def _happen(self) -> None:
        self._act()
        self._happened = True

    def query(self) -> bool:
        if self._before is not None and self._before.query():
            self._before = None
        return self._happened and self._before is None


@dataclass(frozen=True)
class _Gated:
    gate: threading.Event

    def query(self) -> bool:
        return self.gate.is_set()


class PrefillEngine(_Engine):
    """Computes in chunks. `hold` stops it before a stage of every prompt: 'compute', 'second chunk' or 'sample'."""

    def __init__(
        self,
        memory: Memory,
        channel: ControlChannel,
        transfer: Transfer,
        *,
        scale: float = SCALE,
        chunk: int = 24,
        hold: str = "",
        refuse: str = "",
        event_s: float = 0.0,
        gate: threading.Event | None = None,
        report: Callable[[str], None] = lambda stage: None,
        staging: "StagingMemory | None" = None,
        **rest: Any,
    ) -> None:
        self._chunk, self._hold, self._refuse, self._event_s, self._report = chunk, hold, refuse, event_s, report
        self._gate = gate  # forward passes finish when the test sets it
        self.free = list(range(memory.pages))
        self.held: dict[tuple[str, HandoffKey], list[int]] = {}
        self.computed: list[HandoffKey] = []
        self._stream: DeviceEvent | None = None  # the newest event
        buffers = () if staging is None else staging.sender_buffers
        machine = Sender(
            memory.store, scaled(outgoing.SENDER_TIMEOUTS, scale), write_limit=40.0 * scale, buffers=buffers
        )
        super().__init__(machine, memory, channel, transfer, staging=staging, **rest)

    def handle_event(self, event: Any) -> None:
        match event:
            case StartPrefill():
                self.computed.append(event.key)
                self._compute(event)
            case ReleasePages(peer, key):
                self.free += self.held.pop((peer, key))

    def _compute(self, asked: StartPrefill) -> None:
        peer, key, token_ids = asked.peer, asked.key, asked.prompt.token_ids
        count = -(-len(token_ids) // self.memory.page_rows)
        pages, self.free = self.free[-count:], self.free[:-count]
        assert len(pages) == count, "the test asks for more pages than there are"
        self.held[peer, key] = pages
        if self._refuse:
            self.agent.put(PrefillFailed(peer, key, False, self._refuse))
            return
        for first in range(0, len(token_ids), self._chunk):
            if self._stops("compute" if first == 0 else "second chunk"):
                return
            last = min(first + self._chunk, len(token_ids))
            after = self._computed(pages, token_ids, first, last)
            self.agent.put(RowsComputed(peer, key, first, last, tuple(pages), after))
        if not self._stops("sample"):
            alternatives = {5: (-0.5, 1)}
            self.agent.put(FirstTokenSampled(peer, key, first_token(token_ids), alternatives))

    def _computed(self, pages: list[int], token_ids: Sequence[int], first: int, last: int) -> DeviceEvent | None:
        if self._gate is not None:
            self.memory.fill(pages, token_ids, first, last)
            return _Gated(self._gate)
        if not self._event_s:
            self.memory.fill(pages, token_ids, first, last)
            return None
        self._stream = _Later(self._event_s, lambda: self.memory.fill(pages, token_ids, first, last), self._stream)
        return self._stream

    def _stops(self, stage: str) -> bool:
        self._report(stage)
        return self._hold == stage

    def audit(self) -> None:
        self.agent.audit()
        assert self.died is None, self.died
        held = [page for pages in self.held.values() for page in pages]
        assert sorted([*self.free, *held]) == list(range(self.memory.pages))


class FileTransfer:
    """A transfer between processes on one machine, whose memory is a file that all of them map. It writes at once, but
    reports DONE only when `go` is set."""

    name = "file"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._region: Region | None = None
        self._peers: dict[str, tuple[int, Bytes]] = {}
        self._numbers = 0
        self._written = 0
        self.go = threading.Event()
        self.go.set()

    @staticmethod
    def memory(path: Path, pages: int, page_rows: int) -> Memory:
        return Memory(pages, page_rows, np.memmap(path, np.uint8, "w+", shape=(Memory.nbytes(pages, page_rows),)))

    def register(self, region: Region) -> None:
        self._region = region

    def describe(self) -> bytes:
        assert self._region is not None
        return json.dumps([str(self._path), self._region.address]).encode()

    def connect(self, name: str, description: bytes) -> None:
        path, address = json.loads(description)
        self._peers[name] = (address, np.memmap(path, np.uint8, "r+"))

    def forget(self, name: str) -> None:
        self._peers.pop(name, None)

    def submit(self, peer: str, writes: Writes, after: DeviceEvent | None = None) -> WriteTicket:
        assert after is None and self._region is not None
        self._numbers += 1
        if peer not in self._peers:
            return WriteTicket(self._numbers, 0, WriteState.FAILED_QUIESCED)
        base, target = self._peers[peer]
        source = np.memmap(self._path, np.uint8, "r")
        for here, there, nbytes in writes.tolist():
            at = here - self._region.address
            target[there - base : there - base + nbytes] = source[at : at + nbytes]
            self._written += nbytes
        return WriteTicket(self._numbers, 0, WriteState.DONE)

    def poll(self, ticket: WriteTicket) -> WriteState:
        state: WriteState = ticket.handle
        return state if self.go.is_set() else WriteState.PENDING

    def transport(self) -> str:
        return "a file"

    def throughput(self) -> Throughput:
        return Throughput(self._written, 0.0)

    def close(self) -> None:
        self._peers.clear()
