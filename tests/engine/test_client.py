"""The client of an engine process: answers, aborts, start-up errors, and the death of the process."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness import tiny_directory

from hotset.base.config import EngineConfig
from hotset.base.errors import CheckpointError, ConfigError, EngineStopped, RequestError
from hotset.base.sampling import SamplingParams
from hotset.engine.client import EngineClient
from hotset.engine.llm import LLM
from hotset.engine.outputs import Delta

DEADLINE_S = 200.0
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "device_kv_tokens": 256, "page_rows": 4}
    return EngineConfig(model=tiny_directory(folder), **defaults | settings)


def with_client(config: EngineConfig, scenario: Any) -> None:
    """Runs `scenario(client)` on a new event loop within the deadline, then closes the client."""

    async def run() -> None:
        client = EngineClient.start(config)
        try:
            await asyncio.wait_for(scenario(client), DEADLINE_S)
        finally:
            await asyncio.wait_for(client.close(0.0), DEADLINE_S)
        assert not client.alive

    asyncio.run(run())


class SharedEngine(NamedTuple):
    """One engine process for all tests that leave it idle."""

    runner: asyncio.Runner
    config: EngineConfig
    client: EngineClient

    def run(self, scenario: Callable[[EngineClient], Coroutine[Any, Any, None]]) -> None:
        """Runs a scenario and checks that it leaves the engine idle."""

        async def run_and_check() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await scenario(self.client)
                await wait_for_pages_held(self.client, 0)
                stats = await self.client.stats()
                assert (stats.running, stats.waiting, self.client.waiting) == (0, 0, 0)

        self.runner.run(run_and_check())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    config = config_of(tmp_path_factory.mktemp("shared"))

    async def start() -> EngineClient:
        return EngineClient.start(config)

    with asyncio.Runner() as runner:
        client = runner.run(start())
        try:
            yield SharedEngine(runner, config, client)
        finally:
            runner.run(asyncio.wait_for(client.close(0.0), DEADLINE_S))


async def collect(deltas: AsyncIterator[Delta]) -> list[int]:
    return [token async for delta in deltas for token in delta.token_ids]


async def wait_for_pages_held(client: EngineClient, count: int) -> None:
    while (await client.stats()).device_pages_held != count:
        await asyncio.sleep(0.01)


def test_answers_equal_those_of_an_engine_in_this_process(shared: SharedEngine) -> None:
    with LLM(shared.config.model, load_format="dummy", device="cpu", device_kv_tokens=256, page_rows=4) as llm:
        expected = [list(llm.generate({"prompt_token_ids": [n, 4]}, LONG)[0].outputs[0].token_ids) for n in range(5)]

    async def scenario(client: EngineClient) -> None:
        answers = await asyncio.gather(*(collect(client.generate(f"r{n}", [n, 4], LONG)) for n in range(5)))
        assert list(answers) == expected
        assert client.waiting == 0

    shared.run(scenario)


def test_closing_the_iterator_aborts_the_request_and_frees_its_pages(shared: SharedEngine) -> None:
    async def scenario(client: EngineClient) -> None:
        before = (await client.stats()).requests_finished.get("abort", 0)
        deltas = client.generate("r", [5, 6], LONG)
        await anext(deltas)
        await deltas.aclose()
        await wait_for_pages_held(client, 0)
        assert (await client.stats()).requests_finished["abort"] == before + 1

    shared.run(scenario)


def test_refusing_a_request_does_not_affect_other_requests(shared: SharedEngine) -> None:
    async def scenario(client: EngineClient) -> None:
        running = asyncio.create_task(collect(client.generate("good", [5, 6], LONG)))
        with pytest.raises(RequestError, match="vocabulary"):
            await collect(client.generate("bad", [999], LONG))
        assert len(await running) == 100

    shared.run(scenario)


def test_if_the_engine_process_is_killed_open_and_new_requests_fail(tmp_path: Path) -> None:
    async def scenario(client: EngineClient) -> None:
        deltas = client.generate("r", [5, 6], LONG)
        await anext(deltas)
        pid = client._process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineStopped):
            await collect(deltas)
        assert not client.alive
        with pytest.raises(EngineStopped):
            await collect(client.generate("late", [5], LONG))
        with pytest.raises(EngineStopped):
            await client.stats()

    with_client(config_of(tmp_path), scenario)


def test_draining_finishes_running_requests_and_accepts_no_new_ones(tmp_path: Path) -> None:
    async def scenario(client: EngineClient) -> None:
        running = asyncio.create_task(collect(client.generate("r", [5, 6], LONG)))
        await asyncio.sleep(0)
        closing: Coroutine[Any, Any, None] = client.close(DEADLINE_S)
        task = asyncio.create_task(closing)
        await asyncio.sleep(0)
        with pytest.raises(EngineStopped):
            await collect(client.generate("late", [5], LONG))
        assert len(await running) == 100
        await task

    with_client(config_of(tmp_path), scenario)


def test_start_up_errors_of_the_process_are_raised_with_their_type_and_message(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        EngineClient.start(EngineConfig(model=str(tmp_path / "missing")))
    with pytest.raises(ConfigError, match="exceeds the 128"):
        EngineClient.start(config_of(tmp_path, max_model_len=1000))
