"""The sockets of a publisher: what they send, read as the public format says, and what they refuse."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from random_cache import RandomCache
from waiting import wait_until

from hotset.base.address import Address, EventsEndpoint
from hotset.base.errors import StartupError
from hotset.fleet.kv_events import publisher as publisher_module
from hotset.fleet.kv_events.event_log import EventLog
from hotset.fleet.kv_events.publisher import KvEventPublisher, _size
from hotset.tiers.prefix_cache import PagesEvicted, PagesStored

ANY_PORTS = EventsEndpoint(Address("127.0.0.1", 0), Address("127.0.0.1", 0))
DEADLINE_MS = 60_000
HASHES = [bytes([number]) * 24 + bytes([255 - number]) * 8 for number in range(4)]


@contextmanager
def connected(endpoint: EventsEndpoint, topic: str = "") -> Iterator[tuple[Any, Any]]:
    """Yields a SUB socket whose subscription is active, if the publisher publishes something, and a DEALER socket."""
    with zmq.Context() as context:
        live, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for opened in (live, replay):
            opened.linger, opened.rcvtimeo = 0, DEADLINE_MS
        live.subscribe(topic)
        live.connect(f"tcp://{endpoint.live}")
        replay.connect(f"tcp://{endpoint.replay}")
        try:
            yield live, replay
        finally:
            live.close()
            replay.close()


def answer_to(replay: Any, start: int) -> list[list[bytes]]:
    """Requests a replay. Returns the frames of every batch, and checks how the answer ends."""
    replay.send_multipart([b"", start.to_bytes(8, "big")])
    batches = []
    while True:
        delimiter, topic, number, payload = replay.recv_multipart()
        assert delimiter == b""
        if number == (-1).to_bytes(8, "big", signed=True):
            assert (topic, payload) == (b"", b"")
            return batches
        batches.append([topic, number, payload])


def subscribed(publisher: KvEventPublisher, live: Any, replay: Any) -> int:
    """Publishes evictions until one arrives: the subscription takes effect at some time after `connect`. Returns the
    number of the last batch, after all have been read."""
    while not live.poll(20):
        publisher.on_change(PagesEvicted((HASHES[0],)))
        publisher.flush()
    assert wait_until(publisher._steps.empty)
    last = int.from_bytes(answer_to(replay, 0)[-1][1], "big")  # the thread publishes before it answers
    while int.from_bytes(live.recv_multipart()[1], "big") < last:
        pass
    return last


@pytest.fixture
def publisher() -> Iterator[KvEventPublisher]:
    opened = KvEventPublisher(ANY_PORTS, topic="kv@pod@model", rank=3)
    yield opened
    opened.close()


def test_a_stored_block_is_published_in_the_format_of_vllm(publisher: KvEventPublisher) -> None:
    with connected(publisher.endpoint, "kv@") as (live, replay):
        before = subscribed(publisher, live, replay)
        publisher.on_change(PagesStored((HASHES[1], HASHES[2]), HASHES[0], (7, 8, 9, 200_000), ""))
        publisher.on_change(PagesStored((HASHES[3],), None, (5, 6), "tenant"))
        publisher.on_change(PagesEvicted((HASHES[2],)))
        publisher.flush()
        topic, number, payload = live.recv_multipart()
        first, *_ = answer_to(replay, 0)
        newest = answer_to(replay, before + 1)
    assert (topic, int.from_bytes(number, "big")) == (b"kv@pod@model", before + 1)
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert abs(ts - time.time()) < 3600 and rank == 3
    ints = [int.from_bytes(page_hash, "big") % 2**64 for page_hash in HASHES]  # vLLM's way to shorten a hash
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": ints[1:3],
            "parent_block_hash": ints[0],
            "token_ids": [7, 8, 9, 200_000],
            "block_size": 2,
            "lora_id": None,
            "medium": "CPU_TIER1",
            "lora_name": None,
        },
        {
            "type": "BlockStored",
            "block_hashes": ints[3:],
            "parent_block_hash": None,
            "token_ids": [5, 6],
            "block_size": 2,
            "lora_id": None,
            "medium": "CPU_TIER1",
            "lora_name": None,
            "extra_keys": [["tenant"]],
            "cache_salt": "tenant",
        },
        {"type": "BlockRemoved", "block_hashes": [ints[2]], "medium": "CPU_TIER1"},
    ]
    assert newest == [[topic, number, payload]], "a replayed batch differs from the published one"
    assert first[0] == topic and int.from_bytes(first[1], "big") == 0
    assert msgspec.msgpack.decode(first[2])[1:] == [[{"type": "AllBlocksCleared"}], 3]


def test_the_changes_of_one_step_are_one_batch(publisher: KvEventPublisher) -> None:
    cache = RandomCache(1, publisher.on_change)
    with connected(publisher.endpoint) as (_, replay):
        steps = 20
        for _ in range(steps):
            cache.step()
            cache.step()
        assert len(answer_to(replay, 0)) == 1, "changes were published before the end of the step"
        publisher.flush()
        publisher.flush()
        assert wait_until(lambda: publisher._log._next == 2)
        [_, batch] = answer_to(replay, 0)
    assert len(msgspec.msgpack.decode(batch[2])[1]) >= steps // 2


def test_a_long_replay_is_complete_though_the_subscriber_reads_it_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ queues few messages. A ROUTER socket drops the others by default."""
    monkeypatch.setattr(publisher_module, "MAX_QUEUED_ANSWERS", 4)
    refused = threading.Event()
    send = zmq.Socket.send_multipart

    def recorded_send(sender: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return send(sender, *arguments, **options)
        except zmq.Again:
            refused.set()
            raise

    monkeypatch.setattr(zmq.Socket, "send_multipart", recorded_send)
    new_socket = KvEventPublisher._new_socket

    def with_small_buffer(publisher: KvEventPublisher, kind: int) -> Any:
        new = new_socket(publisher, kind)
        new.sndbuf = 1 << 14
        return new

    monkeypatch.setattr(KvEventPublisher, "_new_socket", with_small_buffer)
    publisher = KvEventPublisher(ANY_PORTS)
    try:
        for number in range(80):
            publisher.on_change(PagesStored((HASHES[0],), None, tuple(range(60_000, 64_000)), ""))
            publisher.flush()
            assert wait_until(lambda number=number: publisher._log._next == number + 2)  # type: ignore[misc]
        with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
            replay.linger, replay.rcvtimeo, replay.rcvhwm, replay.rcvbuf = 0, DEADLINE_MS, 4, 1 << 14
            replay.connect(f"tcp://{publisher.endpoint.replay}")
            replay.send_multipart([b"", bytes(8)])
            assert refused.wait(DEADLINE_MS / 1000)  # the queues and buffers between the sockets are full
            batches = []
            while (frames := replay.recv_multipart())[2] != b"\xff" * 8:
                batches.append(int.from_bytes(frames[2], "big"))
        assert batches == list(range(81))
    finally:
        publisher.close()


@pytest.mark.parametrize("request_frames", [[b"", b"short"], [b"x", bytes(8)], [bytes(8)], [b"", bytes(8), b""]])
def test_a_malformed_request_is_ignored(publisher: KvEventPublisher, request_frames: list[bytes]) -> None:
    with connected(publisher.endpoint) as (_, replay):
        replay.send_multipart(request_frames)
        assert len(answer_to(replay, 0)) == 1
        assert not replay.poll(50)


def test_a_flood_of_requests_does_not_keep_a_publisher_from_publishing(publisher: KvEventPublisher) -> None:
    with connected(publisher.endpoint) as (live, replay):
        before = subscribed(publisher, live, replay)
        for _ in range(3000):
            replay.send_multipart([b"", bytes(8)])
        publisher.on_change(PagesEvicted((HASHES[1],)))
        publisher.flush()
        assert int.from_bytes(live.recv_multipart()[1], "big") == before + 1
        replay.send_multipart([b"", (before + 1).to_bytes(8, "big")])
        while replay.recv_multipart()[2] != (before + 1).to_bytes(8, "big"):
            pass  # a part of an answer to one of the earlier requests


def test_a_taken_address_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = Address("127.0.0.1", port)
        with pytest.raises(StartupError, match=rf"tcp://127\.0\.0\.1:{port} .*in use; choose another --kv-events$"):
            KvEventPublisher(EventsEndpoint(taken, None))
        with pytest.raises(StartupError, match=r"in use; choose another --kv-events-replay$"):
            KvEventPublisher(EventsEndpoint(Address("127.0.0.1", 0), taken))


def test_the_engine_never_waits_for_the_publisher_and_its_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the publisher's thread does not keep up, changes are dropped, and subscribers learn that they know nothing."""
    monkeypatch.setattr(publisher_module, "MAX_WAITING", 1000)
    stopped = threading.Event()
    monkeypatch.setattr(KvEventPublisher, "_serve", lambda publisher: stopped.wait())
    publisher = KvEventPublisher(ANY_PORTS, log=EventLog(0, keep=True))
    cache = RandomCache(2, publisher.on_change)
    try:
        for _ in range(200):
            cache.step()
            publisher.flush()
        waiting = [publisher._steps.get() for _ in range(publisher._steps.qsize())]
        assert 500 < sum(_size(change) for changes in waiting for change in changes) <= 1000
        publisher._size_taken = publisher._size_put
        publisher.on_change(PagesEvicted((HASHES[0],)))
        publisher.flush()
        assert [type(change).__name__ for change in publisher._steps.get()] == ["AllBlocksCleared", "PagesEvicted"]
    finally:
        stopped.set()
        publisher.close()


def test_no_batch_is_much_larger_than_one_mebibyte(publisher: KvEventPublisher) -> None:
    """Subscribers refuse messages above 16 MiB. A long prompt, and many steps that wait together, make more."""
    pages = [number.to_bytes(32, "big") for number in range(1, 6001)]
    tokens = [70_000 + number for number in range(100 * len(pages))]
    long_prompt = PagesStored(tuple(pages[:4000]), None, tuple(tokens[: 100 * 4000]), "a salt")
    publisher.on_change(long_prompt)
    for first in range(4000, 6000, 50):
        of_pages = tuple(tokens[100 * first : 100 * (first + 50)])
        publisher.on_change(PagesStored(tuple(pages[first : first + 50]), pages[first - 1], of_pages, "a salt"))
    publisher.on_change(PagesEvicted(tuple(pages) * 25))
    publisher.flush()
    with connected(publisher.endpoint) as (_, replay):
        assert wait_until(publisher._steps.empty)
        batches = [batch[2] for batch in answer_to(replay, 0)]
    assert len(batches) > 6
    assert max(map(len, batches)) < 1.2 * 2**20
    events = [event for batch in batches for event in msgspec.msgpack.decode(batch)[1]]
    stored = [event for event in events if event["type"] == "BlockStored"]
    assert [page for event in stored for page in event["block_hashes"]] == list(range(1, 6001))
    assert [token for event in stored for token in event["token_ids"]] == tokens
    for event in stored:
        assert event["parent_block_hash"] == (event["block_hashes"][0] - 1 or None)
    assert {(event["block_size"], event["cache_salt"]) for event in stored} == {(100, "a salt")}
    removed = [page for event in events if event["type"] == "BlockRemoved" for page in event["block_hashes"]]
    assert removed == [*range(1, 6001)] * 25
