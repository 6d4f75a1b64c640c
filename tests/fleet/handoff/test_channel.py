"""Tests of the control channel over real sockets: messages that arrive, messages that are dropped, malformed input."""

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest
import zmq
from ports import reserved_port

from hotset.base.errors import ConfigError, StartupError
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.fleet.handoff import channel as channel_module
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.channel import MAX_PEERS, MAX_PER_RECEIVE, MAX_QUEUED, Channel
from hotset.fleet.handoff.codec import MARK, MAX_BYTES, PLAIN, Codec
from hotset.schedule.handoffs import HandoffKey

SECRET = "a secret that peers share"
KEY = HandoffKey("r", 0)
WAIT_S = 60.0  # default time limit of waits, long enough for an overloaded machine


@contextmanager
def open_channels(*secrets: str | None, bind: str = "127.0.0.1:0") -> Iterator[list[Channel]]:
    """Yields one channel for each of the secrets (None: without a secret), and closes the channels at the end."""
    opened: list[Channel] = []
    try:
        opened.extend(Channel(bind, secret=secret) for secret in secrets)
        yield opened
    finally:
        for channel in opened:
            channel.close(0.0)


def receive_events(channel: Channel, count: int, seconds: float = WAIT_S) -> list[msg.ChannelEvent]:
    """Receives until there are `count` events or `seconds` have passed, and returns the events."""
    events: list[msg.ChannelEvent] = []
    deadline = time.monotonic() + seconds
    while len(events) < count and time.monotonic() < deadline:
        channel.wait(0.05)
        events += channel.receive()
    return events


def receive_until(channel: Channel, condition: Callable[[], bool], seconds: float = WAIT_S) -> bool:
    """Receives and discards events until the condition holds, for at most `seconds`. Returns whether it holds."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        channel.wait(0.02)
        channel.receive()
    return condition()


def raw_socket(channel: Channel) -> socket.socket:
    """Opens a TCP connection to the control port."""
    host, _, port = channel.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


@contextmanager
def zmq_client(channel: Channel) -> Iterator["zmq.Socket[bytes]"]:
    """Yields a ZeroMQ client of the control port that can send any bytes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://{channel.address}")
        yield dealer


def test_a_message_arrives_with_the_address_of_its_sender_and_can_be_answered() -> None:
    with open_channels(None, None) as (left, right):
        left.send(right.address, msg.Ping(1))
        assert receive_events(right, 1) == [msg.MessageReceived(left.address, msg.Ping(1))]
        right.send(left.address, msg.HandoffAccepted(KEY))
        assert receive_events(left, 1) == [msg.MessageReceived(right.address, msg.HandoffAccepted(KEY))]
        assert (dict(left.dropped), dict(right.dropped)) == ({}, {})


def test_a_request_with_200000_tokens_arrives_unchanged() -> None:
    request = msg.HandoffRequest(
        KEY, PromptSpec(tuple(range(200_000)), SamplingParams()), "host", tuple(range(5_000)), ()
    )
    with open_channels(SECRET, SECRET) as (left, right):
        right.send(left.address, msg.Ping(0))
        assert receive_events(left, 1)
        left.send(right.address, request)
        assert receive_events(right, 1) == [msg.MessageReceived(left.address, request)]


def test_messages_arrive_in_order_and_at_most_a_fixed_number_per_receive() -> None:
    with open_channels(None, None) as (left, right):
        for number in range(MAX_PER_RECEIVE + 50):
            left.send(right.address, msg.Ping(number))
        events: list[msg.ChannelEvent] = []
        deadline = time.monotonic() + WAIT_S
        while len(events) < MAX_PER_RECEIVE + 50 and time.monotonic() < deadline:
            right.wait(WAIT_S)
            batch = right.receive()
            assert len(batch) <= MAX_PER_RECEIVE
            events += batch
        assert events == [msg.MessageReceived(left.address, msg.Ping(number)) for number in range(MAX_PER_RECEIVE + 50)]


def test_a_message_sent_before_the_peer_listens_arrives_later() -> None:
    with reserved_port() as port, open_channels(None) as [left]:
        address = f"127.0.0.1:{port}"
        left.send(address, msg.Ping(7))
        time.sleep(0.1)
        with open_channels(None, bind=address) as [right]:
            assert receive_events(right, 1) == [msg.MessageReceived(left.address, msg.Ping(7))]


def test_sending_without_a_listener_never_blocks_and_overflow_is_counted() -> None:
    with open_channels(None) as [channel]:
        started_at = time.monotonic()
        for number in range(MAX_QUEUED + 100):
            channel.send("127.0.0.1:1", msg.Ping(number))
        assert time.monotonic() - started_at < WAIT_S
        assert channel.dropped["queue full"] >= 100


def test_sending_to_an_unusable_address_raises_no_exception() -> None:
    with open_channels(None) as [channel]:
        for address in ("nowhere.invalid:9", "no address", "[::1:9", "127.0.0.1:99999") * 2:
            channel.send(address, msg.Ping(1))


def test_a_message_to_an_unknown_peer_is_dropped_unless_it_is_a_ping() -> None:
    with open_channels(None, None) as (left, right):
        left.send(right.address, msg.HandoffAccepted(KEY))
        assert left.dropped["unknown peer"] == 1
        left.send(right.address, msg.Ping(1))
        assert receive_events(right, 1) == [msg.MessageReceived(left.address, msg.Ping(1))]


def test_a_restarted_peer_is_reported_once_and_gets_no_message_for_its_old_incarnation() -> None:
    with ExitStack() as opened:
        port = opened.enter_context(reserved_port())
        (left,) = opened.enter_context(open_channels(None))
        (first,) = opened.enter_context(open_channels(None, bind=f"127.0.0.1:{port}"))
        address = first.address
        first.send(left.address, msg.Ping(1))
        assert receive_events(left, 1) == [msg.MessageReceived(address, msg.Ping(1))]
        first.close(0.0)
        with open_channels(None, bind=address) as [second]:
            left.send(address, msg.HandoffAccepted(KEY))
            left.send(address, msg.Ping(2))
            assert receive_events(second, 1) == [msg.MessageReceived(left.address, msg.Ping(2))]
            assert second.dropped["wrong incarnation"] == 1
            second.send(left.address, msg.Pong(2))
            assert receive_events(left, 2) == [msg.PeerRestarted(address), msg.MessageReceived(address, msg.Pong(2))]
            left.send(address, msg.HandoffAccepted(KEY))
            assert receive_events(second, 1) == [msg.MessageReceived(left.address, msg.HandoffAccepted(KEY))]


def test_messages_of_an_old_incarnation_are_dropped() -> None:
    with open_channels(None) as [channel], zmq_client(channel) as dealer:

        def send_ping(incarnation: str, number: int) -> None:
            dealer.send(Codec().encode(msg.Envelope("127.0.0.1:7", incarnation, "", msg.Ping(number))))

        send_ping("aa", 1)
        send_ping("bb", 2)
        send_ping("aa", 3)
        send_ping("bb", 4)
        pings = [msg.MessageReceived("127.0.0.1:7", msg.Ping(number)) for number in (1, 2, 4)]
        assert receive_events(channel, 4) == [pings[0], msg.PeerRestarted("127.0.0.1:7"), *pings[1:]]
        assert receive_until(channel, lambda: channel.dropped["old incarnation"] == 1)


def test_a_channel_ignores_its_own_messages() -> None:
    with open_channels(None) as [channel]:
        channel.send(channel.address, msg.Ping(1))
        assert receive_until(channel, lambda: channel.dropped["own message"] == 1)


def test_a_hello_of_another_version_is_reported_and_can_be_answered_with_refused() -> None:
    with open_channels(None, None) as (channel, newer), zmq_client(channel) as dealer:
        for kind in ("HandoffRequest", "Hello"):
            fields = (msg.PROTOCOL + 1, newer.address, newer.incarnation, "", kind, {})
            dealer.send(MARK + PLAIN + msgspec.msgpack.encode(fields))
        assert receive_events(channel, 1) == [
            msg.ProtocolMismatch(newer.address, newer.incarnation, msg.PROTOCOL + 1, "Hello")
        ]
        assert channel.dropped["protocol mismatch"] == 2
        channel.send(newer.address, msg.Refused("version 1 here, 2 there"))
        assert receive_events(newer, 1) == [
            msg.MessageReceived(channel.address, msg.Refused("version 1 here, 2 there"))
        ]


# The beginning of a ZeroMQ connection: version 3.1 without authentication, and then the command READY of a DEALER.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: hotset\r\n\r\n",
    "ones": b"\xff" * 200,
    "zeros": bytes(200),
    "tls": b"\x16\x03\x01" + bytes(range(256)),
    "empty": b"",
    "half a ZeroMQ greeting": b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48),
}


def test_messages_arrive_while_clients_send_bytes_of_other_protocols() -> None:
    with open_channels(None, None) as (left, right), ExitStack() as connections:
        for number, (name, junk) in enumerate(GARBAGE.items()):
            connections.enter_context(raw_socket(right)).sendall(junk)
            left.send(right.address, msg.Ping(number))
            assert receive_events(right, 1) == [msg.MessageReceived(left.address, msg.Ping(number))], name


def is_closed(connection: socket.socket) -> bool:
    """Returns True if the other side has closed the connection. Ignores what it sent before."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("first_bytes", [b"", GREETING[:20], GREETING], ids=["nothing", "half a greeting", "greeting"])
def test_a_connection_that_does_not_complete_its_handshake_is_closed(
    monkeypatch: pytest.MonkeyPatch, first_bytes: bytes
) -> None:
    monkeypatch.setattr(channel_module, "HANDSHAKE_MS", 200)
    with open_channels(None) as [channel], raw_socket(channel) as connection:
        connection.sendall(first_bytes)
        assert receive_until(channel, lambda: is_closed(connection), 20.0)


def test_a_connection_that_answers_no_heartbeat_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(channel_module, "HEARTBEAT_TIMEOUT_MS", 300)
    with open_channels(None) as [channel], raw_socket(channel) as connection:
        connection.sendall(GREETING + READY)
        assert receive_until(channel, lambda: is_closed(connection), 20.0)


# A channel whose control port is not read for a while. Meanwhile a client sends many messages and heartbeats, and
# disconnects.
UNREAD_MESSAGES = """
import time, zmq
from hotset.fleet.handoff import channel
channel.HEARTBEAT_MS = 50
port = channel.Channel("127.0.0.1:0")
with zmq.Context() as context, context.socket(zmq.DEALER) as client:
    client.linger = 0
    client.sndhwm = 0
    client.heartbeat_ivl = 10
    client.connect(f"tcp://{port.address}")
    for _ in range(60):
        for _ in range(50):
            client.send(bytes(2000))
        time.sleep(0.01)
    time.sleep(0.2)
time.sleep(0.3)
deadline = time.monotonic() + 30
while port.dropped["malformed"] < 3000 and time.monotonic() < deadline:
    port.receive()
print(port.dropped["malformed"])
"""


def test_defect_23_a_peer_that_disconnects_while_its_messages_are_not_read_does_not_end_the_process() -> None:
    """ZeroMQ 4.3.5 aborts the process in this case, if it has stopped reading from the connection. A worker that was
    paused met this when it resumed."""
    process = subprocess.run([sys.executable, "-c", UNREAD_MESSAGES], capture_output=True, text=True, timeout=WAIT_S)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) == 3000


def test_more_connections_than_the_limit_are_closed_and_peers_connect_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel_module, "MAX_CONNECTIONS", 20)
    with caplog.at_level(logging.WARNING, "hotset.fleet.handoff"), open_channels(None, None) as (left, right):
        left.send(right.address, msg.Ping(0))
        assert receive_events(right, 1) == [msg.MessageReceived(left.address, msg.Ping(0))]
        deadline = time.monotonic() + WAIT_S
        for number in (1, 2):
            with ExitStack() as idle:
                connections = [idle.enter_context(raw_socket(right)) for _ in range(20)]
                for connection in connections:
                    connection.sendall(GREETING + READY)
                assert receive_until(right, lambda connections=connections: all(map(is_closed, connections)))
            while msg.MessageReceived(left.address, msg.Ping(number)) not in receive_events(right, 1, 0.1):
                left.send(right.address, msg.Ping(number))  # a message that was on its way may have been lost
                assert time.monotonic() < deadline, "the peer did not connect again"
        assert right.dropped["too many connections"] == 42
        assert caplog.text.count("connections to the control port") == 1


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "[::1]:0"])
def test_no_other_program_gets_the_port_while_a_channel_does_not_listen(bind: str) -> None:
    with open_channels(None, bind=bind) as [channel], socket.socket(family_of(bind)) as other:
        address = (channel.listens_on.host.strip("[]"), channel.listens_on.port)
        with socket.create_connection(address, WAIT_S):
            channel._router.unbind(channel._endpoint)
        deadline = time.monotonic() + WAIT_S
        while accepts_connections(address):
            assert time.monotonic() < deadline, "the channel still listens"
        with pytest.raises(OSError, match="Address already in use"):
            other.bind(address)
        channel._router.bind(channel._endpoint)
        socket.create_connection(address, WAIT_S).close()


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if address.startswith("[") else socket.AF_INET


def accepts_connections(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, WAIT_S).close()
    except ConnectionRefusedError:
        return False
    except ConnectionResetError:  # the socket is being closed, and the next attempt is refused
        return True
    return True


def test_malformed_messages_are_counted_and_logged_once_per_address(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hotset.fleet.handoff"), open_channels(None, None) as (left, right):
        with zmq_client(right) as dealer:
            for junk in ([b"junk"], [b""], [b"one", b"two"], [MARK + PLAIN + b"\x96"], [MARK * 100]):
                dealer.send_multipart(junk)
            assert receive_until(right, lambda: right.dropped["malformed"] == 5)
        assert [record.message for record in caplog.records if "127.0.0.1" in record.message] == [
            "dropped a malformed message from 127.0.0.1 on the control port: it is not a message of this protocol "
            "(further ones are counted, not logged)"
        ]
        with raw_socket(right) as connection:
            connection.sendall(b"\xff" * 200)
        assert receive_until(right, lambda: right.dropped["malformed"] >= 6)
        left.send(right.address, msg.Ping(1))
        assert receive_events(right, 1) == [msg.MessageReceived(left.address, msg.Ping(1))]


def test_a_message_above_the_size_limit_is_not_received() -> None:
    with open_channels(None, None) as (left, right), zmq_client(right) as dealer:
        dealer.send(bytes(MAX_BYTES + 1))
        left.send(right.address, msg.Ping(1))
        assert receive_events(right, 1) == [msg.MessageReceived(left.address, msg.Ping(1))]
        assert receive_events(right, 1, 0.2) == []
        assert not right.dropped, "the message was received and then refused"


def test_a_message_with_a_wrong_secret_is_dropped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "hotset.fleet.handoff"),
        open_channels("another secret, also long", SECRET) as (sender, channel),
    ):
        sender.send(channel.address, msg.Ping(1))
        assert receive_until(channel, lambda: channel.dropped["malformed"] == 1)
        assert "secret" in caplog.text and SECRET not in caplog.text


def test_the_number_of_remembered_peers_is_bounded() -> None:
    with open_channels(None) as [channel], zmq_client(channel) as dealer:
        for number in range(MAX_PEERS + 50):
            dealer.send(
                Codec().encode(msg.Envelope(f"10.0.{number >> 8}.{number & 255}:80", "aa", "", msg.Ping(number)))
            )
        assert len(receive_events(channel, MAX_PEERS + 50)) == MAX_PEERS + 50
        assert len(channel._peers) == MAX_PEERS


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "*:0", "10.1.2.3:0", "some-host:0"])
def test_a_port_that_other_machines_can_reach_needs_a_secret(bind: str) -> None:
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
def test_invalid_addresses_and_short_secrets_are_refused(
    bind: str, advertise: str | None, secret: str | None, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        Channel(bind, secret=secret, advertise=advertise)


def test_the_error_about_a_port_in_use_contains_the_address() -> None:
    with open_channels(None) as [channel], pytest.raises(StartupError, match=channel.address):
        Channel(channel.address)


def test_peers_connect_to_the_advertised_address() -> None:
    advertised = Channel("0.0.0.0:0", secret=SECRET, advertise="127.0.0.1:0")
    try:
        with open_channels(SECRET, bind="localhost:0") as [local]:
            assert local.address.startswith("127.0.0.1:")
            local.send(advertised.address, msg.Ping(1))
            assert receive_events(advertised, 1) == [msg.MessageReceived(local.address, msg.Ping(1))]
    finally:
        advertised.close(0.0)


def test_wakes_before_a_wait_end_that_wait_and_not_the_next() -> None:
    with open_channels(None) as [channel]:
        for _ in range(100_000):
            channel.wake()
        started_at = time.monotonic()
        channel.wait(WAIT_S)
        assert time.monotonic() - started_at < WAIT_S / 2
        started_at = time.monotonic()
        channel.wait(0.05)
        assert time.monotonic() - started_at >= 0.04


def test_close_sends_queued_messages_and_does_not_wait_for_absent_peers() -> None:
    with open_channels(None, None) as (left, right):
        left.send("127.0.0.1:1", msg.Ping(0))
        left.send(right.address, msg.Ping(1))
        started_at = time.monotonic()
        left.close(0.5)
        assert time.monotonic() - started_at < WAIT_S / 2
        left.close()
        left.wake()
        assert receive_events(right, 1) == [msg.MessageReceived(left.address, msg.Ping(1))]
