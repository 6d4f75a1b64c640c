"""Prefill and decode engines in processes, over NIXL. One is killed, or a client leaves, while rows land."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from engine.handoff_pair import DSA_CONFIG
from harness import tiny_directory

from hotset.base.config import EngineConfig
from hotset.base.errors import EngineStopped, HandoffLost
from hotset.base.sampling import SamplingParams
from hotset.engine.client import EngineClient
from hotset.engine.outputs import EngineStats
from hotset.engine.process import AUDIT_AFTER_IDLE_S, EngineProcess
from hotset.handoff.timers import PeerTiming

pytest.importorskip("nixl")

TINY = {"model_type": "deepseek_v32", **DSA_CONFIG, "first_k_dense_replace": 3, "index_topk": 24}
Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
CHUNK = 16
LONG = [3 + position % 90 for position in range(3000)]  # enough chunks for the test to kill a worker meanwhile
MIDDLE = LONG[:1000]
LONGEST = LONG[:1100]
SHORT = LONG[:100]
FEW = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
MANY = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SCENARIO_S = 200.0
SILENCE_S = PeerTiming().peer_timeout + 30.0  # until a peer is declared dead and the engine knows it


class Workers:
    """Starts engines of one tiny model, and closes all of them at the end, dead ones included."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        """`settings` apply to all engines."""
        self._model = tiny_directory(folder, **TINY)
        self._settings = settings
        self._clients: list[EngineClient] = []

    async def start(self, *roles: Role, **settings: Any) -> list[EngineClient]:
        """Starts all engines at the same time, because loading libraries takes most of it."""
        configs = [replace(self._config(role), **self._settings, **settings) for role in roles]
        processes = [EngineProcess(config) for config in configs]
        started = [
            await asyncio.to_thread(EngineClient.start, config, process)
            for config, process in zip(configs, processes, strict=True)
        ]
        self._clients += started
        return started

    def _config(self, role: Role) -> EngineConfig:
        return EngineConfig(
            model=self._model,
            role=role,
            load_format="dummy",
            device="cpu",
            page_rows=16,
            max_num_seqs=4,
            max_num_batched_tokens=CHUNK,
            max_model_len=3500,
            device_kv_tokens=4000,
            host_kv_tokens=16000,
        )

    async def close(self) -> None:
        await asyncio.gather(*(client.close(0.0) for client in self._clients))


@asynccontextmanager
async def workers(folder: Path) -> AsyncIterator[Workers]:
    made = Workers(folder)
    try:
        async with asyncio.timeout(SCENARIO_S):
            yield made
    finally:
        await made.close()


async def answer(
    decode: EngineClient, name: str, prompt: list[int], prefill: EngineClient | None, params: SamplingParams = FEW
) -> list[int]:
    at = None if prefill is None else prefill.control
    deltas = decode.generate(name, prompt, params, prefill_at=at, landing="host" if at else "auto")
    return [token async for delta in deltas for token in delta.token_ids]


async def until(client: EngineClient, true: Callable[[EngineStats], bool], seconds: float = 60.0) -> EngineStats:
    """Waits until `true(stats)`, and returns these stats."""
    deadline = time.monotonic() + seconds
    while not true(stats := await client.stats()):
        assert time.monotonic() < deadline, f"still {stats}"
        await asyncio.sleep(0.01)
    return stats


async def landing(prefill: EngineClient) -> None:
    """Waits until rows of the long prompt have been written to the peer, while much of it is not computed yet."""

    def written(stats: EngineStats) -> bool:
        return stats.handoff is not None and stats.handoff.nbytes > 0

    stats = await until(prefill, written)
    assert stats.tokens_prefilled < len(LONG) / 2, "the worker was faster than this test"


def kill(client: EngineClient) -> None:
    assert client._process.pid is not None
    os.kill(client._process.pid, signal.SIGKILL)


def held(stats: EngineStats) -> int:
    return stats.device_pages_held + stats.host_pages_held


def num_open(stats: EngineStats) -> int:
    """Returns the number of open handoffs."""
    assert stats.handoff is not None
    return stats.handoff.num_open


async def audited(client: EngineClient) -> EngineStats:
    """Waits for the audit of an idle engine, which would end the engine if it found a flaw."""
    await asyncio.sleep(AUDIT_AFTER_IDLE_S + 0.3)
    return await client.stats()


def run(folder: Path, scenario: Callable[[Workers], Awaitable[None]]) -> None:
    async def run_scenario() -> None:
        async with workers(folder) as made:
            await scenario(made)

    asyncio.run(run_scenario())


def test_a_prefill_worker_killed_while_rows_land_loses_one_request_and_its_pages_and_may_return(tmp_path: Path) -> None:
    async def scenario(made: Workers) -> None:
        prefill, decode = await made.start("prefill", "decode")
        expected = await answer(decode, "before", SHORT, None)
        landed = asyncio.create_task(answer(decode, "landed", LONG, prefill))
        other = asyncio.create_task(answer(decode, "other", SHORT, None, MANY))
        await landing(prefill)
        kill(prefill)
        coming = asyncio.create_task(made.start("prefill", control=prefill.control))
        with pytest.raises(HandoffLost, match=str(prefill.control)):
            await asyncio.wait_for(landed, SILENCE_S)
        assert len(await other) == 200

        (successor,) = await coming
        assert successor.control == prefill.control
        assert await answer(decode, "after", SHORT, successor) == expected
        stats = await audited(decode)
        assert (stats.landed, stats.lost, stats.running, stats.waiting) == (1, 1, 0, 0)
        assert stats.quarantined_pages >= len(LONG) // 16, "pages that a dead worker was writing to are in use again"
        assert held(stats) == stats.quarantined_pages, "pages are lost"
        assert stats.handoff is not None and stats.handoff.outcomes["failed, not quiesced"] == 1
        assert stats.handoff.num_open == 0

    run(tmp_path, scenario)


def test_a_prefill_worker_whose_decode_worker_was_killed_keeps_no_pages_for_it(tmp_path: Path) -> None:
    async def scenario(made: Workers) -> None:
        prefill, decode = await made.start("prefill", "decode")
        landed = asyncio.create_task(answer(decode, "landed", LONG, prefill))
        await landing(prefill)
        assert held(await prefill.stats()) > 0
        kill(decode)
        with pytest.raises(EngineStopped):
            await landed
        coming = asyncio.create_task(made.start("decode"))
        # A write may fail before the peer is declared dead. Then the failure is retransmitted until that time.
        await until(prefill, lambda stats: held(stats) == 0 and num_open(stats) == 0, SILENCE_S)

        (successor,) = await coming
        expected = await answer(successor, "alone", SHORT, None)
        assert await answer(successor, "handed", SHORT, prefill) == expected
        stats = await audited(prefill)
        assert held(stats) == stats.quarantined_pages == 0
        assert stats.handoff is not None and stats.handoff.num_open == 0
        outcomes = stats.handoff.outcomes
        assert (outcomes["done"], outcomes["failed"] + outcomes["peer lost"], outcomes["cancelled"]) == (1, 1, 0)

    run(tmp_path, scenario)


class Crowded(NamedTuple):
    """One pair of workers for all tests that leave them idle."""

    runner: asyncio.Runner
    prefill: EngineClient
    decode: EngineClient

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        async def run_and_check() -> None:
            async with asyncio.timeout(SCENARIO_S):
                await scenario
                for client in (self.prefill, self.decode):
                    await until(client, lambda stats: held(stats) == num_open(stats) == 0)
                both = await asyncio.gather(audited(self.prefill), audited(self.decode))
                assert [held(stats) + stats.quarantined_pages for stats in both] == [0, 0]

        self.runner.run(run_and_check())


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowded]:
    """The prefill worker's host store holds one long prompt, the decode worker's two."""
    made = Workers(tmp_path_factory.mktemp("crowded"), max_model_len=len(LONGEST), device_kv_tokens=len(LONGEST))

    async def start() -> list[EngineClient]:
        sizes = {"prefill": len(LONGEST) + 200, "decode": 2 * len(LONGEST)}
        both = await asyncio.gather(*(made.start(role, host_kv_tokens=sizes[role]) for role in ROLES))
        return [client for (client,) in both]

    with asyncio.Runner() as runner:
        try:
            yield Crowded(runner, *runner.run(start()))
        finally:
            runner.run(made.close())


async def highest(client: EngineClient, of: Callable[[EngineStats], int], tasks: Sequence[asyncio.Task[Any]]) -> int:
    """Returns the highest value of `of(stats)` until all tasks have ended."""
    most = 0
    while not all(task.done() for task in tasks):
        most = max(most, of(await client.stats()))
        await asyncio.sleep(0.01)
    return most


def test_both_workers_free_their_pages_when_the_client_leaves_while_rows_land(crowded: Crowded) -> None:
    _runner, prefill, decode = crowded

    async def scenario() -> None:
        before = (await prefill.stats()).tokens_prefilled
        landed = asyncio.create_task(answer(decode, "landed", MIDDLE, prefill))
        await until(prefill, lambda stats: stats.tokens_prefilled > before + 5 * CHUNK)
        landed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await landed
        stats = await until(prefill, lambda stats: held(stats) == 0)
        assert stats.tokens_prefilled < before + len(MIDDLE), "an aborted prompt was computed to its end"
        assert await answer(decode, "handed", SHORT, prefill) == await answer(decode, "alone", SHORT, None)

    crowded.run(scenario())


def test_prompts_wait_while_both_workers_are_full_and_may_be_aborted_meanwhile(crowded: Crowded) -> None:
    _runner, prefill, decode = crowded

    async def scenario() -> None:
        before = await prefill.stats()
        prompts = [MIDDLE[number:] for number in range(3)]
        tasks = [
            asyncio.create_task(answer(decode, f"full {number}", prompt, prefill))
            for number, prompt in enumerate(prompts)
        ]
        leaves = asyncio.create_task(answer(decode, "leaves", MIDDLE[9:], prefill))
        await until(decode, lambda stats: stats.waiting > 0 and held(stats) > 0)
        leaves.cancel()  # it is still in the queue, so no peer has received it
        waiting_prefill, waiting_decode = await asyncio.gather(
            highest(prefill, lambda stats: stats.waiting, tasks), highest(decode, lambda stats: stats.waiting, tasks)
        )
        assert waiting_decode > 0 and waiting_prefill > 0, "there was room for all, so the test has lost its point"
        answers = [await task for task in tasks]
        computed = (await prefill.stats()).tokens_prefilled - before.tokens_prefilled
        assert computed == sum(map(len, prompts)), "prompts were computed twice, or after their abort"
        assert await answer(decode, "again", prompts[2], None) == answers[2]

    crowded.run(scenario())


def test_a_stopping_prefill_worker_notifies_its_peers_and_loses_no_page(crowded: Crowded) -> None:
    """This test must be the last: the worker is gone afterwards. The second stop command cuts the drain short."""
    runner, prefill, decode = crowded

    async def scenario() -> None:
        tasks = [asyncio.create_task(answer(decode, f"stops {n}", MIDDLE[n:], prefill)) for n in range(2)]
        await until(prefill, lambda stats: num_open(stats) == 2)
        patient = asyncio.create_task(prefill.close(SCENARIO_S))
        await asyncio.sleep(0.1)
        patient.cancel()
        await prefill.close(0.0)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:  # a quick machine may have finished
            assert isinstance(end, list) or "the prefill worker is stopping" in str(end), end
        stats = await until(decode, lambda stats: held(stats) == num_open(stats) == 0)
        assert stats.quarantined_pages == 0
        assert await answer(decode, "alone", SHORT, None)

    runner.run(asyncio.wait_for(scenario(), SCENARIO_S))
