"""Tests of the contract that every transfer engine fulfils: loopback, and NIXL and Mooncake between processes.

The numbers in names like `test_defect_16_…` refer to the defects in scripts/sabotage.d.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from far_end import NBYTES, POISON, FarLoopback, FarProcess, wait_for_end
from loopback import Hub, Loopback
from waiting import ManualEvent

from hotset.base.errors import StartupError, TransferError
from hotset.fleet.transfer.api import Region, Transfer, WriteState, WriteTicket
from hotset.fleet.transfer.engines import TransferSettings

DEADLINE_S = 10.0
FAILED = (WriteState.FAILED_QUIESCED, WriteState.FAILED_UNKNOWN)

Far = FarProcess | FarLoopback


@dataclass
class Bench:
    """This process's endpoint with its memory, and the far endpoints that a test has opened."""

    engine: str
    hub: Hub
    transfer: Transfer
    memory: np.ndarray
    opened: list[Far] = field(default_factory=list)
    far: Far = field(init=False)  # the first far endpoint, always connected under the name 'far'

    def __post_init__(self) -> None:
        self.far = self.open_far()
        self.transfer.connect("far", self.far.description)

    def open_far(self) -> Far:
        self.opened.append(FarLoopback(self.hub) if self.engine == "loopback" else FarProcess(self.engine))
        return self.opened[-1]

    def writes(self, spans: np.ndarray, far: Far | None = None) -> np.ndarray:
        """Returns spans [n, 3] of local offsets, remote offsets and bytes as writes between addresses."""
        return spans.astype(np.int64) + np.array([self.memory.ctypes.data, (far or self.far).address, 0])

    def wait_for_end(self, ticket: WriteTicket, seconds: float = DEADLINE_S + 1) -> WriteState:
        return wait_for_end(self.transfer, ticket, seconds)

    def send(self, spans: np.ndarray, peer: str = "far", far: Far | None = None) -> WriteState:
        """Submits the spans as one list and waits for its end."""
        return self.wait_for_end(self.transfer.submit(peer, self.writes(spans, far)))

    def expected(self, spans: np.ndarray) -> np.ndarray:
        """Returns the far memory that is expected after these spans were written into poisoned memory."""
        target = np.full(NBYTES, POISON, np.uint8)
        for local, remote, nbytes in spans.tolist():
            target[remote : remote + nbytes] = self.memory[local : local + nbytes]
        return target


def open_endpoint(engine: str, hub: Hub, deadline_s: float) -> Transfer:
    if engine == "loopback":
        return Loopback(hub, deadline_s=deadline_s)
    return TransferSettings(engine, deadline_s=deadline_s, lanes=2).open()


def open_bench(engine: str) -> Bench:
    hub = Hub(threaded=True)
    transfer = open_endpoint(engine, hub, DEADLINE_S)
    memory = np.zeros(NBYTES, np.uint8)
    transfer.register(Region(memory.ctypes.data, NBYTES))
    return Bench(engine, hub, transfer, memory)


@pytest.fixture(scope="module", params=["loopback", "nixl", "mooncake"])
def shared(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = open_bench(request.param)
    yield bench
    for far in bench.opened:
        far.close()
    bench.transfer.close()
    bench.hub.close()


@pytest.fixture
def bench(shared: Bench) -> Iterator[Bench]:
    """Yields the shared bench with random local and poisoned far memory. Closes the endpoints that the test opened."""
    shared.memory[:] = np.random.default_rng(1).integers(0, 256, NBYTES, np.uint8)
    shared.far.poison()
    yield shared
    while len(shared.opened) > 1:
        shared.opened.pop().close()


def random_spans(seed: int, count: int, longest: int) -> np.ndarray:
    """Returns spans in random order, with random sources and with gaps between their targets."""
    random = np.random.default_rng(seed)
    nbytes = random.integers(1, longest + 1, count)
    gaps = random.integers(1, 1 + (NBYTES - nbytes.sum()) // (count + 1), count)
    remote = np.cumsum(gaps) + np.cumsum(nbytes) - nbytes
    local = random.integers(0, NBYTES - nbytes)
    return random.permutation(np.stack([local, remote, nbytes], axis=1))


@pytest.mark.parametrize(("count", "longest"), [(1, 1), (1, NBYTES // 2), (7, 400_000), (300, 9_000), (4500, 700)])
def test_after_done_every_byte_has_arrived_and_no_other_byte_has_changed(
    bench: Bench, count: int, longest: int
) -> None:
    for seed in range(2):
        bench.far.poison()
        spans = random_spans(seed, count, longest)
        assert bench.send(spans) is WriteState.DONE
        found, expected = bench.far.read(), bench.expected(spans)
        assert np.array_equal(found, expected), f"bytes {np.flatnonzero(found != expected)[:8]}… differ"


@pytest.mark.parametrize("nbytes", [1, 64 << 10, 3 << 20])
def test_the_last_byte_is_visible_at_done(bench: Bench, nbytes: int) -> None:
    """An engine that reported DONE as soon as its own socket had accepted the bytes would fail here."""
    for round_ in range(20):
        bench.memory[:nbytes] = round_
        assert bench.send(np.array([[0, 4096, nbytes]])) is WriteState.DONE
        assert bench.far.read(4096 + nbytes - 1, 4096 + nbytes).tolist() == [round_]


@pytest.mark.parametrize("shuffled", [None, 0, 1], ids=["both sides", "targets", "sources"])
def test_writes_that_are_adjacent_on_both_sides_or_on_one_arrive(bench: Bench, shuffled: int | None) -> None:
    spans = np.stack([np.arange(500) * 1000, 4096 + np.arange(500) * 1000, np.full(500, 1000)], axis=1)
    if shuffled is not None:
        spans[:, shuffled] = np.random.default_rng(shuffled).permutation(spans[:, shuffled])
    assert bench.send(spans) is WriteState.DONE
    assert np.array_equal(bench.far.read(), bench.expected(spans))


def test_an_empty_list_is_done(bench: Bench) -> None:
    assert bench.send(np.empty((0, 3), np.int64)) is WriteState.DONE
    assert bench.send(np.array([[0, 0, 0]])) is WriteState.DONE
    assert (bench.far.read() == POISON).all()


def test_defect_16_source_memory_is_not_read_before_the_event_of_its_list(bench: Bench) -> None:
    spans, event = random_spans(5, 40, 5000), ManualEvent()
    ticket = bench.transfer.submit("far", bench.writes(spans), after=event)
    time.sleep(0.1)
    assert bench.transfer.poll(ticket) is WriteState.PENDING
    assert (bench.far.read() == POISON).all()
    bench.memory[:] = np.random.default_rng(2).integers(0, 256, NBYTES, np.uint8)
    event.happened = True
    assert bench.wait_for_end(ticket) is WriteState.DONE
    assert np.array_equal(bench.far.read(), bench.expected(spans))


def test_a_list_that_waits_for_its_event_does_not_delay_other_lists(bench: Bench) -> None:
    event = ManualEvent()
    waiting = bench.transfer.submit("far", bench.writes(np.array([[0, 0, 100]])), after=event)
    assert bench.send(np.array([[0, 200, 100]])) is WriteState.DONE
    assert bench.transfer.poll(waiting) is WriteState.PENDING
    event.happened = True
    assert bench.wait_for_end(waiting) is WriteState.DONE


def test_a_list_whose_event_never_happens_fails_at_the_deadline_with_nothing_written(bench: Bench) -> None:
    impatient = open_endpoint(bench.engine, bench.hub, 0.3)
    impatient.register(Region(bench.memory.ctypes.data, NBYTES))
    impatient.connect("far", bench.far.description)
    ticket = impatient.submit("far", bench.writes(np.array([[0, 0, 100]])), after=ManualEvent())
    assert wait_for_end(impatient, ticket) is WriteState.FAILED_QUIESCED
    assert (bench.far.read() == POISON).all()
    impatient.close()


def test_the_array_of_writes_may_be_reused_at_once(bench: Bench) -> None:
    spans = random_spans(6, 500, 2000)
    writes = bench.writes(spans)
    ticket = bench.transfer.submit("far", writes)
    writes[:] = 0
    assert bench.wait_for_end(ticket) is WriteState.DONE
    assert np.array_equal(bench.far.read(), bench.expected(spans))


def test_each_of_several_lists_to_one_peer_has_its_own_ticket(bench: Bench) -> None:
    spans = random_spans(7, 64, 20_000)
    tickets = [bench.transfer.submit("far", bench.writes(spans[i : i + 1])) for i in range(64)]
    assert [ticket.nbytes for ticket in tickets] == spans[:, 2].tolist()
    assert {bench.wait_for_end(ticket) for ticket in tickets} == {WriteState.DONE}
    assert np.array_equal(bench.far.read(), bench.expected(spans))


def test_lists_to_several_peers_at_once_do_not_mix(bench: Bench) -> None:
    far_ends = {"far": bench.far, "second": bench.open_far(), "third": bench.open_far()}
    for name in ("second", "third"):
        bench.transfer.connect(name, far_ends[name].description)
    spans = {name: random_spans(seed, 600, 3000) for seed, name in enumerate(far_ends)}
    tickets = [
        bench.transfer.submit(name, bench.writes(spans[name][first::30], far))
        for first in range(30)
        for name, far in far_ends.items()
    ]
    assert {bench.wait_for_end(ticket) for ticket in tickets} == {WriteState.DONE}
    for name, far in far_ends.items():
        assert np.array_equal(far.read(), bench.expected(spans[name]))
    bench.transfer.forget("second")
    bench.transfer.forget("third")


@pytest.mark.parametrize("span", [(0, NBYTES - 50, 100), (NBYTES - 50, 0, 100), (-1, 0, 8), (0, -(1 << 40), 8)])
def test_a_list_with_a_write_outside_registered_memory_is_refused_as_a_whole(
    bench: Bench, span: tuple[int, int, int]
) -> None:
    assert bench.send(np.array([(0, 0, 10), span])) is WriteState.FAILED_QUIESCED
    assert (bench.far.read() == POISON).all()


def test_a_final_state_does_not_change_when_the_peer_is_forgotten_or_killed(bench: Bench) -> None:
    far = bench.open_far()
    bench.transfer.connect("gone", far.description)
    done = bench.transfer.submit("gone", bench.writes(np.array([[0, 0, 10]]), far))
    assert bench.wait_for_end(done) is WriteState.DONE
    unposted = bench.transfer.submit("gone", bench.writes(np.array([[0, 0, 10]]), far), after=ManualEvent())
    bench.transfer.forget("gone")
    assert bench.transfer.poll(unposted) is WriteState.FAILED_QUIESCED
    after_forget = bench.transfer.submit("gone", bench.writes(np.array([[0, 0, 10]]), far))
    far.kill()
    bench.transfer.forget("gone")
    for _ in range(3):
        assert [bench.transfer.poll(ticket) for ticket in (done, unposted, after_forget)] == [
            WriteState.DONE,
            WriteState.FAILED_QUIESCED,
            WriteState.FAILED_QUIESCED,
        ]
        time.sleep(0.02)


def test_a_restarted_peer_can_be_connected_again_under_its_name(bench: Bench) -> None:
    for seed in range(2):
        far = bench.open_far()
        bench.transfer.connect("restarted", far.description)
        spans = random_spans(seed, 20, 10_000)
        assert bench.send(spans, "restarted", far) is WriteState.DONE
        assert np.array_equal(far.read(), bench.expected(spans))
        far.kill()
    bench.transfer.forget("restarted")


def test_a_running_peer_can_be_connected_again(bench: Bench) -> None:
    """The peer is connected under the same name and under a second one. Forgetting one must not break the other."""
    for name in ("far", "far", "twin"):
        bench.transfer.connect(name, bench.far.description)
        time.sleep(0.05)
        spans = random_spans(3, 20, 10_000)
        assert bench.send(spans, name) is WriteState.DONE
    bench.transfer.forget("twin")
    time.sleep(0.05)
    assert bench.send(spans) is WriteState.DONE
    assert np.array_equal(bench.far.read(), bench.expected(spans))


def test_lists_to_a_peer_that_dies_end_and_lists_to_other_peers_arrive(bench: Bench) -> None:
    victim = bench.open_far()
    bench.transfer.connect("victim", victim.description)
    spans = random_spans(8, 2000, 3000)
    started = time.monotonic()
    doomed = [bench.transfer.submit("victim", bench.writes(spans, victim)) for _ in range(4)]
    time.sleep(0.02)
    victim.kill()
    doomed.append(bench.transfer.submit("victim", bench.writes(spans, victim)))
    assert bench.send(spans) is WriteState.DONE
    assert np.array_equal(bench.far.read(), bench.expected(spans))
    states = [bench.wait_for_end(ticket) for ticket in doomed]
    assert WriteState.PENDING not in states
    assert states[-1] in FAILED
    assert time.monotonic() - started < 2 * DEADLINE_S
    assert bench.send(spans[:1], "victim", victim) in FAILED
    assert bench.send(spans) is WriteState.DONE
    bench.transfer.forget("victim")
    assert bench.send(spans) is WriteState.DONE


def test_connecting_to_a_dead_peer_raises_or_its_lists_fail_by_the_deadline(bench: Bench) -> None:
    far = bench.open_far()
    far.kill()
    try:
        bench.transfer.connect("gone", far.description)
    except TransferError:
        pass
    else:
        assert bench.send(np.array([[0, 0, 100]]), "gone", far) in FAILED
    assert bench.send(np.array([[0, 0, 100]])) is WriteState.DONE


@pytest.mark.parametrize("garbage", [b"", b"{}", b"[]", b"\xff\x00", b'{"version": 1, "engine": "unknown"}', b"null"])
def test_an_invalid_description_is_refused(bench: Bench, garbage: bytes) -> None:
    with pytest.raises(TransferError):
        bench.transfer.connect("garbage", garbage)
    assert bench.send(np.array([[0, 0, 1]]), "garbage") is WriteState.FAILED_QUIESCED


def test_a_description_with_invalid_native_bytes_is_refused(bench: Bench) -> None:
    from hotset.fleet.transfer.regions import Description, decode_description

    found = decode_description(bench.far.description, bench.engine)
    with pytest.raises(TransferError):
        bench.transfer.connect("garbage", Description(bench.engine, found.regions, b"\x00garbage").encode())


def test_forgetting_an_unknown_peer_does_nothing(bench: Bench) -> None:
    bench.transfer.forget("unknown")
    assert bench.send(np.array([[0, 0, 1]]), "unknown") is WriteState.FAILED_QUIESCED


def test_throughput_counts_the_bytes_that_arrived(bench: Bench) -> None:
    before = bench.transfer.throughput()
    assert bench.send(np.array([[0, 0, 1 << 20]])) is WriteState.DONE
    after = bench.transfer.throughput()
    assert after.nbytes - before.nbytes == 1 << 20
    assert after.seconds >= before.seconds
    assert bench.transfer.transport()


def test_defect_12_registering_overlapping_or_empty_memory_raises(bench: Bench) -> None:
    with pytest.raises(StartupError, match="overlaps"):
        bench.transfer.register(Region(bench.memory.ctypes.data + 100, 100))
    with pytest.raises(StartupError):
        bench.transfer.register(Region(bench.memory.ctypes.data, 0))


@pytest.mark.parametrize("engine", ["loopback", "nixl", "mooncake"])
def test_closing_twice_with_writes_in_flight_ends_them(engine: str) -> None:
    bench = open_bench(engine)
    spans = random_spans(9, 3000, 2000)
    tickets = [bench.transfer.submit("far", bench.writes(spans), after=None) for _ in range(3)]
    tickets.append(bench.transfer.submit("far", bench.writes(spans), after=ManualEvent()))
    bench.transfer.close()
    bench.transfer.close()
    assert WriteState.PENDING not in [bench.transfer.poll(ticket) for ticket in tickets]
    assert bench.transfer.poll(tickets[-1]) is WriteState.FAILED_QUIESCED
    assert bench.send(spans) is WriteState.FAILED_QUIESCED
    bench.far.close()
    bench.hub.close()
