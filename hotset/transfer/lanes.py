"""Lanes: threads between `submit`, which never waits, and an engine, which may.

Every peer belongs to one lane, so that a peer on which the engine hangs delays only those that share its lane; and a
lane does not wait for one list before it begins another. Deadlines hold even while a lane hangs: `poll` keeps them.
"""

import itertools
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hotset.base.errors import TransferError
from hotset.transfer.api import DeviceEvent, Meter, Region, Throughput, Writes, WriteState, WriteTicket
from hotset.transfer.regions import Description, Regions, cut, decode, runs_between

log = logging.getLogger(__name__)

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.00005, 0.001
CLOSE_S = 5.0
LET_GO_S = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine takes well."""

    writes: int  # in one post
    nbytes: int  # in one post
    write_nbytes: int  # in one write; longer ones are cut
    in_flight: int  # writes to one peer that have not ended


class Backend(Protocol):
    """Calls for one peer come from one thread; calls for several peers, from several."""

    name: str
    limits: Limits

    def register(self, region: Region) -> None:
        """StartupError if it cannot be."""

    def describe(self) -> bytes:
        """For `connect` on the other side."""

    def connect(self, native: bytes, regions: Regions) -> Any:
        """The peer, as the engine knows it; equal to another where the limits hold for both together. TransferError if
        it cannot be reached; that may take seconds to see."""

    def disconnect(self, remote: Any) -> None:
        """Nothing is in flight to it, and nothing will be."""

    def post(self, remote: Any, writes: Writes) -> Any:
        """Begins to write, and gives a handle for `check`. TransferError: not a byte has been or will be written."""

    def check(self, handle: Any) -> WriteState:
        """How it stands. A handle that is not pending any more is not shown again."""

    def transport(self) -> str:
        """What bytes travel over, as far as it is known by now."""

    def close(self) -> None:
        """Nobody calls any more. Idempotent."""


@dataclass(slots=True)
class _Flight:
    """What one connection of the engine's holds, whichever peers write over it."""

    writes: int = 0  # that have not ended; the lane's thread counts


@dataclass(slots=True, eq=False)
class _Peer:
    name: str
    regions: Regions
    remote: Any  # the engine's own
    lane: "_Lane"
    flight: _Flight
    forgotten: bool = False
    reached: bool = False
    gone: threading.Event = field(default_factory=threading.Event)  # the engine has been told to let go of it


@dataclass(slots=True, eq=False)
class _Job:
    """A submitted list. `state` and `posting` change under the lane's lock; the rest is the lane's thread's."""

    peer: _Peer
    writes: Writes
    nbytes: int
    after: DeviceEvent | None
    deadline: float
    state: WriteState = WriteState.PENDING
    posting: bool = False  # some of it has been given to the engine, or is about to be
    runs: Writes | None = None  # merged, once `after` has happened
    posted: int = 0  # runs given to the engine
    parts: list[tuple[Any, int]] = field(default_factory=list)  # in flight: handle and number of writes
    failure: WriteState | None = None  # the worst among the parts that have ended


class _Lane:
    """One thread and the lists that it drives."""

    def __init__(self, backend: Backend, regions: Regions, meter: Meter, name: str) -> None:
        self.peers: list[_Peer] = []
        self._backend = backend
        self._regions = regions
        self._meter = meter
        self._changed = threading.Condition()
        self._jobs: list[_Job] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def load(self) -> tuple[int, int]:
        return sum(not peer.forgotten for peer in self.peers), len(self._jobs)

    def adopt(self, peer: _Peer) -> None:
        with self._changed:
            self.peers.append(peer)

    def flight(self, remote: Any) -> _Flight | None:
        """What is under way to this very remote, if a peer here has it, or had it and writes are left."""
        with self._changed:
            return next((peer.flight for peer in self.peers if peer.remote == remote), None)

    def add(self, job: _Job) -> None:
        with self._changed:
            if self._stopped or job.peer.forgotten:
                job.state = WriteState.FAILED_QUIESCED
                return
            self._jobs.append(job)
            self._changed.notify()

    def state(self, job: _Job) -> WriteState:
        with self._changed:
            if job.state is WriteState.PENDING and time.monotonic() > job.deadline:
                self._end(job, WriteState.FAILED_UNKNOWN if job.posting else WriteState.FAILED_QUIESCED)
            return job.state

    def forget(self, peer: _Peer) -> None:
        """What the engine has of it goes on; what it has not is ended."""
        with self._changed:
            peer.forgotten = True
            for job in self._jobs:
                if job.peer is peer and not job.posting:
                    self._end(job, WriteState.FAILED_QUIESCED)
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            for job in self._jobs:
                self._end(job, WriteState.FAILED_UNKNOWN if job.posting else WriteState.FAILED_QUIESCED)
            self._changed.notify()

    def joined(self, seconds: float) -> bool:
        """The thread is no more. It may be held by the engine for longer than `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = SHORTEST_PAUSE_S
        while True:
            with self._changed:
                if self._stopped:
                    return
                jobs = list(self._jobs)
                if not jobs and not any(peer.forgotten for peer in self.peers):
                    self._changed.wait()
                    continue
            moved = [self._drive(job) for job in jobs]
            self._let_go()
            pause = SHORTEST_PAUSE_S if any(moved) else min(2 * pause, LONGEST_PAUSE_S)
            if not any(moved):
                with self._changed:
                    self._changed.wait(pause)

    def _let_go(self) -> None:
        """Drops lists of which nothing is in flight and nothing will be, then forgotten peers with no list left."""
        with self._changed:
            self._jobs = [job for job in self._jobs if job.state is WriteState.PENDING or job.parts]
            busy = {id(job.peer) for job in self._jobs}
            leaving = [peer for peer in self.peers if peer.forgotten and id(peer) not in busy]
            self.peers = [peer for peer in self.peers if peer not in leaving]
        for peer in leaving:
            try:
                self._backend.disconnect(peer.remote)
            except Exception as error:
                log.warning("could not disconnect from %s: %s", peer.name, error)
            peer.gone.set()

    def _drive(self, job: _Job) -> bool:
        """Does for a list what can be done now. True if anything was."""
        self.state(job)  # ends it if it is too late
        try:
            moved = self._begin(job) if job.runs is None else self._check(job)
            if job.runs is not None and job.failure is None:
                moved |= self._post(job)
        except Exception:
            # Whatever an engine or an event throws, the lane lives, and the pages stay under a possible writer.
            log.exception("a list of writes to %s failed", job.peer.name)
            job.failure = WriteState.FAILED_UNKNOWN if job.posting else WriteState.FAILED_QUIESCED
            moved = True
        self._conclude(job)
        return moved

    def _begin(self, job: _Job) -> bool:
        if job.state is not WriteState.PENDING or (job.after is not None and not job.after.query()):
            return False
        runs = runs_between(job.writes, self._regions, job.peer.regions)
        if runs is None:
            log.error("a list of writes to %s was refused: a part lies outside registered memory", job.peer.name)
            job.failure = WriteState.FAILED_QUIESCED
            return True
        job.runs = cut(runs, self._backend.limits.write_nbytes)
        return True

    def _check(self, job: _Job) -> bool:
        pending: list[tuple[Any, int]] = []
        for handle, count in job.parts:
            state = self._state_of(handle)
            if state is WriteState.PENDING:
                pending.append((handle, count))
                continue
            job.peer.flight.writes -= count
            if state is not WriteState.DONE and job.failure is not WriteState.FAILED_UNKNOWN:
                job.failure = state
        moved = len(pending) < len(job.parts)
        job.parts = pending
        return moved

    def _state_of(self, handle: Any) -> WriteState:
        try:
            return self._backend.check(handle)
        except Exception as error:
            log.warning("%s: %s", self._backend.name, error)
            return WriteState.FAILED_UNKNOWN

    def _post(self, job: _Job) -> bool:
        """Gives the engine the next of its runs, if it has room for them."""
        assert job.runs is not None
        rest, limits = job.runs[job.posted :], self._backend.limits
        fitting = int(np.searchsorted(np.cumsum(rest[: limits.writes, 2]), limits.nbytes, side="right"))
        count = min(max(fitting, 1), len(rest))
        in_flight = job.peer.flight.writes
        if not count or (in_flight and in_flight + count > limits.in_flight):
            return False
        with self._changed:
            if job.state is not WriteState.PENDING:
                return False
            if job.peer.forgotten:
                job.failure = WriteState.FAILED_QUIESCED
                return True
            if not job.posting:
                self._meter.begin()
            job.posting = True
        try:
            job.parts.append((self._backend.post(job.peer.remote, rest[:count]), count))
        except TransferError as error:
            log.warning("writes to %s could not begin: %s", job.peer.name, error)
            job.failure = WriteState.FAILED_QUIESCED
            return True
        job.peer.flight.writes += count
        job.posted += count
        return True

    def _conclude(self, job: _Job) -> None:
        if job.failure is WriteState.FAILED_UNKNOWN or (job.failure and not job.parts):
            state = job.failure
        elif job.runs is not None and job.posted == len(job.runs) and not job.parts:
            state = WriteState.DONE
        else:
            return
        with self._changed:
            self._end(job, state)
        if state is WriteState.DONE and not job.peer.reached:
            job.peer.reached = True
            speed = self._meter.read().gb_per_s
            log.info(
                "%s reaches %s over %s, %.2f GB/s so far",
                self._backend.name,
                job.peer.name,
                self._backend.transport(),
                speed,
            )

    def _end(self, job: _Job, state: WriteState) -> None:
        if job.state is WriteState.PENDING:
            job.state = state
            if job.posting:
                self._meter.end(job.nbytes if state is WriteState.DONE else 0)


class Lanes:
    """A `Transfer` over an engine. `deadline_s` counts from `submit`."""

    def __init__(self, backend: Backend, lanes: int = 4, deadline_s: float = 30.0) -> None:
        self.name = backend.name
        self._backend = backend
        self._deadline_s = deadline_s
        self._regions = Regions()
        self._meter = Meter()
        self._lanes = [_Lane(backend, self._regions, self._meter, f"{backend.name} lane {n}") for n in range(lanes)]
        self._lock = threading.Lock()  # over the peers
        self._peers: dict[str, _Peer] = {}
        self._connecting: dict[str, object] = {}  # by name, a mark of the call that may still become this peer
        self._tickets = itertools.count()
        self._closed = False

    def register(self, region: Region) -> None:
        Regions([*self._regions, region])
        self._backend.register(region)
        self._regions.add(region)

    def describe(self) -> bytes:
        return Description(self.name, self._regions, self._backend.describe()).encode()

    def connect(self, name: str, description: bytes) -> None:
        before, mine = self._forget(name), object()
        found = decode(description, self.name)
        with self._lock:
            self._connecting[name] = mine
        if before is not None:
            before.gone.wait(LET_GO_S)  # an engine may keep a broken connection for as long as anybody has it
        try:
            remote = self._backend.connect(found.native, found.regions)
            with self._lock:
                overtaken = self._connecting.get(name) is not mine
                if not overtaken:
                    self._adopt(name, found.regions, remote)
        finally:
            with self._lock:
                if self._connecting.get(name) is mine:
                    del self._connecting[name]
        if overtaken:
            self._backend.disconnect(remote)
            raise TransferError(f"{name} was forgotten, or connected anew, before it could be reached")

    def forget(self, name: str) -> None:
        self._forget(name)

    def submit(self, peer: str, writes: Writes, after: DeviceEvent | None = None) -> WriteTicket:
        nbytes = int(writes[:, 2].sum())
        found = self._peers.get(peer)
        if found is None:
            return WriteTicket(next(self._tickets), nbytes, WriteState.FAILED_QUIESCED)
        job = _Job(found, writes.copy(), nbytes, after, time.monotonic() + self._deadline_s)
        found.lane.add(job)
        return WriteTicket(next(self._tickets), nbytes, job)

    def poll(self, ticket: WriteTicket) -> WriteState:
        found: _Job | WriteState = ticket.handle
        return found.peer.lane.state(found) if isinstance(found, _Job) else found

    def transport(self) -> str:
        return self._backend.transport()

    def throughput(self) -> Throughput:
        return self._meter.read()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._connecting.clear()
            self._peers.clear()
        for lane in self._lanes:
            lane.stop()
        until = time.monotonic() + CLOSE_S
        joined = [lane.joined(max(0.0, until - time.monotonic())) for lane in self._lanes]
        if not all(joined):
            log.warning("%s is not closed: it still holds a lane", self.name)
            return
        self._backend.close()
        throughput = self.throughput()
        log.info("%s wrote %d bytes, %.2f GB/s", self.name, throughput.nbytes, throughput.gb_per_s)

    def _adopt(self, name: str, regions: Regions, remote: Any) -> None:
        """What the engine knows as one and the same stays on its lane, and is counted together."""
        lane = min(self._lanes, key=lambda each: each.load)
        flight = _Flight()
        for each in self._lanes:
            if (under_way := each.flight(remote)) is not None:
                lane, flight = each, under_way
        peer = _Peer(name, regions, remote, lane, flight)
        lane.adopt(peer)
        self._peers[name] = peer

    def _forget(self, name: str) -> _Peer | None:
        with self._lock:
            self._connecting.pop(name, None)
            peer = self._peers.pop(name, None)
        if peer is not None:
            peer.lane.forget(peer)
        return peer
