"""The loopback transfer engine copies within one process, with optional faults. It is for tests, and is the simplest
implementation of `Transfer`.

Endpoints are connected by a `Hub`. With `Hub(threaded=True)`, a thread of the hub copies the bytes in real time.
Otherwise time is virtual: bytes are copied only while the caller runs `hub.advance(now)`, and the same seed gives the
same run.
"""

import ctypes
import heapq
import itertools
import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from hotset.base.errors import StartupError, TransferError
from hotset.engine.ports import Throughput
from hotset.fleet.transfer.api import MemoryKind, Meter, Region, Writes, WriteState, WriteTicket
from hotset.fleet.transfer.regions import Description, Regions, decode_description, merge_registered
from hotset.schedule.handoffs import DeviceEvent

log = logging.getLogger(__name__)

EVENT_POLL_S = 0.0005  # interval between polls of events
MAX_WAIT_S = 3600.0  # a deadline can be centuries away, which the system cannot wait for

_Write = tuple[int, int, int]  # local address, address at the peer, number of bytes


class Fate(Enum):
    """The outcome of a list that begins: which bytes arrive (*some* may be none), and the state in which the list ends,
    unless its deadline comes first."""

    WRITTEN = "all bytes arrive: DONE"
    CUT = "some bytes arrive: FAILED_QUIESCED"
    LOST = "some bytes arrive: FAILED_UNKNOWN"
    SILENT = "some bytes arrive, and the list stays pending until the deadline: FAILED_UNKNOWN"
    LATE = "some bytes arrive: FAILED_UNKNOWN; the other bytes arrive later"


@dataclass(frozen=True, slots=True)
class Faults:
    """The probability of each fault, and ranges of delays in seconds."""

    cut: float = 0.0
    lost: float = 0.0
    silent: float = 0.0
    late: float = 0.0
    # Drawn twice: first, whether the writes of a list arrive in any order; then, whether some writes of a WRITTEN list
    # arrive only after a second delay.
    reorder: float = 0.0
    duplicate: float = 0.0  # some writes of a WRITTEN list arrive more than once
    delay_s: tuple[float, float] = (0.0, 0.0)  # from the beginning of a list to the arrival of its bytes
    late_s: tuple[float, float] = (0.1, 1.0)  # from the failure to the arrival of the late bytes

    def fate(self, generator: random.Random) -> Fate:
        odds = {Fate.CUT: self.cut, Fate.LOST: self.lost, Fate.SILENT: self.silent, Fate.LATE: self.late}
        drawn = generator.random()
        for fate, probability in odds.items():
            if drawn < probability:
                return fate
            drawn -= probability
        return Fate.WRITTEN


@dataclass(slots=True, eq=False)
class _Job:
    """A submitted list of writes."""

    peer: str  # the name under which the target is connected
    source: "Loopback"
    target: "Loopback"
    writes: Writes
    nbytes: int
    after: DeviceEvent | None
    begun: bool = False
    metered: bool = False  # `Meter.begin` was called for it
    state: WriteState = WriteState.PENDING


@dataclass(order=True, slots=True)
class _Due:
    at: float
    number: int  # actions that are due at the same time run in the order in which they were scheduled
    action: Callable[[], object] = field(compare=False)
    job: _Job | None = field(compare=False)  # if given, the action is skipped once this list has ended


class Hub:
    """Connects endpoints, and owns the clock, the faults and all lists of writes. It may be called from any thread."""

    def __init__(self, faults: Faults | None = None, seed: int = 0, *, threaded: bool = False) -> None:
        self.faults = faults or Faults()  # may be replaced at any time; applies to lists that begin afterwards
        # If given, memory may be registered as GPU memory, and writes from one kind of memory to another take the time
        # of this many bytes per second. Writes between other kinds fail.
        self.speeds: dict[tuple[MemoryKind, MemoryKind], float] = {}
        self.route_bytes: Counter[tuple[MemoryKind, MemoryKind]] = Counter()  # bytes between these kinds, if `speeds`
        self.fates: deque[Fate] = deque()  # of the next lists to begin; if empty, fates are drawn from the faults
        self.lock = threading.Condition(threading.RLock())  # guards the state of the hub and of its endpoints
        self._random = random.Random(seed)
        self._now = 0.0
        self._numbers = itertools.count()
        self._ends: dict[int, Loopback] = {}
        self._due: list[_Due] = []
        self._waiting: list[_Job] = []  # lists that have not begun, for example because they wait for an event
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="loopback", daemon=True) if threaded else None
        if self._thread:
            self._thread.start()

    @property
    def now(self) -> float:
        return time.monotonic() if self._thread else self._now

    def advance(self, now: float) -> None:
        """Moves the clock to `now` and runs every action that is due by then, in order."""
        with self.lock:
            self._begin_ready()
            while self._due and self._due[0].at <= now:
                due = heapq.heappop(self._due)
                self._now = max(self._now, due.at)
                if due.job is None or due.job.state is WriteState.PENDING:
                    due.action()
                self._begin_ready()
            self._now = max(self._now, now)

    def next_due(self) -> float | None:
        """Returns when the next action is due, or None if nothing is due before an event or a `submit`."""
        with self.lock:
            if self._ready():
                return self.now
            while self._due and (job := self._due[0].job) is not None and job.state is not WriteState.PENDING:
                heapq.heappop(self._due)
            return self._due[0].at if self._due else None

    def close(self) -> None:
        """Closes all endpoints and stops the thread. Idempotent."""
        with self.lock:
            self._stopped = True
            for end in list(self._ends.values()):
                end.close()
            self.lock.notify_all()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()

    def join(self, end: "Loopback") -> int:
        """Adds an endpoint and returns its number for `find`."""
        with self.lock:
            number = next(self._numbers)
            self._ends[number] = end
            return number

    def find(self, number: int) -> "Loopback | None":
        return self._ends.get(number)

    def leave(self, number: int) -> None:
        self._ends.pop(number, None)

    def start(self, job: _Job, deadline_s: float) -> None:
        """Accepts a list of writes, which begins when its event has happened."""
        with self.lock:
            self._waiting.append(job)
            self._schedule(self.now + deadline_s, lambda: self.abandon([job]), job)
            self.lock.notify_all()

    def end(self, job: _Job, state: WriteState) -> None:
        """Ends a list, unless it has already ended."""
        if job.state is WriteState.PENDING:
            job.state = state
            job.source.ended(job)

    def abandon(self, jobs: Iterable[_Job]) -> None:
        """Ends these lists as failed: quiesced if they have not begun, else unknown."""
        for job in list(jobs):
            if not job.begun:
                self._waiting.remove(job)
            self.end(job, WriteState.FAILED_UNKNOWN if job.begun else WriteState.FAILED_QUIESCED)

    def _run(self) -> None:
        with self.lock:
            while not self._stopped:
                self.advance(time.monotonic())
                due = self.next_due()
                until_due = None if due is None else min(max(0.0, due - time.monotonic()), MAX_WAIT_S)
                self.lock.wait(EVENT_POLL_S if self._waiting else until_due)

    def _schedule(self, at: float, action: Callable[[], object], job: _Job | None = None) -> None:
        heapq.heappush(self._due, _Due(at, next(self._numbers), action, job))

    def _ready(self) -> list[_Job]:
        return [job for job in self._waiting if job.after is None or job.after.query()]

    def _begin_ready(self) -> None:
        for job in self._ready():
            self._waiting.remove(job)
            self._begin(job)

    def _begin(self, job: _Job) -> None:
        job.begun = True
        merged = merge_registered(job.writes, job.source.regions, job.target.regions)
        if merged is None:
            log.error("a list of writes was refused: a write is not inside registered memory")
            self.end(job, WriteState.FAILED_QUIESCED)
            return
        job.source.meter.begin()
        job.metered = True
        faults = self.faults
        fate = self.fates.popleft() if self.fates else faults.fate(self._random)
        writes = self._split(merged, whole=fate is Fate.WRITTEN)
        if self._random.random() < faults.reorder:
            self._random.shuffle(writes)
        at = max(self._now, self.now) + self._random.uniform(*faults.delay_s)
        if self.speeds and len(merged):
            route = job.source.kind_at(merged[0, 0]), job.target.kind_at(merged[0, 1])
            if route not in self.speeds:
                self.end(job, WriteState.FAILED_QUIESCED)
                return
            at += job.nbytes / self.speeds[route]
            source, target = (
                end.regions.locate(merged[:, column], merged[:, 2])
                for column, end in enumerate((job.source, job.target))
            )
            for pair in np.unique(np.stack((source, target), axis=1), axis=0).tolist():
                kinds = job.source.regions[pair[0]].memory, job.target.regions[pair[1]].memory
                self.route_bytes[kinds] += int(merged[(source == pair[0]) & (target == pair[1]), 2].sum())
        if fate is Fate.WRITTEN:
            self._write(job, writes, at, faults)
        else:
            self._fail(job, fate, writes, at, faults)

    def _split(self, merged: Writes, *, whole: bool) -> list[_Write]:
        """Returns writes, each of which arrives all at once. Unless `whole`, every write is cut at a random byte (at
        byte 0: not at all), because an engine may fail in the middle of a write."""
        writes: list[_Write] = []
        for local, remote, nbytes in merged.tolist():
            first_bytes = 0 if whole else self._random.randrange(nbytes)
            writes += [(local, remote, first_bytes)] if first_bytes else []
            writes.append((local + first_bytes, remote + first_bytes, nbytes - first_bytes))
        return writes

    def _write(self, job: _Job, writes: list[_Write], at: float, faults: Faults) -> None:
        """Schedules the arrival of all bytes of a list."""
        if writes and self._random.random() < faults.duplicate:
            writes = writes + self._random.choices(writes, k=1 + len(writes) // 4)
        if writes and self._random.random() < faults.reorder:
            some = self._random.randrange(len(writes) + 1)
            early, writes = writes[:some], writes[some:]
            self._schedule(at, lambda: self._copy(job, early))
            at += self._random.uniform(*faults.delay_s)

        def finish() -> None:  # if this runs after the deadline, the bytes arrive late
            self.end(job, WriteState.DONE if self._copy(job, writes) else WriteState.FAILED_UNKNOWN)

        self._schedule(at, finish)

    def _fail(self, job: _Job, fate: Fate, writes: list[_Write], at: float, faults: Faults) -> None:
        """Schedules the arrival of some bytes of a list, and its failure. A SILENT list fails at its deadline."""
        some = self._random.randrange(len(writes)) if writes else 0
        self._schedule(at, lambda: self._copy(job, writes[:some]))
        if fate is not Fate.SILENT:
            state = WriteState.FAILED_QUIESCED if fate is Fate.CUT else WriteState.FAILED_UNKNOWN
            self._schedule(at, lambda: self.end(job, state), job)
        if fate is Fate.LATE:
            late = at + self._random.uniform(*faults.late_s)
            self._schedule(late, lambda: self._copy(job, writes[some:]))

    def _copy(self, job: _Job, writes: Iterable[_Write]) -> bool:
        """Copies the bytes. Returns False, and copies nothing, if an endpoint is closed: its memory may be freed."""
        if job.source.closed or job.target.closed:
            return False
        for local, remote, nbytes in writes:
            ctypes.memmove(remote, local, nbytes)
        return True


class Loopback:
    """Implements `Transfer` within one process. After `close` has returned, no byte is copied from or to this
    endpoint's memory."""

    name = "loopback"

    def __init__(self, hub: Hub, deadline_s: float = 30.0) -> None:
        self.regions = Regions()
        self.closed = False
        self._hub = hub
        self._deadline_s = deadline_s
        self.meter = Meter(lambda: hub.now)
        self._peers: dict[str, Loopback] = {}
        self._jobs: list[_Job] = []  # lists that have not ended
        self._number = hub.join(self)

    def register(self, region: Region) -> None:
        if region.memory is MemoryKind.DEVICE and not self._hub.speeds:
            raise StartupError("this hub simulates no GPU memory")
        self.regions.add(region)

    def kind_at(self, address: int) -> MemoryKind:
        (index,) = self.regions.locate(np.array([address]), np.array([1]))
        return self.regions[index].memory

    def describe(self) -> bytes:
        return Description(self.name, self.regions, b"%d:%d" % (id(self._hub), self._number)).encode()

    def connect(self, name: str, description: bytes) -> None:
        self.forget(name)
        hub, _, number = decode_description(description, self.name).native.partition(b":")
        with self._hub.lock:
            peer = self._hub.find(int(number)) if hub == b"%d" % id(self._hub) and number.isdigit() else None
            if peer is None:
                raise TransferError(f"peer {name!r} uses another hub, or is closed")
            self._peers[name] = peer

    def forget(self, name: str) -> None:
        with self._hub.lock:
            if self._peers.pop(name, None) is not None:
                self._hub.abandon(job for job in self._jobs if job.peer == name and not job.begun)

    def submit(self, peer: str, writes: Writes, after: DeviceEvent | None = None) -> WriteTicket:
        with self._hub.lock:
            nbytes = int(writes[:, 2].sum())
            target = self._peers.get(peer)
            if self.closed or target is None:
                return WriteTicket(nbytes, WriteState.FAILED_QUIESCED)
            job = _Job(peer, self, target, writes.copy(), nbytes, after)
            self._jobs.append(job)
            self._hub.start(job, self._deadline_s)
            return WriteTicket(nbytes, job)

    def poll(self, ticket: WriteTicket) -> WriteState:
        job: _Job | WriteState = ticket.handle
        return job.state if isinstance(job, _Job) else job

    def transport(self) -> str:
        return "memory of this process"

    def throughput(self) -> Throughput:
        return self.meter.read()

    def close(self) -> bool:
        with self._hub.lock:
            self.closed = True
            self._hub.abandon(self._jobs)
            self._hub.leave(self._number)
            self._peers.clear()
        return True

    def ended(self, job: _Job) -> None:
        """Records the end of a list. The hub calls it once for each list."""
        self._jobs.remove(job)
        if job.metered:
            self.meter.end(job.nbytes if job.state is WriteState.DONE else 0)
