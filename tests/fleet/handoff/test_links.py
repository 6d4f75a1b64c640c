"""Tests of how a decode worker cuts off prefill workers that may still write: over loopback, and over NIXL."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import pytest
from handoff_engines import MODEL, SHORT_TIMING, THIS_PROCESS, DecodeEngine, PrefillEngine, make_memory
from handoff_world import ScriptedChannel, World, open_world, prefill_process, prompt
from loopback import Fate, Hub, Loopback
from processes import pause
from sharded_memory import POISON
from waiting import WAIT_SECONDS, Clock, wait_until

from hotset.base.errors import StartupError
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.fleet.handoff import links
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.channel import Channel
from hotset.fleet.handoff.decode_agent import DecodeAgent
from hotset.fleet.handoff.links import Endpoints
from hotset.fleet.handoff.receiver import Receiver
from hotset.fleet.handoff.timers import PeerTiming
from hotset.fleet.transfer.api import Region, Transfer
from hotset.fleet.transfer.engines import TransferSettings
from hotset.schedule.handoffs import HandoffKey

PEER = "127.0.0.1:2"


@pytest.fixture
def world() -> Iterator[World]:
    with open_world() as opened:
        yield opened


def test_defect_23_a_live_peer_with_a_write_in_unknown_state_is_cut_off_and_its_late_bytes_do_not_arrive(
    world: World,
) -> None:
    """The peer is on another machine. Its other handoffs are not affected, and it gets a new endpoint."""
    world.hub.faults = replace(world.hub.faults, late_s=(2.0, 2.0))
    decode, prefill = world.decode(process=None, scale=1.0), world.prefill()
    assert isinstance(decode.wait_for_outcome(decode.fetch(prefill.address, prompt(20), "before")), msg.Landed)
    world.hub.fates.append(Fate.LATE)
    key = decode.fetch(prefill.address, prompt(60), "late")
    end = decode.wait_for_outcome(key)
    assert isinstance(end, msg.FetchFailed) and end.quiesced and end.retry, end
    decode.memory.buffer[:] = POISON
    request = decode._requests[key]
    keys = [decode.fetch(prefill.address, prompt(30, seed), f"after {seed}") for seed in range(3)]
    assert all(isinstance(decode.wait_for_outcome(key), msg.Landed) for key in keys)
    reused = {page for key in keys for page in decode._requests[key].row_pages}
    late = [page for page in request.row_pages if page not in reused]
    assert late, "the test needs pages of the failed handoff that were not used again"
    assert wait_until(lambda: world.hub.next_due() is None), "the late bytes are still on their way"
    assert decode.memory.are_rows_poison(late), "bytes arrived after the peer was cut off"
    assert wait_until(lambda: len(decode.transfer) == 1)


@pytest.mark.parametrize("writer", ["its process", "a worker"])
def test_a_peer_on_this_machine_is_not_cut_off_while_it_lives(world: World, writer: str) -> None:
    """It could write without its endpoint, so only its own confirmation counts."""
    assert THIS_PROCESS is not None
    identity = {"process": THIS_PROCESS} if writer == "its process" else {"process": None, "writers": (THIS_PROCESS,)}
    decode, prefill = world.decode(process=THIS_PROCESS), world.prefill(**identity)
    world.hub.fates.append(Fate.LOST)
    key = decode.fetch(prefill.address, prompt(60), "lost")
    end = decode.wait_for_outcome(key)
    assert isinstance(end, msg.FetchFailed) and not end.quiesced
    assert isinstance(decode.wait_for_outcome(decode.fetch(prefill.address, prompt(20), "after")), msg.Landed)
    assert decode.quarantined == {key} and len(decode.transfer) == 1


def serve(pipe: Connection) -> None:
    """Runs a prefill worker over TCP, like one on another machine. Every prompt stops before its second chunk."""
    os.environ["UCX_TLS"] = "tcp"
    engine = PrefillEngine(
        make_memory(64, 16),
        Channel("127.0.0.1:0"),
        TransferSettings("nixl").open,
        stop_before="second chunk",
        scale=10.0,
        timing=replace(SHORT_TIMING, peer_timeout=600.0),
    )
    pipe.send(engine.address)
    while (announced := pipe.recv()) is not None:
        engine.stop_before = announced
        pipe.send(engine.agent.stats().nbytes)
    engine.close()


@pytest.mark.slow
def test_defect_23_over_nixl_nobody_writes_through_a_closed_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill worker is suspended while rows land. The decode worker cannot observe it, closes its endpoint and uses
    the pages again. Then the prefill worker continues, with the old keys."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with prefill_process(serve) as (address, pipe, pid):
        decode = DecodeEngine(
            make_memory(64, 8), Channel("127.0.0.1:0"), TransferSettings("nixl").open, process=None, timing=SHORT_TIMING
        )
        try:
            key = decode.fetch(address, prompt(400), "r")
            request = decode._requests[key]
            assert wait_until(lambda: not decode.memory.are_rows_poison(request.row_pages[:1])), "no row has landed"
            pause(pid)
            end = decode.wait_for_outcome(key)
            assert isinstance(end, msg.FetchFailed) and end.quiesced, "the pages are not free"
            decode.memory.buffer[:] = POISON
            os.kill(pid, signal.SIGCONT)
            pipe.send("")
            assert pipe.poll(60)
            landed = decode.fetch(address, prompt(20), "next")
            assert isinstance(decode.wait_for_outcome(landed), msg.Landed), "the worker must get a new endpoint"
            untouched = [page for page in range(64) if page not in decode._requests[landed].row_pages]
            assert decode.memory.are_rows_poison(untouched), "a write with the old keys has arrived"
        finally:
            decode.close()


class Bench:
    """A decode worker's agent with a scripted channel and clock, and one fetch."""

    def __init__(self, endpoint: type[Loopback] = Loopback) -> None:
        self.channel, self.clock = ScriptedChannel(), Clock()
        self.endpoints = Endpoints(partial(endpoint, Hub()))
        self.hello = msg.Hello(self.channel.address, MODEL, {"host": make_memory(4, 8).store}, "loopback", b"")
        self.agent = DecodeAgent(
            Receiver(), self.hello, self.channel, self.endpoints, wake=lambda: None, clock=self.clock
        )

    def fetch(self, name: str = "r", peer: str = PEER) -> HandoffKey:
        key = HandoffKey(name, 0)
        self.agent.put(
            msg.Fetch(peer, msg.HandoffRequest(key, PromptSpec((1, 2, 3), SamplingParams()), "host", (0,), (0,)))
        )
        self.work()
        return key

    def work(self, *messages: msg.Message, seconds: float = 0.0) -> None:
        events: list[msg.ChannelEvent] = [msg.MessageReceived(PEER, message) for message in messages]
        self.channel.incoming, self.clock.now = events, self.clock.now + seconds
        self.agent._work()

    def welcome(self, endpoint: int = 1) -> None:
        self.work(msg.Welcome(replace(self.hello, control=PEER), endpoint))

    def start_landing(self) -> HandoffKey:
        key = self.fetch()
        self.welcome()
        self.work(msg.HandoffAccepted(key))
        assert msg.StartWrites(key) in self.channel.sent
        return key

    def pings(self) -> list[int]:
        return [message.number for message in self.channel.sent if type(message).__name__ == "Ping"]

    def events(self) -> list[object]:
        return list(self.agent.take_events())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Lets the agent work until the condition holds. Results of other threads may arrive at any time."""

        def holds() -> bool:
            self.work()
            return condition()

        assert wait_until(holds)

    def wait_for_event(self) -> object:
        events: list[object] = []

        def arrived() -> bool:
            events.extend(self.events())
            return bool(events)

        self.wait_until(arrived)
        return events[0]

    def endpoints_in_hellos(self) -> list[int]:
        return [message.endpoint for message in self.channel.sent if isinstance(message, msg.Hello)]


def test_a_mismatched_prefill_worker_that_welcomed_this_worker_is_rejected() -> None:
    bench = Bench()
    bench.fetch()
    bench.work(msg.Welcome(replace(bench.hello, control=PEER, model=replace(MODEL, weights="11")), endpoint=1))
    (end,) = bench.events()
    assert isinstance(end, msg.FetchFailed) and end.quiesced and "'00' here, '11' there" in end.reason
    assert not any(isinstance(message, msg.HandoffRequest) for message in bench.channel.sent)


def test_a_replayed_refusal_does_not_end_handoffs() -> None:
    bench = Bench()
    bench.start_landing()
    bench.work(msg.Refused("recorded when this worker was refused"))
    assert bench.events() == [] and bench.agent.stats().num_open == 1


def test_a_pong_reports_that_the_peer_has_forgotten_this_worker_unless_its_ping_was_sent_before_welcome() -> None:
    bench = Bench()
    key = bench.fetch()
    bench.work(seconds=1.1)
    before = bench.pings()[-1]
    bench.welcome()
    bench.work(msg.HandoffAccepted(key), msg.Pong(before, connected=False))
    assert bench.events() == [], "the Ping was sent before the introduction"
    bench.work(msg.Pong(before, connected=True), seconds=1.1)
    after = bench.pings()[-1]
    assert after > before
    bench.work(msg.Pong(after, connected=False))
    end = bench.wait_for_event()
    assert isinstance(end, msg.FetchFailed) and end.quiesced and end.retry and "has forgotten" in end.reason


def test_a_welcome_for_an_earlier_endpoint_is_ignored() -> None:
    """Otherwise a handoff would begin over an endpoint that is being closed."""
    bench = Bench()
    bench.start_landing()
    bench.agent._on_peer_restarted(PEER, bench.clock.now)
    bench.fetch("s")
    bench.wait_until(lambda: bench.endpoints_in_hellos()[-1] == 2)
    num_sent = len(bench.channel.sent)
    bench.welcome(endpoint=1)
    assert not any(isinstance(message, msg.HandoffRequest) for message in bench.channel.sent[num_sent:])
    bench.welcome(endpoint=2)
    assert any(isinstance(message, msg.HandoffRequest) for message in bench.channel.sent[num_sent:])


def test_a_fetch_fails_if_no_endpoint_can_be_opened_or_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def fail() -> Transfer:
        raise StartupError("no file descriptor is left")

    bench.fetch("first")
    bench.endpoints._open_endpoint = fail
    bench.fetch("second", "127.0.0.1:3")
    end = bench.wait_for_event()
    assert (
        isinstance(end, msg.FetchFailed) and end.quiesced and end.retry and "no file descriptor is left" in end.reason
    )
    monkeypatch.setattr(links, "MAX_LINKS", 1)
    bench.fetch("third", "127.0.0.1:4")
    (end,) = bench.events()
    assert isinstance(end, msg.FetchFailed) and end.quiesced and "transfer endpoints" in end.reason


class SlowLoopback(Loopback):
    """An endpoint that registers memory slowly, as with RDMA."""

    seconds_per_byte = 0.0
    num_registered = 0  # of all endpoints

    def register(self, region: Region) -> None:
        time.sleep(region.nbytes * SlowLoopback.seconds_per_byte)
        SlowLoopback.num_registered += 1
        super().register(region)


def test_peers_connect_within_their_limit_although_registration_takes_longer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second peer needs an endpoint of its own. A peer that was lost or restarted gets one that is registered, and
    one that must be cut off a new one."""
    timing = replace(SHORT_TIMING, hello_timeout=2 * SHORT_TIMING.peer_timeout)
    memory = make_memory(64, 8)
    monkeypatch.setattr(SlowLoopback, "num_registered", 0)
    decode = DecodeEngine(memory, Channel("127.0.0.1:0"), partial(SlowLoopback, world.hub), process=None, timing=timing)
    world.engines.append(decode)
    monkeypatch.setattr(SlowLoopback, "seconds_per_byte", 1.1 * timing.hello_timeout / memory.region.nbytes)
    first, second = world.prefill(), world.prefill()

    def lands(prefill: PrefillEngine, name: str) -> bool:
        return isinstance(decode.wait_for_outcome(decode.fetch(prefill.address, prompt(20), name)), msg.Landed)

    assert lands(first, "first") and SlowLoopback.num_registered == 1
    assert lands(second, "second") and SlowLoopback.num_registered == 2
    first.close()
    failed = decode.wait_for_outcome(decode.fetch(first.address, prompt(20), "lost"))
    assert isinstance(failed, msg.FetchFailed) and failed.quiesced
    assert lands(world.prefill(), "third") and SlowLoopback.num_registered == 2, "the endpoint of the lost peer is free"
    world.hub.fates.append(Fate.LOST)
    failed = decode.wait_for_outcome(decode.fetch(second.address, prompt(20), "unknown"))
    assert isinstance(failed, msg.FetchFailed) and failed.quiesced
    assert lands(second, "again") and SlowLoopback.num_registered == 3, "the endpoint of a failed writer is used again"


@pytest.mark.parametrize("opens", [True, False])
def test_the_limit_of_hello_begins_when_the_endpoint_is_open_and_opening_has_a_limit_too(opens: bool) -> None:
    bench, timing, may_open = Bench(), PeerTiming(), threading.Event()
    open_endpoint = bench.endpoints._open_endpoint

    def blocked() -> Transfer:
        assert may_open.wait(WAIT_SECONDS)
        return open_endpoint()

    def pass_seconds(seconds: float) -> list[object]:
        """Lets time pass in which the peers answer pings. Returns the reasons why fetches have failed."""
        for _ in range(int(seconds)):
            alive = msg.Pong(0, connected=True)
            bench.channel.incoming = [msg.MessageReceived(peer, alive) for peer in (PEER, "127.0.0.1:3")]
            bench.clock.now += 1.0
            bench.agent._work()
        return [event.reason for event in bench.events() if isinstance(event, msg.FetchFailed)]

    bench.endpoints._open_endpoint = blocked
    bench.fetch("first")
    bench.fetch("second", "127.0.0.1:3")
    assert pass_seconds(timing.open_timeout - 1) == [f"{PEER} is alive, but has not answered Hello within 30 s"]
    if opens:
        may_open.set()
        bench.wait_until(lambda: bench.endpoints_in_hellos()[-1] == 2)
        assert pass_seconds(timing.hello_timeout - 1) == []
        assert pass_seconds(1) == ["127.0.0.1:3 is alive, but has not answered Hello within 30 s"]
    else:
        assert pass_seconds(1) == ["no transfer endpoint was opened within 1800 s"]
        may_open.set()
        bench.wait_until(lambda: len(bench.endpoints) == 0 and len(bench.endpoints._unused) == 2)


class StuckLoopback(Loopback):
    """An endpoint that cannot be closed."""

    def close(self) -> bool:
        return False


def test_pages_stay_in_quarantine_if_the_endpoint_of_their_writer_cannot_be_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(StuckLoopback)
    key = bench.start_landing()
    bench.agent._on_peer_lost(PEER, "silent", bench.clock.now)
    bench.agent._next_tick = bench.clock.now  # as after every check of peers
    bench.wait_until(lambda: "cannot be closed" in caplog.text)
    bench.work(seconds=6.0)
    assert bench.events() == [msg.PeerLost(PEER, "silent"), msg.FetchFailed(key, False, False, "silent")]
    bench.work(seconds=100.0)
    assert not any(isinstance(event, msg.Quiesced) for event in bench.events())
