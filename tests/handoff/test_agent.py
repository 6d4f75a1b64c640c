"""Agents with real sockets, real state machines and real bytes."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import get_args

import msgspec
import pytest
import zmq
from handoff_engines import MODEL, QUICK, SECONDS, Memory, until
from handoff_world import Clock, Dictated, FaultyPost, World, prompt, worlds

from hotset.base.errors import EngineStopped, MissingDependency
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.handoff.agent import HandoffAgent, open_channel
from hotset.handoff.channel import Channel
from hotset.handoff.codec import MARK, PLAIN
from hotset.handoff.messages import (
    PROTOCOL,
    Fetch,
    FetchFailed,
    HandoffKey,
    HandoffRequest,
    Hello,
    Landed,
    Message,
    MessageReceived,
    Refused,
    Welcome,
)
from hotset.handoff.packing import StagingMemory
from hotset.handoff.receiver import Receiver
from hotset.transfer.api import WriteState, WriteTicket
from hotset.transfer.loopback import Fate, Faults, Hub, Loopback

SECRET = "a secret that peers share"
LENGTHS = (1, 7, 8, 16, 17, 24, 25, 63, 100)


@pytest.fixture
def world() -> Iterator[World]:
    with worlds() as made:
        yield made


def test_prompts_of_many_lengths_land_byte_for_byte(world: World) -> None:
    decode, prefill = world.decode(), world.prefill(event_s=0.1)
    keys = [decode.fetch(prefill.address, prompt(length, length), f"r{length}") for length in LENGTHS]
    assert [type(decode.ended(key)) for key in keys] == [Landed] * len(LENGTHS)
    assert decode.events[keys[0]] == [Landed(keys[0], sum(prompt(1, 1)) % 1009, {5: (-0.5, 1)})]
    assert until(world.settled)
    world.audit()
    landed, written = decode.agent.stats(), prefill.agent.stats()
    assert landed.outcomes["landed"] == written.outcomes["done"] == len(LENGTHS)
    assert landed.nbytes == written.nbytes == sum(LENGTHS) * (2 * 48 + 16)
    assert written.throughput is not None and written.throughput.gb_per_s > 0
    assert landed.phase_seconds["landing"] > 0 and written.phase_seconds["writing"] > 0
    assert not landed.dropped and not written.dropped


def test_two_decode_and_two_prefill_workers_serve_each_other_at_once(world: World) -> None:
    decodes, prefills = [world.decode(), world.decode()], [world.prefill(), world.prefill()]
    keys = [
        (decode, decode.fetch(prefills[number % 2].address, prompt(20 + number, number), f"r{number}"))
        for number in range(8)
        for decode in decodes
    ]
    assert all(isinstance(decode.ended(key), Landed) for decode, key in keys)
    assert until(world.settled)
    world.audit()


def test_an_idle_agent_neither_polls_nor_pings(world: World) -> None:
    posts = [FaultyPost(Channel("127.0.0.1:0")) for _ in range(2)]
    decode, prefill = world.decode(posts[0]), world.prefill(posts[1])
    assert isinstance(decode.ended(decode.fetch(prefill.address, prompt(40), "r")), Landed)
    assert until(world.settled)

    def quiet() -> bool:
        """Returns whether nothing was sent for longer than the interval of pings."""
        said = [len(channel.sent) for channel in posts]
        time.sleep(1.5 * QUICK.ping_every)
        return [len(channel.sent) for channel in posts] == said

    assert until(lambda: all(engine.agent._seconds_to_wait() > 1.0 for engine in world.engines))
    assert until(quiet)  # an answer may have been in flight


GIVEN_UP, NOT_COMPUTED, MISMATCHED, STAGED = "given up", "not computed", "mismatched", "staged"
KINDS = {
    **dict.fromkeys(
        (
            "Hello",
            "Welcome",
            "HandoffRequest",
            "HandoffAccepted",
            "StartWrites",
            "Progress",
            "HandoffDone",
            "HandoffAck",
        ),
        "",
    ),
    **dict.fromkeys(("Ping", "Pong"), ""),
    **dict.fromkeys(("Cancel", "Cancelled"), GIVEN_UP),
    **dict.fromkeys(("LeaseRequest", "LeaseGranted", "PieceWritten", "PieceUnpacked"), STAGED),
    "HandoffFailed": NOT_COMPUTED,
    "Refused": MISMATCHED,
}
FAULTS: dict[str, Callable[[FaultyPost, str], None]] = {
    "lost": lambda channel, kind: channel.lose.update({kind: 2}),
    "twice": lambda channel, kind: channel.twice.add(kind),
    "late": lambda channel, kind: channel.late.update({kind: 0.15}),
    "all of it": lambda channel, kind: (
        channel.lose.update({kind: 1}),
        channel.twice.add(kind),
        channel.late.update({kind: 0.1}),
    )[2],
}


def test_every_message_type_is_covered_by_these_tests() -> None:
    assert set(KINDS) == {kind.__name__ for kind in get_args(Message)}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_retransmit_of_a_control_message_is_enough(world: World, kind: str, fault: str) -> None:
    posts = [FaultyPost(Channel("127.0.0.1:0"), seed) for seed in range(2)]
    for channel in posts:
        FAULTS[fault](channel, kind)
    how = KINDS[kind]
    hold = "second chunk" if how == GIVEN_UP else ""
    model = replace(MODEL, layers=3) if how == MISMATCHED else MODEL
    ring, buffers = (StagingMemory(1 << 13) if how == STAGED else None for _ in range(2))
    decode = world.decode(posts[0], ranks=4 if ring else 1, staging=ring)
    refuse = "too long" if how == NOT_COMPUTED else ""
    prefill = world.prefill(posts[1], hold=hold, refuse=refuse, model=model, staging=buffers)
    keys = [decode.fetch(prefill.address, prompt(30 + number, number), f"r{number}") for number in range(3)]
    if how == GIVEN_UP:
        assert until(lambda: len(prefill.computed) == 3 and posts[1].sent.count("Progress") >= 3)
        for key in keys:
            decode.give_up(key)
    ends = [decode.ended(key) for key in keys]
    if how in ("", STAGED):
        assert all(isinstance(end, Landed) for end in ends), ends
        assert len(set(prefill.computed)) == len(prefill.computed), "a prompt was computed twice"
    else:
        reason = {GIVEN_UP: "cancelled", NOT_COMPUTED: "too long", MISMATCHED: "layers differs"}[how]
        assert all(isinstance(end, FetchFailed) and end.quiesced and reason in end.reason for end in ends), ends
    assert until(world.settled)
    assert not decode.quarantined
    world.audit()


STAGES = ["introduced", "compute", "second chunk", "sample", "landed"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_request_cancelled_at_any_stage_ends_once_and_leaks_nothing(world: World, stage: str) -> None:
    decode, prefill = world.decode(), world.prefill(hold=stage if stage in STAGES[1:4] else "")
    address = prefill.address if stage != "introduced" else "127.0.0.1:1"
    key = decode.fetch(address, prompt(60), "r")
    if stage == "landed":
        assert isinstance(decode.ended(key), Landed)
    elif stage != "introduced":
        assert until(lambda: decode.agent.stats().phase_seconds["requesting"] > 0)  # it lands
    decode.give_up(key)
    end = decode.ended(key)
    assert isinstance(end, Landed) if stage == "landed" else end == FetchFailed(key, True, False, "cancelled")
    assert until(world.settled)
    assert decode.events[key] == [end]
    world.audit()


@pytest.mark.parametrize("fate", [Fate.CUT, Fate.LOST, Fate.SILENT, Fate.LATE])
def test_a_failed_write_fails_only_its_own_request(world: World, fate: Fate) -> None:
    decode, prefill = world.decode(), world.prefill()
    prefill.transfer._deadline_s = 0.5
    assert isinstance(decode.ended(decode.fetch(prefill.address, prompt(10), "before")), Landed)
    world.hub.faults = Faults(late_s=(0.1, 0.2))
    world.hub.fates.append(fate)
    unlucky = decode.fetch(prefill.address, prompt(60, 1), "unlucky")
    assert until(lambda: not world.hub.fates)
    others = [decode.fetch(prefill.address, prompt(60, 2 + number), f"r{number}") for number in range(3)]
    end = decode.ended(unlucky)
    assert isinstance(end, FetchFailed) and end.quiesced == (fate is Fate.CUT) and end.retry, end
    assert all(isinstance(decode.ended(key), Landed) for key in others)
    assert decode.quarantined == (set() if fate is Fate.CUT else {unlucky})
    assert isinstance(decode.ended(decode.fetch(prefill.address, prompt(60, 1), "unlucky", attempt=1)), Landed)
    assert until(world.settled)
    world.audit()


def test_many_handoffs_under_many_faults_all_end_and_all_bytes_are_right(world: World) -> None:
    posts = [FaultyPost(Channel("127.0.0.1:0"), seed) for seed in range(3)]
    for channel in posts:
        channel.late = dict.fromkeys(KINDS, 0.03)
        channel.twice = {"HandoffRequest", "StartWrites", "HandoffDone", "Cancel", "Progress"}
        channel.lose = dict.fromkeys(KINDS, 3)
    world.hub.faults = Faults(cut=0.03, lost=0.01, late=0.01, reorder=0.3, duplicate=0.3, delay_s=(0.0, 0.01))
    decode, prefills = world.decode(posts[0], pages=256), [world.prefill(posts[1]), world.prefill(posts[2])]
    outcomes: dict[str, int] = {}
    for turn in range(6):
        keys = [
            decode.fetch(prefills[number % 2].address, prompt(5 + 7 * number, turn), f"r{turn}.{number}")
            for number in range(8)
        ]
        decode.give_up(keys[turn % 8])
        for key in keys:
            end = type(decode.ended(key)).__name__
            outcomes[end] = outcomes.get(end, 0) + 1
    assert until(world.settled)
    world.audit()
    assert outcomes["Landed"] > 20, outcomes


def test_two_handoffs_with_the_same_id_land_once(world: World) -> None:
    decode, prefill = world.decode(), world.prefill()
    key = decode.fetch(prefill.address, prompt(30), "same")
    decode.agent.put(Fetch(prefill.address, decode._requests[key]))
    assert isinstance(decode.ended(key), Landed)
    assert until(world.settled)
    assert len(decode.events[key]) == 1 and prefill.computed == [key]
    world.audit()


def test_a_later_attempt_replaces_an_earlier_one(world: World) -> None:
    decode, prefill = world.decode(), world.prefill(hold="sample")
    first = decode.fetch(prefill.address, prompt(30), "same")
    assert until(lambda: prefill.computed == [first])
    prefill._hold = ""
    second = decode.fetch(prefill.address, prompt(30), "same", attempt=1)
    assert isinstance(decode.ended(second), Landed)
    assert decode.ended(first) == FetchFailed(first, True, False, "cancelled")
    assert until(world.settled)
    world.audit()


def test_two_decode_workers_may_use_the_same_id(world: World) -> None:
    decodes, prefill = [world.decode(), world.decode()], world.prefill()
    keys = [decode.fetch(prefill.address, prompt(30, seed), "same") for seed, decode in enumerate(decodes)]
    assert all(isinstance(decode.ended(key), Landed) for decode, key in zip(decodes, keys, strict=True))


def test_malformed_input_on_the_control_port_disturbs_no_handoff(world: World) -> None:
    decode, prefill = world.decode(), world.prefill()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://{prefill.address}")
        keys = []
        for number in range(10):
            for junk in (b"", b"junk" * 100, MARK + PLAIN, MARK + PLAIN + bytes(range(256))):
                dealer.send(junk)
            keys.append(decode.fetch(prefill.address, prompt(20, number), f"r{number}"))
        assert all(isinstance(decode.ended(key), Landed) for key in keys)
        assert until(lambda: prefill.agent.stats().dropped.get("malformed") == 40)


def test_a_peer_with_another_secret_is_never_served(world: World) -> None:
    decode = world.decode(Channel("127.0.0.1:0", secret="another secret, also long"))
    prefill = world.prefill(Channel("127.0.0.1:0", secret=SECRET))
    key = decode.fetch(prefill.address, prompt(20), "r")
    end = decode.ended(key)
    assert isinstance(end, FetchFailed) and end.quiesced and "no message from" in end.reason
    assert prefill.agent.stats().dropped["malformed"] > 0 and not prefill.computed


def test_mismatched_models_are_refused_with_both_sides_values(world: World, caplog: pytest.LogCaptureFixture) -> None:
    decode, prefill = world.decode(), world.prefill(model=replace(MODEL, row="40 bytes"))
    end = decode.ended(decode.fetch(prefill.address, prompt(20), "r"))
    assert isinstance(end, FetchFailed) and end.quiesced and not end.retry
    assert "refused" in end.reason and "'48 bytes'" in end.reason and "'40 bytes'" in end.reason
    assert caplog.text.count(f"refused {decode.address}: the model's row differs") == 1, "the other log knows too"
    assert not prefill.computed


def test_a_decode_worker_checks_a_prefill_worker_itself() -> None:
    channel, peer = Dictated(), "127.0.0.1:2"
    hello = Hello(channel.address, MODEL, {"host": Memory(4, 8).store}, "loopback", b"")
    agent = HandoffAgent(Receiver(), hello, channel, Loopback(Hub()), wake=lambda: None, clock=Clock())
    key = HandoffKey("r", 0)
    agent.put(Fetch(peer, HandoffRequest(key, PromptSpec((1, 2, 3), SamplingParams()), "host", (0,), (0,))))
    agent._work()
    channel.coming = [MessageReceived(peer, Welcome(replace(hello, control=peer, model=replace(MODEL, weights="11"))))]
    agent._work()
    (end,) = agent.take_events()
    assert isinstance(end, FetchFailed) and end.quiesced and "'00' here, '11' there" in end.reason
    assert not any(isinstance(message, HandoffRequest) for message in channel.said)


def test_another_version_of_the_protocol_is_refused_with_both_versions(world: World) -> None:
    prefill, later = world.prefill(), Channel("127.0.0.1:0")
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(f"tcp://{prefill.address}")
            envelope = (PROTOCOL + 1, later.address, later.incarnation, "", "Hello", {"all": "new"})
            dealer.send(MARK + PLAIN + msgspec.msgpack.encode(envelope))
            later.wait(SECONDS)
            reason = f"protocol version {PROTOCOL} here, {PROTOCOL + 1} there"
            assert later.receive() == [MessageReceived(prefill.address, Refused(reason))]
    finally:
        later.close(0.0)


def test_a_decode_worker_refuses_to_prefill(world: World) -> None:
    decode, other = world.decode(), world.decode()
    end = decode.ended(decode.fetch(other.address, prompt(20), "r"))
    assert isinstance(end, FetchFailed) and not end.retry and "is a decode worker" in end.reason


class Counting(Loopback):
    """Counts polls, and reports the end of a write at the fourth or later."""

    polls = 0

    def poll(self, ticket: WriteTicket) -> WriteState:
        self.polls += 1
        return super().poll(ticket) if self.polls > 3 else WriteState.PENDING


def test_writes_in_flight_are_polled_at_intervals(world: World) -> None:
    transfer = Counting(world.hub)
    decode = world.decode()
    prefill = world.prefill(transfer=transfer, event_s=0.5, timing=replace(QUICK, poll_every=0.05))
    began = time.monotonic()
    assert isinstance(decode.ended(decode.fetch(prefill.address, prompt(20), "r")), Landed)
    assert 3 < transfer.polls < 4 * (time.monotonic() - began) / 0.05


class BrokenReceiver(Receiver):
    def tick(self, now: float) -> None:
        raise ZeroDivisionError("a bug")


def test_an_agent_that_dies_reports_it_to_its_engine() -> None:
    woken = threading.Event()
    channel = Channel("127.0.0.1:0")
    hello = Hello(channel.address, MODEL, {"host": Memory(4, 8).store}, "loopback", b"")
    agent = HandoffAgent(BrokenReceiver(), hello, channel, None, wake=woken.set)  # type: ignore[arg-type]
    agent.start()
    assert woken.wait(SECONDS)
    for call in (agent.take_events, lambda: agent.put(None)):  # type: ignore[arg-type]
        with pytest.raises(EngineStopped, match="a bug") as failure:
            call()
        assert isinstance(failure.value.__cause__, ZeroDivisionError)
    agent.close(0.0)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hotset.handoff.channel")
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(MissingDependency, match=r"zmq.*pip install 'hotset\[transfer\]'"):
        open_channel("127.0.0.1:0")
