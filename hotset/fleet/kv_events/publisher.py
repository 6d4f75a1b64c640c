"""Publishes the changes of a prefix cache as KV events.

The engine's thread only collects changes. A thread of the publisher encodes and sends them, and answers requests for
replay. It never waits for a subscriber: a subscriber that reads too slowly loses messages, and can request them again.
"""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import zmq

from hotset.base.address import Address, EventsEndpoint, normalized_host
from hotset.base.errors import StartupError
from hotset.fleet.kv_events.event_log import EventLog, NumberedPayload, stored
from hotset.fleet.kv_events.wire import (
    END_OF_REPLAY,
    HOST_MEDIUM,
    SEQUENCE_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    Event,
    sequence_frame,
)
from hotset.tiers.prefix_cache import CacheChange, PagesEvicted, PagesStored, event_hash

LOGGER = logging.getLogger("hotset.fleet.kv_events")

MAX_WAITING = 1 << 22  # total size of changes that wait for the publisher's thread, in units of `_size`
MAX_BATCH = 1 << 17  # size of a batch, in units of `_size`: at most 1.2 MB
EVENT_SIZE = 32  # size of an event without its hashes and tokens, in units of `_size`
MAX_QUEUED = 10_000  # batches that wait for one subscriber; it loses further ones
MAX_QUEUED_ANSWERS = 100  # batches of a replay that are queued for one subscriber; the others are sent later
REQUESTS_PER_TURN = 16  # limit of requests per turn, so that many requests do not delay the events
MAX_REPLAYS = 64  # at the same time; further requests are not answered, so subscribers repeat them
ANSWERS_PER_TURN = 32
STALLED_SECONDS = 30.0  # a replay that nobody reads ends after this time
PACE_MS = 5  # interval between attempts to continue replays
HANDSHAKE_MS = 5000  # time for a new connection to complete ZeroMQ's handshake
MAX_REQUEST_BYTES = 4096  # limit of a message from a subscriber; the longest messages subscribe to a topic
CLOSE_SECONDS = 1.0
LINGER_MS = 200


@dataclass(slots=True)
class _Replay:
    """An answer that is being sent. `unsent` is the first message that has not been sent; None: the end marker."""

    rest: Iterator[NumberedPayload]
    unsent: NumberedPayload | None
    progress_at: float


class KvEventPublisher:
    """Publishes the changes of one prefix cache. `on_change`, `flush` and `close` are called by the engine's thread."""

    def __init__(
        self, endpoint: EventsEndpoint, *, topic: str = "", rank: int = 0, log: EventLog | None = None
    ) -> None:
        """Listens at `endpoint`; port 0 chooses a free port. `rank` is the data parallel rank of the cache.

        Raises StartupError if an address cannot be bound.
        """
        self._log = EventLog(rank, keep=endpoint.replay is not None) if log is None else log
        self._topic = topic.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._live = self._new_socket(zmq.PUB)
        self._live.sndhwm = MAX_QUEUED
        self._replay = None if endpoint.replay is None else self._new_socket(zmq.ROUTER)
        self.endpoint = EventsEndpoint(
            self._bind(self._live, endpoint.live, "--kv-events"),
            None
            if self._replay is None or endpoint.replay is None
            else self._bind(self._replay, endpoint.replay, "--kv-events-replay"),
        )
        self._changes: list[CacheChange | AllBlocksCleared] = []  # of the present step
        self._steps: queue.SimpleQueue[list[CacheChange | AllBlocksCleared]] = queue.SimpleQueue()
        # The total size that was put into the queue, which only the engine's thread writes, and the total size that was
        # taken out, which only the publisher's thread writes.
        self._size_put = self._size_taken = 0
        self._replays: dict[bytes, _Replay] = {}
        self._closing = self._failed = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for end in (self._wake_receiver, self._wake_sender):
            end.setblocking(False)
        self._publish([AllBlocksCleared()])  # a subscriber may know the cache of an earlier process at this address
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()  # from here on, only this thread uses the sockets

    def on_change(self, change: CacheChange) -> None:
        """Collects a change of the cache. It is published after the next `flush`."""
        self._changes.append(change)

    def flush(self) -> None:
        """Passes the collected changes of a step to the publisher's thread. Does not wait for it."""
        if not self._changes or self._failed:
            self._changes.clear()
            return
        waiting = self._size_put - self._size_taken
        size = sum(map(_size, self._changes))
        if not waiting or waiting + size <= MAX_WAITING:
            self._size_put += size
            self._steps.put(self._changes)
            self._changes = []
            self._wake()
        else:
            # The thread does not keep up, so these changes are lost. Subscribers must forget pages that were evicted.
            self._changes = [AllBlocksCleared()]

    def close(self) -> None:
        """Publishes what was flushed, and closes the sockets. Idempotent."""
        self._closing = True
        self._wake()
        self._thread.join(CLOSE_SECONDS)

    def _new_socket(self, kind: int) -> "zmq.Socket[bytes]":
        new = self._context.socket(kind)
        new.linger = LINGER_MS
        new.ipv6 = True
        new.handshake_ivl = HANDSHAKE_MS
        new.maxmsgsize = MAX_REQUEST_BYTES
        new.rcvhwm = 0  # no limit: at a limit, ZeroMQ 4.3.5 can abort the process (see handoff/channel.py)
        new.tcp_keepalive = 1  # closes connections to machines that have crashed
        if kind == zmq.ROUTER:
            new.sndhwm = MAX_QUEUED_ANSWERS
            new.router_mandatory = True  # `send` reports a full queue, instead of dropping the message
        return new

    def _bind(self, opened: "zmq.Socket[bytes]", address: Address, flag: str) -> Address:
        try:
            opened.bind(f"tcp://{address.host}:{address.port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            reason = zmq.strerror(error.errno or 0)
            message = f"cannot listen at tcp://{address} for KV events: {reason}; choose another {flag}"
            raise StartupError(message) from None
        host, _, port = opened.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").rpartition(":")
        return Address(normalized_host(host), int(port))

    def _wake(self) -> None:
        # BlockingIOError: the buffer is full, so the thread will wake anyway. OSError: the publisher is closed.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_sender.send(b"!")

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            self._failed = True
            LOGGER.exception("KV events are no longer published")
        finally:
            self._context.destroy(linger=LINGER_MS)
            self._wake_receiver.close()
            self._wake_sender.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_receiver, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._closing:
            poller.poll(PACE_MS if self._replays else None)
            with contextlib.suppress(BlockingIOError):
                self._wake_receiver.recv(4096)
            self._publish_steps()
            if self._replay is not None:
                self._read_requests(self._replay)
                self._send_answers(self._replay)
        self._publish_steps()

    def _publish_steps(self) -> None:
        """Publishes the changes of all waiting steps, as one batch unless that would be too large."""
        events: list[Event] = []
        size_of_batch = 0
        for _ in range(self._steps.qsize()):
            for change in self._steps.get():
                self._size_taken += _size(change)
                for part in _divided(change):
                    if events and size_of_batch + _size(part) > MAX_BATCH:
                        self._publish(events)
                        events, size_of_batch = [], 0
                    events.append(_event(part))
                    size_of_batch += _size(part)
        if events:
            self._publish(events)

    def _publish(self, events: Sequence[Event]) -> None:
        batch = self._log.append(events)
        self._live.send_multipart([self._topic, sequence_frame(batch.sequence), batch.payload])

    def _read_requests(self, replay: "zmq.Socket[bytes]") -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(REQUESTS_PER_TURN):
                client, *frames = replay.recv_multipart(zmq.NOBLOCK)
                fits = client in self._replays or len(self._replays) < MAX_REPLAYS
                if len(frames) == 2 and not frames[0] and len(frames[1]) == SEQUENCE_BYTES and fits:
                    rest = self._log.replay(int.from_bytes(frames[1], "big"))
                    self._replays[client] = _Replay(rest, next(rest, None), time.monotonic())

    def _send_answers(self, replay: "zmq.Socket[bytes]") -> None:
        """Sends a few batches of every open replay."""
        now = time.monotonic()
        for client, answer in list(self._replays.items()):
            try:
                for _ in range(ANSWERS_PER_TURN):
                    if answer.unsent is None:
                        replay.send_multipart([client, b"", b"", END_OF_REPLAY, b""], zmq.NOBLOCK)
                        del self._replays[client]
                        break
                    number, payload = sequence_frame(answer.unsent.sequence), answer.unsent.payload
                    replay.send_multipart([client, b"", self._topic, number, payload], zmq.NOBLOCK)
                    answer.unsent, answer.progress_at = next(answer.rest, None), now
            except zmq.Again:
                if now > answer.progress_at + STALLED_SECONDS:
                    del self._replays[client]
            except zmq.ZMQError:
                del self._replays[client]  # the subscriber has disconnected


def _size(change: CacheChange | AllBlocksCleared) -> int:
    """Returns an upper bound for the encoded size of a change, in units of 9 bytes: a hash takes 9 bytes, a token at
    most 5, and a character of the salt, which is sent twice, at most 8."""
    match change:
        case AllBlocksCleared():
            return EVENT_SIZE
        case PagesStored(hashes, _, token_ids, salt):
            return EVENT_SIZE + len(hashes) + len(token_ids) + len(salt)
        case _:
            return EVENT_SIZE + len(change.hashes)


def _divided(change: CacheChange | AllBlocksCleared) -> Iterator[CacheChange | AllBlocksCleared]:
    """Divides a change of more than half a batch into parts of a quarter of a batch. Yields others unchanged."""
    if _size(change) <= MAX_BATCH // 2 or isinstance(change, AllBlocksCleared):
        yield change
        return
    hashes = change.hashes
    if isinstance(change, PagesEvicted):
        for first in range(0, len(hashes), MAX_BATCH // 4):
            yield PagesEvicted(hashes[first : first + MAX_BATCH // 4])
        return
    rows = len(change.token_ids) // len(hashes)
    pages = max(1, MAX_BATCH // 4 // (rows + 1))
    for first in range(0, len(hashes), pages):
        parent = hashes[first - 1] if first else change.parent
        tokens = change.token_ids[first * rows : (first + pages) * rows]
        yield PagesStored(hashes[first : first + pages], parent, tokens, change.salt)


def _event(change: CacheChange | AllBlocksCleared) -> Event:
    match change:
        case AllBlocksCleared():
            return change
        case PagesStored(hashes, parent, token_ids, salt):
            known_parent = None if parent is None else event_hash(parent)
            return stored([event_hash(page_hash) for page_hash in hashes], known_parent, token_ids, salt or None)
        case _:
            return BlockRemoved([event_hash(page_hash) for page_hash in change.hashes], HOST_MEDIUM)
