"""Control messages over real sockets: which are received, which are dropped, and malformed input."""

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from hotset.base.errors import ConfigError, StartupError
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.handoff.channel import MAX_PEERS, MAX_PER_RECEIVE, MAX_QUEUED, Channel
from hotset.handoff.codec import MARK, MAX_BYTES, PLAIN, Codec
from hotset.handoff.messages import (
    PROTOCOL,
    ChannelEvent,
    Envelope,
    HandoffAccepted,
    HandoffKey,
    HandoffRequest,
    MessageReceived,
    PeerRestarted,
    Ping,
    Pong,
    ProtocolMismatch,
    Refused,
)

SECRET = "a secret that peers share"
KEY = HandoffKey("r", 0)
SECONDS = 60.0  # generous: for an overloaded machine


@contextmanager
def channels(*secrets: str | None, bind: str = "127.0.0.1:0") -> Iterator[list[Channel]]:
    opened: list[Channel] = []
    try:
        opened.extend(Channel(bind, secret=secret) for secret in secrets)
        yield opened
    finally:
        for each in opened:
            each.close(0.0)


def received(channel: Channel, count: int, seconds: float = SECONDS) -> list[ChannelEvent]:
    """Returns the next `count` events, or those that arrived in time."""
    events: list[ChannelEvent] = []
    deadline = time.monotonic() + seconds
    while len(events) < count and time.monotonic() < deadline:
        channel.wait(0.05)
        events += channel.receive()
    return events


def becomes(channel: Channel, wanted: Callable[[], bool], seconds: float = SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not wanted() and time.monotonic() < deadline:
        channel.wait(0.02)
        channel.receive()
    return wanted()


def raw_socket(channel: Channel) -> socket.socket:
    host, _, port = channel.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


@contextmanager
def speaker(channel: Channel) -> Iterator["zmq.Socket[bytes]"]:
    """A ZeroMQ client of the control port that can send any bytes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://{channel.address}")
        yield dealer


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
def test_a_message_arrives_with_its_senders_address_and_is_answered(secret: str | None) -> None:
    with channels(secret, secret) as (left, right):
        left.send(right.address, Ping(1))
        assert received(right, 1) == [MessageReceived(left.address, Ping(1))]
        right.send(left.address, HandoffAccepted(KEY))
        assert received(left, 1) == [MessageReceived(right.address, HandoffAccepted(KEY))]
        assert (dict(left.dropped), dict(right.dropped)) == ({}, {})


def test_a_request_with_a_long_prompt_arrives_whole() -> None:
    request = HandoffRequest(KEY, PromptSpec(tuple(range(200_000)), SamplingParams()), "host", tuple(range(5_000)), ())
    with channels(SECRET, SECRET) as (left, right):
        right.send(left.address, Ping(0))
        assert received(left, 1)
        left.send(right.address, request)
        assert received(right, 1) == [MessageReceived(left.address, request)]


def test_order_is_kept_and_a_flood_is_received_in_portions() -> None:
    with channels(None, None) as (left, right):
        for number in range(MAX_PER_RECEIVE + 50):
            left.send(right.address, Ping(number))
        events: list[ChannelEvent] = []
        while len(events) < MAX_PER_RECEIVE + 50:
            right.wait(SECONDS)
            portion = right.receive()
            assert 0 < len(portion) <= MAX_PER_RECEIVE
            events += portion
        assert events == [MessageReceived(left.address, Ping(number)) for number in range(MAX_PER_RECEIVE + 50)]


def test_a_message_sent_before_the_peer_listens_arrives_later() -> None:
    with channels(None) as [left]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        left.send(address, Ping(7))
        time.sleep(0.1)
        with channels(None, bind=address) as [right]:
            assert received(right, 1) == [MessageReceived(left.address, Ping(7))]


def test_sending_without_a_listener_never_blocks_and_overflow_is_counted() -> None:
    with channels(None) as [channel]:
        began = time.monotonic()
        for number in range(MAX_QUEUED + 100):
            channel.send("127.0.0.1:1", Ping(number))
        assert time.monotonic() - began < SECONDS
        assert channel.dropped["queue full"] >= 100


@pytest.mark.parametrize("address", ["nowhere.invalid:9", "no address", "[::1:9", "127.0.0.1:99999"])
def test_an_unusable_address_raises_no_exception(address: str) -> None:
    with channels(None) as [channel]:
        for number in range(3):
            channel.send(address, Ping(number))


def test_only_hello_and_ping_go_to_an_unknown_peer() -> None:
    with channels(None, None) as (left, right):
        left.send(right.address, HandoffAccepted(KEY))
        assert left.dropped["unknown peer"] == 1
        left.send(right.address, Ping(1))
        assert received(right, 1) == [MessageReceived(left.address, Ping(1))]


def test_a_restarted_peer_is_reported_once_and_gets_no_message_for_its_old_incarnation() -> None:
    with channels(None, None) as (left, first):
        address = first.address
        first.send(left.address, Ping(1))
        assert received(left, 1) == [MessageReceived(address, Ping(1))]
        first.close(0.0)
        with channels(None, bind=address) as [second]:
            left.send(address, HandoffAccepted(KEY))
            left.send(address, Ping(2))
            assert received(second, 1) == [MessageReceived(left.address, Ping(2))]
            assert second.dropped["wrong incarnation"] == 1
            second.send(left.address, Pong(2))
            assert received(left, 2) == [PeerRestarted(address), MessageReceived(address, Pong(2))]
            left.send(address, HandoffAccepted(KEY))
            assert received(second, 1) == [MessageReceived(left.address, HandoffAccepted(KEY))]


def test_messages_of_an_old_incarnation_do_not_revive_it() -> None:
    with channels(None) as [channel], speaker(channel) as dealer:

        def say(incarnation: str, number: int) -> None:
            dealer.send(Codec().encode(Envelope("127.0.0.1:7", incarnation, "", Ping(number))))

        say("aa", 1)
        say("bb", 2)
        say("aa", 3)
        say("bb", 4)
        pings = [MessageReceived("127.0.0.1:7", Ping(number)) for number in (1, 2, 4)]
        assert received(channel, 4) == [pings[0], PeerRestarted("127.0.0.1:7"), *pings[1:]]
        assert becomes(channel, lambda: channel.dropped["old incarnation"] == 1)


def test_a_channel_ignores_its_own_messages() -> None:
    with channels(None) as [channel]:
        channel.send(channel.address, Ping(1))
        assert becomes(channel, lambda: channel.dropped["own message"] == 1)


def test_a_hello_of_another_version_is_reported_so_that_it_can_be_refused() -> None:
    with channels(None, None) as (channel, later), speaker(channel) as dealer:
        for kind in ("HandoffRequest", "Hello"):
            fields = (PROTOCOL + 1, later.address, later.incarnation, "", kind, {})
            dealer.send(MARK + PLAIN + msgspec.msgpack.encode(fields))
        assert received(channel, 1) == [ProtocolMismatch(later.address, later.incarnation, PROTOCOL + 1, "Hello")]
        assert channel.dropped["protocol mismatch"] == 2
        channel.send(later.address, Refused("version 1 here, 2 there"))
        assert received(later, 1) == [MessageReceived(channel.address, Refused("version 1 here, 2 there"))]


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: hotset\r\n\r\n",
    b"\xff" * 200,
    bytes(200),
    b"\x16\x03\x01" + bytes(range(256)),
    b"",
    b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48),
]


@pytest.mark.parametrize("junk", GARBAGE, ids=["http", "ones", "zeros", "tls", "nothing", "half a greeting"])
def test_bytes_of_another_protocol_do_no_harm(junk: bytes) -> None:
    with channels(None, None) as (left, right):
        with raw_socket(right) as connection:
            connection.sendall(junk)
            left.send(right.address, Ping(1))
            assert received(right, 1) == [MessageReceived(left.address, Ping(1))]
        left.send(right.address, Ping(2))
        assert received(right, 1) == [MessageReceived(left.address, Ping(2))]


def test_malformed_messages_are_counted_and_logged_once_per_address(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hotset.handoff"), channels(None, None) as (left, right):
        with speaker(right) as dealer:
            for junk in ([b"junk"], [b""], [b"one", b"two"], [MARK + PLAIN + b"\x96"], [MARK * 100]):
                dealer.send_multipart(junk)
            assert becomes(right, lambda: right.dropped["malformed"] == 5)
        assert [record.message for record in caplog.records if "127.0.0.1" in record.message] == [
            "dropped a malformed message from 127.0.0.1 on the control port: not a message of this protocol "
            "(further ones are counted, not logged)"
        ]
        with raw_socket(right) as connection:
            connection.sendall(b"\xff" * 200)
        assert becomes(right, lambda: right.dropped["malformed"] >= 6)
        left.send(right.address, Ping(1))
        assert received(right, 1) == [MessageReceived(left.address, Ping(1))]


def test_a_message_above_the_size_limit_is_never_read() -> None:
    with channels(None, None) as (left, right), speaker(right) as dealer:
        dealer.send(bytes(MAX_BYTES + 1))
        left.send(right.address, Ping(1))
        assert received(right, 1) == [MessageReceived(left.address, Ping(1))]
        assert received(right, 1, 0.2) == []
        assert not right.dropped, "it was read whole before it was refused"


@pytest.mark.parametrize(("theirs", "ours"), [(None, SECRET), ("another secret, also long", SECRET), (SECRET, None)])
def test_a_message_with_a_wrong_secret_is_dropped_and_logged(
    theirs: str | None, ours: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hotset.handoff"), channels(theirs, ours) as (stranger, channel):
        stranger.send(channel.address, Ping(1))
        assert becomes(channel, lambda: channel.dropped["malformed"] == 1)
        assert "secret" in caplog.text and SECRET not in caplog.text


def test_invented_peers_take_bounded_memory() -> None:
    with channels(None) as [channel], speaker(channel) as dealer:
        for number in range(MAX_PEERS + 50):
            dealer.send(Codec().encode(Envelope(f"10.0.{number >> 8}.{number & 255}:80", "aa", "", Ping(number))))
        assert len(received(channel, MAX_PEERS + 50)) == MAX_PEERS + 50
        assert len(channel._peers) == MAX_PEERS


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "*:0", "10.1.2.3:0", "some-host:0"])
def test_a_port_open_to_other_machines_needs_a_secret(bind: str) -> None:
    with pytest.raises(ConfigError, match=r"shared secret.*127\.0\.0\.1"):
        Channel(bind, advertise="10.1.2.3:0")


@pytest.mark.parametrize(
    ("bind", "advertise", "secret", "error"),
    [
        ("127.0.0.1", None, None, "host:port"),
        ("127.0.0.1:http", None, None, "host:port"),
        (":9000", None, None, "host:port"),
        ("127.0.0.1:70000", None, None, "host:port"),
        ("0.0.0.0:0", None, SECRET, "the address at which they reach this machine"),
        ("0.0.0.0:0", "worker", SECRET, "host:port"),
        ("127.0.0.1:0", None, "short", "at least 16 characters"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    bind: str, advertise: str | None, secret: str | None, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        Channel(bind, secret=secret, advertise=advertise)


def test_a_port_that_is_taken_is_named() -> None:
    with channels(None) as [channel], pytest.raises(StartupError, match=channel.address):
        Channel(channel.address)


def test_peers_connect_to_the_advertised_address() -> None:
    outside = Channel("0.0.0.0:0", secret=SECRET, advertise="127.0.0.1:0")
    try:
        with channels(SECRET, bind="localhost:0") as [inside]:
            assert inside.address.startswith("127.0.0.1:")
            inside.send(outside.address, Ping(1))
            assert received(outside, 1) == [MessageReceived(inside.address, Ping(1))]
    finally:
        outside.close(0.0)


def test_a_wake_before_or_during_the_wait_ends_it() -> None:
    with channels(None) as [channel]:
        for _ in range(100_000):
            channel.wake()
        began = time.monotonic()
        channel.wait(SECONDS)
        assert time.monotonic() - began < SECONDS / 2
        began = time.monotonic()
        channel.wait(0.05)
        assert time.monotonic() - began >= 0.04


def test_queued_messages_leave_on_close_and_closing_is_bounded() -> None:
    with channels(None, None) as (left, right):
        left.send("127.0.0.1:1", Ping(0))
        left.send(right.address, Ping(1))
        began = time.monotonic()
        left.close(0.5)
        assert time.monotonic() - began < SECONDS / 2
        left.close()
        left.wake()
        assert received(right, 1) == [MessageReceived(left.address, Ping(1))]
