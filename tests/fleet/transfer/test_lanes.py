"""Tests of lanes over a fake backend that blocks, raises exceptions, and leaves writes pending.

A real backend does not produce these faults on demand. The numbers in names like `test_defect_12_…` refer to the
defects in scripts/sabotage.d.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

from hotset.base.errors import StartupError, TransferError
from hotset.fleet.transfer import lanes as lanes_module
from hotset.fleet.transfer.api import Region, Writes, WriteState, WriteTicket
from hotset.fleet.transfer.lanes import Lanes, Limits
from hotset.fleet.transfer.regions import Description, Regions, decode_description

NBYTES, POISON = 4096, 0xAB
BACKEND_METHODS = ("register", "describe", "connect", "disconnect", "post", "check", "close")
SECONDS = 15.0  # upper limit of every wait; what the tests wait for happens much sooner


@dataclass
class Remote:
    """The backend's handle of one peer. It sets how writes to this peer behave, and counts them."""

    may_post: threading.Event = field(default_factory=threading.Event)  # `post` blocks until it is set
    error: Exception | None = None  # raised by `post`
    state: WriteState = WriteState.DONE  # the state that `check` returns for every post
    posts_begun: int = 0  # calls of `post`, including those that are blocked
    posts: list[int] = field(default_factory=list)  # number of writes in each post that has returned
    in_flight: int = 0  # writes that were posted and have not ended
    most_in_flight: int = 0
    disconnected: bool = False


class FaultyBackend:
    """A backend that copies memory within the process, with faults that the test sets."""

    name = "faulty"
    limits = Limits(writes=4, nbytes=400, write_nbytes=300, in_flight=8)

    def __init__(self) -> None:
        self.device = threading.local()  # has a value in threads that have made the device their current one
        self.called_without_device: list[str] = []  # methods
        self.remotes: dict[bytes, Remote] = {}
        self.closed = 0
        self.reuse_remotes = False  # whether connecting again to a peer returns the same `Remote`
        self.may_connect = threading.Event()  # `connect` blocks until it is set
        self.may_connect.set()
        self.refuse_registration = False

    def use_device(self) -> None:
        self.device.used = True

    def __getattribute__(self, name: str) -> Any:
        if name in BACKEND_METHODS and not hasattr(self.device, "used"):
            self.called_without_device.append(name)
        return object.__getattribute__(self, name)

    def register(self, region: Region) -> None:
        if self.refuse_registration:
            raise StartupError("no locked memory is left")

    def describe(self) -> bytes:
        return b""

    def connect(self, native: bytes, regions: Regions) -> Remote:
        self.may_connect.wait()
        if not self.reuse_remotes or native not in self.remotes:
            self.remotes[native] = Remote()
            self.remotes[native].may_post.set()
        return self.remotes[native]

    def disconnect(self, remote: Remote) -> None:
        assert self.reuse_remotes or not remote.in_flight, "disconnected while writes were in flight"
        remote.disconnected = True

    def post(self, remote: Remote, writes: Writes) -> tuple[Remote, int]:
        assert len(writes) <= self.limits.writes and writes[:, 2].max() <= self.limits.write_nbytes
        assert len(writes) == 1 or writes[:, 2].sum() <= self.limits.nbytes
        remote.posts_begun += 1
        remote.may_post.wait()
        if remote.error:
            raise remote.error
        for local, remote_address, nbytes in writes.tolist():
            ctypes.memmove(remote_address, local, nbytes)
        remote.posts.append(len(writes))
        remote.in_flight += len(writes)
        remote.most_in_flight = max(remote.most_in_flight, remote.in_flight)
        return remote, len(writes)

    def check(self, handle: tuple[Remote, int]) -> WriteState:
        remote, count = handle
        if remote.state is not WriteState.PENDING:
            remote.in_flight -= count
        return remote.state

    def transport(self) -> str:
        return "memory of this process"

    def close(self) -> None:
        self.closed += 1


class Bench:
    """Lanes over a faulty backend, with source memory and one target that all peers share."""

    def __init__(self, lanes: int) -> None:
        self.backend = FaultyBackend()
        self.transfer = Lanes(self.backend, lanes, SECONDS, self.backend.use_device)
        self.source = np.arange(NBYTES).astype(np.uint8) % POISON
        self.target = np.full(NBYTES, POISON, np.uint8)
        self.transfer.register(Region(self.source.ctypes.data, NBYTES))

    def connect(self, name: str) -> Remote:
        regions = Regions([Region(self.target.ctypes.data, NBYTES)])
        self.transfer.connect(name, Description("faulty", regions, name.encode()).encode())
        return self.backend.remotes[name.encode()]

    def submit(self, peer: str, count: int = 1, nbytes: int = 10) -> WriteTicket:
        """Submits one list of `count` writes that cannot be merged, and returns its ticket."""
        starts = np.arange(count) * 2 * nbytes
        spans = np.stack([starts, starts, np.full(count, nbytes)], axis=1)
        addresses = np.array([self.source.ctypes.data, self.target.ctypes.data, 0])
        return self.transfer.submit(peer, spans + addresses)

    def expire(self, *tickets: WriteTicket) -> None:
        """Moves the deadlines of these lists into the past."""
        for ticket in tickets:
            ticket.handle.deadline = 0.0

    def wait_for_end(self, ticket: WriteTicket, seconds: float = SECONDS) -> WriteState:
        """Returns the final state of a list, or PENDING if it has not ended after `seconds`."""
        wait_until(lambda: self.transfer.poll(ticket) is not WriteState.PENDING, seconds)
        return self.transfer.poll(ticket)


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(lanes: int = 1) -> Bench:
        benches.append(Bench(lanes))
        return benches[-1]

    yield make
    for bench in benches:
        for remote in bench.backend.remotes.values():
            remote.may_post.set()
        bench.transfer.close()
        # A blocked write continues now, so the memory must live until the threads of the lanes have ended.
        assert all(lane.join(SECONDS) for lane in bench.transfer._lanes)
        assert not bench.backend.called_without_device, "a thread did not make the device its current one"


MakeBench = Callable[..., Bench]


def test_every_thread_makes_the_device_its_current_one_before_it_calls_the_backend(make_bench: MakeBench) -> None:
    """The lane's thread posts, checks and disconnects. Of the others, each calls one method of the endpoint. The
    fixture checks this for the calls of all tests."""
    bench = make_bench()
    calls: list[Callable[[], object]] = [
        bench.transfer.describe,
        lambda: bench.transfer.register(Region(1, 1)),
        lambda: bench.wait_for_end(bench.submit("peer")) if bench.connect("peer") else None,
        bench.transfer.close,
    ]
    for call in calls:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(SECONDS)
    assert bench.backend.closed and bench.backend.remotes[b"peer"].posts == [1]


def test_submit_and_poll_do_not_wait_for_a_lane_that_hangs(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.connect("stuck").may_post.clear()
    # The lane hangs until the end of the test, so a call that waited for the lane would never return.
    tickets = [bench.submit("stuck", 50) for _ in range(50)]
    assert {bench.transfer.poll(ticket) for ticket in tickets} == {WriteState.PENDING}


def test_lists_fail_at_their_deadline_while_the_lane_hangs_and_an_unposted_list_is_never_posted(
    make_bench: MakeBench,
) -> None:
    bench = make_bench()
    remote = bench.connect("stuck")
    remote.may_post.clear()
    posting = bench.submit("stuck")
    assert wait_until(lambda: remote.posts_begun == 1)
    queued = bench.submit("stuck", nbytes=20)
    bench.expire(posting, queued)
    assert bench.transfer.poll(posting) is WriteState.FAILED_UNKNOWN
    assert bench.transfer.poll(queued) is WriteState.FAILED_QUIESCED
    remote.may_post.set()
    assert wait_until(lambda: len(remote.posts) == 1)
    time.sleep(0.05)
    assert remote.posts == [1], "a list that had failed as quiesced was posted"
    assert [bench.transfer.poll(ticket) for ticket in (posting, queued)] == [
        WriteState.FAILED_UNKNOWN,
        WriteState.FAILED_QUIESCED,
    ]
    assert bench.wait_for_end(bench.submit("stuck")) is WriteState.DONE


def test_a_list_that_the_backend_refuses_fails_as_quiesced_and_the_next_is_written(make_bench: MakeBench) -> None:
    bench = make_bench()
    remote = bench.connect("peer")
    remote.error = TransferError("refused")
    assert bench.wait_for_end(bench.submit("peer")) is WriteState.FAILED_QUIESCED
    remote.error = None
    assert bench.wait_for_end(bench.submit("peer")) is WriteState.DONE


def test_defect_12_a_lane_and_its_peers_survive_an_exception_of_the_backend(make_bench: MakeBench) -> None:
    bench = make_bench()
    remote = bench.connect("peer")
    remote.error = RuntimeError("unexpected")
    assert bench.wait_for_end(bench.submit("peer")) is WriteState.FAILED_UNKNOWN
    remote.error = None
    assert bench.wait_for_end(bench.submit("peer")) is WriteState.DONE


def test_an_exception_of_an_event_fails_only_the_list_that_waits_for_it(make_bench: MakeBench) -> None:
    class BrokenEvent:
        def query(self) -> bool:
            raise RuntimeError("no such device")

    bench = make_bench()
    bench.connect("peer")
    writes = np.array([[bench.source.ctypes.data, bench.target.ctypes.data, 8]])
    assert bench.wait_for_end(bench.transfer.submit("peer", writes, after=BrokenEvent())) is WriteState.FAILED_QUIESCED
    assert bench.wait_for_end(bench.submit("peer")) is WriteState.DONE


@pytest.mark.parametrize("failure", [WriteState.FAILED_UNKNOWN, WriteState.FAILED_QUIESCED])
def test_a_failed_post_fails_its_list_and_the_rest_of_the_list_is_not_posted(
    make_bench: MakeBench, failure: WriteState
) -> None:
    bench = make_bench()
    remote = bench.connect("peer")
    remote.state = WriteState.PENDING
    ticket = bench.submit("peer", 30)
    assert wait_until(lambda: sum(remote.posts) == 8)
    remote.state = failure
    assert bench.wait_for_end(ticket) is failure
    time.sleep(0.02)
    assert sum(remote.posts) == 8


def test_the_in_flight_limit_counts_posted_writes_of_lists_that_reached_their_deadline(make_bench: MakeBench) -> None:
    bench = make_bench()
    remote = bench.connect("peer")
    remote.state = WriteState.PENDING
    first = bench.submit("peer", 30)
    assert wait_until(lambda: sum(remote.posts) == 8)
    bench.expire(first)
    assert bench.wait_for_end(first) is WriteState.FAILED_UNKNOWN
    second = bench.submit("peer", 30)
    time.sleep(0.05)
    assert sum(remote.posts) == 8, (
        "the eight writes of the first list are still in flight at the backend and were not counted"
    )
    remote.state = WriteState.DONE
    assert bench.wait_for_end(second) is WriteState.DONE
    assert remote.most_in_flight == 8
    assert sum(remote.posts) == 38


def test_lists_and_writes_above_the_limits_of_the_backend_are_split(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.connect("peer")
    assert bench.wait_for_end(bench.submit("peer", 3, 650)) is WriteState.DONE
    expected = np.full(NBYTES, POISON, np.uint8)
    for start in (0, 1300, 2600):
        expected[start : start + 650] = bench.source[start : start + 650]
    assert np.array_equal(bench.target, expected)


def test_a_forgotten_peer_is_disconnected_when_its_writes_have_ended(make_bench: MakeBench) -> None:
    bench = make_bench()
    remote = bench.connect("peer")
    remote.state = WriteState.PENDING
    ticket = bench.submit("peer", 30)
    assert wait_until(lambda: sum(remote.posts) == 8)
    bench.transfer.forget("peer")
    time.sleep(0.02)
    assert not remote.disconnected
    remote.state = WriteState.DONE
    assert bench.wait_for_end(ticket) is WriteState.FAILED_QUIESCED
    assert sum(remote.posts) == 8
    assert wait_until(lambda: remote.disconnected)


def test_a_peer_is_disconnected_before_it_is_connected_again(make_bench: MakeBench) -> None:
    """Otherwise a backend that keeps one connection per peer would reuse the old one, which may be broken."""
    bench = make_bench(2)
    for _ in range(5):
        before = bench.connect("peer")
        assert bench.wait_for_end(bench.submit("peer")) is WriteState.DONE
        after = bench.connect("peer")
        assert before.disconnected and not after.disconnected


def test_a_peer_is_connected_again_even_if_writes_to_it_do_not_end(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    before = bench.connect("peer")
    before.state = WriteState.PENDING
    held = bench.submit("peer")
    assert wait_until(lambda: bool(before.posts))
    bench.connect("peer")
    assert not before.disconnected
    assert bench.wait_for_end(bench.submit("peer")) is WriteState.DONE
    before.state = WriteState.DONE
    assert bench.wait_for_end(held) is WriteState.DONE
    assert wait_until(lambda: before.disconnected)


def test_the_in_flight_limit_includes_writes_posted_before_the_peer_was_connected_again(make_bench: MakeBench) -> None:
    bench = make_bench(4)
    bench.backend.reuse_remotes = True
    remote = bench.connect("peer")
    remote.state = WriteState.PENDING
    held = [bench.submit("peer", 30)]
    assert wait_until(lambda: sum(remote.posts) == 8)
    for _ in range(2):
        assert bench.connect("peer") is remote
        held.append(bench.submit("peer", 30))
    time.sleep(0.05)
    assert sum(remote.posts) == 8, "writes in flight from before the second connect were not counted"
    remote.state = WriteState.DONE
    assert [bench.wait_for_end(ticket) for ticket in held] == [
        WriteState.FAILED_QUIESCED,
        WriteState.FAILED_QUIESCED,
        WriteState.DONE,
    ]
    assert remote.most_in_flight == 8


@pytest.mark.parametrize("superseded_by", ["forget", "second connect"])
def test_a_superseded_connect_does_not_become_the_peer(make_bench: MakeBench, superseded_by: str) -> None:
    bench, failures = make_bench(2), list[Exception]()
    bench.backend.may_connect.clear()

    def connect() -> None:
        try:
            bench.connect("peer")
        except TransferError as error:
            failures.append(error)

    first = threading.Thread(target=connect)
    first.start()
    assert wait_until(lambda: "peer" in bench.transfer._connecting)
    first_attempt = bench.transfer._connecting["peer"]
    if superseded_by == "forget":
        bench.transfer.forget("peer")
        bench.backend.may_connect.set()
        first.join(SECONDS)
        assert bench.wait_for_end(bench.submit("peer")) is WriteState.FAILED_QUIESCED
    else:
        second = threading.Thread(target=connect)
        second.start()
        assert wait_until(lambda: bench.transfer._connecting.get("peer") not in (None, first_attempt))
        bench.backend.may_connect.set()
        first.join(SECONDS)
        second.join(SECONDS)
        assert bench.wait_for_end(bench.submit("peer")) is WriteState.DONE
    assert len(failures) == 1 and "before this connect finished" in str(failures[0])
    assert not bench.transfer._connecting


def test_defect_12_a_failed_registration_raises_and_its_memory_is_not_described_to_peers(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.connect("peer")
    bench.backend.refuse_registration = True
    unregistered = np.zeros(NBYTES, np.uint8)
    with pytest.raises(StartupError, match="no locked memory"):
        bench.transfer.register(Region(unregistered.ctypes.data, NBYTES))
    assert len(decode_description(bench.transfer.describe(), "faulty").regions) == 1
    writes = np.array([[unregistered.ctypes.data, bench.target.ctypes.data, 8]])
    assert bench.wait_for_end(bench.transfer.submit("peer", writes)) is WriteState.FAILED_QUIESCED


def test_an_idle_lane_disconnects_a_forgotten_peer(make_bench: MakeBench) -> None:
    bench = make_bench()
    remote = bench.connect("peer")
    bench.transfer.forget("peer")
    assert wait_until(lambda: remote.disconnected)


def test_closing_does_not_wait_longer_than_its_limit_for_a_lane_that_hangs(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_module, "CLOSE_S", 0.1)
    bench = make_bench(2)
    remote = bench.connect("stuck")
    remote.may_post.clear()
    ticket = bench.submit("stuck")
    assert wait_until(lambda: remote.posts_begun == 1)
    bench.transfer.close()
    assert bench.transfer.poll(ticket) is WriteState.FAILED_UNKNOWN
    assert not bench.backend.closed, "the backend was closed while a thread was inside it"


def test_closing_twice_closes_the_backend_once(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    bench.transfer.close()
    bench.transfer.close()
    assert bench.backend.closed == 1


def test_peers_are_spread_over_lanes(make_bench: MakeBench) -> None:
    """Four peers on four lanes: while the backend hangs on one peer, lists to the other three end."""
    bench = make_bench(4)
    remotes = {name: bench.connect(name) for name in "abcd"}
    for name, remote in remotes.items():
        remote.may_post.clear()
        held = bench.submit(name)
        assert {bench.wait_for_end(bench.submit(other_name)) for other_name in remotes if other_name != name} == {
            WriteState.DONE
        }
        remote.may_post.set()
        assert bench.wait_for_end(held) is WriteState.DONE
