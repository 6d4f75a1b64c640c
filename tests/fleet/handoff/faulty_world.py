"""Decode and prefill workers with random faults, in virtual time and with real bytes. One seed determines a run.

Each worker has a state machine, a loopback transfer, memory and allocators. The classes of this file replace engines
and agents. Free pages are filled with POISON and must not change. A context is compared with the computed bytes when it
lands, and again before its pages are released. The workers of a kind divide their rows over different numbers of ranks,
so contexts are written directly, packed or staged.
"""

import heapq
import itertools
import math
import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from loopback import Faults, Hub, Loopback
from scaled_timeouts import scaled
from sharded_memory import POISON, ShardedMemory

from hotset.base.processes import ProcessIdentity
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.deliveries import Sources
from hotset.fleet.handoff.layout import check_peers
from hotset.fleet.handoff.outgoing import SENDER_TIMEOUTS
from hotset.fleet.handoff.packing import pack, unpack
from hotset.fleet.handoff.receiver import RECEIVER_TIMEOUTS, Receiver
from hotset.fleet.handoff.sender import Sender
from hotset.fleet.handoff.staged_delivery import PIECE_TIMEOUTS
from hotset.fleet.handoff.staging import ReceiverStaging
from hotset.fleet.transfer.api import Region, WriteState, WriteTicket
from hotset.memory.pages import PageAllocator
from hotset.schedule.handoffs import ContextPages, FirstTokenSampled, HandoffKey, PrefillFailed, RowsComputed

LAYERS, GROUPS, HEADS, HEAD_BYTES, KEY_BYTES = 3, 2, 4, 3, 5
ROW_BYTES = 2 * HEADS * HEAD_BYTES  # K and V of all heads
STAGING_BYTES = 4096  # 4 pieces of at most 12 rows
RANKS = (1, 2, 4, 8)  # of the workers of each kind, in turn
TIMEOUT_SCALE = 0.2  # for the timeouts of the state machines


class Memory(ShardedMemory):
    """One store, and the allocators of its pages."""

    def __init__(self, ranks: int, groups: int, *, same_pages: bool, **shape: Any) -> None:
        """If `same_pages`, rows and index keys have the same page numbers, as in a host store of a prefill worker."""
        super().__init__(
            ranks, HEADS, layers=LAYERS, groups=groups, head_bytes=HEAD_BYTES, key_bytes=KEY_BYTES, **shape
        )
        self.row_pages = PageAllocator(self.pages)
        self.key_pages = self.row_pages if same_pages else PageAllocator(shape.get("key_pages", self.pages))

    def allocate(self, tokens: int) -> ContextPages | None:
        """Returns pages of rows and pages of index keys, or None if there are too few of either."""
        rows = self.row_pages.allocate(self.ranks[0].span.pages_for(tokens))
        if rows is None or self.keys is None:
            return None if rows is None else ContextPages(tuple(rows), ())
        if self.key_pages is self.row_pages:
            return ContextPages(tuple(rows), tuple(rows))
        keys = self.key_pages.allocate(self.keys.span.pages_for(tokens))
        if keys is None:
            self.row_pages.release(rows)
        return None if keys is None else ContextPages(tuple(rows), tuple(keys))

    def split(self, pages: ContextPages, first: int) -> tuple[ContextPages, ContextPages]:
        """Returns the pages with only rows, or index keys, before `first`, and all others."""
        rows, keys = (0 if pool is None else pool.span.pages_before(first) for pool in (self.ranks[0], self.keys))
        before = ContextPages(pages.rows[:rows], pages.keys[:keys])
        return before, ContextPages(pages.rows[rows:], pages.keys[keys:])

    def check_prompt(self, pages: ContextPages, request: msg.HandoffRequest) -> None:
        self.check(pages, request.prompt.token_ids, 0, len(request.prompt))

    def release(self, pages: ContextPages) -> None:
        self.poison(pages)
        self.row_pages.release(pages.rows)
        if self.key_pages is not self.row_pages:
            self.key_pages.release(pages.keys)

    def audit(self) -> None:
        """Audits the allocators, and asserts that all free pages are POISON."""
        for allocator, pools in ((self.row_pages, self.ranks), (self.key_pages, [self.keys] if self.keys else [])):
            allocator.audit()
            free = [page for page in range(allocator.capacity) if not allocator._held[page]]
            assert all(pool.is_poison(free) for pool in pools), "free pages were written to"

    @property
    def num_held(self) -> int:
        return self.row_pages.held + self.key_pages.held


@dataclass(frozen=True)
class FaultRates:
    """The probability of each fault: per message, per handoff, per chunk, or per worker and step."""

    lose: float = 0.05  # a message is lost
    duplicate: float = 0.05  # a message is sent twice
    delay: float = 0.05  # a message takes 0.1 to 3 s instead of at most 20 ms
    abort: float = 0.12  # a handoff is cancelled
    not_computed: float = 0.01  # a prompt fails instead of computing its next chunk
    death: float = 0.002  # a worker is killed, and restarted later
    false_alarm: float = 0.002  # a worker treats a living peer as lost
    writes: Faults = field(default_factory=Faults)  # faults of the transfer engine


class World:
    """Owns the clock, the random numbers, the network and all workers."""

    def __init__(self, seed: int, rates: FaultRates, *, groups: int = GROUPS) -> None:
        """`groups` is the number of index groups of the model, which is 0 if it has no index keys."""
        self.random, self.rates, self.now = random.Random(seed), rates, 0.0
        key = f"{KEY_BYTES} bytes" if groups else None
        self.model = msg.ModelIdentity("toy", LAYERS, f"{ROW_BYTES} bytes", key, groups, "w")
        self.hub = Hub(rates.writes, seed)
        self.counts: Counter[str] = Counter()
        self.longest_s = 0.0  # the longest time from the beginning of a handoff to its outcome
        self.phase_seconds: Counter[str] = Counter()  # total time that handoffs or pieces have spent in each phase
        self._due: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()
        self.prompt_numbers = itertools.count(1)
        self.decodes = [DecodeWorker(self, f"decode-{number}", number) for number in range(len(RANKS))]
        self.prefills = [PrefillWorker(self, f"prefill-{number}", number) for number in range(len(RANKS))]
        # For each dead prefill worker: when its writes end, its transfer, and its memory, which must exist until then.
        self.orphaned_writers: list[tuple[float, Loopback, Any]] = []

    @property
    def workers(self) -> "list[Worker]":
        return [*self.decodes, *self.prefills]

    def call_later(self, seconds: float, action: Any) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), action))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def send(self, origin: "Worker", to: str, message: msg.Message) -> None:
        """Sends a message to the incarnation of `to` that `origin` knows. The network loses, duplicates, delays and
        reorders messages."""
        worker = next(worker for worker in self.workers if worker.name == to)
        target_incarnation, sender_incarnation = origin.known_peers.get(to), origin.incarnation
        for _ in range(2 if self.chance(self.rates.duplicate) else 1):
            if self.chance(self.rates.lose):
                self.counts["lost messages"] += 1
                continue
            seconds = self.random.uniform(0.1, 3.0) if self.chance(self.rates.delay) else self.random.uniform(0, 0.02)
            self.call_later(
                seconds, partial(self._arrive, worker, target_incarnation, origin.name, sender_incarnation, message)
            )

    def _arrive(
        self, to: "Worker", target_incarnation: int | None, origin: str, sender_incarnation: int, message: msg.Message
    ) -> None:
        if to.alive and to.incarnation == target_incarnation and to.known_peers.get(origin) == sender_incarnation:
            to.machine.handle_message(origin, message, self.now)

    def introduce(self, decode: "DecodeWorker", prefill: "PrefillWorker") -> None:
        """Connects two workers, like Hello and Welcome between agents. If one has restarted, the state machine of the
        other receives `peer_lost` first."""
        if (
            decode.known_peers.get(prefill.name) == prefill.incarnation
            and prefill.known_peers.get(decode.name) == decode.incarnation
        ):
            return
        for worker, peer in ((decode, prefill), (prefill, decode)):
            if worker.known_peers.get(peer.name) not in (None, peer.incarnation):
                worker.lose(peer.name, "restarted")
            worker.known_peers[peer.name] = peer.incarnation
        assert check_peers(prefill.hello, decode.hello) is None
        hello = replace(decode.hello, description=decode.endpoint_of(prefill.name).describe())
        prefill.machine.peer_lost(decode.name, "introduced itself again", self.now)
        prefill.transfer.connect(decode.name, hello.description)
        prefill.machine.add_peer(decode.name, hello)
        decode.machine.add_peer(prefill.name, prefill.hello)

    def step(self, seconds: float) -> None:
        """Advances the clock, delivers the messages and writes that are due, and runs one step of every living worker.
        Then stops the writes of dead prefill workers whose time has come."""
        self.now += seconds
        while self._due and self._due[0][0] <= self.now:
            heapq.heappop(self._due)[2]()
        self.hub.advance(self.now)
        for worker in self.workers:
            if worker.alive:
                worker.step()
        for writer in [entry for entry in self.orphaned_writers if entry[0] <= self.now]:
            writer[1].close()
            self.orphaned_writers.remove(writer)

    @property
    def is_idle(self) -> bool:
        """Whether every handoff is closed and nothing is due any more, so that further steps change nothing."""
        is_due = self._due or self.orphaned_writers or self.hub.next_due() is not None
        return not is_due and all(worker.is_idle for worker in self.workers)

    def inject_worker_faults(self) -> None:
        """Kills workers at random, and reports living peers as lost at random."""
        for worker in self.workers:
            if worker.alive and self.chance(self.rates.death):
                self.counts["deaths"] += 1
                worker.die()
        for worker in self.workers:
            if worker.alive and self.chance(self.rates.false_alarm):
                peer = self.random.choice(self.prefills if isinstance(worker, DecodeWorker) else self.decodes)
                self.counts["false alarms"] += 1
                if worker.known_peers.pop(peer.name, None) is not None:
                    worker.lose(peer.name, "silent")

    def audit(self) -> None:
        for worker in self.workers:
            if worker.alive:
                worker.machine.audit()
                for memory in worker.memories:
                    memory.audit()


class Worker(ABC):
    """The common part of both kinds of workers. A worker keeps its name when it dies and starts again."""

    machine: Any
    store_names: tuple[msg.StoreName, ...] = ("host",)

    def __init__(self, world: World, name: str, number: int) -> None:
        self.world, self.name, self.number, self.incarnation = world, name, number, 0
        self.ranks = RANKS[number % len(RANKS)]
        self.start()

    def start(self) -> None:
        """Starts a new incarnation with new memory."""
        self.alive, self.known_peers = True, dict[str, int]()  # the incarnations of peers, by name
        self.incarnation += 1
        self.memories = self.make_memories()
        staging = np.full(STAGING_BYTES, POISON, np.uint8)  # the ring of a receiver, or the buffers of a sender
        staging_range = msg.MemoryRange(staging.ctypes.data, staging.nbytes)
        self.blocks = [staging, *(memory.buffer for memory in self.memories)]
        self.transfer = self.open_endpoint()
        stores = {
            name: replace(memory.store, staging=(staging_range,) * len(memory.store.shards))
            for name, memory in zip(self.store_names, self.memories, strict=True)
        }
        self.hello = msg.Hello(self.name, self.world.model, stores, "loopback", self.transfer.describe())
        self.hello = replace(self.hello, process=ProcessIdentity("boot", "namespace", self.incarnation + 1, 0))

    def open_endpoint(self) -> Loopback:
        endpoint = Loopback(self.world.hub, deadline_s=6.0)
        for block in self.blocks:
            endpoint.register(Region(block.ctypes.data, block.nbytes))
        return endpoint

    def lose(self, peer: str, reason: str) -> None:
        self.machine.peer_lost(peer, reason, self.world.now)

    @property
    def is_idle(self) -> bool:
        return self.alive and self.machine.next_deadline() == math.inf

    @abstractmethod
    def make_memories(self) -> list[Memory]:
        """Returns one memory for each of `store_names`."""

    @abstractmethod
    def step(self) -> None:
        """Runs one iteration of the worker's loop."""

    def die(self) -> None:
        """Kills the worker, which starts again 0.2 to 3 s later. Writes of a dead prefill worker may continue for up to
        2 s. Writes to a dead decode worker no longer arrive."""
        world, self.alive = self.world, False
        self.record_phase_seconds()
        if isinstance(self, DecodeWorker):
            for endpoint in (*self.endpoints.values(), *self.retired):
                endpoint.close()
        else:
            world.orphaned_writers.append((world.now + world.random.uniform(0, 2), self.transfer, self.memories))
        for peer in world.workers:
            delay = world.random.uniform(0.5, 1.5)
            world.call_later(delay, partial(self._report_death, peer, self.incarnation))
        world.call_later(world.random.uniform(0.2, 3), self.start)

    def _report_death(self, peer: "Worker", incarnation: int) -> None:
        if peer.alive and peer.known_peers.get(self.name) == incarnation:
            del peer.known_peers[self.name]
            peer.lose(self.name, "the process died")

    def record_phase_seconds(self) -> None:
        """Adds the seconds that this incarnation has spent in each phase to the totals of the world."""
        tables = {type(self.machine).__name__: self.machine.table}
        if isinstance(self.machine, Sender):
            tables["Piece"] = self.machine.piece_table
        for name, table in tables.items():
            for phase, spent in table.seconds.items():
                self.world.phase_seconds[f"{name}.{phase.name}"] += spent


class DecodeWorker(Worker):
    """Requests prompts, checks the contexts that land, keeps them for a while, and releases their pages.

    Some prompts begin with rows that this worker has already. Their pages are not in the request. If the handoff fails,
    they are released and poisoned at once, even if the sender may still write to the other pages.
    """

    store_names = ("host", "device")

    def make_memories(self) -> list[Memory]:
        page_rows, groups = (4, 16, 6, 10)[self.number % 4], self.world.model.groups
        host = Memory(self.ranks, groups, same_pages=False, page_rows=page_rows, pages=400 // page_rows)
        keys: dict[str, Any] = {"key_page_rows": 14, "key_pages": 40, "key_parts": 2, "key_spare": 3}
        device = Memory(1, groups, same_pages=False, page_rows=8, pages=50, **keys)
        return [host, device]

    def start(self) -> None:
        super().start()
        self.ring = ReceiverStaging(self.hello.stores)
        self.machine = Receiver(scaled(RECEIVER_TIMEOUTS, TIMEOUT_SCALE), self.ring)
        self.request_ids = itertools.count()  # each incarnation begins at 0 again
        # Requests that wait for pages or a prefill worker: key, token ids, and number of further attempts allowed.
        self.waiting: deque[tuple[HandoffKey, tuple[int, ...], int]] = deque()
        # Handoffs without an outcome: request, number of further attempts allowed, and when the handoff began.
        self.open: dict[HandoffKey, tuple[msg.HandoffRequest, int, float]] = {}
        # Landed contexts: when to release the pages, and the request.
        self.landed: dict[HandoffKey, tuple[float, msg.HandoffRequest]] = {}
        self.quarantined: dict[HandoffKey, msg.HandoffRequest] = {}
        self.pages: dict[HandoffKey, ContextPages] = {}  # all pages of each context that holds any
        self.known_keys: set[HandoffKey] = set()
        self.staged: set[HandoffKey] = set()
        self.endpoints: dict[str, Loopback] = {}  # by prefill worker
        self.retired: dict[Loopback, set[HandoffKey]] = {}  # handoffs that end when the endpoint is closed

    @property
    def is_idle(self) -> bool:
        return super().is_idle and not self.waiting and not self.landed

    def request(self) -> None:
        """Adds a prompt of random length to the queue. A few do not fit into the ring at once."""
        longest = 150 if self.world.chance(0.05) else 40
        count, number = self.world.random.randint(1, longest), next(self.world.prompt_numbers)
        token_ids = tuple(range(number * 256, number * 256 + count))
        self.waiting.append((HandoffKey(str(next(self.request_ids)), 1), token_ids, 2))

    def step(self) -> None:
        now = self.world.now
        for key, (release_at, request) in list(self.landed.items()):
            if now >= release_at:
                memory, pages = self.memory(request), self.pages.pop(key)
                memory.check_prompt(pages, request)
                memory.release(pages)
                del self.landed[key]
        while self.waiting and self._fetch(*self.waiting[0]):
            self.waiting.popleft()
        self.machine.tick(now)
        self._cut_off_unconfirmed()
        while actions := self.machine.take_actions():
            for action in actions:
                self._run_action(action)

    def _run_action(self, action: Any) -> None:
        match action:
            case msg.SendMessage(peer, message):
                if isinstance(message, msg.StartWrites):
                    self.world.counts["staged" if message.staged else "not staged"] += 1
                    self.staged.update({message.key} if message.staged else ())
                self.world.send(self, peer, message)
            case msg.UnpackPiece(key, number, piece):
                unpack(piece)
                self.machine.on_unpacked(key, number)
                self.world.counts["pieces"] += 1
            case event:
                self._handle_event(event)

    def memory(self, request: msg.HandoffRequest) -> Memory:
        return self.memories[self.store_names.index(request.landing)]

    def endpoint_of(self, prefill: str) -> Loopback:
        if prefill not in self.endpoints:
            self.endpoints[prefill] = self.open_endpoint()
        return self.endpoints[prefill]

    def lose(self, peer: str, reason: str) -> None:
        """Like an agent, closes the endpoint of a lost peer a little later, and then ends the quarantine."""
        super().lose(peer, reason)
        endpoint = self.endpoints.pop(peer, None)
        if endpoint is not None:
            self.retired[endpoint] = self.machine.unconfirmed_keys(peer).difference(*self.retired.values())
            self.world.call_later(self.world.random.uniform(0, 3), partial(self._close, endpoint, self.incarnation))

    def _close(self, endpoint: Loopback, incarnation: int) -> None:
        if self.alive and self.incarnation == incarnation:
            self.world.counts["cut off"] += bool(self.retired[endpoint] & self.machine.unconfirmed_keys())
            endpoint.close()
            self.machine.end_writers(self.retired.pop(endpoint), self.world.now)

    def _cut_off_unconfirmed(self) -> None:
        """Loses peers that may still write for a failed handoff, although they are alive."""
        unconfirmed = self.machine.unconfirmed_keys().difference(*self.retired.values())
        for peer in list(self.endpoints):
            if unconfirmed & self.machine.unconfirmed_keys(peer) and self.world.chance(0.02):
                self.known_peers.pop(peer, None)
                self.lose(peer, "it cannot confirm that it has stopped")

    def _fetch(self, key: HandoffKey, token_ids: tuple[int, ...], attempts: int) -> bool:
        """Begins a handoff. Returns False, and begins nothing, if there are too few pages or no prefill worker."""
        prefills = [
            prefill
            for prefill in self.world.prefills
            if prefill.alive or self.known_peers.get(prefill.name) is not None
        ]
        store = self.world.random.randrange(2)
        pages = self.memories[store].allocate(len(token_ids)) if prefills else None
        if pages is None:
            self.world.counts["waits for pages"] += 1
            return False
        prefill = self.world.random.choice(prefills)
        if prefill.alive:
            self.world.introduce(self, prefill)
        first = self._write_prefix(self.memories[store], pages, token_ids)
        _, listed = self.memories[store].split(pages, first)
        prompt = PromptSpec(token_ids, SamplingParams())
        request = msg.HandoffRequest(key, prompt, self.store_names[store], listed.rows, listed.keys, first)
        self.pages[key] = pages
        assert key not in self.known_keys
        self.known_keys.add(key)
        self.open[key] = request, attempts, self.world.now
        self.machine.fetch(msg.Fetch(prefill.name, request), self.world.now)
        self.world.counts["handoffs"] += 1
        if self.world.chance(self.world.rates.abort):
            machine = self.machine
            seconds = self.world.random.choice([0.0, 0.01, 0.05, 0.2, 1.0])
            self.world.call_later(seconds, lambda: machine.cancel(key, self.world.now))
        return True

    def _write_prefix(self, memory: Memory, pages: ContextPages, token_ids: tuple[int, ...]) -> int:
        """Writes the rows and index keys of some whole pages, which the worker has without the handoff. Returns the
        number of rows, which is 0 for most prompts."""
        page_rows = memory.page_rows
        most = (len(token_ids) - 1) // page_rows if self.world.chance(0.4) else 0
        first = self.world.random.randint(0, most) * page_rows
        memory.write(pages, token_ids, 0, first)
        self.world.counts["prefixes"] += first > 0
        return first

    def _handle_event(self, event: Any) -> None:
        counts = self.world.counts
        if isinstance(event, msg.Quiesced):
            request = self.quarantined.pop(event.key)
            self.memory(request).release(self.pages.pop(event.key))
            counts["quiesced later"] += 1
            return
        request, attempts, began_at = self.open.pop(event.key)  # raises KeyError if a handoff ends twice
        self.world.longest_s = max(self.world.longest_s, self.world.now - began_at)
        if isinstance(event, msg.Landed):
            assert event.token_id == request.prompt.token_ids[-1] + 1
            self.memory(request).check_prompt(self.pages[event.key], request)
            counts["landed after a prefix"] += request.first > 0
            self.landed[event.key] = self.world.now + self.world.random.uniform(0, 1.5), request
            counts["landed"] += 1
            return
        assert isinstance(event, msg.FetchFailed)
        assert event.quiesced or event.key not in self.staged, (
            "only the receiver writes to the pages of staged contexts"
        )
        counts["failed" if event.quiesced else "failed, not quiesced"] += 1
        before, own = self.memory(request).split(self.pages[event.key], request.first)
        self.memory(request).release(before)
        if event.quiesced:
            self.memory(request).release(own)
            del self.pages[event.key]
        else:
            self.quarantined[event.key], self.pages[event.key] = request, own
        if attempts > 0 and event.reason != "cancelled":
            next_key = HandoffKey(event.key.request_id, event.key.attempt + 1)
            self.waiting.append((next_key, request.prompt.token_ids, attempts - 1))


@dataclass
class Job:
    """A prompt that is computed chunk by chunk."""

    start: msg.StartPrefill
    pages: ContextPages
    num_submitted: int = 0  # rows whose forward pass is submitted


@dataclass(eq=False)
class ForwardPass:
    """A forward pass and its event. Rows [first, last) are in their pages only after the event has happened."""

    incarnation: int
    job: Job
    first: int
    last: int
    happened: bool = False

    def query(self) -> bool:
        return self.happened


class PrefillWorker(Worker):
    """Computes prompts in its own pages, and fills the pages with POISON as soon as they are released."""

    def make_memories(self) -> list[Memory]:
        page_rows = (16, 4, 10, 6)[self.number % 4]
        groups, pages = self.world.model.groups, 240 // page_rows
        return [Memory(self.ranks, groups, same_pages=True, page_rows=page_rows, pages=pages)]

    def start(self) -> None:
        super().start()
        self.machine = Sender(
            Sources(self.hello.stores["host"]),
            scaled(SENDER_TIMEOUTS, TIMEOUT_SCALE),
            write_limit=3.0,
            tombstone_limit=20.0,
            max_direct_writes=20,
            piece_timeouts=scaled(PIECE_TIMEOUTS, TIMEOUT_SCALE / 4),
        )
        self.stream_end = 0.0  # when the newest forward pass finishes; passes finish in order
        self.queue: deque[msg.StartPrefill] = deque()
        self.jobs: dict[tuple[str, HandoffKey], Job] = {}
        self.lists: dict[int, tuple[msg.SubmitWrites, WriteTicket]] = {}  # lists of writes in flight, by number

    @property
    def memory(self) -> Memory:
        return self.memories[0]

    def step(self) -> None:
        now = self.world.now
        for number, (submitted, ticket) in list(self.lists.items()):
            state = self.transfer.poll(ticket)
            if state is not WriteState.PENDING:
                del self.lists[number]
                self.machine.on_write_ended(submitted.peer, submitted.key, number, state, now)
        self.machine.tick(now)
        if self.machine.has_pending_events:
            self.machine.poll_events(now)
        self._run_actions()
        self._compute()
        self._run_actions()

    def _run_actions(self) -> None:
        while actions := self.machine.take_actions():
            for action in actions:
                match action:
                    case msg.SendMessage(peer, message):
                        self.world.send(self, peer, message)
                    case msg.SubmitWrites():
                        if action.pack is not None:
                            pack(action.pack)
                            self.world.counts["packed"] += 1
                        ticket = self.transfer.submit(action.peer, action.writes, action.after)
                        self.lists[action.number] = action, ticket
                    case msg.StartPrefill():
                        assert (action.peer, action.key) not in self.jobs, (
                            f"{action.key} is computed twice at the same time"
                        )
                        self.queue.append(action)
                    case msg.ReleasePages(peer, key):
                        self._release(peer, key)

    def _release(self, peer: str, key: HandoffKey) -> None:
        job = self.jobs.pop((peer, key), None)
        if job is not None:
            self.memory.release(job.pages)
        else:
            queued = [start for start in self.queue if (start.peer, start.key) == (peer, key)]
            assert len(queued) == 1, f"ReleasePages for {key}, which is neither queued nor computed"
            self.queue.remove(queued[0])

    def _compute(self) -> None:
        """Submits one chunk of each of up to three prompts. The rows reach their pages at most 30 ms after they were
        announced, in order."""
        while self.queue and (pages := self.memory.allocate(len(self.queue[0].prompt))) is not None:
            start = self.queue.popleft()
            self.jobs[start.peer, start.key] = Job(start, pages)
        for job in [job for job in self.jobs.values() if job.num_submitted < len(job.start.prompt)][:3]:
            peer, key, total = job.start.peer, job.start.key, len(job.start.prompt)
            if self.world.chance(self.world.rates.not_computed):
                self.machine.handle_command(PrefillFailed(peer, key, True, "injected fault"), self.world.now)
                continue
            first, job.num_submitted = (
                job.num_submitted,
                min(total, job.num_submitted + self.world.random.randint(1, 16)),
            )
            forward = ForwardPass(self.incarnation, job, first, job.num_submitted)
            self.machine.handle_command(
                RowsComputed(peer, key, first, job.num_submitted, job.pages.rows, forward), self.world.now
            )
            self.stream_end = max(self.stream_end, self.world.now + self.world.random.uniform(0, 0.03))
            self.world.call_later(self.stream_end - self.world.now, partial(self._finish_forward_pass, forward))
            if job.num_submitted == total:
                self.machine.handle_command(
                    FirstTokenSampled(peer, key, job.start.prompt.token_ids[-1] + 1, None), self.world.now
                )

    def _finish_forward_pass(self, forward: "ForwardPass") -> None:
        """Writes rows and index keys to the job's pages, unless the pages were released, and marks the event as
        happened. Does nothing if the worker has died meanwhile."""
        job = forward.job
        if forward.incarnation != self.incarnation or not self.alive:
            return
        if self.jobs.get((job.start.peer, job.start.key)) is job:
            self.memory.write(job.pages, job.start.prompt.token_ids, forward.first, forward.last)
        forward.happened = True
