"""A subscriber knows the blocks of the publisher's cache, although messages are lost and processes come and go."""

import asyncio
import itertools
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from random_cache import RandomCache
from waiting import in_event_loop, until
from zmq.utils.monitor import recv_monitor_message

from hotset.base.address import Address, EventsEndpoint
from hotset.base.errors import BadMessage
from hotset.fleet.kv_events import publisher as publisher_module
from hotset.fleet.kv_events import subscriber as subscriber_module
from hotset.fleet.kv_events.event_log import EventLog
from hotset.fleet.kv_events.publisher import KvEventPublisher
from hotset.fleet.kv_events.subscriber import KnownBlocks, KvEventSubscriber
from hotset.fleet.kv_events.wire import END_OF_REPLAY, MAX_BATCH_BYTES, decode, sequence_frame
from hotset.tiers.prefix_cache import PagesStored

ANY_PORTS = EventsEndpoint(Address("127.0.0.1", 0), Address("127.0.0.1", 0))
DEADLINE_S = 60.0
SOON = {"check_seconds": 0.1, "retry_seconds": 0.1}  # a subscriber that soon asks for the newest batches
NEVER = {"check_seconds": 1e6, "retry_seconds": 0.1}


@pytest.fixture(autouse=True)
def patient_subscribers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that runs in the same event loop may answer late if the machine is busy."""
    monkeypatch.setattr(subscriber_module, "ANSWER_SECONDS", DEADLINE_S)


@asynccontextmanager
async def following(
    endpoint: EventsEndpoint, *, live: str | None = None, replay: bool = True, **options: Any
) -> AsyncIterator[KvEventSubscriber]:
    """Runs a subscriber. `live` replaces the address of the publisher's PUB socket."""
    context = zmq.asyncio.Context()
    address = f"tcp://{endpoint.replay}" if replay else None
    subscriber = KvEventSubscriber(context, live or f"tcp://{endpoint.live}", address, **options)
    task = asyncio.create_task(subscriber.run())
    try:
        yield subscriber
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])
        context.destroy(linger=0)


@asynccontextmanager
async def lossy_proxy(endpoint: EventsEndpoint, loss: Callable[[], bool]) -> AsyncIterator[str]:
    """Forwards the messages of a publisher, except those for which `loss` returns True. Yields its address."""
    context = zmq.asyncio.Context()
    source, sink = context.socket(zmq.SUB), context.socket(zmq.PUB)
    source.subscribe(b"")
    source.connect(f"tcp://{endpoint.live}")
    port = sink.bind_to_random_port("tcp://127.0.0.1")

    async def forward() -> None:
        while True:
            frames = await source.recv_multipart()
            if not loss():
                await sink.send_multipart(frames)

    task = asyncio.create_task(forward())
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        task.cancel()
        await asyncio.wait([task])
        context.destroy(linger=0)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))])
@in_event_loop
async def test_subscribers_agree_with_the_cache_after_random_changes_and_lost_messages(seed: int) -> None:
    rng = random.Random(seed)
    publisher = KvEventPublisher(ANY_PORTS, log=EventLog(0, keep=True, max_batches=rng.choice([1, 5, 50, 1000])))
    cache = RandomCache(seed, publisher.on_change)
    losses: list[bool] = []

    def is_lost() -> bool:
        losses.append(rng.random() < 0.3)
        return losses[-1]

    try:
        async with (
            lossy_proxy(publisher.endpoint, is_lost) as lossy,
            following(publisher.endpoint, **SOON) as direct,
            following(publisher.endpoint, live=lossy, **SOON) as behind,
        ):
            while not losses:  # until the proxy has connected
                cache.step()
                publisher.flush()
                await asyncio.sleep(0.002)
            for _ in range(4):
                for _ in range(100):
                    cache.step()
                    publisher.flush()
                    if rng.random() < 0.3:
                        await asyncio.sleep(0)
                await until(lambda: direct.synced and direct.blocks.hashes() == cache.hashes)
                await until(lambda: behind.synced and behind.blocks.hashes() == cache.hashes)
            async with following(publisher.endpoint, **NEVER) as late:
                await until(lambda: late.synced)
                assert late.blocks.hashes() == cache.hashes
                assert late.catch_ups == 1
            await until(lambda: any(losses))
    finally:
        publisher.close()


@in_event_loop
async def test_a_subscriber_forgets_the_blocks_of_a_publisher_that_was_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscriber_module, "ANSWER_SECONDS", 1.0)  # the publisher may end before it answers
    publisher = KvEventPublisher(ANY_PORTS)
    endpoint = publisher.endpoint
    try:
        async with following(endpoint, **SOON) as subscriber:
            cache = RandomCache(1, publisher.on_change)
            for _ in range(50):
                cache.step()
            publisher.flush()
            await until(lambda: subscriber.synced and len(subscriber.blocks) > 0)
            assert subscriber.blocks.hashes() == cache.hashes
            publisher.close()
            await until(lambda: not subscriber.synced)
            assert len(subscriber.blocks) == 0
            # The new process publishes more batches than the old one before the subscriber connects.
            publisher = reopened(endpoint)
            publish_blocks(publisher, range(20))
            await until(lambda: subscriber.synced and subscriber.blocks.hashes() == set(range(20)))
    finally:
        publisher.close()


@in_event_loop
async def test_messages_that_a_subscriber_has_not_read_when_its_connection_ends_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their numbers may fit to those of the next process."""
    monkeypatch.setattr(subscriber_module, "MAX_PER_WAKE", 10)
    monkeypatch.setattr(subscriber_module, "ANSWER_SECONDS", 1.0)
    publisher = KvEventPublisher(ANY_PORTS)
    endpoint, witness = publisher.endpoint, None
    try:
        async with following(endpoint, **NEVER) as subscriber:
            witness = Witness(endpoint)
            while subscriber._last_live < 0 or not witness.live.poll(0):
                publish_blocks(publisher, range(1))
                await asyncio.sleep(0.01)
            publish_blocks(publisher, range(1, 100))
            # They arrive, but the subscriber, in the same thread, does not read them.
            witness.wait_for_batch(publisher._log._next - 1)
            publisher.close()
            publisher = reopened(endpoint)
            publish_blocks(publisher, range(1000, 1020))
            witness.wait_for_reconnection()
            await until(lambda: 1019 in subscriber.blocks and subscriber.synced)
            for _ in range(100):
                await asyncio.sleep(0.002)
            assert subscriber.blocks.hashes() == set(range(1000, 1020))
    finally:
        publisher.close()
        if witness is not None:
            witness.close()


class Witness:
    """Another subscriber in the same thread. It shows what ZeroMQ's threads have received meanwhile."""

    def __init__(self, endpoint: EventsEndpoint) -> None:
        self._context = zmq.Context()
        self.live = self._context.socket(zmq.SUB)
        self.live.subscribe(b"")
        self._monitor = self.live.get_monitor_socket(subscriber_module.MONITORED)
        self.live.rcvtimeo = self._monitor.rcvtimeo = int(DEADLINE_S * 1000)
        self.live.connect(f"tcp://{endpoint.live}")

    def wait_for_batch(self, number: int) -> None:
        while int.from_bytes(self.live.recv_multipart()[1], "big") < number:
            pass

    def wait_for_reconnection(self) -> None:
        reports = []
        while reports[-2:] != [zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED]:
            reports.append(recv_monitor_message(self._monitor)["event"])

    def close(self) -> None:
        self.live.disable_monitor()
        self._monitor.close()
        self._context.destroy(linger=0)


def publish_blocks(publisher: KvEventPublisher, numbers: Iterable[int]) -> None:
    """Publishes each block in a batch of its own. Blocks the thread until they have been sent."""
    for number in numbers:
        batch = publisher._log._next
        publisher.on_change(PagesStored((number.to_bytes(32, "big"),), None, (1, 2), ""))
        publisher.flush()
        wait_for_batch(publisher, batch)


def reopened(endpoint: EventsEndpoint) -> KvEventPublisher:
    """Opens a publisher at the address of one that was closed, which ZeroMQ frees a moment later."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return KvEventPublisher(endpoint)
        except publisher_module.StartupError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


class FakePublisher:
    """A publisher whose messages and answers the test determines. Its addresses stay the same when it restarts."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._live, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._live.sndhwm = self._replay.sndhwm = 0
        ports = [opened.bind_to_random_port("tcp://127.0.0.1") for opened in (self._live, self._replay)]
        self.endpoint = EventsEndpoint(*(Address("127.0.0.1", port) for port in ports))
        self.batches = [batch_of({"type": "AllBlocksCleared"})]
        self.wrong_answers: list[list[list[bytes]]] = []  # messages that answer the next requests
        self.requests: list[int] = []

    async def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        self.batches.append(batch_of(*events))
        if not lost:
            await self.send([b"", sequence_frame(len(self.batches) - 1), self.batches[-1]])

    async def send(self, frames: list[bytes]) -> None:
        await self._live.send_multipart(frames)

    async def answer(self) -> None:
        while True:
            client, _, start = await self._replay.recv_multipart()
            self.requests.append(int.from_bytes(start, "big"))
            batches = list(enumerate(self.batches))[self.requests[-1] :]
            answer = [[b"", b"", sequence_frame(number), payload] for number, payload in batches]
            answer.append([b"", b"", END_OF_REPLAY, b""])
            for frames in self.wrong_answers.pop(0) if self.wrong_answers else answer:
                await self._replay.send_multipart([client, *frames])


def batch_of(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, events, 0])


def stored(*hashes: Any, **changes: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": [1] * len(hashes)}
    return event | {"block_size": 1, "lora_id": None, "medium": "GPU", "lora_name": None} | changes


def removed(*hashes: int, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


@asynccontextmanager
async def fake_publisher() -> AsyncIterator[FakePublisher]:
    context = zmq.asyncio.Context()
    publisher = FakePublisher(context)
    task = asyncio.create_task(publisher.answer())
    try:
        yield publisher
    finally:
        task.cancel()
        await asyncio.wait([task])
        context.destroy(linger=0)


@asynccontextmanager
async def followed_fake(**options: Any) -> AsyncIterator[tuple[FakePublisher, KvEventSubscriber]]:
    """Yields a publisher and a subscriber whose subscription is active."""
    async with fake_publisher() as publisher, following(publisher.endpoint, **NEVER | options) as subscriber:
        await until(lambda: subscriber.synced or subscriber._replay is None)
        while subscriber._last_live < 0:
            await publisher.publish(stored(1))
            await asyncio.sleep(0.005)
        await until(lambda: subscriber._last_live == len(publisher.batches) - 1)
        yield publisher, subscriber


@in_event_loop
async def test_a_gap_is_filled_by_the_missing_batches_alone() -> None:
    async with followed_fake() as (publisher, subscriber):
        await publisher.publish(stored(2), lost=True)
        missing = len(publisher.batches) - 1
        await publisher.publish(removed(1))
        await until(lambda: subscriber.synced and subscriber.blocks.hashes() == {2})
        assert publisher.requests[-1] == missing


@in_event_loop
async def test_a_lost_newest_batch_is_found_by_the_next_check() -> None:
    async with followed_fake(check_seconds=0.05) as (publisher, subscriber):
        await publisher.publish(removed(1), lost=True)
        await until(lambda: subscriber.synced and len(subscriber.blocks) == 0)


@in_event_loop
async def test_after_lower_sequence_numbers_the_subscriber_expects_another_process() -> None:
    """Behind a proxy, the connection of the subscriber survives the publisher."""
    async with followed_fake() as (publisher, subscriber):
        await publisher.publish(stored(2))
        await publisher.publish(stored(3))
        await until(lambda: subscriber.blocks.hashes() == {1, 2, 3})
        publisher.batches = [batch_of({"type": "AllBlocksCleared"})]
        await publisher.publish(stored(9))
        await until(lambda: subscriber.synced and subscriber.blocks.hashes() == {9})


@in_event_loop
async def test_an_answer_of_another_process_is_not_appended_to_what_is_known() -> None:
    """The subscriber asks for batches that the other process does not have yet, and gets all that it has."""
    async with followed_fake(check_seconds=0.05) as (publisher, subscriber):
        other = [
            [b"", b"", sequence_frame(0), batch_of({"type": "AllBlocksCleared"})],
            [b"", b"", END_OF_REPLAY, b""],
        ]
        publisher.batches = [batch_of({"type": "AllBlocksCleared"}), batch_of(stored(9))]
        publisher.wrong_answers = [other]
        await until(lambda: subscriber.synced and subscriber.blocks.hashes() == {9})


GARBAGE = {
    "one frame": [b"x"],
    "a short number": [b"", b"1234567", batch_of()],
    "no MessagePack": [b"", bytes(8), b"\xc1\xff"],
    "no batch": [b"", bytes(8), msgspec.msgpack.encode({"ts": 1.0})],
    "an unknown event": [b"", bytes(8), batch_of({"type": "BlockMoved"})],
    "an event in an array": [b"", bytes(8), batch_of(["BlockStored", [1], None, [1], 1, None])],
    "hashes as text": [b"", bytes(8), batch_of(stored("1"))],
    "hashes as fractions": [b"", bytes(8), batch_of(stored(1.5))],
    "no hashes": [b"", bytes(8), batch_of({"type": "BlockStored"})],
    "a long medium": [b"", bytes(8), batch_of(stored(1, medium="x" * 33))],
    "deep nesting": [b"", bytes(8), b"\x93\xcb" + bytes(8) + b"\x91" * 100_000],
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE)
def test_a_malformed_message_is_not_a_batch(frames: list[bytes]) -> None:
    with pytest.raises(BadMessage):
        decode(frames)


@in_event_loop
async def test_malformed_messages_are_dropped_and_the_blocks_requested_again(caplog: pytest.LogCaptureFixture) -> None:
    async with followed_fake() as (publisher, subscriber):
        for frames in (*GARBAGE.values(), [b"", END_OF_REPLAY, b""]):
            requests = len(publisher.requests)
            await publisher.send(frames)
            await until(lambda before=requests: len(publisher.requests) > before)  # type: ignore[misc]
            await publisher.publish(stored(2))
            await until(lambda: subscriber.synced and subscriber.blocks.hashes() == {1, 2})
    assert [record.levelname for record in caplog.records] == ["WARNING"], "it is logged once"
    assert "dropped a malformed message" in caplog.text


WRONG_ANSWERS = {
    "no delimiter": [[b"x", b"", bytes(8), batch_of()]],
    "a frame is missing": [[b"", bytes(8), batch_of()]],
    "garbage": [[b"", b"", bytes(8), b"\xc1"]],
    "a gap": [[b"", b"", sequence_frame(number), batch_of(stored(number))] for number in (0, 2)],
    "nothing": [],
}


@pytest.mark.parametrize("answer", WRONG_ANSWERS.values(), ids=WRONG_ANSWERS)
@in_event_loop
async def test_a_subscriber_knows_nothing_until_an_answer_is_whole_and_asks_again(
    answer: list[list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not answer:
        monkeypatch.setattr(subscriber_module, "ANSWER_SECONDS", 0.1)
    async with fake_publisher() as publisher:
        await publisher.publish(stored(5))
        publisher.wrong_answers = [answer] * 4
        async with following(publisher.endpoint, **NEVER) as subscriber:
            await until(lambda: len(publisher.requests) >= 2)
            assert not publisher.wrong_answers or not subscriber.synced
            await until(lambda: subscriber.synced and subscriber.blocks.hashes() == {5})


@in_event_loop
async def test_without_a_replay_address_a_lost_message_makes_the_subscriber_forget() -> None:
    async with followed_fake(replay=False) as (publisher, subscriber):
        await publisher.publish(stored(2))
        await publisher.publish(stored(3), lost=True)
        await publisher.publish(stored(4))
        await until(lambda: 4 in subscriber.blocks)
        assert subscriber.blocks.hashes() == {4} and publisher.requests == []


@in_event_loop
async def test_without_a_replay_address_a_subscriber_is_synced_only_if_it_has_seen_the_whole_history() -> None:
    cleared = {"type": "AllBlocksCleared"}
    async with followed_fake(replay=False, check_seconds=0.001, retry_seconds=0.001) as (publisher, subscriber):
        await publisher.publish(stored(2))
        await until(lambda: 2 in subscriber.blocks)
        assert not subscriber.synced, "earlier batches were not received"
        await publisher.publish(cleared)
        await publisher.publish(stored(3))
        await until(lambda: subscriber.blocks.hashes() == {3})
        assert subscriber.synced
        await publisher.publish(removed(3), lost=True)
        await publisher.publish(stored(4))
        await until(lambda: subscriber.blocks.hashes() == {4})
        assert not subscriber.synced, "a batch was lost"
        await asyncio.sleep(0.02)  # the time of several attempts to catch up, which cannot succeed
        assert not subscriber.synced
        await publisher.publish(stored(5), cleared, stored(6))
        await until(lambda: subscriber.blocks.hashes() == {6})
        assert subscriber.synced
    async with fake_publisher() as publisher, following(publisher.endpoint, replay=False, **NEVER) as subscriber:
        while subscriber._last_live < 0:
            await publisher.send([b"", sequence_frame(0), batch_of(stored(7))])
            await asyncio.sleep(0.005)
        await until(lambda: subscriber.synced and subscriber.blocks.hashes() == {7})


@in_event_loop
async def test_an_address_without_a_publisher_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subscriber_module, "CONNECT_SECONDS", 0.01)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # it does not listen, so connections are refused
        address = Address("127.0.0.1", reserved.getsockname()[1])
        async with following(EventsEndpoint(address, address), **NEVER) as subscriber:
            await until(lambda: bool(caplog.records))
            await asyncio.sleep(0.05)  # several times the limit
            assert not subscriber.synced
            [record] = caplog.records
            assert f"KV events of tcp://{address}: no connection for 0.01 s" in record.getMessage()


@in_event_loop
async def test_a_subscriber_that_reads_too_slowly_loses_messages_and_catches_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (publisher_module, subscriber_module):
        monkeypatch.setattr(module, "MAX_QUEUED", 2)
    publisher = KvEventPublisher(ANY_PORTS)
    try:
        async with following(publisher.endpoint, **NEVER) as subscriber:
            hashes: set[int] = set()

            def publish() -> None:
                number = len(hashes)
                hashes.add(number)
                publisher.on_change(PagesStored((number.to_bytes(32, "big"),), None, (70_000,) * 20_000, ""))
                publisher.flush()
                wait_for_batch(publisher, number + 1)

            def up_to_date() -> bool:
                return subscriber._last_live >= 0 and subscriber.synced and subscriber.blocks.hashes() == hashes

            async def publish_until_up_to_date() -> None:
                while not up_to_date():
                    publish()  # the newest batches may be lost: only a later one reveals this
                    for _ in range(20):  # a busy machine needs time to read what was published
                        if not up_to_date():
                            await asyncio.sleep(0.02)

            await publish_until_up_to_date()
            catch_ups, count = subscriber.catch_ups, 50
            while subscriber.catch_ups == catch_ups:
                for _ in range(count):  # the subscriber, in the same thread, does not read meanwhile
                    publish()
                count *= 2  # the buffers of the kernel may have held all messages
                await publish_until_up_to_date()
    finally:
        publisher.close()


def wait_for_batch(publisher: KvEventPublisher, number: int) -> None:
    """Blocks until batch `number` has been published."""
    deadline = time.monotonic() + DEADLINE_S
    while publisher._log._next <= number:
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.mark.parametrize("lost", [False, True], ids=["live", "replayed"])
@in_event_loop
async def test_other_tasks_run_while_many_messages_arrive(monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    monkeypatch.setattr(subscriber_module, "MAX_PER_WAKE", 20)
    async with followed_fake() as (publisher, subscriber):
        first = len(publisher.batches)
        for number in range(1000):
            await publisher.publish(stored(number), lost=lost)
        await publisher.publish(stored(1000))
        processed = [first]
        while processed[-1] <= first + 1000:
            assert subscriber._next is not None
            processed.append(subscriber._next)
            await asyncio.sleep(0)
        assert max(after - before for before, after in itertools.pairwise(processed)) <= 20


def test_a_block_is_known_while_one_medium_has_it() -> None:
    blocks = KnownBlocks()
    blocks.store([1, 2, 3], "GPU")
    blocks.store([2, 3], "CPU_TIER1")
    blocks.remove([1, 2], "GPU")
    blocks.remove([3, 4], "CPU_TIER1")
    assert blocks.hashes() == {2, 3} and len(blocks) == 2


def test_a_publisher_cannot_exhaust_the_memory_of_a_subscriber() -> None:
    blocks = KnownBlocks(limit=5)
    blocks.store([1, 2, 3], "GPU")
    blocks.store([4, 5, 6, 7], None)
    blocks.store([8], "CPU_TIER1")
    assert blocks.hashes() == {1, 2, 3, 4, 5}
    with pytest.raises(BadMessage, match="bytes"):
        decode([b"", bytes(8), bytes(MAX_BATCH_BYTES + 1)])
