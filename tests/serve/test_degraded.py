"""A worker whose pages in quarantine leave no room for a long request says so, at /health and to routers."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from hotset.base.errors import NoRoomLeft
from hotset.base.serve_config import ServeConfig
from hotset.engine.outputs import EngineStats
from hotset.serve.service import Service


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


def test_defect_23_health_is_degraded_while_quarantine_leaves_no_room_for_the_longest_request() -> None:
    async def scenario() -> None:
        degraded = service(lacks_room=True)
        with pytest.raises(NoRoomLeft, match=r"309 of 500 pages are in quarantine.* too few for 4096 tokens"):
            degraded.health()
        assert degraded.state().degraded is not None
        roomy = service(lacks_room=False)
        assert roomy.health().status == "ok" and roomy.state().degraded is None

    asyncio.run(scenario())
