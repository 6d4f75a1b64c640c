"""Tests of agents with real state machines and real bytes. Most tests use real sockets."""

import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import get_args

import msgspec
import pytest
import zmq
from handoff_engines import MODEL, SHORT_TIMING, make_memory
from handoff_world import FaultyChannel, ScriptedChannel, World, open_world, prompt
from loopback import Fate, Faults, Hub, Loopback
from waiting import WAIT_SECONDS, Clock, wait_until

from hotset.base.errors import EngineStopped, MissingDependency
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.agent import open_channel
from hotset.fleet.handoff.channel import Channel
from hotset.fleet.handoff.codec import MARK, PLAIN
from hotset.fleet.handoff.decode_agent import DecodeAgent
from hotset.fleet.handoff.deliveries import Sources
from hotset.fleet.handoff.links import Endpoints
from hotset.fleet.handoff.prefill_agent import PrefillAgent
from hotset.fleet.handoff.receiver import Receiver
from hotset.fleet.handoff.sender import Sender
from hotset.fleet.handoff.timers import PeerTiming
from hotset.fleet.transfer.api import WriteState, WriteTicket
from hotset.schedule.handoffs import HandoffKey, RowsComputed

SECRET = "a secret that peers share"
LENGTHS = (1, 7, 8, 16, 17, 24, 25, 63, 100)


@pytest.fixture
def world() -> Iterator[World]:
    with open_world() as opened:
        yield opened


def test_prompts_of_many_lengths_land_with_correct_bytes_and_counts(world: World) -> None:
    decode, prefill = world.decode(), world.prefill(event_s=0.1)
    keys = [decode.fetch(prefill.address, prompt(length, length), f"r{length}") for length in LENGTHS]
    assert [type(decode.wait_for_outcome(key)) for key in keys] == [msg.Landed] * len(LENGTHS)
    assert decode.events[keys[0]] == [msg.Landed(keys[0], sum(prompt(1, 1)) % 1009, {5: (-0.5, 1)})]
    assert wait_until(world.is_idle)
    world.audit()
    landed, written = decode.agent.stats(), prefill.agent.stats()
    assert landed.outcomes["landed"] == written.outcomes["done"] == len(LENGTHS)
    assert landed.nbytes == written.nbytes == sum(LENGTHS) * (2 * 48 + 16)
    assert written.throughput is not None and written.throughput.gb_per_s > 0
    assert landed.phase_seconds["landing"] > 0 and written.phase_seconds["writing"] > 0
    assert not landed.dropped and not written.dropped


def test_an_idle_agent_neither_polls_nor_pings(world: World) -> None:
    channels = [FaultyChannel(Channel("127.0.0.1:0")) for _ in range(2)]
    decode, prefill = world.decode(channels[0]), world.prefill(channels[1])
    assert isinstance(decode.wait_for_outcome(decode.fetch(prefill.address, prompt(40), "r")), msg.Landed)
    assert wait_until(world.is_idle)

    def nothing_is_sent() -> bool:
        """Returns whether no agent sends a message during one and a half ping intervals."""
        before = [len(channel.sent) for channel in channels]
        time.sleep(1.5 * SHORT_TIMING.ping_every)
        return [len(channel.sent) for channel in channels] == before

    assert wait_until(lambda: all(engine.agent._seconds_to_wait() > 1.0 for engine in world.engines))
    assert wait_until(nothing_is_sent)  # several attempts, because an answer may be in flight during the first


@pytest.mark.parametrize("kind", ["Hello", "Welcome", "Ping", "Pong", "Refused"])
def test_handoffs_end_as_expected_although_messages_between_agents_are_lost_duplicated_and_delayed(
    world: World, kind: str
) -> None:
    """The first two messages of this type are lost. Later ones are sent twice, each with a delay of its own.

    test_handoffs_under_faults.py does the same to the messages of the state machines.
    """
    channels = [FaultyChannel(Channel("127.0.0.1:0"), seed) for seed in range(2)]
    for channel in channels:
        channel.lose[kind], channel.max_delay[kind] = 2, 0.1
        channel.duplicate.add(kind)
    model = replace(MODEL, layers=3) if kind == "Refused" else MODEL
    decode, prefill = world.decode(channels[0]), world.prefill(channels[1], model=model)
    keys = [decode.fetch(prefill.address, prompt(30 + number, number), f"r{number}") for number in range(3)]
    outcomes = [decode.wait_for_outcome(key) for key in keys]
    if kind == "Refused":
        assert all(
            isinstance(event, msg.FetchFailed) and event.quiesced and "layers differs" in event.reason
            for event in outcomes
        ), outcomes
    else:
        assert all(isinstance(outcome, msg.Landed) for outcome in outcomes), outcomes
        assert len(set(prefill.started)) == len(prefill.started), "a prompt was computed twice"
    assert wait_until(world.is_idle)
    assert not decode.quarantined
    world.audit()


@pytest.mark.parametrize("stage", ["Hello unanswered", "sample", "landed"])
def test_a_request_cancelled_at_any_stage_ends_once_and_all_pages_are_released(world: World, stage: str) -> None:
    decode, prefill = world.decode(), world.prefill(stop_before=stage if stage == "sample" else "")
    address = prefill.address if stage != "Hello unanswered" else "127.0.0.1:1"
    key = decode.fetch(address, prompt(60), "r")
    if stage == "landed":
        assert isinstance(decode.wait_for_outcome(key), msg.Landed)
    elif stage != "Hello unanswered":
        # Once phase REQUESTING has ended, the handoff is in phase LANDING.
        assert wait_until(lambda: decode.agent.stats().phase_seconds["requesting"] > 0)
    decode.cancel(key)
    end = decode.wait_for_outcome(key)
    assert isinstance(end, msg.Landed) if stage == "landed" else end == msg.FetchFailed(key, True, False, "cancelled")
    assert wait_until(world.is_idle)
    assert decode.events[key] == [end]
    world.audit()


@pytest.mark.parametrize("fate", [Fate.CUT, Fate.LOST])
def test_a_failed_write_fails_only_its_own_request(world: World, fate: Fate) -> None:
    decode, prefill = world.decode(), world.prefill()
    prefill.transfer._deadline_s = 0.5
    assert isinstance(decode.wait_for_outcome(decode.fetch(prefill.address, prompt(10), "before")), msg.Landed)
    world.hub.fates.append(fate)
    failing = decode.fetch(prefill.address, prompt(60, 1), "failing")
    assert wait_until(lambda: not world.hub.fates)
    other_keys = [decode.fetch(prefill.address, prompt(60, 2 + number), f"r{number}") for number in range(3)]
    end = decode.wait_for_outcome(failing)
    assert isinstance(end, msg.FetchFailed) and end.quiesced == (fate is Fate.CUT) and end.retry, end
    assert all(isinstance(decode.wait_for_outcome(key), msg.Landed) for key in other_keys)
    assert decode.quarantined == (set() if fate is Fate.CUT else {failing})
    assert isinstance(
        decode.wait_for_outcome(decode.fetch(prefill.address, prompt(60, 1), "failing", attempt=1)), msg.Landed
    )
    assert wait_until(world.is_idle)
    world.audit()


def test_many_handoffs_under_many_faults_all_end_and_all_landed_bytes_are_correct(world: World) -> None:
    channels = [FaultyChannel(Channel("127.0.0.1:0"), seed) for seed in range(3)]
    kinds = [kind.__name__ for kind in get_args(msg.Message)]
    for channel in channels:
        channel.max_delay, channel.lose = dict.fromkeys(kinds, 0.03), dict.fromkeys(kinds, 3)
        channel.duplicate = {"HandoffRequest", "StartWrites", "HandoffDone", "Cancel", "Progress"}
    world.hub.faults = Faults(cut=0.03, lost=0.01, late=0.01, reorder=0.3, duplicate=0.3, delay_s=(0.0, 0.01))
    decode, prefills = world.decode(channels[0], pages=256), [world.prefill(channels[1]), world.prefill(channels[2])]
    outcomes: dict[str, int] = {}
    for round_ in range(6):
        keys = [
            decode.fetch(prefills[number % 2].address, prompt(5 + 7 * number, round_), f"r{round_}.{number}")
            for number in range(8)
        ]
        decode.cancel(keys[round_ % 8])
        for key in keys:
            name = type(decode.wait_for_outcome(key)).__name__
            outcomes[name] = outcomes.get(name, 0) + 1
    assert wait_until(world.is_idle)
    world.audit()
    assert outcomes["Landed"] > 20, outcomes


def test_mismatched_models_are_refused_with_both_sides_values(world: World, caplog: pytest.LogCaptureFixture) -> None:
    decode, prefill = world.decode(), world.prefill(model=replace(MODEL, row="40 bytes"))
    end = decode.wait_for_outcome(decode.fetch(prefill.address, prompt(20), "r"))
    assert isinstance(end, msg.FetchFailed) and end.quiesced and not end.retry
    assert "refused" in end.reason and "'48 bytes'" in end.reason and "'40 bytes'" in end.reason
    assert caplog.text.count(f"refused {decode.address}: the model's row differs") == 1, (
        "the refusing worker must log the reason once"
    )
    assert not prefill.started


def test_writes_are_polled_soon_after_they_are_submitted() -> None:
    """Writes that are submitted while nothing else is in flight must not wait until the next check of timers."""
    channel, clock, hub, peer = ScriptedChannel(), Clock(), Hub(), "127.0.0.1:2"
    source, target = make_memory(4, 8), make_memory(4, 8)
    transfer, decode_transfer = Loopback(hub), Loopback(hub)
    transfer.register(source.region)
    decode_transfer.register(target.region)
    hello = msg.Hello(channel.address, MODEL, {"host": source.store}, "loopback", b"")
    agent = PrefillAgent(Sender(Sources(source.store)), hello, channel, transfer, wake=lambda: None, clock=clock)

    def work(*messages: msg.Message) -> None:
        channel.incoming = [msg.MessageReceived(peer, message) for message in messages]
        agent._work()

    work(msg.Hello(peer, MODEL, {"host": target.store}, "loopback", decode_transfer.describe()))
    assert wait_until(lambda: not agent._connecting or not agent._inbox.empty())
    work()
    assert any(isinstance(message, msg.Welcome) for message in channel.sent)
    key = HandoffKey("r", 0)
    work(msg.HandoffRequest(key, PromptSpec((1, 2, 3), SamplingParams()), "host", (0,), (0,)))
    work(msg.StartWrites(key))
    assert agent._seconds_to_wait() > 2 * PeerTiming().poll_every
    agent.put(RowsComputed(peer, key, 0, 3, (1,), None))
    work()
    assert agent._lists and agent._seconds_to_wait() <= PeerTiming().poll_every
    agent.close(0.0)


def test_another_version_of_the_protocol_is_refused_with_both_versions(world: World) -> None:
    prefill, newer = world.prefill(), Channel("127.0.0.1:0")
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(f"tcp://{prefill.address}")
            envelope = (msg.PROTOCOL + 1, newer.address, newer.incarnation, "", "Hello", {"all": "new"})
            dealer.send(MARK + PLAIN + msgspec.msgpack.encode(envelope))
            received: list[msg.ChannelEvent] = []
            assert wait_until(lambda: bool(received.extend(newer.receive()) or received))
            reason = f"the protocol versions differ: {msg.PROTOCOL} here, {msg.PROTOCOL + 1} there"
            assert received == [msg.MessageReceived(prefill.address, msg.Refused(reason))]
    finally:
        newer.close(0.0)


def test_a_decode_worker_refuses_to_prefill(world: World) -> None:
    decode, other = world.decode(), world.decode()
    end = decode.wait_for_outcome(decode.fetch(other.address, prompt(20), "r"))
    assert isinstance(end, msg.FetchFailed) and not end.retry and "is a decode worker" in end.reason


class CountingLoopback(Loopback):
    """Counts polls. The first three polls return PENDING."""

    polls = 0

    def poll(self, ticket: WriteTicket) -> WriteState:
        self.polls += 1
        return super().poll(ticket) if self.polls > 3 else WriteState.PENDING


def test_writes_in_flight_are_polled_at_the_poll_interval(world: World) -> None:
    transfer = CountingLoopback(world.hub)
    decode = world.decode()
    prefill = world.prefill(transfer=transfer, event_s=0.5, timing=replace(SHORT_TIMING, poll_every=0.05))
    started_at = time.monotonic()
    assert isinstance(decode.wait_for_outcome(decode.fetch(prefill.address, prompt(20), "r")), msg.Landed)
    assert 3 < transfer.polls < 4 * (time.monotonic() - started_at) / 0.05


class BrokenReceiver(Receiver):
    def tick(self, now: float) -> None:
        raise ZeroDivisionError("a bug")


def test_calls_of_a_failed_agent_raise_with_the_cause() -> None:
    woken = threading.Event()
    channel = Channel("127.0.0.1:0")
    hello = msg.Hello(channel.address, MODEL, {"host": make_memory(4, 8).store}, "loopback", b"")
    agent = DecodeAgent(BrokenReceiver(), hello, channel, Endpoints(partial(Loopback, Hub())), wake=woken.set)
    agent.start()
    assert woken.wait(WAIT_SECONDS)
    for call in (agent.take_events, lambda: agent.put(None)):  # type: ignore[arg-type]
        with pytest.raises(EngineStopped, match="a bug") as failure:
            call()
        assert isinstance(failure.value.__cause__, ZeroDivisionError)
    agent.close(0.0)


def test_the_error_about_a_missing_package_contains_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "hotset.fleet.handoff.channel")
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(MissingDependency, match=r"zmq.*pip install 'hotset\[transfer\]'"):
        open_channel("127.0.0.1:0")
