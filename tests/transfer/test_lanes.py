"""Lanes over a fake backend that hangs, raises and never ends, which a real one does not do on demand."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from hotset.base.errors import StartupError, TransferError
from hotset.transfer import lanes as lanes_module
from hotset.transfer.api import Region, Writes, WriteState, WriteTicket
from hotset.transfer.lanes import Lanes, Limits
from hotset.transfer.regions import Description, Regions, decode_description

NBYTES, POISON = 4096, 0xAB
SECONDS = 15.0  # a generous deadline: these events happen much sooner


@dataclass
class Remote:
    """How writes to one peer behave. `hang` blocks the lane's thread within `post` until the test sets it."""

    hang: threading.Event = field(default_factory=threading.Event)
    throws: Exception | None = None
    state: WriteState = WriteState.DONE  # of all its handles
    entered: int = 0  # calls of `post` that have begun
    posts: list[int] = field(default_factory=list)
    unended: int = 0
    most_unended: int = 0
    disconnected: bool = False


class TroubledWire:
    name = "troubled"
    limits = Limits(writes=4, nbytes=400, write_nbytes=300, in_flight=8)

    def __init__(self) -> None:
        self.remotes: dict[bytes, Remote] = {}
        self.closed = 0
        self.one_queue = False  # all connections to a peer share one
        self.slow = threading.Event()  # blocks `connect` until the test sets it
        self.slow.set()
        self.refuses = False

    def register(self, region: Region) -> None:
        if self.refuses:
            raise StartupError("no locked memory is left")

    def describe(self) -> bytes:
        return b""

    def connect(self, native: bytes, regions: Regions) -> Remote:
        self.slow.wait()
        if not self.one_queue or native not in self.remotes:
            self.remotes[native] = Remote()
            self.remotes[native].hang.set()
        return self.remotes[native]

    def disconnect(self, remote: Remote) -> None:
        assert self.one_queue or not remote.unended, "disconnected under writes"
        remote.disconnected = True

    def post(self, remote: Remote, writes: Writes) -> tuple[Remote, int]:
        assert len(writes) <= self.limits.writes and writes[:, 2].max() <= self.limits.write_nbytes
        assert len(writes) == 1 or writes[:, 2].sum() <= self.limits.nbytes
        remote.entered += 1
        remote.hang.wait()
        if remote.throws:
            raise remote.throws
        for here, there, nbytes in writes.tolist():
            ctypes.memmove(there, here, nbytes)
        remote.posts.append(len(writes))
        remote.unended += len(writes)
        remote.most_unended = max(remote.most_unended, remote.unended)
        return remote, len(writes)

    def check(self, handle: tuple[Remote, int]) -> WriteState:
        remote, count = handle
        if remote.state is not WriteState.PENDING:
            remote.unended -= count
        return remote.state

    def transport(self) -> str:
        return "trouble"

    def close(self) -> None:
        self.closed += 1


class Bench:
    def __init__(self, lanes: int, deadline_s: float) -> None:
        self.wire = TroubledWire()
        self.transfer = Lanes(self.wire, lanes, deadline_s)
        self.source = np.arange(NBYTES).astype(np.uint8) % POISON
        self.target = np.full(NBYTES, POISON, np.uint8)
        self.transfer.register(Region(self.source.ctypes.data, NBYTES))

    def connect(self, name: str) -> Remote:
        regions = Regions([Region(self.target.ctypes.data, NBYTES)])
        self.transfer.connect(name, Description("troubled", regions, name.encode()).encode())
        return self.wire.remotes[name.encode()]

    def submit(self, peer: str, count: int = 1, nbytes: int = 10) -> WriteTicket:
        """Returns `count` writes that cannot be merged."""
        starts = np.arange(count) * 2 * nbytes
        spans = np.stack([starts, starts, np.full(count, nbytes)], axis=1)
        addresses = np.array([self.source.ctypes.data, self.target.ctypes.data, 0])
        return self.transfer.submit(peer, spans + addresses)

    def expire(self, *tickets: WriteTicket) -> None:
        """Lets the deadlines of these lists pass now."""
        for ticket in tickets:
            ticket.handle.deadline = 0.0

    def ended(self, ticket: WriteTicket, seconds: float = SECONDS) -> WriteState:
        waited(lambda: self.transfer.poll(ticket) is not WriteState.PENDING, seconds)
        return self.transfer.poll(ticket)


def waited(condition: Callable[[], bool], seconds: float = SECONDS) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.001)
    return condition()


@pytest.fixture
def make() -> Iterator[Callable[[int, float], Bench]]:
    made: list[Bench] = []

    def make_one(lanes: int, deadline_s: float) -> Bench:
        made.append(Bench(lanes, deadline_s))
        return made[-1]

    yield make_one
    for bench in made:
        for remote in bench.wire.remotes.values():
            remote.hang.set()
        bench.transfer.close()
        # A write that hung continues later: the memory must live as long as its lane.
        assert all(lane.join(SECONDS) for lane in bench.transfer._lanes)


Make = Callable[[int, float], Bench]


def test_a_peer_on_which_the_engine_hangs_delays_no_other(make: Make) -> None:
    bench = make(4, SECONDS)
    stuck = bench.connect("stuck")
    others = ["a", "b", "c"]
    for name in others:
        bench.connect(name)
    stuck.hang.clear()
    held = bench.submit("stuck")
    assert [bench.ended(bench.submit(name)) for name in others] == [WriteState.DONE] * 3
    assert bench.transfer.poll(held) is WriteState.PENDING
    stuck.hang.set()
    assert bench.ended(held) is WriteState.DONE


def test_submit_and_poll_do_not_wait_for_a_lane_that_hangs(make: Make) -> None:
    bench = make(1, SECONDS)
    bench.connect("stuck").hang.clear()
    # The lane hangs until the test has ended, so a call that waited for it would never return.
    tickets = [bench.submit("stuck", 50) for _ in range(50)]
    assert {bench.transfer.poll(ticket) for ticket in tickets} == {WriteState.PENDING}


def test_the_deadline_holds_while_the_lane_hangs_and_what_had_not_begun_never_will(make: Make) -> None:
    bench = make(1, SECONDS)
    remote = bench.connect("stuck")
    remote.hang.clear()
    begun = bench.submit("stuck")
    assert waited(lambda: remote.entered == 1)
    behind = bench.submit("stuck", nbytes=20)
    bench.expire(begun, behind)
    assert bench.transfer.poll(begun) is WriteState.FAILED_UNKNOWN
    assert bench.transfer.poll(behind) is WriteState.FAILED_QUIESCED
    remote.hang.set()
    assert waited(lambda: len(remote.posts) == 1)
    time.sleep(0.05)
    assert remote.posts == [1], "a list that had failed as quiesced was written"
    assert [bench.transfer.poll(each) for each in (begun, behind)] == [
        WriteState.FAILED_UNKNOWN,
        WriteState.FAILED_QUIESCED,
    ]
    assert bench.ended(bench.submit("stuck")) is WriteState.DONE


def test_an_engine_that_refuses_has_written_nothing(make: Make) -> None:
    bench = make(1, SECONDS)
    remote = bench.connect("peer")
    remote.throws = TransferError("no")
    assert bench.ended(bench.submit("peer")) is WriteState.FAILED_QUIESCED
    remote.throws = None
    assert bench.ended(bench.submit("peer")) is WriteState.DONE


def test_defect_12_an_exception_of_the_backend_kills_no_lane_and_blocks_no_peer(make: Make) -> None:
    bench = make(1, SECONDS)
    remote = bench.connect("peer")
    remote.throws = RuntimeError("whatever")
    assert bench.ended(bench.submit("peer")) is WriteState.FAILED_UNKNOWN
    remote.throws = None
    assert bench.ended(bench.submit("peer")) is WriteState.DONE


def test_an_exception_of_an_event_fails_its_list_only(make: Make) -> None:
    class Broken:
        def query(self) -> bool:
            raise RuntimeError("no such device")

    bench = make(1, SECONDS)
    bench.connect("peer")
    writes = np.array([[bench.source.ctypes.data, bench.target.ctypes.data, 8]])
    assert bench.ended(bench.transfer.submit("peer", writes, after=Broken())) is WriteState.FAILED_QUIESCED
    assert bench.ended(bench.submit("peer")) is WriteState.DONE


@pytest.mark.parametrize("failure", [WriteState.FAILED_UNKNOWN, WriteState.FAILED_QUIESCED])
def test_a_failed_part_fails_its_list_and_nothing_more_of_it_is_posted(make: Make, failure: WriteState) -> None:
    bench = make(1, SECONDS)
    remote = bench.connect("peer")
    remote.state = WriteState.PENDING
    ticket = bench.submit("peer", 30)
    assert waited(lambda: sum(remote.posts) == 8)
    remote.state = failure
    assert bench.ended(ticket) is failure
    time.sleep(0.02)
    assert sum(remote.posts) == 8


def test_the_in_flight_limit_counts_abandoned_lists(make: Make) -> None:
    bench = make(1, SECONDS)
    remote = bench.connect("peer")
    remote.state = WriteState.PENDING
    first = bench.submit("peer", 30)
    assert waited(lambda: sum(remote.posts) == 8)
    bench.expire(first)
    assert bench.ended(first) is WriteState.FAILED_UNKNOWN
    second = bench.submit("peer", 30)
    time.sleep(0.05)
    assert sum(remote.posts) == 8, "the engine still holds those of the list that was given up"
    remote.state = WriteState.DONE
    assert bench.ended(second) is WriteState.DONE
    assert remote.most_unended == 8
    assert sum(remote.posts) == 38


def test_long_lists_and_long_writes_are_posted_in_pieces(make: Make) -> None:
    bench = make(1, SECONDS)
    bench.connect("peer")
    assert bench.ended(bench.submit("peer", 3, 650)) is WriteState.DONE
    expected = np.full(NBYTES, POISON, np.uint8)
    for start in (0, 1300, 2600):
        expected[start : start + 650] = bench.source[start : start + 650]
    assert np.array_equal(bench.target, expected)


def test_a_forgotten_peer_is_disconnected_when_its_writes_have_ended(make: Make) -> None:
    bench = make(1, SECONDS)
    remote = bench.connect("peer")
    remote.state = WriteState.PENDING
    ticket = bench.submit("peer", 30)
    assert waited(lambda: sum(remote.posts) == 8)
    bench.transfer.forget("peer")
    time.sleep(0.02)
    assert not remote.disconnected
    remote.state = WriteState.DONE
    assert bench.ended(ticket) is WriteState.FAILED_QUIESCED
    assert sum(remote.posts) == 8
    assert waited(lambda: remote.disconnected)


def test_a_peer_is_disconnected_before_it_is_connected_again(make: Make) -> None:
    """Otherwise a backend that identifies both would continue with a connection that may be broken."""
    bench = make(2, SECONDS)
    for _ in range(5):
        before = bench.connect("peer")
        assert bench.ended(bench.submit("peer")) is WriteState.DONE
        after = bench.connect("peer")
        assert before.disconnected and not after.disconnected


def test_a_peer_whose_writes_do_not_end_is_still_connected_again(make: Make) -> None:
    bench = make(2, SECONDS)
    before = bench.connect("peer")
    before.state = WriteState.PENDING
    held = bench.submit("peer")
    assert waited(lambda: bool(before.posts))
    bench.connect("peer")
    assert not before.disconnected
    assert bench.ended(bench.submit("peer")) is WriteState.DONE
    before.state = WriteState.DONE
    assert bench.ended(held) is WriteState.DONE
    assert waited(lambda: before.disconnected)


def test_the_in_flight_limit_holds_for_a_peer_that_is_connected_repeatedly(make: Make) -> None:
    bench = make(4, SECONDS)
    bench.wire.one_queue = True
    remote = bench.connect("peer")
    remote.state = WriteState.PENDING
    held = [bench.submit("peer", 30)]
    assert waited(lambda: sum(remote.posts) == 8)
    for _ in range(2):
        assert bench.connect("peer") is remote
        held.append(bench.submit("peer", 30))
    time.sleep(0.05)
    assert sum(remote.posts) == 8, "what the connection before still holds is not counted"
    remote.state = WriteState.DONE
    assert [bench.ended(each) for each in held] == [
        WriteState.FAILED_QUIESCED,
        WriteState.FAILED_QUIESCED,
        WriteState.DONE,
    ]
    assert remote.most_unended == 8


@pytest.mark.parametrize("by", ["forgotten", "connected anew"])
def test_a_superseded_connect_does_not_become_the_peer(make: Make, by: str) -> None:
    bench, failures = make(2, SECONDS), list[Exception]()
    bench.wire.slow.clear()

    def connect() -> None:
        try:
            bench.connect("peer")
        except TransferError as error:
            failures.append(error)

    first = threading.Thread(target=connect)
    first.start()
    assert waited(lambda: "peer" in bench.transfer._connecting)
    mark = bench.transfer._connecting["peer"]
    if by == "forgotten":
        bench.transfer.forget("peer")
        bench.wire.slow.set()
        first.join(SECONDS)
        assert bench.ended(bench.submit("peer")) is WriteState.FAILED_QUIESCED
    else:
        second = threading.Thread(target=connect)
        second.start()
        assert waited(lambda: bench.transfer._connecting["peer"] is not mark)
        bench.wire.slow.set()
        first.join(SECONDS)
        second.join(SECONDS)
        assert bench.ended(bench.submit("peer")) is WriteState.DONE
    assert len(failures) == 1 and "before it could be reached" in str(failures[0])
    assert not bench.transfer._connecting


def test_defect_12_a_failed_registration_is_reported_and_not_described(make: Make) -> None:
    bench = make(1, SECONDS)
    bench.connect("peer")
    bench.wire.refuses = True
    more = np.zeros(NBYTES, np.uint8)
    with pytest.raises(StartupError, match="no locked memory"):
        bench.transfer.register(Region(more.ctypes.data, NBYTES))
    assert len(decode_description(bench.transfer.describe(), "troubled").regions) == 1
    writes = np.array([[more.ctypes.data, bench.target.ctypes.data, 8]])
    assert bench.ended(bench.transfer.submit("peer", writes)) is WriteState.FAILED_QUIESCED


class Later:
    happened = False

    def query(self) -> bool:
        return self.happened


def test_defect_16_nothing_is_posted_before_its_event(make: Make) -> None:
    bench, event = make(1, SECONDS), Later()
    remote = bench.connect("peer")
    writes = np.array([[bench.source.ctypes.data, bench.target.ctypes.data, 8]])
    ticket = bench.transfer.submit("peer", writes, after=event)
    time.sleep(0.05)
    assert not remote.posts and bench.transfer.poll(ticket) is WriteState.PENDING
    event.happened = True
    assert bench.ended(ticket) is WriteState.DONE


def test_an_idle_lane_disconnects_a_forgotten_peer(make: Make) -> None:
    bench = make(1, SECONDS)
    remote = bench.connect("peer")
    bench.transfer.forget("peer")
    assert waited(lambda: remote.disconnected)


def test_closing_does_not_wait_for_a_lane_that_hangs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "CLOSE_S", 0.1)
    bench = make(2, SECONDS)
    remote = bench.connect("stuck")
    remote.hang.clear()
    ticket = bench.submit("stuck")
    assert waited(lambda: remote.entered == 1)
    bench.transfer.close()
    assert bench.transfer.poll(ticket) is WriteState.FAILED_UNKNOWN
    assert not bench.wire.closed, "the engine was closed under a thread that is in it"


def test_closing_closes_the_engine_once(make: Make) -> None:
    bench = make(2, SECONDS)
    bench.transfer.close()
    bench.transfer.close()
    assert bench.wire.closed == 1


def test_peers_are_spread_over_lanes(make: Make) -> None:
    """Of four peers on four lanes, no two wait for each other."""
    bench = make(4, SECONDS)
    remotes = {name: bench.connect(name) for name in "abcd"}
    for name, remote in remotes.items():
        remote.hang.clear()
        held = bench.submit(name)
        assert {bench.ended(bench.submit(other)) for other in remotes if other != name} == {WriteState.DONE}
        remote.hang.set()
        assert bench.ended(held) is WriteState.DONE
