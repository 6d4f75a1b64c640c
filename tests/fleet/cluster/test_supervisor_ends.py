"""A supervisor reports that memory is held until all that its process has started has ended."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import in_event_loop, until

from hotset.fleet.cluster import supervisor as module
from hotset.fleet.cluster.spec import Restart
from hotset.fleet.cluster.supervisor import Launch, Supervisor


class EndedChild:
    """A command that was killed, and whose workers still hold memory until `freed` is set."""

    pid = 4321

    def __init__(self) -> None:
        self.freed = asyncio.Event()

    async def ready(self) -> str:
        return "Hotset serves demo at http://127.0.0.1:8000 (cpu)"

    async def ended(self) -> str:
        return "decode-1 ended (SIGKILL)"

    async def gone(self) -> None:
        await self.freed.wait()


@in_event_loop
async def test_the_end_of_a_process_is_reported_at_once_and_its_memory_when_it_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "n1"))
    spec: Any = SimpleNamespace(restart=Restart())
    supervisor = Supervisor(Launch("app", "decode-1", "decode", spec, {}, {}, "controller", {}))
    child: Any = EndedChild()
    supervisor._child, supervisor._host, supervisor._is_gone = child, "10.0.0.1", False
    watching = asyncio.create_task(supervisor._watch_process())
    await until(lambda: supervisor._ended is not None)
    report = await supervisor.report("epoch")
    assert report.ended == "decode-1 ended (SIGKILL)" and report.holds_memory and not report.ready
    child.freed.set()
    await watching
    assert not (await supervisor.report("epoch")).holds_memory
