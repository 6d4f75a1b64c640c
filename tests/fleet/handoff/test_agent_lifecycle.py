"""Tests of how agents connect to peers and how they close: Hello and Welcome, hanging connections, drains."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from handoff_engines import MODEL, SHORT_TIMING, StoppableClock, make_memory
from handoff_world import FaultyChannel, ScriptedChannel, World, open_world, prompt
from loopback import Hub, Loopback
from waiting import WAIT_SECONDS, Clock, wait_until

from hotset.base.errors import EngineStopped, TransferError
from hotset.fleet.handoff.channel import Channel
from hotset.fleet.handoff.deliveries import Sources
from hotset.fleet.handoff.messages import FetchFailed, Hello, Landed, MessageReceived, Refused
from hotset.fleet.handoff.prefill_agent import MAX_CONNECTING, MAX_HUNG_CONNECTS, STOPPING, PrefillAgent
from hotset.fleet.handoff.sender import Sender
from hotset.fleet.handoff.timers import PeerTiming


@pytest.fixture
def world() -> Iterator[World]:
    with open_world() as opened:
        yield opened


def test_a_peer_whose_memory_cannot_be_reached_is_refused_with_the_reason(world: World) -> None:
    prefill, other_world = world.prefill(), World()
    try:
        decode = other_world.decode()
        end = decode.wait_for_outcome(decode.fetch(prefill.address, prompt(20), "r"))
        assert isinstance(end, FetchFailed) and end.quiesced and "memory cannot be reached" in end.reason
    finally:
        decode.close()
        other_world.hub.close()


class BlockedLoopback(Loopback):
    """Connecting to the peer `blocked`, or to any peer if it is None, blocks until the test sets `may_fail`, and then
    fails."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        self.may_fail = threading.Event()
        self.blocked: str | None = None

    def connect(self, name: str, description: bytes) -> None:
        if self.blocked in (None, name):
            self.may_fail.wait(WAIT_SECONDS)
            raise TransferError("the peer cannot be reached")
        super().connect(name, description)


def test_a_peer_that_is_slow_to_connect_does_not_delay_other_peers(world: World) -> None:
    timing = replace(SHORT_TIMING, hello_timeout=2 * SHORT_TIMING.peer_timeout)
    decodes = [world.decode(timing=timing), world.decode(timing=timing)]
    transfer = BlockedLoopback(world.hub)
    transfer.blocked = decodes[0].address
    prefill = world.prefill(transfer=transfer, timing=timing)
    waiting = decodes[0].fetch(prefill.address, prompt(20), "waiting")
    # `may_fail` is not set, so the connection to the first decode worker is still blocked.
    assert isinstance(
        decodes[1].wait_for_outcome(decodes[1].fetch(prefill.address, prompt(20), "r"), WAIT_SECONDS / 2), Landed
    )
    # The prefill worker answers pings, so it is not treated as lost. But it must answer Hello within `hello_timeout`.
    end = decodes[0].wait_for_outcome(waiting, WAIT_SECONDS / 2)
    assert isinstance(end, FetchFailed) and end.quiesced and end.retry and "has not answered Hello" in end.reason
    assert wait_until(lambda: not prefill.agent._connecting)
    transfer.blocked = "nobody"
    again = decodes[0].fetch(prefill.address, prompt(20), "waiting", attempt=1)
    assert isinstance(decodes[0].wait_for_outcome(again), Landed)
    transfer.may_fail.set()


def test_hung_connections_are_given_up_at_their_timeout_and_above_a_limit_new_peers_are_refused() -> None:
    channel, clock, transfer = ScriptedChannel(), Clock(), BlockedLoopback(Hub())
    store = make_memory(4, 8).store
    hello = Hello(channel.address, MODEL, {"host": store}, "loopback", b"")
    agent = PrefillAgent(Sender(Sources(store)), hello, channel, transfer, wake=lambda: None, clock=clock)
    peers = [f"127.0.0.1:{9000 + number}" for number in range(MAX_CONNECTING + 1)]

    def deliver_hello(peer: str) -> None:
        channel.incoming = [MessageReceived(peer, replace(hello, control=peer))]
        agent._work()

    for peer in peers:
        deliver_hello(peer)
    assert [*agent._connecting] == peers[:MAX_CONNECTING]
    clock.now = PeerTiming().hello_timeout
    deliver_hello(peers[-1])
    deliver_hello(peers[-1])
    assert [*agent._connecting] == peers[-1:]
    for number in range(MAX_HUNG_CONNECTS):
        clock.now += PeerTiming().hello_timeout
        agent._work()
        deliver_hello(peers[number % 2])
    assert (
        agent._connects_running == MAX_HUNG_CONNECTS
        and isinstance(channel.sent[-1], Refused)
        and "hang" in channel.sent[-1].reason
    )
    transfer.may_fail.set()
    assert wait_until(lambda: agent._inbox.qsize() == MAX_HUNG_CONNECTS)
    agent._work()
    assert not agent._connects_running and not agent._connecting


def test_a_peer_that_was_idle_for_longer_than_its_timeout_gets_hello_again(world: World) -> None:
    channel = FaultyChannel(Channel("127.0.0.1:0"))
    clock = StoppableClock()
    decode, prefill = world.decode(channel, clock=clock), world.prefill()
    clock.stop()
    assert isinstance(decode.wait_for_outcome(decode.fetch(prefill.address, prompt(20), "a")), Landed)
    assert isinstance(decode.wait_for_outcome(decode.fetch(prefill.address, prompt(20), "b")), Landed)
    assert channel.sent.count("Hello") == 1
    clock.advance(1.2 * SHORT_TIMING.peer_timeout)
    assert isinstance(decode.wait_for_outcome(decode.fetch(prefill.address, prompt(20), "c")), Landed)
    assert channel.sent.count("Hello") == 2


def test_a_prefill_worker_that_has_forgotten_a_peer_fails_its_request_and_gets_hello_again(world: World) -> None:
    decode, prefill = world.decode(), world.prefill()
    assert isinstance(decode.wait_for_outcome(decode.fetch(prefill.address, prompt(20), "a")), Landed)
    with prefill.agent._lock:
        prefill.agent._on_peer_lost(decode.address, "silent", time.monotonic())
    failed = decode.wait_for_outcome(decode.fetch(prefill.address, prompt(20), "b"))
    assert isinstance(failed, FetchFailed) and failed.quiesced and failed.retry and "has forgotten" in failed.reason
    assert isinstance(decode.wait_for_outcome(decode.fetch(prefill.address, prompt(20), "b", attempt=1)), Landed)
    world.audit()


def test_a_closing_decode_worker_cancels_its_open_handoffs(world: World) -> None:
    decode, prefill = world.decode(), world.prefill(stop_before="sample")
    keys = [decode.fetch(prefill.address, prompt(60, number), f"r{number}") for number in range(3)]
    assert wait_until(lambda: len(prefill.started) == 3)
    started_at = time.monotonic()
    decode.agent.close(WAIT_SECONDS)
    assert time.monotonic() - started_at < WAIT_SECONDS / 2
    assert [decode.wait_for_outcome(key) for key in keys] == [
        FetchFailed(key, True, False, "cancelled") for key in keys
    ]
    assert wait_until(lambda: not prefill.held)
    with pytest.raises(EngineStopped, match="closed"):
        decode.cancel(keys[0])
    decode.agent.close(WAIT_SECONDS)


def test_a_closing_prefill_worker_finishes_its_handoffs_and_refuses_new_ones(world: World) -> None:
    computed = threading.Event()
    decode, prefill = world.decode(), world.prefill(gate=computed)
    key = decode.fetch(prefill.address, prompt(60), "r")
    assert wait_until(lambda: prefill.started == [key])
    closing = threading.Thread(target=prefill.agent.close, args=(WAIT_SECONDS,))
    closing.start()
    assert wait_until(lambda: prefill.agent._closing)
    late = decode.fetch(prefill.address, prompt(20), "late")
    end = decode.wait_for_outcome(late)
    assert isinstance(end, FetchFailed) and end.quiesced and "stopping" in end.reason
    computed.set()
    assert isinstance(decode.wait_for_outcome(key), Landed)
    closing.join(WAIT_SECONDS)
    assert not closing.is_alive()
    assert wait_until(lambda: not prefill.held), "the engine thread must release the pages"


@pytest.mark.parametrize("drain_seconds", [0.0, 0.3])
def test_a_closing_prefill_worker_notifies_peers_of_unfinished_handoffs(world: World, drain_seconds: float) -> None:
    decode, prefill = world.decode(), world.prefill(stop_before="sample")
    keys = [decode.fetch(prefill.address, prompt(60, number), f"r{number}") for number in range(3)]
    all_bytes = 3 * 60 * (2 * 48 + 16)  # all rows and index keys: only the first token is missing
    assert wait_until(lambda: prefill.agent.stats().nbytes == all_bytes and not prefill.agent._lists)
    prefill.agent.close(drain_seconds)
    assert [decode.wait_for_outcome(key) for key in keys] == [FetchFailed(key, True, False, STOPPING) for key in keys]
    assert wait_until(lambda: not decode.agent.stats().num_open) and not decode.quarantined
    decode.audit()


def test_a_peer_is_notified_at_the_end_of_a_drain_only_after_its_writes_have_ended(world: World) -> None:
    clock, computed = StoppableClock(), threading.Event()
    decode, prefill = world.decode(), world.prefill(stop_before="sample", gate=computed, clock=clock)
    key = decode.fetch(prefill.address, prompt(20), "r")
    assert wait_until(lambda: bool(prefill.agent._lists))
    clock.stop()
    closing = threading.Thread(target=prefill.agent.close, args=(1.0,))
    closing.start()
    assert wait_until(lambda: prefill.agent._closing)
    clock.advance(1.0)
    assert wait_until(lambda: prefill.agent._drained) and not decode.events[key]
    computed.set()
    assert decode.wait_for_outcome(key) == FetchFailed(key, True, False, STOPPING)
    assert not prefill.agent._lists, "HandoffFailed was sent before the last write had ended"
    closing.join(WAIT_SECONDS)
    assert not closing.is_alive()


def test_a_second_close_shortens_the_drain(world: World) -> None:
    decode, prefill = world.decode(), world.prefill(stop_before="sample")
    key = decode.fetch(prefill.address, prompt(20), "r")
    assert wait_until(lambda: bool(prefill.started))
    closing = threading.Thread(target=prefill.agent.close, args=(60.0,))
    closing.start()
    assert wait_until(lambda: prefill.agent._closing) and not decode.events[key]
    prefill._closing = True  # its thread may still put commands when the agent is closed
    prefill.agent.close(0.0)
    closing.join(WAIT_SECONDS)
    assert not closing.is_alive() and isinstance(decode.wait_for_outcome(key), FetchFailed)


def test_closing_ends_after_the_drain_time_if_a_peer_is_silent(world: World) -> None:
    channel = FaultyChannel(Channel("127.0.0.1:0"))
    channel.lose = {"HandoffFailed": 100}  # the prefill worker closes without notifying its peer
    decode = world.decode(timing=replace(SHORT_TIMING, peer_timeout=60.0), scale=10.0)
    prefill = world.prefill(channel, stop_before="sample")
    decode.fetch(prefill.address, prompt(60), "r")
    assert wait_until(lambda: len(prefill.started) == 1)
    prefill.close()
    started_at = time.monotonic()
    decode.agent.close(0.5)
    assert 0.4 < time.monotonic() - started_at < WAIT_SECONDS / 2
