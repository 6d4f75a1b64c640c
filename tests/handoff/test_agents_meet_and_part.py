"""Introductions, connects that hang, and closing of agents."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from handoff_engines import MODEL, QUICK, SECONDS, Memory, StoppableClock, until
from handoff_world import Clock, Dictated, FaultyPost, World, prompt, worlds

from hotset.base.errors import EngineStopped, TransferError
from hotset.handoff.agent import HandoffAgent
from hotset.handoff.channel import Channel
from hotset.handoff.messages import FetchFailed, Hello, Landed, MessageReceived, Refused
from hotset.handoff.prefill_role import MAX_CONNECTING, MAX_HUNG_CONNECTS, STOPPING, PrefillRole
from hotset.handoff.sender import Sender
from hotset.handoff.timers import PeerTiming
from hotset.transfer.loopback import Hub, Loopback


@pytest.fixture
def world() -> Iterator[World]:
    with worlds() as made:
        yield made


def test_a_peer_whose_memory_cannot_be_reached_is_refused_with_the_reason(world: World) -> None:
    prefill, elsewhere = world.prefill(), World()
    try:
        decode = elsewhere.decode()
        end = decode.ended(decode.fetch(prefill.address, prompt(20), "r"))
        assert isinstance(end, FetchFailed) and end.quiesced and "memory cannot be reached" in end.reason
    finally:
        decode.close()
        elsewhere.hub.close()


class SlowToConnect(Loopback):
    """Connecting to one peer blocks until the test sets `go`."""

    go: threading.Event
    slow: str = ""

    def connect(self, name: str, description: bytes) -> None:
        if name == self.slow:
            self.go.wait(SECONDS)
            raise TransferError("it never came up")
        super().connect(name, description)


def test_a_peer_that_is_slow_to_connect_delays_no_other(world: World) -> None:
    timing = replace(QUICK, hello_timeout=2 * QUICK.peer_timeout)
    decodes = [world.decode(timing=timing), world.decode(timing=timing)]
    transfer = SlowToConnect(world.hub)
    transfer.go, transfer.slow = threading.Event(), decodes[0].address
    prefill = world.prefill(transfer=transfer, timing=timing)
    waiting = decodes[0].fetch(prefill.address, prompt(20), "waits")
    # `go` is not set, so the other connection has not ended.
    assert isinstance(decodes[1].ended(decodes[1].fetch(prefill.address, prompt(20), "r"), SECONDS / 2), Landed)
    # The prefill worker answers pings, so it is not treated as lost. The wait for it is still bounded.
    end = decodes[0].ended(waiting, SECONDS / 2)
    assert isinstance(end, FetchFailed) and end.quiesced and end.retry and "has not answered Hello" in end.reason
    assert until(lambda: not prefill.agent._role._connecting)
    transfer.slow = ""
    again = decodes[0].fetch(prefill.address, prompt(20), "waits", attempt=1)
    assert isinstance(decodes[0].ended(again), Landed)
    transfer.go.set()


class Hanging(Loopback):
    """Connecting blocks until the test releases it."""

    go: threading.Event

    def connect(self, name: str, description: bytes) -> None:
        self.go.wait(SECONDS)
        raise TransferError("it never came up")


def test_connects_that_hang_do_not_block_other_peers_for_good() -> None:
    channel, clock, transfer = Dictated(), Clock(), Hanging(Hub())
    transfer.go = threading.Event()
    store = Memory(4, 8).store
    hello = Hello(channel.address, MODEL, {"host": store}, "loopback", b"")
    agent = HandoffAgent(Sender(store), hello, channel, transfer, wake=lambda: None, clock=clock)
    side = agent._role
    assert isinstance(side, PrefillRole)
    peers = [f"127.0.0.1:{9000 + number}" for number in range(MAX_CONNECTING + 1)]

    def say_hello(peer: str) -> None:
        channel.coming = [MessageReceived(peer, replace(hello, control=peer))]
        agent._work()

    for peer in peers:
        say_hello(peer)
    assert [*side._connecting] == peers[:MAX_CONNECTING]
    clock.now = PeerTiming().hello_timeout
    say_hello(peers[-1])
    say_hello(peers[-1])
    assert [*side._connecting] == peers[-1:]
    for number in range(MAX_HUNG_CONNECTS):
        clock.now += PeerTiming().hello_timeout
        agent._work()
        say_hello(peers[number % 2])
    assert (
        side._connects_running == MAX_HUNG_CONNECTS
        and isinstance(channel.said[-1], Refused)
        and "hang" in channel.said[-1].reason
    )
    transfer.go.set()
    assert until(lambda: agent._inbox.qsize() == MAX_HUNG_CONNECTS)
    agent._work()
    assert not side._connects_running and not side._connecting


def test_a_peer_that_was_idle_for_long_is_introduced_again_first(world: World) -> None:
    channel = FaultyPost(Channel("127.0.0.1:0"))
    clock = StoppableClock()
    decode, prefill = world.decode(channel, clock=clock), world.prefill()
    clock.stop()
    assert isinstance(decode.ended(decode.fetch(prefill.address, prompt(20), "a")), Landed)
    assert isinstance(decode.ended(decode.fetch(prefill.address, prompt(20), "b")), Landed)
    assert channel.sent.count("Hello") == 1
    clock.advance(1.2 * QUICK.peer_timeout)
    assert isinstance(decode.ended(decode.fetch(prefill.address, prompt(20), "c")), Landed)
    assert channel.sent.count("Hello") == 2


def test_a_prefill_worker_that_has_forgotten_its_peer_gets_a_new_introduction(world: World) -> None:
    decode, prefill = world.decode(), world.prefill()
    assert isinstance(decode.ended(decode.fetch(prefill.address, prompt(20), "a")), Landed)
    with prefill.agent._lock:
        prefill.agent._role.peer_lost(decode.address, "as if it had been silent", time.monotonic())
    lost = decode.ended(decode.fetch(prefill.address, prompt(20), "b"))
    assert isinstance(lost, FetchFailed) and lost.quiesced and "send Hello first" in lost.reason
    assert isinstance(decode.ended(decode.fetch(prefill.address, prompt(20), "b", attempt=1)), Landed)
    world.audit()


def test_a_closing_decode_worker_cancels_what_is_open_and_reports_it(world: World) -> None:
    decode, prefill = world.decode(), world.prefill(hold="sample")
    keys = [decode.fetch(prefill.address, prompt(60, number), f"r{number}") for number in range(3)]
    assert until(lambda: len(prefill.computed) == 3)
    began = time.monotonic()
    decode.agent.close(SECONDS)
    assert time.monotonic() - began < SECONDS / 2
    assert [decode.ended(key) for key in keys] == [FetchFailed(key, True, False, "cancelled") for key in keys]
    assert until(lambda: not prefill.held)
    with pytest.raises(EngineStopped, match="closed"):
        decode.give_up(keys[0])
    decode.agent.close(SECONDS)


def test_a_closing_prefill_worker_finishes_what_it_began_and_begins_nothing(world: World) -> None:
    computed = threading.Event()
    decode, prefill = world.decode(), world.prefill(gate=computed)
    key = decode.fetch(prefill.address, prompt(60), "r")
    assert until(lambda: prefill.computed == [key])
    closing = threading.Thread(target=prefill.agent.close, args=(SECONDS,))
    closing.start()
    assert until(lambda: prefill.agent._closing)
    late = decode.fetch(prefill.address, prompt(20), "late")
    end = decode.ended(late)
    assert isinstance(end, FetchFailed) and end.quiesced and "stopping" in end.reason
    computed.set()
    assert isinstance(decode.ended(key), Landed)
    closing.join(SECONDS)
    assert not closing.is_alive() and not prefill.held


@pytest.mark.parametrize("drain_seconds", [0.0, 0.3])
def test_a_closing_prefill_worker_notifies_peers_of_unfinished_handoffs(world: World, drain_seconds: float) -> None:
    decode, prefill = world.decode(), world.prefill(hold="sample")
    keys = [decode.fetch(prefill.address, prompt(60, number), f"r{number}") for number in range(3)]
    landed = 3 * 60 * (2 * 48 + 16)  # all rows, so that only the first token is missing
    assert until(lambda: prefill.agent.stats().nbytes == landed and not prefill.agent._role.needs_polling)
    prefill.agent.close(drain_seconds)
    assert [decode.ended(key) for key in keys] == [FetchFailed(key, True, False, STOPPING) for key in keys]
    assert until(lambda: not decode.agent.stats().num_open) and not decode.quarantined
    decode.audit()


def test_a_write_in_flight_at_the_end_of_a_drain_ends_before_its_peer_is_notified(world: World) -> None:
    clock, computed = StoppableClock(), threading.Event()
    decode, prefill = world.decode(), world.prefill(hold="sample", gate=computed, clock=clock)
    key = decode.fetch(prefill.address, prompt(20), "r")
    assert until(lambda: prefill.agent._role.needs_polling)
    clock.stop()
    closing = threading.Thread(target=prefill.agent.close, args=(1.0,))
    closing.start()
    assert until(lambda: prefill.agent._closing)
    clock.advance(1.0)
    assert until(lambda: prefill.agent._drained) and not decode.events[key]
    computed.set()
    assert decode.ended(key) == FetchFailed(key, True, False, STOPPING)
    assert not prefill.agent._role.needs_polling, "told before its last write had ended"
    closing.join(SECONDS)
    assert not closing.is_alive()


def test_a_second_close_shortens_the_drain(world: World) -> None:
    decode, prefill = world.decode(), world.prefill(hold="sample")
    key = decode.fetch(prefill.address, prompt(20), "r")
    assert until(lambda: bool(prefill.computed))
    closing = threading.Thread(target=prefill.agent.close, args=(60.0,))
    closing.start()
    assert until(lambda: prefill.agent._closing) and not decode.events[key]
    prefill.agent.close(0.0)
    closing.join(SECONDS)
    assert not closing.is_alive() and isinstance(decode.ended(key), FetchFailed)


def test_closing_is_bounded_when_a_peer_is_silent(world: World) -> None:
    channel = FaultyPost(Channel("127.0.0.1:0"))
    channel.lose = {"HandoffFailed": 100}  # it closes without notifying its peer
    decode = world.decode(timing=replace(QUICK, peer_timeout=60.0), scale=10.0)
    prefill = world.prefill(channel, hold="sample")
    decode.fetch(prefill.address, prompt(60), "r")
    assert until(lambda: len(prefill.computed) == 1)
    prefill.close()
    began = time.monotonic()
    decode.agent.close(0.5)
    assert 0.4 < time.monotonic() - began < SECONDS / 2
