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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from loopback import Faults, Hub, Loopback
from numpy.typing import NDArray
from scaled_timeouts import scaled

from hotset.base.paged_span import PagedSpan
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.deliveries import PIECE_TIMEOUTS, Sources
from hotset.fleet.handoff.layout import check_peers, head_shards
from hotset.fleet.handoff.outgoing import SENDER_TIMEOUTS
from hotset.fleet.handoff.packing import pack, unpack
from hotset.fleet.handoff.receiver import RECEIVER_TIMEOUTS, Receiver
from hotset.fleet.handoff.sender import Sender
from hotset.fleet.handoff.staging import ReceiverStaging
from hotset.fleet.processes import ProcessIdentity
from hotset.fleet.transfer.api import Region, WriteState, WriteTicket
from hotset.memory.pages import PageAllocator
from hotset.schedule.handoffs import FirstTokenSampled, HandoffKey, PrefillFailed, RowsComputed

POISON = 0xAB
LAYERS, GROUPS, HEADS, HEAD_BYTES, KEY_BYTES = 3, 2, 4, 3, 5
ROW_BYTES = 2 * HEADS * HEAD_BYTES  # K and V of all heads
STAGING_BYTES = 4096  # 4 pieces of at most 12 rows
RANKS = (1, 2, 4, 8)  # of the workers of each kind, in turn
TIMEOUT_SCALE = 0.2  # for the timeouts of the state machines
Bytes = NDArray[np.uint8]


def computed_bytes(token_ids: Sequence[int], first: int, last: int, unit: int, width: int) -> Bytes:
    """Returns the bytes of positions [first, last) in one unit (a layer or an index group): [last - first, width]. The
    bytes depend on token, position and unit."""
    tokens = np.asarray(token_ids[first:last], np.int64)[:, None]
    positions = np.arange(first, last, dtype=np.int64)[:, None]
    mixed = tokens * 2654435761 + positions * 40503 + unit * 9176 + np.arange(width) * 131
    return ((mixed >> 7) & 0xFF).astype(np.uint8)


class Arena:
    """All memory of one worker, allocated in order, so that distances between its pools are the same in every run."""

    def __init__(self) -> None:
        self._bytes, self._num_allocated = np.full(1 << 18, POISON, np.uint8), 0

    def allocate(self, *shape: int) -> Bytes:
        first, self._num_allocated = self._num_allocated, self._num_allocated + math.prod(shape)
        return self._bytes[first : self._num_allocated].reshape(shape)


class Pool:
    """Pages of rows or of index keys: `[units][parts][pages][bytes]`, filled with POISON while they are free.

    A unit is a layer or an index group. Each page is divided into parts, as in `PagedSpan`. Each part ends with
    `spare` unused bytes.
    """

    def __init__(
        self, arena: Arena, units: int, parts: int, pages: int, page_rows: int, row_bytes: int, spare: int = 0
    ) -> None:
        self.part_rows, self.page_rows = page_rows // parts, page_rows
        page_bytes = self.part_rows * row_bytes + spare
        self.bytes = arena.allocate(units, parts, pages, page_bytes)
        bases = tuple(tuple(part.ctypes.data for part in unit) for unit in self.bytes)
        self.span = PagedSpan(bases, page_bytes, self.part_rows, row_bytes)
        self.allocator = PageAllocator(pages)

    def rows(self, pages: Sequence[int], unit: int, count: int) -> Bytes:
        """Returns a copy of the first `count` rows of a context in one unit: [count, row_bytes]."""
        parts = self.bytes[unit][:, list(pages), : self.part_rows * self.span.row_bytes]
        by_page = parts.swapaxes(0, 1).reshape(-1, self.span.row_bytes)
        return by_page[:count]

    def write(self, pages: Sequence[int], unit: int, first: int, rows: Bytes) -> None:
        """Writes rows to positions [first, first + len(rows)) of a context in one unit."""
        for position, row in enumerate(rows, first):
            page, row_index = pages[position // self.page_rows], position % self.page_rows
            start = row_index % self.part_rows * self.span.row_bytes
            self.bytes[unit, row_index // self.part_rows, page, start : start + len(row)] = row

    def poison(self, pages: Sequence[int]) -> None:
        self.bytes[:, :, list(pages)] = POISON

    def release(self, pages: Sequence[int]) -> None:
        self.poison(pages)
        self.allocator.release(pages)

    def audit(self, allocator: PageAllocator | None = None) -> None:
        """Audits `allocator`, by default the pool's own, and asserts that all its free pages are POISON."""
        allocator = allocator or self.allocator
        allocator.audit()
        free = self.bytes[:, :, [page for page in range(allocator.capacity) if not allocator._held[page]]]
        assert (free == POISON).all(), "free pages were written to"


class ShardedPool:
    """A pool of rows that are sharded over ranks by heads. Page n of the pool consists of page n of every rank."""

    def __init__(self, arena: Arena, ranks: int, pages: int, page_rows: int) -> None:
        width = 2 * max(1, HEADS // ranks) * HEAD_BYTES
        self.pools = [Pool(arena, LAYERS, 1, pages, page_rows, width) for _ in range(ranks)]
        self.shards = head_shards([pool.span for pool in self.pools], HEADS, HEAD_BYTES)
        self.span, self.allocator = self.pools[0].span, self.pools[0].allocator

    def check(self, pages: Sequence[int], layer: int, rows: Bytes) -> None:
        """Asserts that the pages contain these rows of one layer, from the context's first row."""
        for pool, shard in zip(self.pools, self.shards, strict=True):
            found = pool.rows(pages, layer, len(rows))
            assert (found == self._slices(rows, shard)).all(), f"rows of layer {layer} are wrong"

    def write(self, pages: Sequence[int], layer: int, first: int, rows: Bytes) -> None:
        for pool, shard in zip(self.pools, self.shards, strict=True):
            pool.write(pages, layer, first, self._slices(rows, shard))

    @staticmethod
    def _slices(rows: Bytes, shard: msg.Shard) -> Bytes:
        return np.concatenate([rows[:, first : first + nbytes] for first, nbytes in shard.slices], axis=1)

    def release(self, pages: Sequence[int]) -> None:
        for pool in self.pools:
            pool.poison(pages)
        self.allocator.release(pages)

    def audit(self) -> None:
        for pool in self.pools:
            pool.audit(self.allocator)


class Memory:
    """The rows and index keys of one store."""

    def __init__(self, rows: ShardedPool, keys: Pool, groups: int) -> None:
        """If `groups` is 0, the model has no index keys, and `keys` stays POISON."""
        self.rows, self.keys, self._groups = rows, keys, groups
        self.store = msg.Store(rows.shards, keys.span if groups else None)

    @property
    def pools(self) -> list[Pool]:
        return [*self.rows.pools, self.keys]

    def allocate(self, tokens: int) -> "ContextPages | None":
        """Returns pages of rows and pages of index keys, or None if there are too few of either."""
        rows = self.rows.allocator.allocate(self.rows.span.pages_for(tokens))
        keys = self.keys.allocator.allocate(self.keys.span.pages_for(tokens)) if rows is not None else None
        if rows is not None and keys is None:
            self.rows.allocator.release(rows)
        return None if rows is None or keys is None else ContextPages(tuple(rows), tuple(keys))

    def write(self, pages: "ContextPages", token_ids: Sequence[int], first: int, last: int) -> None:
        """Writes the computed bytes of rows and index keys [first, last) of a prompt."""
        for layer in range(LAYERS):
            self.rows.write(pages.rows, layer, first, computed_bytes(token_ids, first, last, layer, ROW_BYTES))
        for group in range(self._groups):
            self.keys.write(pages.keys, group, first, computed_bytes(token_ids, first, last, group, KEY_BYTES))

    def check(self, pages: "ContextPages", request: msg.HandoffRequest) -> None:
        """Asserts that the pages contain the computed bytes of the prompt."""
        count = len(request.prompt)
        for layer in range(LAYERS):
            self.rows.check(pages.rows, layer, computed_bytes(request.prompt.token_ids, 0, count, layer, ROW_BYTES))
        for group in range(self._groups):
            expected = computed_bytes(request.prompt.token_ids, 0, count, group, KEY_BYTES)
            assert (self.keys.rows(pages.keys, group, count) == expected).all(), (
                f"{request.key}: index keys of group {group} are wrong"
            )

    def release(self, pages: "ContextPages") -> None:
        self.rows.release(pages.rows)
        self.keys.release(pages.keys)

    def audit(self) -> None:
        self.rows.audit()
        self.keys.audit()


@dataclass(frozen=True)
class ContextPages:
    """Pages of a context."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]

    def split(self, memory: Memory, first: int) -> "tuple[ContextPages, ContextPages]":
        """Returns the pages with only rows, or index keys, before `first`, and all others."""
        rows, keys = memory.rows.span.pages_before(first), memory.keys.span.pages_before(first)
        before = ContextPages(self.rows[:rows], self.keys[:keys])
        return before, ContextPages(self.rows[rows:], self.keys[keys:])


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
        arena = Arena()
        self.memories = self.make_memories(arena)
        staging = arena.allocate(STAGING_BYTES)  # the ring of a receiver, or the buffers of a sender
        staging_range = msg.MemoryRange(staging.ctypes.data, staging.nbytes)
        self.blocks = [staging, *(pool.bytes for memory in self.memories for pool in memory.pools)]
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

    @abstractmethod
    def make_memories(self, arena: Arena) -> list[Memory]:
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

    def make_memories(self, arena: Arena) -> list[Memory]:
        page_rows, groups = (4, 16, 6, 10)[self.number % 4], self.world.model.groups
        keys = Pool(arena, GROUPS, 1, 400 // page_rows, page_rows, KEY_BYTES)
        host = Memory(ShardedPool(arena, self.ranks, 400 // page_rows, page_rows), keys, groups)
        device = Memory(ShardedPool(arena, 1, 50, 8), Pool(arena, GROUPS, 2, 40, 14, KEY_BYTES, spare=3), groups)
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
                memory.check(pages, request)
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
        _, listed = pages.split(self.memories[store], first)
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
        page_rows = memory.rows.span.part_rows
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
            self.memory(request).check(self.pages[event.key], request)
            counts["landed after a prefix"] += request.first > 0
            self.landed[event.key] = self.world.now + self.world.random.uniform(0, 1.5), request
            counts["landed"] += 1
            return
        assert isinstance(event, msg.FetchFailed)
        assert event.quiesced or event.key not in self.staged, (
            "only the receiver writes to the pages of staged contexts"
        )
        counts["failed" if event.quiesced else "failed, not quiesced"] += 1
        before, own = self.pages[event.key].split(self.memory(request), request.first)
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
    pages: list[int]
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

    def make_memories(self, arena: Arena) -> list[Memory]:
        page_rows = (16, 4, 10, 6)[self.number % 4]
        rows = ShardedPool(arena, self.ranks, 240 // page_rows, page_rows)
        keys = Pool(arena, GROUPS, 1, 240 // page_rows, page_rows, KEY_BYTES)
        keys.allocator = rows.allocator  # in a host store, rows and index keys have the same page numbers
        return [Memory(rows, keys, self.world.model.groups)]

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
            self.memory.keys.poison(job.pages)
            self.memory.rows.release(job.pages)
        else:
            queued = [start for start in self.queue if (start.peer, start.key) == (peer, key)]
            assert len(queued) == 1, f"ReleasePages for {key}, which is neither queued nor computed"
            self.queue.remove(queued[0])

    def _compute(self) -> None:
        """Submits one chunk of each of up to three prompts. The rows reach their pages at most 30 ms after they were
        announced, in order."""
        while self.queue and (pages := self._allocate(len(self.queue[0].prompt))) is not None:
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
                RowsComputed(peer, key, first, job.num_submitted, tuple(job.pages), forward), self.world.now
            )
            self.stream_end = max(self.stream_end, self.world.now + self.world.random.uniform(0, 0.03))
            self.world.call_later(self.stream_end - self.world.now, partial(self._finish_forward_pass, forward))
            if job.num_submitted == total:
                self.machine.handle_command(
                    FirstTokenSampled(peer, key, job.start.prompt.token_ids[-1] + 1, None), self.world.now
                )

    def _allocate(self, tokens: int) -> list[int] | None:
        return self.memory.rows.allocator.allocate(self.memory.rows.span.pages_for(tokens))

    def _finish_forward_pass(self, forward: "ForwardPass") -> None:
        """Writes rows and index keys to the job's pages, unless the pages were released, and marks the event as
        happened. Does nothing if the worker has died meanwhile."""
        job = forward.job
        if forward.incarnation != self.incarnation or not self.alive:
            return
        if self.jobs.get((job.start.peer, job.start.key)) is job:
            pages = ContextPages(tuple(job.pages), tuple(job.pages))
            self.memory.write(pages, job.start.prompt.token_ids, forward.first, forward.last)
        forward.happened = True
