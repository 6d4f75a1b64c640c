"""The client of an engine process: answers, aborts, start-up errors, and a process that dies, is stopped or hangs."""

import asyncio
import multiprocessing
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness import DEMO, tiny_directory
from processes import command_line, is_running, pause

from hotset.base.config import EngineConfig
from hotset.base.errors import CheckpointError, ConfigError, EngineStopped, RequestError, StartupError
from hotset.base.request_options import RequestOptions
from hotset.base.sampling import SamplingParams
from hotset.base.status_line import TaskProgress
from hotset.engine import process as process_module
from hotset.engine import progress as progress_module
from hotset.engine.client import EngineClient
from hotset.engine.input_processor import InputProcessor
from hotset.engine.llm import LLM
from hotset.engine.outputs import Delta
from hotset.engine.process import AddRequests, EngineProcess, EngineStarting, StopEngine
from hotset.engine.progress import Progress
from hotset.models.decoder_layer import DecoderLayer

DEADLINE_S = 200.0
NOTICE_S = 60.0  # time for a client to notice a process that is stopped or hangs; the limit is 3 s
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
STEP_TIMEOUT_S = 3.0
# Prompts that the process of `child_with_slow_layers` computes slowly, or never finishes.
SLOW_PROMPT, HANGING_PROMPT = [1] * 20, [2] * 30  # they begin differently: no prefix is reused
LAYER_SECONDS = 1.0
HANGING = 99  # the number of open requests that this process reports when it hangs
ENGINE_CHILD = process_module._child


def child_with_slow_layers(config: EngineConfig, pipe: Connection, progress: Progress) -> None:
    """Runs an engine process that sleeps in each layer of the prompts above."""
    compute: Any = DecoderLayer.__call__

    def slowly(layer: Any, residual: Any, *rest: Any) -> Any:
        if len(residual.x) == len(SLOW_PROMPT):
            time.sleep(LAYER_SECONDS)
        elif len(residual.x) == len(HANGING_PROMPT):
            progress.record_step(progress.steps, HANGING)
            threading.Event().wait()
        return compute(layer, residual, *rest)

    DecoderLayer.__call__ = slowly  # type: ignore[method-assign]
    process_module.LOST_PARENT_SECONDS = 0.5
    ENGINE_CHILD(config, pipe, progress)


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
    config = config_of(tmp_path_factory.mktemp("shared"), max_num_batched_tokens=8)

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


def test_cached_tokens_are_reported_although_the_first_token_comes_steps_later(shared: SharedEngine) -> None:
    prompt = [5, *range(30)]  # eight of its tokens are computed in a step

    async def scenario(client: EngineClient) -> None:
        await collect(client.generate("first", prompt, SHORT))
        deltas = [delta async for delta in client.generate("second", [*prompt[:20], *range(20)], SHORT)]
        assert {delta.cached_tokens for delta in deltas} == {20}
        salted = [delta async for delta in client.generate("third", prompt, SHORT, RequestOptions(cache_salt="a"))]
        assert {delta.cached_tokens for delta in salted} == {0}

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


@pytest.mark.parametrize(
    "when", ["decode", pytest.param("prefill", marks=pytest.mark.slow), pytest.param("idle", marks=pytest.mark.slow)]
)
def test_a_stopped_engine_process_is_killed_and_requests_fail_with_the_reason(tmp_path: Path, when: str) -> None:
    reason = "the engine process has shown no sign of life for 3 s"
    endless = SamplingParams(temperature=0, max_tokens=6000, ignore_eos=True)
    settings = {"step_timeout": STEP_TIMEOUT_S, "max_num_batched_tokens": 1, "device_kv_tokens": 8192}
    config = config_of(tmp_path, **settings)
    tiny_directory(tmp_path, max_position_embeddings=8192)

    async def scenario(client: EngineClient) -> None:
        deltas = client.generate("r", [5] * (2000 if when == "prefill" else 2), endless)
        first = asyncio.ensure_future(anext(deltas))
        if when != "prefill":
            await first
        if when == "idle":
            await deltas.aclose()
            await wait_for_pages_held(client, 0)
        pid = client._process.pid
        assert pid is not None
        pause(pid)
        async with asyncio.timeout(NOTICE_S):
            if when == "idle":
                while client.alive:
                    await asyncio.sleep(0.01)
            else:
                with pytest.raises(EngineStopped, match=reason):
                    await first
                    await collect(deltas)
        with pytest.raises(EngineStopped, match=reason):
            await collect(client.generate("late", [5], LONG))
        with pytest.raises(EngineStopped, match=reason):
            await client.stats()
        while client._process.alive:
            await asyncio.sleep(0.01)

    with_client(config, scenario)


def test_only_a_step_that_does_not_advance_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_child", child_with_slow_layers)
    monkeypatch.setattr(progress_module, "STALL_MARGIN_SECONDS", 0.0)
    layers = 1 + round(STEP_TIMEOUT_S / LAYER_SECONDS)
    config = config_of(tmp_path, step_timeout=STEP_TIMEOUT_S)
    tiny_directory(tmp_path, num_hidden_layers=layers)

    async def scenario(client: EngineClient) -> None:
        one = SamplingParams(temperature=0, max_tokens=1)
        assert len(await collect(client.generate("first", [1], one))) == 1
        began = time.monotonic()
        assert len(await collect(client.generate("slow", SLOW_PROMPT, one))) == 1
        assert time.monotonic() - began > STEP_TIMEOUT_S, "the step was faster than the limit, so nothing was tested"
        assert client.progress.steps == 2
        async with asyncio.timeout(NOTICE_S):
            with pytest.raises(EngineStopped, match=r"step 3 of the engine has made no progress for \d+ s"):
                await collect(client.generate("hanging", HANGING_PROMPT, one))
        assert client.seconds_without_progress > STEP_TIMEOUT_S

    with_client(config, scenario)


def test_statistics_of_an_engine_that_does_not_answer_are_the_newest_ones(shared: SharedEngine) -> None:
    async def scenario(client: EngineClient) -> None:
        await collect(client.generate("r", [5, 6], LONG))
        before = await client.stats()
        pid = client._process.pid
        assert pid is not None
        pause(pid)
        try:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.stats(), 0.05)
            received = client.newest_stats  # they may have arrived after the engine was paused
            assert received is not None and received.stats == before
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.stats(), 0.05)
            assert client.newest_stats is received and received.age_seconds > 0.02, "their age grows"
            assert client.alive, "an engine that has not answered for less than the step timeout is up"
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await client.stats() is not before

    shared.run(scenario)


def test_an_engine_in_a_long_step_exits_after_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_child", child_with_slow_layers)
    process = EngineProcess(config_of(tmp_path))
    try:
        card = process.wait_ready()
        process.pipe.send(AddRequests(InputProcessor(card, 0).accept("r", HANGING_PROMPT, SamplingParams())))
        deadline = time.monotonic() + DEADLINE_S
        while process.progress.open_requests != HANGING:
            assert time.monotonic() < deadline, "the step did not begin"
            time.sleep(0.01)
        process.pipe.close()  # as if the parent had died
        process._process.join(NOTICE_S)
        assert process._process.exitcode == 1, "the process still runs, or did not end itself"
    finally:
        process.end(0.0)


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


def test_the_progress_of_the_start_reaches_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "SHOW_SECONDS", 0.0)
    process = EngineProcess.__new__(EngineProcess)
    process._process, process._descendants = multiprocessing.current_process(), []  # a thread stands for the child
    process.pipe, child_end = multiprocessing.Pipe()
    config = EngineConfig(DEMO, device="cpu", device_kv_tokens=256)
    building = threading.Thread(target=process_module._build, args=(config, child_end, lambda: None, lambda: None))
    building.start()
    shown: list[TaskProgress] = []
    card = process.wait_ready(shown.append)
    building.join()
    title, size = f"Loading {card.name}", sum(file.stat().st_size for file in Path(DEMO).glob("*.safetensors"))
    loading = [progress for progress in shown if progress.title == title]
    total = loading[-1].total
    assert loading[0].total is None and loading[-1] == TaskProgress(title, total or 0, total, in_bytes=True)
    assert total is not None and 0.8 * size < total < size, "the layer that drafts may be left out"
    assert [progress.done for progress in loading] == sorted(progress.done for progress in loading)


def test_no_more_progress_is_sent_than_a_person_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent reads the pipe late, so many reports would fill it and delay the start."""
    monkeypatch.setattr(process_module, "SHOW_SECONDS", 1000.0)
    pipe, child_end = multiprocessing.Pipe()
    reporter = process_module._StartReporter(child_end)
    for title in ("a", "b"):
        for done in range(20):
            reporter.show(TaskProgress(title, done, 20))
    child_end.close()
    assert [pipe.recv().progress.title for _ in range(2)] == ["a", "b"]
    with pytest.raises(EOFError):
        pipe.recv()


def test_start_up_errors_of_the_process_are_raised_with_their_type_and_message(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        EngineClient.start(EngineConfig(model=str(tmp_path / "missing")))
    with pytest.raises(ConfigError, match="exceeds the 128"):
        EngineClient.start(config_of(tmp_path, max_model_len=1000))


def test_after_the_death_of_the_parent_the_drain_of_handoffs_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of the worker's peers wait until the drain has ended."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(process_module.os, "_exit", leave)
    monkeypatch.setattr(process_module.multiprocessing, "active_children", list)
    monkeypatch.setattr(process_module, "LOST_PARENT_SECONDS", 0.0)
    named: list[bool] = []
    monkeypatch.setattr(process_module, "name_as_ending", lambda: named.append(True))
    parent_end, child_end = process_module.multiprocessing.Pipe()
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    parent_end.close()
    with child_end, pytest.raises(SystemExit):
        process_module._read_commands(child_end, inbox, 0.0, threading.Event())
    assert named, "an engine that starts now waits for the memory of this one"
    assert isinstance(inbox.get(), StopEngine), "the first command ends the steps"
    assert process_module._stop_requested(inbox), "the second command ends the drain"


def leave_a_worker(_config: EngineConfig, pipe: Connection, _progress: Progress) -> None:
    """An engine process that starts a worker and is then killed. The worker stands for one whose memory is freed."""
    subprocess.Popen(["sleep", "600"])
    pipe.send(EngineStarting(TaskProgress("starts")))
    pipe.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_engine_that_was_killed_has_ended_when_nothing_is_left_of_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "_child", leave_a_worker)
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    monkeypatch.setattr(process_module, "SayWaiting", lambda _: waiting.put)
    process = EngineProcess(config_of(tmp_path))
    with pytest.raises(StartupError, match=r"^the engine process died while starting \(exit code -9\)$"):
        process.wait_ready(lambda _: process.pipe.send("die"))
    ending = threading.Thread(target=process.end, args=(0.0,))
    ending.start()
    (worker,) = waiting.get(timeout=DEADLINE_S)
    assert command_line(worker) == b"sleep\x00600\x00" and ending.is_alive()
    os.kill(worker, signal.SIGKILL)
    ending.join(DEADLINE_S)
    assert not ending.is_alive() and not is_running(worker)
