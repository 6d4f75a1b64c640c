"""A world of decode and prefill workers in which everything can fail: virtual time, real bytes, one seed.

Each worker has a state machine, a loopback transfer, memory and an allocator; this file acts as its engine and its
agent. Free memory is poisoned and must stay so. A landed context is compared twice with what was computed.
"""

import heapq
import itertools
import math
import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pace import scaled

from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.handoff.layout import check_peers, head_shards, pages_for
from hotset.handoff.messages import (
    Fetch,
    FetchFailed,
    FirstTokenSampled,
    HandoffKey,
    HandoffRequest,
    Hello,
    Landed,
    MemoryRange,
    Message,
    ModelIdentity,
    PagedSpan,
    PrefillFailed,
    Quiesced,
    ReleasePages,
    RowsComputed,
    SendMessage,
    Shard,
    StartPrefill,
    StartWrites,
    Store,
    StoreName,
    SubmitWrites,
    UnpackPiece,
)
from hotset.handoff.outgoing import SENDER_TIMEOUTS
from hotset.handoff.packing import pack, unpack
from hotset.handoff.receiver import RECEIVER_TIMEOUTS, Receiver
from hotset.handoff.sender import Sender
from hotset.handoff.sender_staging import PIECE_TIMEOUTS
from hotset.handoff.staging import ReceiverStaging, split_into_buffers
from hotset.memory.pages import PageAllocator
from hotset.transfer.api import Region, WriteState, WriteTicket
from hotset.transfer.loopback import Faults, Hub, Loopback

POISON = 0xAB
LAYERS, GROUPS, HEADS, HEAD_BYTES, KEY_BYTES = 3, 2, 2, 3, 5
ROW_BYTES = 2 * HEADS * HEAD_BYTES  # K and V of all heads
STAGING_BYTES = 2048  # 4 pieces of at most 11 rows
PACE = 0.2  # scales the timeouts of the state machines
MODEL = ModelIdentity("toy", LAYERS, f"{ROW_BYTES} bytes", f"{KEY_BYTES} bytes", GROUPS, "w")
Bytes = NDArray[np.uint8]


def content(token_ids: Sequence[int], first: int, last: int, unit: int, width: int) -> Bytes:
    """Returns what a model would compute: [last - first, width], different for every token, position and unit."""
    tokens = np.asarray(token_ids[first:last], np.int64)[:, None]
    positions = np.arange(first, last, dtype=np.int64)[:, None]
    mixed = tokens * 2654435761 + positions * 40503 + unit * 9176 + np.arange(width) * 131
    return ((mixed >> 7) & 0xFF).astype(np.uint8)


class Arena:
    """All memory of one worker, allocated in order, so that the addresses of its pools are deterministic."""

    def __init__(self) -> None:
        self._bytes, self._taken = np.full(1 << 17, POISON, np.uint8), 0

    def take(self, *shape: int) -> Bytes:
        first, self._taken = self._taken, self._taken + math.prod(shape)
        return self._bytes[first : self._taken].reshape(shape)


class Pool:
    """Pages of rows, or of index keys: `[units][parts][pages][bytes]`, poisoned while free."""

    def __init__(
        self, arena: Arena, units: int, parts: int, pages: int, page_rows: int, row_bytes: int, spare: int = 0
    ) -> None:
        self.part_rows = -(-page_rows // parts)
        page_bytes = self.part_rows * row_bytes + spare
        self.bytes = arena.take(units, parts, pages, page_bytes)
        base, steps = self.bytes.ctypes.data, self.bytes.strides
        bases = tuple(tuple(base + unit * steps[0] + part * steps[1] for part in range(parts)) for unit in range(units))
        self.span = PagedSpan(bases, page_bytes, page_rows, self.part_rows, row_bytes)
        self.allocator = PageAllocator(pages)

    def rows(self, pages: Sequence[int], unit: int, count: int) -> Bytes:
        """Returns a copy of the first `count` rows of a context: [count, row_bytes]."""
        parts = self.bytes[unit][:, list(pages), : self.part_rows * self.span.row_bytes]
        by_page = parts.swapaxes(0, 1).reshape(len(pages), -1, self.span.row_bytes)[:, : self.span.page_rows]
        return by_page.reshape(-1, self.span.row_bytes)[:count]

    def put(self, pages: Sequence[int], unit: int, first: int, rows: Bytes) -> None:
        for position, row in enumerate(rows, first):
            page, within = pages[position // self.span.page_rows], position % self.span.page_rows
            start = within % self.part_rows * self.span.row_bytes
            self.bytes[unit, within // self.part_rows, page, start : start + len(row)] = row

    def poison(self, pages: Sequence[int]) -> None:
        self.bytes[:, :, list(pages)] = POISON

    def release(self, pages: Sequence[int]) -> None:
        self.poison(pages)
        self.allocator.release(pages)

    def audit(self, allocator: PageAllocator | None = None) -> None:
        """`allocator` replaces the pool's own allocator."""
        allocator = allocator or self.allocator
        allocator.audit()
        free = self.bytes[:, :, [page for page in range(allocator.capacity) if not allocator._held[page]]]
        assert (free == POISON).all(), "free pages were written to"


class ShardedPool:
    """A pool of rows that are sharded over ranks by heads: page n is page n of every rank."""

    def __init__(self, arena: Arena, ranks: int, pages: int, page_rows: int) -> None:
        width = 2 * max(1, HEADS // ranks) * HEAD_BYTES
        self.pools = [Pool(arena, LAYERS, 1, pages, page_rows, width) for _ in range(ranks)]
        self.shards = head_shards([pool.span for pool in self.pools], HEADS, HEAD_BYTES)
        self.span, self.allocator = self.pools[0].span, self.pools[0].allocator

    def check(self, pages: Sequence[int], unit: int, rows: Bytes) -> None:
        for pool, shard in zip(self.pools, self.shards, strict=True):
            assert (pool.rows(pages, unit, len(rows)) == self._part(rows, shard)).all(), "wrong bytes of rows"

    def put(self, pages: Sequence[int], unit: int, first: int, rows: Bytes) -> None:
        for pool, shard in zip(self.pools, self.shards, strict=True):
            pool.put(pages, unit, first, self._part(rows, shard))

    @staticmethod
    def _part(rows: Bytes, shard: Shard) -> Bytes:
        return np.concatenate([rows[:, first : first + nbytes] for first, nbytes in shard.slices], axis=1)

    def release(self, pages: Sequence[int]) -> None:
        for pool in self.pools:
            pool.poison(pages)
        self.allocator.release(pages)

    def audit(self) -> None:
        for pool in self.pools:
            pool.audit(self.allocator)


class Memory:
    """The rows and index keys of one landing."""

    def __init__(self, rows: ShardedPool, keys: Pool) -> None:
        self.rows, self.keys = rows, keys
        self.store = Store(rows.shards, keys.span)

    @property
    def pools(self) -> list[Pool]:
        return [*self.rows.pools, self.keys]

    def allocate(self, tokens: int) -> tuple[list[int], list[int]] | None:
        rows = self.rows.allocator.allocate(pages_for(self.rows.span, tokens))
        keys = self.keys.allocator.allocate(pages_for(self.keys.span, tokens)) if rows is not None else None
        if rows is not None and keys is None:
            self.rows.allocator.release(rows)
        return None if rows is None or keys is None else (rows, keys)

    def check(self, request: HandoffRequest) -> None:
        count = len(request.prompt)
        for layer in range(LAYERS):
            self.rows.check(request.row_pages, layer, content(request.prompt.token_ids, 0, count, layer, ROW_BYTES))
        for group in range(GROUPS):
            expected = content(request.prompt.token_ids, 0, count, group, KEY_BYTES)
            assert (self.keys.rows(request.key_pages, group, count) == expected).all(), (
                f"{request.key}: wrong keys landed"
            )

    def release(self, request: HandoffRequest) -> None:
        self.rows.release(request.row_pages)
        self.keys.release(request.key_pages)

    def audit(self) -> None:
        self.rows.audit()
        self.keys.audit()


@dataclass(frozen=True)
class Trouble:
    """The probability of each fault, per message, request or step."""

    lose: float = 0.05
    duplicate: float = 0.05
    delay: float = 0.05  # takes seconds instead of milliseconds
    abort: float = 0.12
    not_computed: float = 0.01
    death: float = 0.0004
    false_alarm: float = 0.0006
    writes: Faults = field(default_factory=Faults)


class World:
    """Owns the clock, the random source, the network and all workers."""

    def __init__(self, seed: int, trouble: Trouble, decodes: int = 3, prefills: int = 3) -> None:
        self.random, self.trouble, self.now = random.Random(seed), trouble, 0.0
        self.hub = Hub(trouble.writes, seed)
        self.counts: Counter[str] = Counter()
        self.longest = 0.0  # seconds from the request to the end
        self.seconds: Counter[str] = Counter()  # in each phase, over all state machines so far
        self._due: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()
        self.serial = itertools.count(1)
        self.decodes = [Decode(self, f"decode-{number}", number) for number in range(decodes)]
        self.prefills = [PrefillWorker(self, f"prefill-{number}") for number in range(prefills)]
        self.zombies: list[tuple[float, Loopback, Any]] = []

    @property
    def workers(self) -> "list[Worker]":
        return [*self.decodes, *self.prefills]

    def later(self, seconds: float, act: Any) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), act))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def send(self, origin: "Worker", to: str, message: Message) -> None:
        """Sends to one incarnation, over a network that loses, duplicates, delays and reorders messages."""
        worker = next(each for each in self.workers if each.name == to)
        meant, sender, trouble = origin.knows.get(to), origin.incarnation, self.trouble
        for _ in range(2 if self.chance(trouble.duplicate) else 1):
            if self.chance(trouble.lose):
                self.counts["lost messages"] += 1
                continue
            seconds = self.random.uniform(0.1, 3.0) if self.chance(trouble.delay) else self.random.uniform(0, 0.02)

            self.later(seconds, partial(self._arrive, worker, meant, origin.name, sender, message))

    def _arrive(self, to: "Worker", meant: int | None, name: str, sender: int, message: Message) -> None:
        if to.alive and to.incarnation == meant and to.knows.get(name) == sender:
            to.machine.handle_message(name, message, self.now)

    def introduce(self, decode: "Decode", prefill: "PrefillWorker") -> None:
        """Does what Hello and Welcome do between agents. The state machines learn of a restart before anything else."""
        if (
            decode.knows.get(prefill.name) == prefill.incarnation
            and prefill.knows.get(decode.name) == decode.incarnation
        ):
            return
        for one, other in ((decode, prefill), (prefill, decode)):
            if one.knows.get(other.name) not in (None, other.incarnation):
                one.machine.peer_lost(other.name, "restarted", self.now)
            one.knows[other.name] = other.incarnation
        assert check_peers(prefill.hello, decode.hello) is None
        prefill.transfer.connect(decode.name, decode.transfer.describe())
        prefill.machine.add_peer(decode.name, decode.hello)
        decode.machine.add_peer(prefill.name, prefill.hello)

    def step(self, seconds: float) -> None:
        self.now += seconds
        while self._due and self._due[0][0] <= self.now:
            heapq.heappop(self._due)[2]()
        self.hub.advance(self.now)
        for worker in self.workers:
            if worker.alive:
                worker.step()
        for zombie in [each for each in self.zombies if each[0] <= self.now]:
            zombie[1].close()
            self.zombies.remove(zombie)

    def disturb(self) -> None:
        """Kills workers at random, and reports living ones as lost."""
        for worker in self.workers:
            if worker.alive and self.chance(self.trouble.death):
                self.counts["deaths"] += 1
                worker.die()
        for worker in self.workers:
            if worker.alive and self.chance(self.trouble.false_alarm):
                other = self.random.choice(self.prefills if isinstance(worker, Decode) else self.decodes)
                self.counts["false alarms"] += 1
                if worker.knows.pop(other.name, None) is not None:
                    worker.machine.peer_lost(other.name, "silent", self.now)

    def audit(self) -> None:
        for worker in self.workers:
            if worker.alive:
                worker.machine.audit()
                for memory in worker.memories:
                    memory.audit()


class Worker(ABC):
    """What both kinds of workers share: a name that outlives its incarnations, and how it dies."""

    machine: Any

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.incarnation = world, name, 0
        self.begin()

    def begin(self) -> None:
        self.alive, self.knows = True, dict[str, int]()  # name: incarnation
        self.incarnation += 1
        arena = Arena()
        self.memories = self.make_memories(arena)
        self.staging = arena.take(STAGING_BYTES)  # a ring, or buffers
        self.space = MemoryRange(self.staging.ctypes.data, self.staging.nbytes)
        self.transfer = Loopback(self.world.hub, deadline_s=6.0)
        for taken in [self.staging, *(pool.bytes for memory in self.memories for pool in memory.pools)]:
            self.transfer.register(Region(taken.ctypes.data, taken.nbytes))
        stores = {landing: memory.store for landing, memory in zip(self.landings, self.memories, strict=True)}
        self.hello = Hello(self.name, MODEL, stores, "loopback", self.transfer.describe(), self.space)

    landings: tuple[StoreName, ...] = ("host",)

    @abstractmethod
    def make_memories(self, arena: Arena) -> list[Memory]:
        """Returns one memory for each of `landings`."""

    @abstractmethod
    def step(self) -> None:
        """Does the work that is due now."""

    def die(self) -> None:
        """Kills the worker. Its writes may continue for a while without an owner; its own memory is gone at once."""
        world, self.alive = self.world, False
        self.note_seconds()
        if isinstance(self, Decode):
            self.transfer.close()
        else:
            world.zombies.append((world.now + world.random.uniform(0, 2), self.transfer, self.memories))
        died = self.incarnation
        for other in world.workers:
            delay = world.random.uniform(0.5, 1.5)
            world.later(delay, partial(self._noticed, other, died))
        world.later(world.random.uniform(0.2, 3), self.begin)

    def _noticed(self, other: "Worker", died: int) -> None:
        if other.alive and other.knows.get(self.name) == died:
            del other.knows[self.name]
            other.machine.peer_lost(self.name, "it died", self.world.now)

    def note_seconds(self) -> None:
        tables = {type(self.machine).__name__: self.machine.table}
        if isinstance(self.machine, Sender):
            tables["Piece"] = self.machine.piece_table
        for name, table in tables.items():
            for phase, spent in table.seconds.items():
                self.world.seconds[f"{name}.{phase.name}"] += spent


class Decode(Worker):
    """Requests prompts, checks what lands, keeps it for a while, and releases pages only when that is allowed."""

    landings = ("host", "device")

    def __init__(self, world: World, name: str, number: int) -> None:
        self.host_page, self.ranks = (4, 16, 6)[number % 3], (1, 2, 4)[number % 3]
        super().__init__(world, name)

    def make_memories(self, arena: Arena) -> list[Memory]:
        page = self.host_page
        keys = Pool(arena, GROUPS, 1, 400 // page, page, KEY_BYTES)
        host = Memory(ShardedPool(arena, self.ranks, 400 // page, page), keys)
        device = Memory(ShardedPool(arena, 1, 50, 8), Pool(arena, GROUPS, 2, 40, 14, KEY_BYTES, spare=3))
        return [host, device]

    def begin(self) -> None:
        super().begin()
        self.ring = ReceiverStaging(self.space, self.hello.stores)
        self.machine = Receiver(scaled(RECEIVER_TIMEOUTS, PACE), self.ring)
        self.numbers = itertools.count()  # ids start again with every incarnation
        self.waiting: deque[tuple[HandoffKey, tuple[int, ...], int]] = (
            deque()
        )  # for pages; the last item is the number of attempts left
        self.asked: dict[
            HandoffKey, tuple[HandoffRequest, int, float]
        ] = {}  # requests without an end; attempts left, since when
        self.kept: dict[HandoffKey, tuple[float, HandoffRequest]] = {}  # landed: until when
        self.quarantined: dict[HandoffKey, HandoffRequest] = {}  # pages that must not be used
        self.known_keys: set[HandoffKey] = set()

    def request(self) -> None:
        count, serial = self.world.random.randint(1, 40), next(self.world.serial)
        token_ids = tuple(range(serial * 64, serial * 64 + count))
        self.waiting.append((HandoffKey(str(next(self.numbers)), 1), token_ids, 2))

    def step(self) -> None:
        now = self.world.now
        for key, (until, request) in list(self.kept.items()):
            if now >= until:
                memory = self.memory(request)
                memory.check(request)
                memory.release(request)
                del self.kept[key]
        while self.waiting and self._fetch(*self.waiting[0]):
            self.waiting.popleft()
        self.machine.tick(now)
        for action in self.machine.take_actions():
            match action:
                case SendMessage(peer, message):
                    self.world.counts["staged"] += isinstance(message, StartWrites) and message.staged
                    self.world.counts["direct"] += isinstance(message, StartWrites) and not message.staged
                    self.world.send(self, peer, message)
                case UnpackPiece(piece):
                    unpack(piece)
                    self.world.counts["pieces"] += 1
                case event:
                    self._hear(event)

    def memory(self, request: HandoffRequest) -> Memory:
        return self.memories[self.landings.index(request.landing)]

    def _fetch(self, key: HandoffKey, token_ids: tuple[int, ...], attempts: int) -> bool:
        """Returns False if there are no pages or no prefill worker, so that the request waits."""
        prefills = [each for each in self.world.prefills if each.alive or self.knows.get(each.name) is not None]
        at = self.world.random.randrange(2)
        pages = self.memories[at].allocate(len(token_ids)) if prefills else None
        if pages is None:
            self.world.counts["waits for room"] += 1
            return False
        prefill = self.world.random.choice(prefills)
        if prefill.alive:
            self.world.introduce(self, prefill)
        request = HandoffRequest(
            key, PromptSpec(token_ids, SamplingParams()), self.landings[at], tuple(pages[0]), tuple(pages[1])
        )
        assert key not in self.known_keys
        self.known_keys.add(key)
        self.asked[key] = request, attempts, self.world.now
        self.machine.fetch(Fetch(prefill.name, request), self.world.now)
        self.world.counts["handoffs"] += 1
        if self.world.chance(self.world.trouble.abort):
            machine = self.machine
            seconds = self.world.random.choice([0.0, 0.01, 0.05, 0.2, 1.0])
            self.world.later(seconds, lambda: machine.cancel(key, self.world.now))
        return True

    def _hear(self, event: Any) -> None:
        counts = self.world.counts
        if isinstance(event, Quiesced):
            request = self.quarantined.pop(event.key)
            self.memory(request).release(request)
            counts["calm"] += 1
            return
        request, attempts, since = self.asked.pop(event.key)  # raises KeyError at a second end
        self.world.longest = max(self.world.longest, self.world.now - since)
        if isinstance(event, Landed):
            assert event.token_id == request.prompt.token_ids[-1] + 1
            self.memory(request).check(request)
            self.kept[event.key] = self.world.now + self.world.random.uniform(0, 1.5), request
            counts["landed"] += 1
            return
        assert isinstance(event, FetchFailed)
        counts["lost" if event.quiesced else "lost, in doubt"] += 1
        if event.quiesced:
            self.memory(request).release(request)
        else:
            self.quarantined[event.key] = request
        if attempts > 0 and event.reason != "cancelled":
            again = HandoffKey(event.key.request_id, event.key.attempt + 1)
            self.waiting.append((again, request.prompt.token_ids, attempts - 1))


@dataclass
class Job:
    """A prompt that is computed chunk by chunk."""

    prefill: StartPrefill
    pages: list[int]
    done: int = 0


@dataclass(eq=False)
class Forward:
    """The event of a forward pass: rows [first, last) are in their pages only after it has happened."""

    incarnation: int
    job: Job
    first: int
    last: int
    happened: bool = False

    def query(self) -> bool:
        return self.happened


class PrefillWorker(Worker):
    """Computes prompts in its own pages, and poisons the pages as soon as they are released."""

    def make_memories(self, arena: Arena) -> list[Memory]:
        page, ranks = (16, 4, 10)[int(self.name[-1]) % 3], (2, 1, 4)[int(self.name[-1]) % 3]
        rows = ShardedPool(arena, ranks, 240 // page, page)
        keys = Pool(arena, GROUPS, 1, 240 // page, page, KEY_BYTES)
        keys.allocator = rows.allocator  # a page of a host store holds both
        return [Memory(rows, keys)]

    def begin(self) -> None:
        super().begin()
        self.machine = Sender(
            self.memories[0].store,
            scaled(SENDER_TIMEOUTS, PACE),
            write_limit=3.0,
            tombstone_limit=20.0,
            buffers=split_into_buffers(self.space),
            max_direct_writes=20,
            piece_timeouts=scaled(PIECE_TIMEOUTS, PACE / 4),
        )
        self.queue: deque[StartPrefill] = deque()
        self.jobs: dict[tuple[str, HandoffKey], Job] = {}
        self.tickets: list[tuple[str, HandoffKey, WriteTicket]] = []

    @property
    def memory(self) -> Memory:
        return self.memories[0]

    def step(self) -> None:
        now = self.world.now
        for entry in list(self.tickets):
            state = self.transfer.poll(entry[2])
            if state is not WriteState.PENDING:
                self.tickets.remove(entry)
                self.machine.on_write_ended(*entry, state, now)
        self.machine.tick(now)
        if self.machine.has_pending_events:
            self.machine.poll_events(now)
        self._act()
        self._compute()
        self._act()

    def _act(self) -> None:
        while actions := self.machine.take_actions():
            for action in actions:
                match action:
                    case SendMessage(peer, message):
                        self.world.send(self, peer, message)
                    case SubmitWrites(peer, key, writes, after, piece):
                        if piece is not None:
                            pack(piece)
                        ticket = self.transfer.submit(peer, writes, after)
                        self.machine.on_submitted(peer, key, ticket)
                        self.tickets.append((peer, key, ticket))
                    case StartPrefill():
                        assert (action.peer, action.key) not in self.jobs, "computed twice at once"
                        self.queue.append(action)
                    case ReleasePages(peer, key):
                        self._drop(peer, key)

    def _drop(self, peer: str, key: HandoffKey) -> None:
        job = self.jobs.pop((peer, key), None)
        if job is not None:
            self.memory.keys.poison(job.pages)
            self.memory.rows.release(job.pages)
        else:
            queued = [each for each in self.queue if (each.peer, each.key) == (peer, key)]
            assert len(queued) == 1, "dropped what it does not have"
            self.queue.remove(queued[0])

    def _compute(self) -> None:
        """Computes one chunk of up to two requests. The rows appear a little after they were announced."""
        while self.queue and (pages := self._room(len(self.queue[0].prompt))) is not None:
            prefill = self.queue.popleft()
            self.jobs[prefill.peer, prefill.key] = Job(prefill, pages)
        for job in [each for each in self.jobs.values() if each.done < len(each.prefill.prompt)][:3]:
            peer, key, total = job.prefill.peer, job.prefill.key, len(job.prefill.prompt)
            if self.world.chance(self.world.trouble.not_computed):
                self.machine.handle_command(PrefillFailed(peer, key, True, "bad luck"), self.world.now)
                continue
            first, job.done = job.done, min(total, job.done + self.world.random.randint(1, 16))
            forward = Forward(self.incarnation, job, first, job.done)
            self.machine.handle_command(
                RowsComputed(peer, key, first, job.done, tuple(job.pages), forward), self.world.now
            )
            self.world.later(self.world.random.uniform(0, 0.03), partial(self._pass, forward))
            if job.done == total:
                self.machine.handle_command(
                    FirstTokenSampled(peer, key, job.prefill.prompt.token_ids[-1] + 1, None), self.world.now
                )

    def _room(self, tokens: int) -> list[int] | None:
        return self.memory.rows.allocator.allocate(pages_for(self.memory.rows.span, tokens))

    def _pass(self, forward: "Forward") -> None:
        """Writes rows and index keys to the job's pages, if it still has them, because the forward pass has run."""
        job = forward.job
        if forward.incarnation != self.incarnation or not self.alive:
            return
        if self.jobs.get((job.prefill.peer, job.prefill.key)) is job:
            token_ids, first, last = job.prefill.prompt.token_ids, forward.first, forward.last
            for layer in range(LAYERS):
                self.memory.rows.put(job.pages, layer, first, content(token_ids, first, last, layer, ROW_BYTES))
            for group in range(GROUPS):
                self.memory.keys.put(job.pages, group, first, content(token_ids, first, last, group, KEY_BYTES))
        forward.happened = True
