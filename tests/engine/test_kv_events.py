"""Engine processes publish the pages of their prefix caches as KV events, at the addresses of their settings."""

import contextlib
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from harness import tiny_directory
from listening import listening
from processes import descendants_of

from hotset.base.address import Address
from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError, MissingDependency
from hotset.base.sampling import SamplingParams
from hotset.engine.build import build_engine
from hotset.engine.input_processor import InputProcessor, ModelCard
from hotset.engine.model_checks import check_model
from hotset.engine.process import AddRequests, EngineProcess, OutputsReport, StopEngine
from hotset.fleet.connections import FleetConnections
from hotset.tiers.prefix_cache import PrefixCache, event_hash

ANY_PORT = "tcp://127.0.0.1:0"
PAGE_ROWS = 4
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "page_rows": PAGE_ROWS,
    "device_kv_tokens": 256,
    "host_kv_tokens": 512,
    "kv_events": ANY_PORT,
    "kv_events_replay": ANY_PORT,
}
DEADLINE_MS = 60_000


def answered(process: EngineProcess, card: ModelCard, request_id: str, prompt: list[int], tokens: int) -> list[int]:
    """Runs a request to its end, and returns prompt and answer."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    process.pipe.send(AddRequests(InputProcessor(card, seed=0).accept(request_id, prompt, params)))
    answer: list[int] = []
    while True:
        assert process.pipe.poll(DEADLINE_MS / 1000)
        report = process.pipe.recv()
        assert isinstance(report, OutputsReport)
        answer += report.outputs.token_ids
        if report.outputs.finished:
            return prompt + answer


def replayed(card: ModelCard, rank: int = 0) -> list[dict[str, Any]]:
    """Returns all events of a publisher, and checks the ranks and numbers of its batches."""
    events: list[dict[str, Any]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.linger, replay.rcvtimeo = 0, DEADLINE_MS
        replay.connect(f"tcp://{card.kv_events[rank].replay}")
        replay.send_multipart([b"", bytes(8)])
        batches = 0
        while (frames := replay.recv_multipart())[2] != b"\xff" * 8:
            _, of_batch, batch_rank = msgspec.msgpack.decode(frames[3])
            assert (int.from_bytes(frames[2], "big"), batch_rank) == (batches, rank)
            events += of_batch
            batches += 1
    return events


def test_two_requests_with_a_common_prefix_are_published_as_a_chain_of_blocks(tmp_path: Path) -> None:
    config = EngineConfig(tiny_directory(tmp_path), **SETTINGS, kv_events_topic="kv@here@tiny")
    process = EngineProcess(config)
    try:
        card = process.wait_ready()
        assert process.pid is not None and card.page_hasher is not None
        [endpoint] = card.kv_events
        common = [5 + number for number in range(11)]
        first = answered(process, card, "first", [*common, 20, 21], 6)
        second = answered(process, card, "second", [*common, 30, 31, 32, 33, 34, 35], 1)
        cleared, *events = replayed(card)
        found = listening({process.pid} | descendants_of(process.pid))
        process.pipe.send(StopEngine())
    finally:
        process.end()
    assert [(socket.host, socket.port) for socket in found] == sorted(
        ("127.0.0.1", address.port) for address in endpoint.addresses
    )
    assert cleared == {"type": "AllBlocksCleared"}
    assert {(event["type"], event["medium"], event["block_size"]) for event in events} == {
        ("BlockStored", "CPU_TIER1", PAGE_ROWS)
    }
    tokens_of: dict[int, list[int]] = {}  # of the context up to the end of a block
    for event in events:
        parent = event["parent_block_hash"]
        for number, block_hash in enumerate(event["block_hashes"]):
            assert block_hash not in tokens_of, "a page of the common prefix was stored twice"
            own = event["token_ids"][number * PAGE_ROWS : (number + 1) * PAGE_ROWS]
            tokens_of[block_hash] = (tokens_of[parent] if parent is not None else []) + own
            parent = block_hash
    expected = {}
    for context in (first[:-1], second[:-1]):  # the last token is never computed
        hashes: list[bytes] = []
        card.page_hasher.extend(hashes, context, "")
        assert len(hashes) == 4
        for number, page_hash in enumerate(hashes):
            expected[event_hash(page_hash)] = context[: (number + 1) * PAGE_ROWS]
    assert len(expected) == 2 + 2 + 2
    assert tokens_of == expected


def test_each_replica_has_a_publisher_that_names_its_rank() -> None:
    caches = [PrefixCache(4) for _ in range(2)]
    ledgers: Any = [SimpleNamespace(host=cache) for cache in caches]
    with contextlib.ExitStack() as closing:
        config = EngineConfig(**SETTINGS, data_parallel_size=2)
        publishers = FleetConnections().open_publishers(config, ledgers)
        for publisher in publishers:
            closing.callback(publisher.close)
        card: Any = SimpleNamespace(kv_events=[publisher.endpoint for publisher in publishers])
        for rank, cache in enumerate(caches):
            pages = cache.allocate(1)
            assert pages is not None
            cache.publish([], pages, [bytes([rank]) * 32], [rank] * PAGE_ROWS)
            publishers[rank].flush()
            deadline = time.monotonic() + DEADLINE_MS / 1000
            while len(events := replayed(card, rank)) == 1:
                assert time.monotonic() < deadline
            assert events[1]["token_ids"] == [rank] * PAGE_ROWS


@pytest.mark.parametrize("flag", ["kv_events", "kv_events_replay"])
def test_a_taken_address_is_refused_by_name_before_the_model_is_loaded(tmp_path: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        config = EngineConfig(tiny_directory(tmp_path), **SETTINGS | {flag: f"tcp://{taken}"})
        message = f"^cannot listen at {taken}: Address already in use; choose another --{flag.replace('_', '-')}$"
        with pytest.raises(ConfigError, match=message):
            check_model(config)


def test_an_address_of_another_machine_is_refused_by_name(tmp_path: Path) -> None:
    config = EngineConfig(
        tiny_directory(tmp_path), **SETTINGS | {"kv_events": "tcp://192.0.2.1:5557", "kv_events_public": True}
    )
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1:5557: .*; choose another --kv-events$"):
        check_model(config)


def test_a_missing_package_is_named_with_its_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "hotset.fleet.kv_events.publisher", raising=False)
    with pytest.raises(MissingDependency, match=r"--kv-events needs zmq: pip install 'hotset\[serve\]'"):
        build_engine(EngineConfig(tiny_directory(tmp_path), **SETTINGS))


LOOPBACK = "tcp://127.0.0.1:5557"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kv_events": "127.0.0.1:5557"},
            "--kv-events must be tcp://.* like tcp://127.0.0.1:5557, got '127.0.0.1:5557'",
        ),
        ({"kv_events": "tcp://127.0.0.1"}, "--kv-events must be tcp://"),
        ({"kv_events": "tcp://eth0:5557"}, "--kv-events must be tcp://"),
        ({"kv_events": "tcp://127.0.0.1:70000"}, "--kv-events must be tcp://"),
        ({"kv_events": "ipc:///tmp/events"}, "--kv-events must be tcp://"),
        ({"kv_events": LOOPBACK, "kv_events_replay": "5558"}, "--kv-events-replay must be tcp://"),
        ({"kv_events": "tcp://*:5557"}, "reached from other machines.*tokens of all prompts.*add --kv-events-public"),
        ({"kv_events": "tcp://0.0.0.0:5557"}, "--kv-events tcp://0.0.0.0:5557 can be reached from other machines"),
        ({"kv_events": LOOPBACK, "kv_events_replay": "tcp://[::]:5558"}, "--kv-events-replay .* can be reached"),
        ({"kv_events": LOOPBACK, "kv_events_replay": LOOPBACK}, "use the same port; .* at least 1 apart"),
        (
            {"kv_events": LOOPBACK, "kv_events_replay": "tcp://127.0.0.1:5559", "data_parallel_size": 4},
            r"use the same port \(there are 4 data parallel ranks, with one port each\); .* at least 4 apart",
        ),
        ({"kv_events": "tcp://127.0.0.1:65534", "data_parallel_size": 3}, "needs 3 ports.*choose a lower port"),
        (
            {"kv_events": LOOPBACK, "role": "decode", "control": "127.0.0.1:5557"},
            "--kv-events tcp://127.0.0.1:5557 uses the port of --control 127.0.0.1:5557; choose another port",
        ),
        (
            {"kv_events": ANY_PORT, "kv_events_replay": LOOPBACK, "role": "prefill", "control": "localhost:5557"},
            "--kv-events-replay tcp://127.0.0.1:5557 uses the port of --control 127.0.0.1:5557",
        ),
        ({"kv_events_replay": LOOPBACK}, "--kv-events-replay needs --kv-events"),
        ({"kv_events_topic": "kv@a@b"}, "--kv-events-topic needs --kv-events"),
        ({"kv_events_public": True}, "--kv-events-public needs --kv-events"),
        ({"kv_events": LOOPBACK, "prefix_cache": False}, "which --no-prefix-cache disables; leave one of the two out"),
        ({"kv_events": LOOPBACK, "tiers": "off"}, "which --tiers off disables; leave one of the two out"),
    ],
)
def test_unusable_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_an_address_overlaps_those_with_its_port_and_host_or_a_wildcard() -> None:
    assert Address("127.0.0.1", 5557).overlaps(Address("0.0.0.0", 5557))
    assert Address("*", 5557).overlaps(Address("[::1]", 5557))
    assert not Address("127.0.0.1", 5557).overlaps(Address("127.0.0.2", 5557))
    assert not Address("127.0.0.1", 5557).overlaps(Address("127.0.0.1", 5558))
    assert not Address("127.0.0.1", 0).overlaps(Address("127.0.0.1", 0))


def test_publishers_are_closed_although_the_executor_fails_to_close(tmp_path: Path) -> None:
    engine = build_engine(EngineConfig(tiny_directory(tmp_path), **SETTINGS))
    close = engine.executor.close

    def failing_close() -> None:
        close()
        raise RuntimeError("no")

    engine.executor.close = failing_close  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no"):
        engine.close()
    assert [publisher._thread.is_alive() for publisher in engine._publishers] == [False]


def test_the_ports_of_a_rank_are_higher_by_its_number() -> None:
    config = EngineConfig(kv_events="tcp://localhost:5557", kv_events_replay="tcp://[::1]:6000", data_parallel_size=2)
    assert [str(endpoint) for endpoint in config.events_endpoints] == [
        "tcp://127.0.0.1:5557 and tcp://[::1]:6000",
        "tcp://127.0.0.1:5558 and tcp://[::1]:6001",
    ]
    public = EngineConfig(kv_events="tcp://*:5557", kv_events_public=True)
    assert [str(endpoint) for endpoint in public.events_endpoints] == ["tcp://*:5557"]
