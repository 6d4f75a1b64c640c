"""Fake engines for tests of the agent. They write predictable bytes instead of running a model, and check what landed.

The agents and state machines around them are real. The transfer engine is one of hotset's, or `FileTransfer`.
"""

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scaled_timeouts import scaled
from sharded_memory import ShardedMemory
from waiting import WAIT_SECONDS, wait_until

from hotset.base.errors import EngineStopped
from hotset.base.processes import ProcessIdentity, this_process
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.engine.ports import Throughput
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff import outgoing, receiver
from hotset.fleet.handoff.agent import HandoffAgent
from hotset.fleet.handoff.channel import Channel
from hotset.fleet.handoff.decode_agent import DecodeAgent
from hotset.fleet.handoff.deliveries import Sources
from hotset.fleet.handoff.links import Endpoints
from hotset.fleet.handoff.prefill_agent import PrefillAgent
from hotset.fleet.handoff.receiver import Receiver
from hotset.fleet.handoff.sender import Sender
from hotset.fleet.handoff.staging import ReceiverStaging
from hotset.fleet.handoff.timers import PeerTiming
from hotset.fleet.transfer.api import Region, Transfer, Writes, WriteState, WriteTicket
from hotset.schedule.handoffs import CancelFetch, ContextPages, DeviceEvent, FirstTokenSampled, HandoffKey, RowsComputed

if TYPE_CHECKING:
    from hotset.fleet.handoff.packing import StagingMemory  # imports torch, which would slow the start of processes

LAYERS, HEADS, HEAD_BYTES, GROUPS, KEY_BYTES = 2, 4, 6, 1, 16
ROW_BYTES = 2 * HEADS * HEAD_BYTES  # K and V of all heads
MODEL = msg.ModelIdentity("demo", LAYERS, "48 bytes", "16 bytes", GROUPS, "00")
SHORT_TIMING = PeerTiming(hello_every=0.1, ping_every=0.2, peer_timeout=1.5, poll_every=0.001)
TIMEOUT_SCALE = 0.2  # default factor for the timeouts of the state machines

THIS_PROCESS = this_process()


def first_token(token_ids: Sequence[int]) -> int:
    return sum(token_ids) % 1009


def make_memory(pages: int, page_rows: int, ranks: int = 1, **options: Any) -> ShardedMemory:
    """Returns memory for contexts of MODEL."""
    return ShardedMemory(
        ranks,
        HEADS,
        page_rows=page_rows,
        pages=pages,
        layers=LAYERS,
        groups=GROUPS,
        head_bytes=HEAD_BYTES,
        key_bytes=KEY_BYTES,
        **options,
    )


class StoppableClock:
    """A monotonic clock that a test can stop and advance. While it is stopped, no timeout can end a phase."""

    def __init__(self) -> None:
        self._lag = 0.0
        self._stopped_at: float | None = None

    def __call__(self) -> float:
        return (time.monotonic() if self._stopped_at is None else self._stopped_at) - self._lag

    def stop(self) -> None:
        self._stopped_at = time.monotonic()

    def resume(self) -> None:
        assert self._stopped_at is not None, "the clock was not stopped"
        self._lag += time.monotonic() - self._stopped_at
        self._stopped_at = None

    def advance(self, seconds: float) -> None:
        self._lag -= seconds


def staged(store: msg.Store, staging: "StagingMemory | None") -> msg.Store:
    return store if staging is None else staging.beside(store)


class _Engine(ABC):
    """The common part of both engines: an agent, memory, and a thread that handles the events of the agent."""

    def __init__(
        self,
        machine: Receiver | Sender,
        memory: ShardedMemory,
        channel: Channel,
        open_transfer: Callable[[], Transfer],
        timing: PeerTiming = SHORT_TIMING,
        model: msg.ModelIdentity = MODEL,
        staging: "StagingMemory | None" = None,
        clock: Callable[[], float] = time.monotonic,
        process: ProcessIdentity | None = THIS_PROCESS,
        writers: tuple[ProcessIdentity, ...] = (),
    ) -> None:
        self.machine, self.memory, self._staging, self._open_transfer = machine, memory, staging, open_transfer
        is_decode, store = isinstance(machine, Receiver), {"host": staged(memory.store, staging)}
        self.transfer: Any = Endpoints(self._open_endpoint) if is_decode else self._open_endpoint()
        description = b"" if is_decode else self.transfer.describe()
        hello = msg.Hello(channel.address, model, store, self.transfer.name, description, process, writers)
        self.address = channel.address
        self._event_ready = threading.Event()
        role: Any = DecodeAgent if is_decode else PrefillAgent
        self.agent: HandoffAgent = role(
            machine, hello, channel, self.transfer, wake=self._event_ready.set, timing=timing, clock=clock
        )
        self.failure: BaseException | None = None  # the exception that ended the thread
        self._closing = self._stopped = False  # while closing, the agent may refuse commands of the thread
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.agent.start()
        self._thread.start()

    def _open_endpoint(self) -> Transfer:
        transfer = self._open_transfer()
        transfer.register(self.memory.region)
        if self._staging is not None:
            transfer.register(self._staging.region)
        return transfer

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._event_ready.wait()
                self._event_ready.clear()
                for event in self.agent.take_events():
                    self.handle_event(event)
        except EngineStopped as error:
            self.failure = None if self._closing else error
        except BaseException as error:
            self.failure = error

    @abstractmethod
    def handle_event(self, event: Any) -> None:
        """Handles one event of the agent."""

    def in_phases(self, *phases: str) -> bool:
        """Returns whether the handoffs that are not closed are in exactly these phases. Without arguments:
        whether all are closed."""
        with self.agent._lock:
            return sorted(phase.value for phase in self.machine.phases().values()) == sorted(phases)

    def close(self, drain_seconds: float = 0.0) -> None:
        self._closing = True
        self.agent.close(drain_seconds)
        self._stopped = True
        self._event_ready.set()
        self._thread.join(WAIT_SECONDS)
        self.transfer.close()


class DecodeEngine(_Engine):
    """Fetches contexts, checks their bytes when they land, and records the events of each handoff."""

    def __init__(
        self,
        memory: ShardedMemory,
        channel: Channel,
        open_transfer: Callable[[], Transfer],
        *,
        scale: float = TIMEOUT_SCALE,
        staging: "StagingMemory | None" = None,
        **options: Any,
    ) -> None:
        self.free_rows = list(range(memory.pages))
        self.free_keys = list(reversed(range(memory.pages)))
        self.quarantined: set[HandoffKey] = set()
        self.events: dict[HandoffKey, list[msg.ReceiverEvent]] = {}
        self.lost_peers: list[str] = []
        self._requests: dict[HandoffKey, msg.HandoffRequest] = {}
        self._lock = threading.Lock()
        self.ring = None if staging is None else ReceiverStaging({"host": staging.beside(memory.store)})
        machine = Receiver(scaled(receiver.RECEIVER_TIMEOUTS, scale), self.ring)
        super().__init__(machine, memory, channel, open_transfer, staging=staging, **options)

    def fetch(self, peer: str, token_ids: Sequence[int], name: str, attempt: int = 0) -> HandoffKey:
        """Poisons target pages, and begins a handoff from the prefill worker at address `peer`."""
        key, count = HandoffKey(name, attempt), -(-len(token_ids) // self.memory.page_rows)
        with self._lock:
            rows, self.free_rows = self.free_rows[:count], self.free_rows[count:]
            keys, self.free_keys = self.free_keys[:count], self.free_keys[count:]
            assert len(rows) == len(keys) == count, "the test needs more pages than the memory has"
        self.memory.poison(ContextPages(tuple(rows), tuple(keys)))
        request = msg.HandoffRequest(
            key, PromptSpec(tuple(token_ids), SamplingParams(), frozenset({2})), "host", tuple(rows), tuple(keys)
        )
        self._requests[key] = request
        self.events[key] = []
        self.agent.put(msg.Fetch(peer, request))
        return key

    def cancel(self, key: HandoffKey) -> None:
        self.agent.put(CancelFetch(key))

    def handle_event(self, event: msg.ReceiverEvent) -> None:
        if isinstance(event, msg.RoutesMeasured):
            return
        if isinstance(event, msg.PeerLost):
            self.lost_peers.append(event.peer)
            return
        request = self._requests[event.key]
        match event:
            case msg.Landed(key, token_id):
                assert not self.events[key], f"{event} came after {self.events[key]}"
                token_ids = request.prompt.token_ids
                self.memory.check(ContextPages(request.row_pages, request.key_pages), token_ids, 0, len(token_ids))
                assert token_id == first_token(token_ids)
                self._release(request)
            case msg.FetchFailed(key, quiesced):
                assert not self.events[key], f"{event} came after {self.events[key]}"
                if quiesced:
                    self._release(request)
                else:
                    self.quarantined.add(key)
            case msg.Quiesced(key):
                self.quarantined.remove(key)
                self._release(request)
        self.events[event.key].append(event)

    def _release(self, request: msg.HandoffRequest) -> None:
        with self._lock:
            self.free_rows += request.row_pages
            self.free_keys += request.key_pages

    def wait_for_outcome(self, key: HandoffKey, seconds: float = WAIT_SECONDS) -> msg.ReceiverEvent:
        """Waits for `Landed` or `FetchFailed` of this handoff and returns it."""
        ended = wait_until(lambda: bool(self.events[key]) or self.failure is not None, seconds)
        assert ended, f"{key} has not ended after {seconds:g} s"
        assert self.failure is None, self.failure
        return self.events[key][0]

    def audit(self) -> None:
        """Asserts that every page is either free or quarantined. There must be no open handoff."""
        self.agent.audit()
        assert self.failure is None, self.failure
        for free, quarantined in (
            (self.free_rows, [page for key in self.quarantined for page in self._requests[key].row_pages]),
            (self.free_keys, [page for key in self.quarantined for page in self._requests[key].key_pages]),
        ):
            assert sorted([*free, *quarantined]) == list(range(self.memory.pages))


class _DelayedEvent:
    """Behaves like a GPU event. After `seconds`, it runs `action`, which writes the bytes. The event has happened when
    `action` has run and `previous`, the preceding event of the stream, has happened."""

    def __init__(self, seconds: float, action: Callable[[], None], previous: DeviceEvent | None) -> None:
        self._action_done = False
        self._action, self._previous = action, previous
        threading.Timer(seconds, self._happen).start()

    def _happen(self) -> None:
        self._action()
        self._action_done = True

    def query(self) -> bool:
        if self._previous is not None and self._previous.query():
            self._previous = None
        return self._action_done and self._previous is None


@dataclass(frozen=True)
class _GatedEvent:
    """An event that happens when the test sets `gate`."""

    gate: threading.Event

    def query(self) -> bool:
        return self.gate.is_set()


class PrefillEngine(_Engine):
    """Computes prompts in chunks.

    `stop_before`, if not empty, is the stage before which every prompt stops: 'compute', 'second chunk' (any chunk but
    the first) or 'sample'. By default, a chunk is computed before it is announced, and has no event. With `event_s`, it
    is computed `event_s` seconds later, and then its event happens. With `gate`, which overrides `event_s`, it is
    computed before it is announced, and its event happens when the test sets the gate. `report` is called with the name
    of each stage that a prompt reaches.
    """

    def __init__(
        self,
        memory: ShardedMemory,
        channel: Channel,
        open_transfer: Callable[[], Transfer],
        *,
        scale: float = TIMEOUT_SCALE,
        chunk: int = 24,
        stop_before: str = "",
        event_s: float = 0.0,
        gate: threading.Event | None = None,
        report: Callable[[str], None] = lambda stage: None,
        staging: "StagingMemory | None" = None,
        **options: Any,
    ) -> None:
        self._chunk, self._event_s, self._report = chunk, event_s, report
        self.stop_before, self._gate = stop_before, gate
        self.free = list(range(memory.pages))
        self.held: dict[tuple[str, HandoffKey], list[int]] = {}
        self.started: list[HandoffKey] = []  # one entry for each StartPrefill
        self._stream: DeviceEvent | None = None  # the newest event of the simulated stream
        sources = Sources(staged(memory.store, staging))
        machine = Sender(sources, scaled(outgoing.SENDER_TIMEOUTS, scale), write_limit=40.0 * scale)
        super().__init__(machine, memory, channel, open_transfer, staging=staging, **options)

    def handle_event(self, event: Any) -> None:
        match event:
            case msg.StartPrefill():
                self.started.append(event.key)
                self._compute(event)
            case msg.ReleasePages(peer, key):
                self.free += self.held.pop((peer, key))

    def _compute(self, start: msg.StartPrefill) -> None:
        peer, key, token_ids = start.peer, start.key, start.prompt.token_ids
        count = -(-len(token_ids) // self.memory.page_rows)
        pages, self.free = self.free[-count:], self.free[:-count]
        assert len(pages) == count, "the test needs more pages than the memory has"
        self.held[peer, key] = pages
        for first in range(0, len(token_ids), self._chunk):
            if self._stops_before("compute" if first == 0 else "second chunk"):
                return
            last = min(first + self._chunk, len(token_ids))
            after = self._submit_chunk(pages, token_ids, first, last)
            self.agent.put(RowsComputed(peer, key, first, last, tuple(pages), after))
        if not self._stops_before("sample"):
            alternatives = {5: (-0.5, 1)}
            self.agent.put(FirstTokenSampled(peer, key, first_token(token_ids), alternatives))

    def _submit_chunk(self, pages: list[int], token_ids: Sequence[int], first: int, last: int) -> DeviceEvent | None:
        """Computes a chunk, now or after `event_s` seconds. Returns its event, or None if it needs none."""
        compute = partial(self.memory.write, ContextPages(tuple(pages), tuple(pages)), token_ids, first, last)
        if self._event_s and self._gate is None:
            self._stream = _DelayedEvent(self._event_s, compute, self._stream)
            return self._stream
        compute()
        return None if self._gate is None else _GatedEvent(self._gate)

    def _stops_before(self, stage: str) -> bool:
        self._report(stage)
        return self.stop_before == stage

    def audit(self) -> None:
        self.agent.audit()
        assert self.failure is None, self.failure
        held = [page for pages in self.held.values() for page in pages]
        assert sorted([*self.free, *held]) == list(range(self.memory.pages))


class FileTransfer:
    """A transfer between processes of one machine that map each other's files. `submit` writes at once, but `poll`
    returns PENDING while `may_end` is not set."""

    name = "file"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._region: Region | None = None
        self._peers: dict[str, tuple[int, NDArray[np.uint8]]] = {}
        self._written = 0
        self.may_end = threading.Event()
        self.may_end.set()

    @staticmethod
    def memory(path: Path, pages: int, page_rows: int) -> ShardedMemory:
        """Returns memory in a new file."""
        return make_memory(pages, page_rows, allocate=lambda nbytes: np.memmap(path, np.uint8, "w+", shape=(nbytes,)))

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
        submitted = int(writes[:, 2].sum())
        if peer not in self._peers:
            return WriteTicket(submitted, WriteState.FAILED_QUIESCED)
        base, target = self._peers[peer]
        source = np.memmap(self._path, np.uint8, "r")
        for local, remote, nbytes in writes.tolist():
            first, target_first = local - self._region.address, remote - base
            target[target_first : target_first + nbytes] = source[first : first + nbytes]
        self._written += submitted
        return WriteTicket(submitted, WriteState.DONE)

    def poll(self, ticket: WriteTicket) -> WriteState:
        state: WriteState = ticket.handle
        return state if self.may_end.is_set() else WriteState.PENDING

    def transport(self) -> str:
        return "a file"

    def throughput(self) -> Throughput:
        return Throughput(self._written, 0.0)

    def close(self) -> bool:
        self._peers.clear()
        return True
