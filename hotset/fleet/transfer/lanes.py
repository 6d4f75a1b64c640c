"""Implements `Transfer` with lanes: threads between `submit`, which never blocks, and a backend, which may block.

Every peer belongs to one lane. If the backend hangs in a call for one peer, only the peers of the same lane are
delayed. A lane does not wait for one list to end before it begins the next. Deadlines hold even while a lane hangs,
because `poll` enforces them.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hotset.base.errors import TransferError
from hotset.engine.ports import Throughput
from hotset.fleet.transfer.api import Meter, Region, Writes, WriteState, WriteTicket
from hotset.fleet.transfer.regions import Description, Regions, decode_description, merge_registered, split_writes
from hotset.schedule.handoffs import DeviceEvent

log = logging.getLogger(__name__)

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.00005, 0.001  # between polls of the backend without progress
CLOSE_S = 5.0  # time for the lanes' threads to end
DISCONNECT_WAIT_S = 0.5  # time for an earlier connection to a peer to be released before a new one is made


@dataclass(frozen=True, slots=True)
class Limits:
    """The maximum sizes with which a backend works well."""

    writes: int  # writes per post
    nbytes: int  # bytes per post
    write_nbytes: int  # bytes per write; longer writes are split
    in_flight: int  # writes in flight on one connection


class Backend(Protocol):
    """A library that writes between processes. `Lanes` turns it into a `Transfer`: `Lanes` adds deadlines, merges
    and splits writes, and tracks the states of lists.

    Calls for one peer come from one thread, except `connect`, and `disconnect` if the peer was forgotten or connected
    again during `connect`. Calls for different peers may come from different threads.
    """

    name: str
    limits: Limits

    def register(self, region: Region) -> None:
        """Registers memory. Raises StartupError if that fails."""

    def describe(self) -> bytes:
        """Returns the argument `native` for `connect` at a peer."""

    def connect(self, native: bytes, regions: Regions) -> Any:
        """Connects to a peer and returns the backend's handle for it. Peers with equal handles share a connection,
        to which `Limits.in_flight` applies. Raises TransferError if the peer cannot be reached, which may take seconds
        to find out."""

    def disconnect(self, remote: Any) -> None:
        """Releases a peer. Nothing is in flight to it, and nothing will be posted to it."""

    def post(self, remote: Any, writes: Writes) -> Any:
        """Begins to write, and returns a handle for `check`. If it raises TransferError, no byte is ever written."""

    def check(self, handle: Any) -> WriteState:
        """Returns the state of a post. It is not called again after it has returned a state other than PENDING."""

    def transport(self) -> str:
        """Returns the transports in use, as far as they are known."""

    def close(self) -> None:
        """Releases all resources. No other method is called afterwards. Idempotent."""


@dataclass(slots=True)
class _Connection:
    """One connection of the backend, which several peers may share."""

    writes: int = 0  # writes in flight; only the lane's thread changes this


@dataclass(slots=True, eq=False)
class _Peer:
    name: str
    regions: Regions
    remote: Any  # the backend's handle
    lane: "_Lane"
    connection: _Connection
    forgotten: bool = False
    reached: bool = False  # a list has ended as DONE
    disconnected: threading.Event = field(default_factory=threading.Event)  # set when the backend has released the peer


@dataclass(slots=True, eq=False)
class _Job:
    """A submitted list of writes. `state` and `posting` change under the lane's lock. Only the lane's thread changes
    the other fields."""

    peer: _Peer
    writes: Writes
    nbytes: int
    after: DeviceEvent | None
    deadline: float
    state: WriteState = WriteState.PENDING
    posting: bool = False  # a write of the list was posted, or is about to be
    merged: Writes | None = None  # the writes, merged and split; set when `after` has happened
    posted: int = 0  # number of merged writes posted so far
    posts: list[tuple[Any, int]] = field(default_factory=list)  # posts in flight: handle and number of writes
    failure: WriteState | None = None  # the worst failure so far, of a post or of the list itself


class _Lane:
    """One thread, and the lists of writes that it posts and checks."""

    def __init__(
        self, backend: Backend, regions: Regions, meter: Meter, name: str, use_device: Callable[[], None]
    ) -> None:
        self.peers: list[_Peer] = []
        self._use_device = use_device
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
        """Returns the number of peers that are not forgotten, and the number of lists. A new peer gets the lane with
        the least load."""
        return sum(not peer.forgotten for peer in self.peers), len(self._jobs)

    def add_peer(self, peer: _Peer) -> None:
        with self._changed:
            self.peers.append(peer)

    def connection(self, remote: Any) -> _Connection | None:
        """Returns the connection of a peer of this lane with this handle, or None if there is no such peer."""
        with self._changed:
            return next((peer.connection for peer in self.peers if peer.remote == remote), None)

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
        """Fails the peer's lists of which nothing was posted, and posts nothing more of its other lists. A list that
        was posted only in part fails when its posts have ended."""
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

    def join(self, seconds: float) -> bool:
        """Waits for the thread to end. Returns False if the backend still blocks it."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._use_device()
        pause = SHORTEST_PAUSE_S
        while True:
            with self._changed:
                if self._stopped:
                    return
                jobs = list(self._jobs)
                if not jobs and not any(peer.forgotten for peer in self.peers):
                    self._changed.wait()
                    continue
            progressed = [self._advance(job) for job in jobs]
            self._release_ended()
            pause = SHORTEST_PAUSE_S if any(progressed) else min(2 * pause, LONGEST_PAUSE_S)
            if not any(progressed):
                with self._changed:
                    self._changed.wait(pause)

    def _release_ended(self) -> None:
        """Removes lists that have ended and have nothing in flight, and forgotten peers without lists."""
        with self._changed:
            self._jobs = [job for job in self._jobs if job.state is WriteState.PENDING or job.posts]
            busy = {id(job.peer) for job in self._jobs}
            released = [peer for peer in self.peers if peer.forgotten and id(peer) not in busy]
            self.peers = [peer for peer in self.peers if peer not in released]
        for peer in released:
            try:
                self._backend.disconnect(peer.remote)
            except Exception as error:
                log.warning("could not disconnect from %s: %s", peer.name, error)
            peer.disconnected.set()

    def _advance(self, job: _Job) -> bool:
        """Begins, posts and checks writes of a list, as far as possible. Returns whether there was progress."""
        self.state(job)  # ends the list as failed if its deadline has passed
        try:
            progressed = self._begin(job) if job.merged is None else self._check(job)
            if job.merged is not None and job.failure is None:
                progressed |= self._post(job)
        except Exception:
            # The lane must survive any exception. FAILED_UNKNOWN keeps memory reserved that may still be written to.
            log.exception("a list of writes to %s failed", job.peer.name)
            job.failure = WriteState.FAILED_UNKNOWN if job.posting else WriteState.FAILED_QUIESCED
            progressed = True
        self._conclude(job)
        return progressed

    def _begin(self, job: _Job) -> bool:
        if job.state is not WriteState.PENDING or (job.after is not None and not job.after.query()):
            return False
        merged = merge_registered(job.writes, self._regions, job.peer.regions)
        if merged is None:
            log.error("a list of writes to %s was refused: a write is not inside registered memory", job.peer.name)
            job.failure = WriteState.FAILED_QUIESCED
            return True
        job.merged = split_writes(merged, self._backend.limits.write_nbytes)
        return True

    def _check(self, job: _Job) -> bool:
        pending: list[tuple[Any, int]] = []
        for handle, count in job.posts:
            state = self._state_of(handle)
            if state is WriteState.PENDING:
                pending.append((handle, count))
                continue
            job.peer.connection.writes -= count
            if state is not WriteState.DONE and job.failure is not WriteState.FAILED_UNKNOWN:
                job.failure = state
        progressed = len(pending) < len(job.posts)
        job.posts = pending
        return progressed

    def _state_of(self, handle: Any) -> WriteState:
        try:
            return self._backend.check(handle)
        except Exception as error:
            log.warning("%s: %s", self._backend.name, error)
            return WriteState.FAILED_UNKNOWN

    def _post(self, job: _Job) -> bool:
        """Posts the next writes of a list, unless too many are in flight."""
        assert job.merged is not None
        remaining, limits = job.merged[job.posted :], self._backend.limits
        fitting = int(np.searchsorted(np.cumsum(remaining[: limits.writes, 2]), limits.nbytes, side="right"))
        count = min(max(fitting, 1), len(remaining))
        in_flight = job.peer.connection.writes
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
            job.posts.append((self._backend.post(job.peer.remote, remaining[:count]), count))
        except TransferError as error:
            log.warning("writes to %s could not begin: %s", job.peer.name, error)
            job.failure = WriteState.FAILED_QUIESCED
            return True
        job.peer.connection.writes += count
        job.posted += count
        return True

    def _conclude(self, job: _Job) -> None:
        """Ends the list if its outcome is known."""
        if job.failure is WriteState.FAILED_UNKNOWN or (job.failure and not job.posts):
            state = job.failure
        elif job.merged is not None and job.posted == len(job.merged) and not job.posts:
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
    """Implements `Transfer` over a backend. A list fails `deadline_s` seconds after `submit`, unless it has ended."""

    def __init__(
        self, backend: Backend, lanes: int, deadline_s: float, use_device: Callable[[], None] = lambda: None
    ) -> None:
        """`use_device` is called in every thread before its first call of the backend."""
        self.name = backend.name
        self._use_device, self._prepared = use_device, threading.local()
        self._shared = backend
        self._deadline_s = deadline_s
        self._regions = Regions()
        self._meter = Meter()
        self._lanes = [
            _Lane(backend, self._regions, self._meter, f"{backend.name} lane {n}", use_device) for n in range(lanes)
        ]
        self._lock = threading.Lock()  # guards `_peers` and `_connecting`
        self._peers: dict[str, _Peer] = {}
        self._connecting: dict[str, object] = {}  # by name: identifies the newest `connect` call that is running
        self._closed = self._released = False

    @property
    def _backend(self) -> Backend:
        """The backend. Makes the device the current one of this thread first."""
        if not hasattr(self._prepared, "done"):
            self._use_device()
            self._prepared.done = True
        return self._shared

    def register(self, region: Region) -> None:
        Regions([*self._regions, region])  # raises if the region is invalid or overlaps another
        self._backend.register(region)
        self._regions.add(region)

    def describe(self) -> bytes:
        return Description(self.name, self._regions, self._backend.describe()).encode()

    def connect(self, name: str, description: bytes) -> None:
        previous, attempt = self._forget(name), object()
        decoded = decode_description(description, self.name)
        with self._lock:
            self._connecting[name] = attempt
        if previous is not None:
            # The backend may reuse a broken connection until it is released.
            previous.disconnected.wait(DISCONNECT_WAIT_S)
        try:
            remote = self._backend.connect(decoded.native, decoded.regions)
            with self._lock:
                superseded = self._connecting.get(name) is not attempt
                if not superseded:
                    self._add_peer(name, decoded.regions, remote)
        finally:
            with self._lock:
                if self._connecting.get(name) is attempt:
                    del self._connecting[name]
        if superseded:
            self._backend.disconnect(remote)
            raise TransferError(f"{name} was forgotten, or connected again, before this connect finished")

    def forget(self, name: str) -> None:
        self._forget(name)

    def submit(self, peer: str, writes: Writes, after: DeviceEvent | None = None) -> WriteTicket:
        nbytes = int(writes[:, 2].sum())
        target = self._peers.get(peer)
        if target is None:
            return WriteTicket(nbytes, WriteState.FAILED_QUIESCED)
        job = _Job(target, writes.copy(), nbytes, after, time.monotonic() + self._deadline_s)
        target.lane.add(job)
        return WriteTicket(nbytes, job)

    def poll(self, ticket: WriteTicket) -> WriteState:
        job: _Job | WriteState = ticket.handle
        return job.peer.lane.state(job) if isinstance(job, _Job) else job

    def transport(self) -> str:
        return self._backend.transport()

    def throughput(self) -> Throughput:
        return self._meter.read()

    def close(self) -> bool:
        with self._lock:
            if self._closed:
                return self._released
            self._closed = True
            self._connecting.clear()
            self._peers.clear()
        for lane in self._lanes:
            lane.stop()
        until = time.monotonic() + CLOSE_S
        joined = [lane.join(max(0.0, until - time.monotonic())) for lane in self._lanes]
        if not all(joined):
            log.warning("%s cannot be closed, because it blocks the thread of a lane", self.name)
            return False
        self._backend.close()
        self._released = True
        throughput = self.throughput()
        log.info("%s wrote %d bytes, %.2f GB/s", self.name, throughput.nbytes, throughput.gb_per_s)
        return True

    def _add_peer(self, name: str, regions: Regions, remote: Any) -> None:
        """Adds a peer. Peers with equal handles share one lane and one connection."""
        lane = min(self._lanes, key=lambda candidate: candidate.load)
        connection = _Connection()
        for candidate in self._lanes:
            if (known := candidate.connection(remote)) is not None:
                lane, connection = candidate, known
        peer = _Peer(name, regions, remote, lane, connection)
        lane.add_peer(peer)
        self._peers[name] = peer

    def _forget(self, name: str) -> _Peer | None:
        with self._lock:
            self._connecting.pop(name, None)
            peer = self._peers.pop(name, None)
        if peer is not None:
            peer.lane.forget(peer)
        return peer
