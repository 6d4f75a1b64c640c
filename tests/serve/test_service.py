"""A service reports the fingerprint of its answers, its load, and whether it has room for a long request."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import in_event_loop

from hotset.base.config import EngineConfig
from hotset.base.errors import EngineStopped, NoRoomLeft
from hotset.base.serve_config import ServeConfig
from hotset.engine.client import ReceivedStats
from hotset.engine.input_processor import ModelCard
from hotset.engine.outputs import EngineStats
from hotset.serve.service import ServerLoad, Service, fingerprint

CARD = ModelCard("m", "llama", 128, 50, (), tiers=True, resident_len=128, device="cpu", dtype="float32")
EVENTS = {"kv_events": "tcp://127.0.0.1:5557", "kv_events_replay": "tcp://127.0.0.1:5558", "kv_events_topic": "t"}


@pytest.mark.parametrize(
    ("settings", "is_same"),
    [
        ({"model": "/elsewhere/m"}, True),
        ({"seed": 5}, True),
        ({"step_timeout": 9.0}, True),
        ({"role": "decode", "control": "127.0.0.1:7001", "handoff_secret": "at-least-16-characters"}, True),
        (EVENTS, True),
        ({"kv_dtype": "fp8"}, False),
        ({"max_num_batched_tokens": 7}, False),
        ({"prefix_cache": False}, False),
    ],
    ids=str,
)
def test_the_fingerprint_depends_on_settings_that_may_change_tokens(settings: dict[str, Any], is_same: bool) -> None:
    assert (fingerprint(EngineConfig(**settings), CARD) == fingerprint(EngineConfig(), CARD)) is is_same


class FakeClient:
    """An engine client with fixed statistics."""

    role, control, waiting, seconds_without_progress = "decode", "127.0.0.1:7000", 0, 0.0
    model = SimpleNamespace(max_model_len=4096, name="m", page_hasher=None, kv_events=())
    progress = SimpleNamespace(steps=1, seconds_since_step=0.5, open_requests=0)

    def __init__(self, **stats: Any) -> None:
        self.newest_stats = SimpleNamespace(stats=EngineStats(**stats))

    def check(self) -> None: ...

    async def stats(self) -> EngineStats:
        return self.newest_stats.stats


def service(**stats: Any) -> Service:
    client: Any = FakeClient(device_pages_total=300, host_pages_total=200, device_pages_quarantined=309, **stats)
    return Service(client, ServeConfig())


@in_event_loop
async def test_defect_23_health_is_degraded_while_quarantine_leaves_no_room_for_the_longest_request() -> None:
    degraded = service(lacks_room=True)
    with pytest.raises(NoRoomLeft, match=r"309 of 500 pages are in quarantine.* too few for 4096 tokens"):
        degraded.health()
    assert degraded.state().degraded is not None
    roomy = service(lacks_room=False)
    assert roomy.health().status == "ok" and roomy.state().degraded is None


class SilentClient:
    """An engine client whose engine has answered once, and does not answer any more."""

    def __init__(self, stats: EngineStats) -> None:
        self.newest_stats = ReceivedStats(stats, time.monotonic())
        self.calls = 0

    async def stats(self) -> EngineStats:
        self.calls += 1
        raise EngineStopped("it has stopped")


@in_event_loop
async def test_if_a_worker_does_not_answer_its_newest_known_load_counts() -> None:
    client: Any = SilentClient(EngineStats(tokens_to_prefill=700))
    load = ServerLoad()
    for _ in range(3):
        assert load.stats(client).tokens_to_prefill == 700, "a busy worker must not look idle"
        await asyncio.sleep(0)
    assert client.calls == 3
