"""Handoffs over NIXL between engines in separate processes. Tests kill a prefill worker or cancel a request while rows
land. tests/fleet/handoff/test_agent_processes.py kills decode workers."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from engine.handoff_pair import DSA_CONFIG
from harness import tiny_directory
from ports import reserved_port

from hotset.base.config import EngineConfig
from hotset.base.errors import HandoffLost
from hotset.base.request_options import RequestOptions
from hotset.base.sampling import SamplingParams
from hotset.engine.client import EngineClient
from hotset.engine.outputs import EngineStats
from hotset.engine.process import AUDIT_AFTER_IDLE_S, EngineProcess
from hotset.fleet.handoff.timers import PeerTiming

pytest.importorskip("nixl")

TINY = {"model_type": "deepseek_v32", **DSA_CONFIG, "first_k_dense_replace": 3, "index_topk": 24}
Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
CHUNK = 16
# The long prompt has so many chunks that a test can kill a worker before the last chunk is computed.
LONG_PROMPT = [3 + position % 90 for position in range(3000)]
MEDIUM_PROMPT = LONG_PROMPT[:1000]
MAX_CROWDED_TOKENS = 1100  # maximum context length of the `crowded` workers
SHORT_PROMPT = LONG_PROMPT[:100]
FOUR_TOKENS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
MANY_TOKENS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SCENARIO_S = 200.0
PEER_LOST_S = PeerTiming().peer_timeout + 30.0  # time within which a dead peer is declared lost and its requests end


class Workers:
    """Starts engines of one tiny model. `close` closes all of them, including those whose process was killed."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        """`settings` apply to all engines."""
        self._model = tiny_directory(folder, **TINY)
        self._settings = settings
        self._clients: list[EngineClient] = []

    async def start(self, role: Role, **settings: Any) -> EngineClient:
        """Starts an engine. `settings` apply to this engine only."""
        config = replace(self._config(role), **self._settings, **settings)
        client = await asyncio.to_thread(EngineClient.start, config, EngineProcess(config))
        client.listen()  # an engine hangs as soon as the pipe is full of reports that nobody reads
        self._clients.append(client)
        return client

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
            # Most tests compare a prompt that lands with the same prompt computed by the decode worker.
            prefix_cache=False,
        )

    async def close(self) -> None:
        await asyncio.gather(*(client.close(0.0) for client in self._clients))


async def answer(
    decode: EngineClient,
    name: str,
    prompt: list[int],
    prefill: EngineClient | None,
    params: SamplingParams = FOUR_TOKENS,
) -> list[int]:
    """Returns the tokens of the answer. `prefill` computes the prompt; None means that `decode` does."""
    prefill_at = None if prefill is None else prefill.control
    options = RequestOptions(landing="host" if prefill_at else "auto", prefill_at=prefill_at)
    deltas = decode.generate(name, prompt, params, options)
    return [token async for delta in deltas for token in delta.token_ids]


async def wait_until(
    client: EngineClient, condition: Callable[[EngineStats], bool], seconds: float = 60.0
) -> EngineStats:
    """Waits until `condition(stats)` is true, and returns these stats."""
    deadline = time.monotonic() + seconds
    while not condition(stats := await client.stats()):
        assert time.monotonic() < deadline, f"the condition is still false after {seconds:g} s: {stats}"
        await asyncio.sleep(0.01)
    return stats


def bytes_landed(stats: EngineStats) -> int:
    """Returns the bytes of all contexts that landed in this worker or, of a prefill worker, that it has written."""
    assert stats.handoff is not None
    return stats.handoff.nbytes


async def wait_for_first_rows(prefill: EngineClient, before: int) -> None:
    """Waits until rows of the long prompt have been written to the peer: more than `before` bytes in all. Fails if half
    of the prompt is computed by then."""

    def written(stats: EngineStats) -> bool:
        return bytes_landed(stats) > before

    stats = await wait_until(prefill, written)
    assert stats.tokens_prefilled < len(LONG_PROMPT) / 2, "half of the prompt was computed before rows were written"


def kill(client: EngineClient) -> None:
    assert client._process.pid is not None
    os.kill(client._process.pid, signal.SIGKILL)


def pages_held(stats: EngineStats) -> int:
    return stats.device_pages_held + stats.host_pages_held


def num_open(stats: EngineStats) -> int:
    assert stats.handoff is not None
    return stats.handoff.num_open


async def wait_for_audit(client: EngineClient) -> EngineStats:
    """Waits until an idle engine has audited itself, and returns its stats. A failed audit would end the engine, and
    `stats` would raise."""
    await asyncio.sleep(AUDIT_AFTER_IDLE_S + 0.3)
    return await client.stats()


def run(folder: Path, scenario: Callable[[Workers], Awaitable[None]]) -> None:
    async def run_scenario() -> None:
        workers = Workers(folder)
        try:
            async with asyncio.timeout(SCENARIO_S):
                await scenario(workers)
        finally:
            await workers.close()

    asyncio.run(run_scenario())


def test_a_killed_prefill_worker_fails_only_its_request_loses_no_page_and_is_replaceable(tmp_path: Path) -> None:
    """All prompts begin alike. The decode worker has 6 pages of them, or 96 rows, in its prefix cache: they are neither
    sent again nor lost."""

    async def scenario(workers: Workers) -> None:
        reuse = {"prefix_cache": True, "extend_locally": 0}
        prefill, decode = await asyncio.gather(
            workers.start("prefill", control=f"127.0.0.1:{port}", **reuse), workers.start("decode", **reuse)
        )
        await answer(decode, "before", SHORT_PROMPT, prefill)
        row_bytes = bytes_landed(await decode.stats()) // len(SHORT_PROMPT)
        interrupted = asyncio.create_task(answer(decode, "interrupted", LONG_PROMPT, prefill))
        other = asyncio.create_task(answer(decode, "other", SHORT_PROMPT, None, MANY_TOKENS))
        await wait_for_first_rows(prefill, before=row_bytes * len(SHORT_PROMPT))
        kill(prefill)
        starting = asyncio.create_task(workers.start("prefill", control=prefill.control, **reuse))
        with pytest.raises(HandoffLost, match=str(prefill.control)):
            await asyncio.wait_for(interrupted, PEER_LOST_S)
        assert len(await other) == 200

        successor = await starting
        assert successor.control == prefill.control
        handed = await answer(decode, "after", MEDIUM_PROMPT, successor)
        computed_here = replace(FOUR_TOKENS, prompt_logprobs=0)  # the whole prompt, without the cache
        assert handed == await answer(decode, "alone", MEDIUM_PROMPT, None, computed_here)
        stats = await wait_for_audit(decode)
        assert (stats.landed, stats.lost, stats.running, stats.waiting) == (2, 1, 0, 0)
        assert bytes_landed(stats) == row_bytes * (len(SHORT_PROMPT) + len(MEDIUM_PROMPT) - 96)
        assert pages_held(stats) == stats.quarantined_pages == 0, "pages of the killed worker's handoff are not free"
        assert stats.handoff is not None and stats.handoff.num_open == 0

    with reserved_port() as port:
        run(tmp_path, scenario)


class Crowded(NamedTuple):
    """Two workers with little memory, shared by several tests. Every test except the last leaves both workers idle."""

    runner: asyncio.Runner
    prefill: EngineClient
    decode: EngineClient

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        """Runs a scenario and checks that both workers have freed all pages afterwards."""

        async def run_and_check() -> None:
            async with asyncio.timeout(SCENARIO_S):
                await scenario
                for client in (self.prefill, self.decode):
                    await wait_until(client, lambda stats: pages_held(stats) == num_open(stats) == 0)
                both = await asyncio.gather(wait_for_audit(self.prefill), wait_for_audit(self.decode))
                assert [pages_held(stats) + stats.quarantined_pages for stats in both] == [0, 0]

        self.runner.run(run_and_check())


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowded]:
    """The host store of the prefill worker has room for one medium prompt, that of the decode worker for two."""
    workers = Workers(
        tmp_path_factory.mktemp("crowded"), max_model_len=MAX_CROWDED_TOKENS, device_kv_tokens=MAX_CROWDED_TOKENS
    )

    async def start() -> list[EngineClient]:
        sizes = {"prefill": MAX_CROWDED_TOKENS + 200, "decode": 2 * MAX_CROWDED_TOKENS}
        return await asyncio.gather(*(workers.start(role, host_kv_tokens=sizes[role]) for role in ROLES))

    with asyncio.Runner() as runner:
        try:
            yield Crowded(runner, *runner.run(start()))
        finally:
            runner.run(workers.close())


async def max_waiting(client: EngineClient, tasks: Sequence[asyncio.Task[Any]]) -> int:
    """Polls until all tasks have ended, and returns the maximum number of waiting requests."""
    maximum = 0
    while not all(task.done() for task in tasks):
        maximum = max(maximum, (await client.stats()).waiting)
        await asyncio.sleep(0.01)
    return maximum


def test_both_workers_free_their_pages_when_a_request_is_cancelled_while_rows_land(crowded: Crowded) -> None:
    _runner, prefill, decode = crowded

    async def scenario() -> None:
        before = (await prefill.stats()).tokens_prefilled
        interrupted = asyncio.create_task(answer(decode, "interrupted", MEDIUM_PROMPT, prefill))
        await wait_until(prefill, lambda stats: stats.tokens_prefilled > before + 5 * CHUNK)
        interrupted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await interrupted
        stats = await wait_until(prefill, lambda stats: pages_held(stats) == 0)
        assert stats.tokens_prefilled < before + len(MEDIUM_PROMPT), "a cancelled prompt was computed to its end"
        assert await answer(decode, "handed", SHORT_PROMPT, prefill) == await answer(
            decode, "alone", SHORT_PROMPT, None
        )

    crowded.run(scenario())


def test_prompts_wait_while_both_workers_are_full_and_can_be_cancelled_meanwhile(crowded: Crowded) -> None:
    _runner, prefill, decode = crowded

    async def scenario() -> None:
        before = await prefill.stats()
        prompts = [MEDIUM_PROMPT[number:] for number in range(3)]
        tasks = [
            asyncio.create_task(answer(decode, f"full {number}", prompt, prefill))
            for number, prompt in enumerate(prompts)
        ]
        cancelled = asyncio.create_task(answer(decode, "cancelled", MEDIUM_PROMPT[9:], prefill))
        await wait_until(decode, lambda stats: stats.waiting > 0 and pages_held(stats) > 0)
        cancelled.cancel()  # the request is still queued, so no peer has received it
        waiting_prefill, waiting_decode = await asyncio.gather(max_waiting(prefill, tasks), max_waiting(decode, tasks))
        assert waiting_decode > 0 and waiting_prefill > 0, (
            "no prompt waited at one of the workers, so this test checks less than it should"
        )
        answers = [await task for task in tasks]
        computed = (await prefill.stats()).tokens_prefilled - before.tokens_prefilled
        assert computed == sum(map(len, prompts)), "a prompt was computed twice, or after it was cancelled"
        assert await answer(decode, "again", prompts[2], None) == answers[2]

    crowded.run(scenario())


def test_a_stopping_prefill_worker_notifies_its_peers_so_they_quarantine_no_page(crowded: Crowded) -> None:
    """The second stop command cuts the drain short. This must be the last test that uses `crowded`, because it stops
    the prefill worker."""
    runner, prefill, decode = crowded

    async def scenario() -> None:
        tasks = [asyncio.create_task(answer(decode, f"stops {n}", MEDIUM_PROMPT[n:], prefill)) for n in range(2)]
        await wait_until(prefill, lambda stats: num_open(stats) == 2)
        first_close = asyncio.create_task(prefill.close(SCENARIO_S))
        await asyncio.sleep(0.1)
        first_close.cancel()
        await prefill.close(0.0)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:  # on a fast machine, a request can finish before the worker stops
            assert isinstance(outcome, list) or "the prefill worker is stopping" in str(outcome), outcome
        stats = await wait_until(decode, lambda stats: pages_held(stats) == num_open(stats) == 0)
        assert stats.quarantined_pages == 0
        assert await answer(decode, "alone", SHORT_PROMPT, None)

    runner.run(asyncio.wait_for(scenario(), SCENARIO_S))
