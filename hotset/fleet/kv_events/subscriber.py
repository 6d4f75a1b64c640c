"""Follows the KV events of one publisher, and knows which blocks are in its cache.

Messages can be lost: ZeroMQ drops them before a connection is complete, after it has broken, and if a subscriber reads
too slowly. Gaps in the sequence numbers show this. The subscriber then asks the publisher's replay socket for the
missing batches. It does the same if nothing has arrived for a while, because the newest batch may be lost. After a
connection was lost, the publisher may be a new process, so the subscriber forgets everything and asks for all batches.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from hotset.base.errors import BadMessage
from hotset.fleet.kv_events.wire import (
    MAX_BATCH_BYTES,
    AllBlocksCleared,
    NumberedBatch,
    RemovedHashes,
    StoredHashes,
    decode,
    sequence_frame,
)

LOGGER = logging.getLogger("hotset.fleet.kv_events")

MAX_KNOWN_BLOCKS = 1 << 22  # of one publisher; a host store of 4 million pages of 1 MiB has 4 TiB
CHECK_SECONDS = 5.0  # time without a message after which the subscriber asks for batches that it may have missed
RETRY_SECONDS = 2.0  # time between a failed attempt to catch up and the next
ANSWER_SECONDS = 2.0  # time limit for each answer of the replay socket
CONNECT_SECONDS = 10.0  # time without a connection after which the log names the address
MAX_QUEUED = 10_000  # messages that wait to be read; further ones are dropped, and replayed later
MAX_PER_WAKE = 256  # messages per turn, so that many messages do not keep the event loop from other work
RECONNECT_MS, RECONNECT_MAX_MS = 100, 1000
MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class KnownBlocks:
    """The blocks of one publisher, by medium. A block can be in several media at the same time."""

    def __init__(self, limit: int = MAX_KNOWN_BLOCKS) -> None:
        """Further blocks are ignored while `limit` are known, so a publisher cannot exhaust the memory."""
        self._limit = limit
        self._media: dict[str | None, set[int]] = {}

    def __len__(self) -> int:
        return len(self.hashes())

    def __contains__(self, block_hash: int) -> bool:
        # A router asks this hundreds of times for a prompt, and any() takes twice as long.
        for known in self._media.values():  # noqa: SIM110
            if block_hash in known:
                return True
        return False

    def hashes(self) -> set[int]:
        """Returns the hashes of all known blocks."""
        return set().union(*self._media.values())

    def store(self, hashes: Sequence[int], medium: str | None) -> None:
        room = self._limit - sum(map(len, self._media.values()))
        if accepted := hashes[: max(0, room)]:
            self._media.setdefault(medium, set()).update(accepted)

    def remove(self, hashes: Iterable[int], medium: str | None) -> None:
        if (known := self._media.get(medium)) is not None:
            known.difference_update(hashes)
            if not known:
                del self._media[medium]

    def clear(self) -> None:
        self._media.clear()


class KvEventSubscriber:
    """Follows one publisher while `run` runs, in its event loop. `blocks` are the known blocks of the publisher."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        replay: str | None,
        *,
        topic: str = "",
        check_seconds: float = CHECK_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """`address` and `replay` are the publisher's addresses, like tcp://127.0.0.1:5557. The caller owns `context`.

        Without a replay address, the subscriber forgets all blocks when a message is lost, and `synced` is True only
        after batch 0 or an `AllBlocksCleared`, until a message is lost.
        """
        self.blocks = KnownBlocks()
        self.synced = False  # whether `blocks` equals the publisher's cache, except for messages on their way
        self.catch_ups = 0  # successful requests for missing batches
        self._context, self._address, self._replay, self._topic = context, address, replay, topic
        self._check_seconds, self._retry_seconds = check_seconds, retry_seconds
        self._next: int | None = None  # the sequence number of the next batch; None if nothing is known
        self._last_live = -1  # the last sequence number that came over the present connection
        self._warned = False

    async def run(self) -> None:
        """Follows the publisher until the task is cancelled. The publisher may start later, and may be restarted.

        Raises zmq.ZMQError if ZeroMQ refuses an address.
        """
        live = self._socket(zmq.SUB)
        live.subscribe(self._topic)
        monitor = live.get_monitor_socket(MONITORED)
        try:
            live.connect(self._address)
            await self._follow(live, monitor)
        finally:
            self._forget()
            live.disable_monitor()
            monitor.close()
            live.close()

    async def _follow(self, live: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        poller = zmq.asyncio.Poller()
        poller.register(live, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        connected = False
        catch_up_at = not_before = 0.0
        unreachable_at = time.monotonic() + CONNECT_SECONDS
        while True:
            # Without a connection, `poll` ends when the monitor reports one.
            wake_at = catch_up_at if connected else None if self._warned else unreachable_at
            await poller.poll(None if wake_at is None else max(0.0, wake_at - time.monotonic()) * 1000)
            if not connected and time.monotonic() >= unreachable_at:
                self._warn(f"no connection for {CONNECT_SECONDS:g} s")
            messages = await _receive_all(live, MAX_PER_WAKE)
            # ZeroMQ reports the end of a connection before it delivers messages of the next one.
            for report in await _receive_all(monitor, MAX_PER_WAKE):
                connected = parse_monitor_message(report)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
                catch_up_at = 0.0
                if not connected:
                    unreachable_at = time.monotonic() + CONNECT_SECONDS
                    # The numbers of messages of the lost connection may continue those of the next process.
                    messages.clear()
                    while await _receive_all(live, MAX_PER_WAKE):
                        pass
                    self._forget()
            if messages and self.synced:
                catch_up_at = time.monotonic() + self._check_seconds
            for frames in messages:
                if not self._on_live(frames):
                    catch_up_at, self.synced = not_before, False
            if connected and time.monotonic() >= catch_up_at:
                self.synced = await self._catch_up()
                catch_up_at = time.monotonic() + (self._check_seconds if self.synced else self._retry_seconds)
                not_before = 0.0 if self.synced else catch_up_at

    def _on_live(self, frames: Sequence[bytes]) -> bool:
        """Applies a message of the publisher's PUB socket. Returns False if batches before it are missing."""
        try:
            batch = decode(frames)
            if batch is None:
                raise BadMessage("it ends a replay that nobody asked for")
        except BadMessage as error:
            self._warn(f"dropped a malformed message: {error}")
            self._forget()
            return False
        if batch.sequence <= self._last_live:
            self._forget()  # behind a proxy, another process has taken the publisher's place
        self._last_live = batch.sequence
        if self._replay is not None:
            return self._next is not None and self._accept(batch)
        if self._next != batch.sequence:
            self.blocks.clear()
            self.synced, self._next = batch.sequence == 0, batch.sequence
        self.synced = self.synced or any(isinstance(event, AllBlocksCleared) for event in batch.events)
        return self._accept(batch)

    async def _catch_up(self) -> bool:
        """Asks for all batches that follow the last known one, and applies them. Returns False if that fails."""
        if self._replay is None:
            return self.synced
        try:
            complete = await self._replay_from(self._replay, self._next or 0)
            if not complete:
                # The missing batches are no longer available, or the publisher is a new process.
                self._forget()
                complete = await self._replay_from(self._replay, 0)
        except BadMessage as error:
            self._warn(f"cannot catch up: {error}")
            complete = False
        except TimeoutError:
            self._warn(f"cannot catch up: {self._replay} does not answer within {ANSWER_SECONDS:g} s")
            complete = False
        if not complete:
            self._forget()
        self.catch_ups += complete
        return complete

    async def _replay_from(self, address: str, start: int) -> bool:
        """Requests and applies the batches from number `start` on. Returns False if batches are missing before the
        answer."""
        with self._socket(zmq.DEALER) as dealer:
            dealer.connect(address)
            await dealer.send_multipart([b"", sequence_frame(start)])
            while True:
                await asyncio.sleep(0)  # other tasks may run; `recv_multipart` does not yield if a message is there
                async with asyncio.timeout(ANSWER_SECONDS):
                    delimiter, *frames = await dealer.recv_multipart()
                if delimiter:
                    raise BadMessage("an answer does not begin with an empty frame")
                batch = decode(frames)
                if batch is None:
                    return True
                # A lower number than requested comes from a new process.
                if batch.sequence < start or not self._accept(batch):
                    return False

    def _accept(self, batch: NumberedBatch) -> bool:
        """Applies a batch unless it was applied before. Returns False if batches before it are missing."""
        if self._next is not None and batch.sequence != self._next:
            if batch.sequence < self._next:
                return True
            if not batch.starts_anew:
                return False
        for event in batch.events:
            if isinstance(event, StoredHashes):
                self.blocks.store(event.block_hashes, event.medium)
            elif isinstance(event, RemovedHashes):
                self.blocks.remove(event.block_hashes, event.medium)
            else:
                self.blocks.clear()
        self._next = batch.sequence + 1
        return True

    def _forget(self) -> None:
        self.blocks.clear()
        self.synced, self._next, self._last_live = False, None, -1

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        new = self._context.socket(kind)
        new.linger = 0
        new.ipv6 = True
        new.maxmsgsize = MAX_BATCH_BYTES
        new.rcvhwm = MAX_QUEUED
        new.reconnect_ivl, new.reconnect_ivl_max = RECONNECT_MS, RECONNECT_MAX_MS
        return new

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            LOGGER.warning("KV events of %s: %s (further problems are not logged)", self._address, text)


async def _receive_all(source: zmq.asyncio.Socket, limit: int) -> list[list[bytes]]:
    """Returns the messages that have arrived, up to a limit."""
    messages: list[list[bytes]] = []
    try:
        while len(messages) < limit:
            messages.append(await source.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        pass
    return messages
