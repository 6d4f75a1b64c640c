"""Control messages over ZeroMQ: one bound socket to hear by, one connected socket for each peer to speak by.

Nothing here waits for a peer and nothing is promised: what cannot be queued is dropped, and whoever needs an answer
asks again. Peers are known by the control address at which they listen, and by their incarnation: a word that a process
draws when it starts. What was meant for an incarnation that is gone is dropped.
"""

import contextlib
import logging
import math
import secrets
import socket
from collections import Counter, deque
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import parse_monitor_message

from hotset.base.address import Address, control_port
from hotset.base.errors import BadMessage, StartupError
from hotset.handoff.codec import MAX_BYTES, Codec
from hotset.handoff.messages import (
    ChannelEvent,
    Envelope,
    Hello,
    Message,
    MessageReceived,
    PeerRestarted,
    Ping,
    ProtocolMismatch,
)

LOGGER = logging.getLogger("hotset.handoff")

QUEUED = 1000  # messages at most to one peer, and from one
AT_ONCE = 256  # messages that one `receive` takes, so that a flood does not keep its caller from other work
PEERS_KEPT = 512  # each may have a socket
INCARNATIONS_KEPT = 4
MAX_WARNINGS = 256
RECONNECT_MS, RECONNECT_MAX_MS = 100, 1000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2000, 6000
ANY_INCARNATION = (Hello, Ping)  # asked in order to learn who is there
FAILED_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


@dataclass(slots=True)
class _Peer:
    socket: "zmq.Socket[bytes] | None" = None
    incarnation: str = ""  # empty until something was heard from it
    gone: deque[str] = field(default_factory=lambda: deque(maxlen=INCARNATIONS_KEPT))


class Channel:
    """One process's end. All calls but `wake` come from one thread at a time."""

    def __init__(self, bind: str, *, secret: str | None = None, advertise: str | None = None) -> None:
        """Listens at `bind` (`host:port`; port 0: any free one). `advertise` is what peers connect to where that is
        another address; its port 0 stands for the one that was found.

        ConfigError where an address is none, or would let other machines in without a secret; StartupError where it
        cannot be had.
        """
        control = control_port(bind, advertise, secret)
        self.dropped: Counter[str] = Counter()  # messages, by cause
        self.incarnation = secrets.token_hex(16)
        self._codec = Codec(secret.encode() if secret else None)
        self._peers: dict[str, _Peer] = {}  # the one heard or spoken to last comes last
        self._complained: set[str] = set()
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ear = self._new_socket(zmq.ROUTER)
        try:
            self._ear.bind(f"tcp://{control.listen.host}:{control.listen.port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StartupError(f"cannot listen at {bind} for control messages: {error.strerror}") from None
        port = int(self._ear.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.address = str(Address(control.peers.host, control.peers.port or port))
        self._monitor = self._ear.get_monitor_socket(FAILED_HANDSHAKES)
        self._alarm, self._alarm_button = socket.socketpair()
        self._poller = zmq.Poller()
        for source in (self._ear, self._monitor, self._alarm):
            self._poller.register(source, zmq.POLLIN)
        for end in (self._alarm, self._alarm_button):
            end.setblocking(False)

    def send(self, peer: str, message: Message) -> None:
        """Queues it for the incarnation heard last at this address; questions of who is there go to any."""
        known = self._known(peer)
        addressee = "" if isinstance(message, ANY_INCARNATION) else known.incarnation
        if not addressee and not isinstance(message, ANY_INCARNATION):
            self.dropped["to nobody known"] += 1
            return
        try:
            if known.socket is None:
                known.socket = self._connected(peer)
            letter = Envelope(self.address, self.incarnation, addressee, message)
            known.socket.send(self._codec.encode(letter), zmq.NOBLOCK)
        except zmq.Again:
            self.dropped["queue full"] += 1
        except zmq.ZMQError as error:
            # An address that ZeroMQ cannot make sense of: like one at which nobody answers.
            self.dropped["not sent"] += 1
            self._complain(peer, f"cannot send to {peer}: {error.strerror}")

    def receive(self) -> list[ChannelEvent]:
        """What has come, in its order, a limited number at a time. Never waits."""
        events: list[ChannelEvent] = []
        self._count_failed_handshakes()
        for _ in range(AT_ONCE):
            try:
                frames = self._ear.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            events += self._understood(frames)
        return events

    def wait(self, seconds: float) -> None:
        """Until something has come, somebody called `wake`, or so long."""
        self._poller.poll(math.ceil(max(0.0, seconds) * 1000))
        try:
            while self._alarm.recv(4096):
                pass
        except BlockingIOError:
            pass

    def wake(self) -> None:
        """Ends the `wait` of the owner, now or the next. From any thread, at any time."""
        # Full: it is awake already. Closed: nobody waits any more.
        with contextlib.suppress(BlockingIOError, OSError):
            self._alarm_button.send(b"!")

    def forget(self, peer: str) -> None:
        """Drops what is queued for it, and its incarnation."""
        known = self._peers.pop(peer, None)
        if known is not None and known.socket is not None:
            known.socket.close(linger=0)

    def close(self, last_words_s: float = 0.2) -> None:
        """Gives messages just sent so long to leave, then closes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._ear.disable_monitor()
        self._context.destroy(linger=int(last_words_s * 1000))
        self._alarm.close()
        self._alarm_button.close()

    def _new_socket(self, kind: int) -> "zmq.Socket[bytes]":
        new = self._context.socket(kind)
        new.linger = 0
        new.ipv6 = True
        new.maxmsgsize = MAX_BYTES
        new.sndhwm = new.rcvhwm = QUEUED
        return new

    def _connected(self, peer: str) -> "zmq.Socket[bytes]":
        new = self._new_socket(zmq.DEALER)
        new.reconnect_ivl, new.reconnect_ivl_max = RECONNECT_MS, RECONNECT_MAX_MS
        # A machine that vanished sends no sign of it, and its successor is reached by a new connection only.
        new.heartbeat_ivl, new.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
        try:
            new.connect(f"tcp://{peer}")
        except zmq.ZMQError:
            new.close(linger=0)
            raise
        return new

    def _known(self, peer: str) -> _Peer:
        known = self._peers.pop(peer, None) or _Peer()
        self._peers[peer] = known
        if len(self._peers) > PEERS_KEPT:
            self.forget(next(iter(self._peers)))
        return known

    def _understood(self, frames: "list[zmq.Frame]") -> list[ChannelEvent]:
        """What one arrival amounts to: garbage comes to nothing."""
        try:
            if len(frames) != 2:  # the first is ZeroMQ's own: by which connection it came
                raise BadMessage(f"{len(frames) - 1} parts instead of one")
            letter = self._codec.decode(frames[1].bytes)
        except BadMessage as error:
            self.dropped["garbage"] += 1
            address = _address_of(frames[-1])
            self._complain(address, f"dropped garbage from {address} on the control port: {error}")
            return []
        if letter.sender == self.incarnation:
            self.dropped["from ourselves"] += 1
            return []
        return self._from_peer(letter)

    def _from_peer(self, letter: Envelope | ProtocolMismatch) -> list[ChannelEvent]:
        known = self._known(letter.origin)
        if letter.sender in known.gone:
            self.dropped["from the dead"] += 1
            return []
        events: list[ChannelEvent] = []
        if known.incarnation not in ("", letter.sender):
            known.gone.append(known.incarnation)
            events.append(PeerRestarted(letter.origin))
        known.incarnation = letter.sender
        if isinstance(letter, ProtocolMismatch):
            self.dropped["other version"] += 1
            return [*events, letter] if letter.kind == Hello.__name__ else events
        if letter.addressee not in ("", self.incarnation):
            self.dropped["misaddressed"] += 1
            return events
        return [*events, MessageReceived(letter.origin, letter.message)]

    def _count_failed_handshakes(self) -> None:
        while self._monitor.poll(0):
            parse_monitor_message(self._monitor.recv_multipart())
            self.dropped["garbage"] += 1
            self._complain("", "dropped a connection to the control port that does not speak its protocol")

    def _complain(self, about: str, text: str) -> None:
        """Once for each culprit, and not for ever more culprits."""
        if about not in self._complained and len(self._complained) < MAX_WARNINGS:
            self._complained.add(about)
            LOGGER.warning("%s (further ones are counted, not logged)", text)


def _address_of(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address")).removeprefix("::ffff:")
    except zmq.ZMQError:
        return "somebody"  # whose bytes look like ZeroMQ's first version, which says nothing of the kind
