"""Control messages over ZeroMQ: one bound socket for receiving, one connected socket per peer for sending.

Nothing here waits for a peer, and delivery is not guaranteed: a message that cannot be queued is dropped. Callers
retransmit messages that need an answer. A peer is identified by the control address at which it listens, and by its
incarnation, a random string that a process chooses at start. Messages for or from an earlier incarnation are dropped.
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

from hotset.base.address import Address, control_port, normalized_host
from hotset.base.descriptors import free_descriptors
from hotset.base.errors import BadMessage, StartupError
from hotset.base.listeners import reserve_port
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.codec import MAX_BYTES, Codec
from hotset.fleet.handoff.messages import Hello, Message

LOGGER = logging.getLogger("hotset.fleet.handoff")

MAX_QUEUED = 1000  # messages queued to one peer
MAX_PER_RECEIVE = 256  # messages per `receive`, so that many messages do not keep the caller from other work
MAX_PEERS = 512  # limit of peers, each of which may have a socket
# Limit of connections to the control port. A peer that reconnects may have two for a moment. The limit is lower if half
# of the free file descriptors are fewer.
MAX_CONNECTIONS = 2 * MAX_PEERS
MAX_OLD_INCARNATIONS = 4  # remembered for each peer
MAX_WARNINGS = 256
RECONNECT_MS, RECONNECT_MAX_MS = 100, 1000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2000, 6000
LISTEN_AGAIN_SECONDS = 0.05
HANDSHAKE_MS = 5000  # time for a new connection to complete ZeroMQ's handshake
FOR_ANY_INCARNATION = (Hello, msg.Ping)  # sent even if the peer's incarnation is unknown
FAILED_HANDSHAKES = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
MONITORED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | FAILED_HANDSHAKES[0] | FAILED_HANDSHAKES[1]


@dataclass(slots=True)
class _Peer:
    socket: "zmq.Socket[bytes] | None" = None
    incarnation: str = ""  # empty until the peer has sent a message
    old_incarnations: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_OLD_INCARNATIONS))


class Channel:
    """One process's end of the control channel. All methods except `wake` must be called by one thread at a time."""

    def __init__(self, bind: str, *, secret: str | None = None, advertise: str | None = None) -> None:
        """Listens at `bind` (`host:port`; port 0 chooses a free port). `advertise` is the address to which peers
        connect, if it differs from `bind`. If its port is 0, the port on which this process listens is used.

        Raises ConfigError if an address is invalid, or if other machines could connect and there is no secret. Raises
        StartupError if the address cannot be bound.
        """
        control = control_port(bind, advertise, secret)
        self.dropped: Counter[str] = Counter()  # dropped messages, by cause
        self.incarnation = secrets.token_hex(16)
        self._codec = Codec(secret.encode() if secret else None)
        self._peers: dict[str, _Peer] = {}  # the most recently used peer is last
        self._warned: set[str] = set()
        self._closed = False
        self._connections: set[int] = set()  # file descriptors of the connections to the control port
        self._max_connections = min(MAX_CONNECTIONS, free_descriptors() // 2)
        self._listening = True
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._new_socket(zmq.ROUTER)
        # ZeroMQ stops reading from a connection with more unread messages than `rcvhwm`. If the peer then disconnects,
        # a heartbeat of either side aborts this process (ZeroMQ 4.3.5). The limit is therefore off; `receive` takes
        # messages from the queue about as fast as a connection delivers them.
        self._router.rcvhwm = 0
        self._router.handshake_ivl = HANDSHAKE_MS
        with contextlib.ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            try:
                # The router stops listening for a moment if there are too many connections.
                self._reservation = undo.enter_context(reserve_port(control.listen))
                self._router.bind(f"tcp://{control.listen.host}:{self._reservation.getsockname()[1]}")
            except (OSError, zmq.ZMQError) as error:
                raise StartupError(f"cannot listen at {bind} for control messages: {error.strerror}") from None
            undo.pop_all()
        self._endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)  # like tcp://127.0.0.1:7000
        host, _, port = self._endpoint.removeprefix("tcp://").rpartition(":")
        self.listens_on = Address(normalized_host(host), int(port))
        self.address = str(Address(control.peers.host, control.peers.port or int(port)))
        self._monitor = self._router.get_monitor_socket(MONITORED)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._poller = zmq.Poller()
        for source in (self._router, self._monitor, self._wake_receiver):
            self._poller.register(source, zmq.POLLIN)
        for end in (self._wake_receiver, self._wake_sender):
            end.setblocking(False)

    def send(self, peer: str, message: Message) -> None:
        """Queues a message for the last known incarnation at this address. Hello and Ping go to any incarnation.
        Other messages are dropped if no incarnation is known."""
        known = self._peer(peer)
        for_any = isinstance(message, FOR_ANY_INCARNATION)
        target = "" if for_any else known.incarnation
        if not target and not for_any:
            self.dropped["unknown peer"] += 1
            return
        try:
            if known.socket is None:
                known.socket = self._connect(peer)
            envelope = msg.Envelope(self.address, self.incarnation, target, message)
            known.socket.send(self._codec.encode(envelope), zmq.NOBLOCK)
        except zmq.Again:
            self.dropped["queue full"] += 1
        except zmq.ZMQError as error:
            # For example, ZeroMQ rejects the address. The message is lost, as if nothing listened at the address.
            self.dropped["send failed"] += 1
            self._warn_once(peer, f"cannot send to {peer}: {error.strerror}")

    def receive(self) -> list[msg.ChannelEvent]:
        """Returns the messages and events that have arrived, in order, up to a limit. Never blocks."""
        events: list[msg.ChannelEvent] = []
        self._watch_connections()
        for _ in range(MAX_PER_RECEIVE):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            events += self._decode(frames)
        return events

    def wait(self, seconds: float) -> None:
        """Blocks until a message or a connection arrives, `wake` is called, or the time has passed."""
        if not self._listening:
            seconds = min(seconds, LISTEN_AGAIN_SECONDS)
        self._poller.poll(math.ceil(max(0.0, seconds) * 1000))
        try:
            while self._wake_receiver.recv(4096):
                pass
        except BlockingIOError:
            pass

    def wake(self) -> None:
        """Ends the current or the next `wait`. May be called from any thread, at any time."""
        # BlockingIOError: the buffer is full, so `wait` will return anyway. OSError: the channel is closed.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_sender.send(b"!")

    def forget(self, peer: str) -> None:
        """Drops the messages that are queued for a peer, and forgets its incarnation."""
        known = self._peers.pop(peer, None)
        if known is not None and known.socket is not None:
            known.socket.close(linger=0)

    def close(self, linger_s: float = 0.2) -> None:
        """Waits up to `linger_s` seconds for queued messages to be sent, then closes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._router.disable_monitor()
        self._context.destroy(linger=int(linger_s * 1000))
        self._reservation.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _new_socket(self, kind: int) -> "zmq.Socket[bytes]":
        new = self._context.socket(kind)
        new.linger = 0
        new.ipv6 = True
        new.maxmsgsize = MAX_BYTES
        new.sndhwm = new.rcvhwm = MAX_QUEUED
        # A machine that crashes does not close its connections. Heartbeats detect this: ZeroMQ reconnects a socket for
        # sending, and closes a connection to the control port.
        new.heartbeat_ivl, new.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
        return new

    def _connect(self, peer: str) -> "zmq.Socket[bytes]":
        new = self._new_socket(zmq.DEALER)
        new.reconnect_ivl, new.reconnect_ivl_max = RECONNECT_MS, RECONNECT_MAX_MS
        try:
            new.connect(f"tcp://{peer}")
        except zmq.ZMQError:
            new.close(linger=0)
            raise
        return new

    def _peer(self, address: str) -> _Peer:
        known = self._peers.pop(address, None) or _Peer()
        self._peers[address] = known
        if len(self._peers) > MAX_PEERS:
            self.forget(next(iter(self._peers)))
        return known

    def _decode(self, frames: "list[zmq.Frame]") -> list[msg.ChannelEvent]:
        """Returns the events of one received message. A malformed message has none."""
        try:
            if len(frames) != 2:  # the first frame identifies the connection
                raise BadMessage(f"it has {len(frames) - 1} frames instead of one")
            envelope = self._codec.decode(frames[1].bytes)
        except BadMessage as error:
            self.dropped["malformed"] += 1
            address = _address_of(frames[-1])
            self._warn_once(address, f"dropped a malformed message from {address} on the control port: {error}")
            return []
        if envelope.sender_incarnation == self.incarnation:
            self.dropped["own message"] += 1
            return []
        return self._from_peer(envelope)

    def _from_peer(self, envelope: msg.Envelope | msg.ProtocolMismatch) -> list[msg.ChannelEvent]:
        address, incarnation = envelope.sender_address, envelope.sender_incarnation
        known = self._peer(address)
        if incarnation in known.old_incarnations:
            self.dropped["old incarnation"] += 1
            return []
        events: list[msg.ChannelEvent] = []
        if known.incarnation not in ("", incarnation):
            known.old_incarnations.append(known.incarnation)
            events.append(msg.PeerRestarted(address))
        known.incarnation = incarnation
        if isinstance(envelope, msg.ProtocolMismatch):
            self.dropped["protocol mismatch"] += 1
            return [*events, envelope] if envelope.kind == Hello.__name__ else events
        if envelope.target_incarnation not in ("", self.incarnation):
            self.dropped["wrong incarnation"] += 1
            return events
        return [*events, msg.MessageReceived(address, envelope.message)]

    def _watch_connections(self) -> None:
        """Counts connections and failed handshakes, and closes all connections if there are too many.

        ZeroMQ can neither limit connections nor close a single one. Peers connect again at once. Connections that were
        only opened to exhaust file descriptors stay closed.
        """
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connections.add(event["value"])
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._connections.discard(event["value"])
            else:
                self.dropped["malformed"] += 1
                self._warn_once("", "dropped a connection to the control port that does not use the ZeroMQ protocol")
        if len(self._connections) > self._max_connections:
            self.dropped["too many connections"] += len(self._connections)
            self._warn_once(
                "connections",
                f"closed all {len(self._connections)} connections to the control port, more than the limit of "
                f"{self._max_connections}; peers connect again",
            )
            self._connections.clear()
            self._router.unbind(self._endpoint)  # this also closes the connections that were accepted there
            self._listening = False
        if not self._listening:
            # A thread of ZeroMQ closes the old socket. `bind` fails until then, and the next call of this method tries
            # again.
            with contextlib.suppress(zmq.ZMQError):
                self._router.bind(self._endpoint)
                self._listening = True

    def _warn_once(self, source: str, text: str) -> None:
        """Logs a warning once per source, and for a limited number of sources."""
        if source not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(source)
            LOGGER.warning("%s (further ones are counted, not logged)", text)


def _address_of(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address")).removeprefix("::ffff:")
    except zmq.ZMQError:
        return "an unknown address"  # ZeroMQ's first protocol version does not have this property
