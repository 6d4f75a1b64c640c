"""A server whose engine or worker process is stopped reports it, fails its requests, and exits with 1. No process
outlives it."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import plain_http
import pytest
from processes import command_line, descendants_of, is_running, is_spawned, pause, shared_memory_of, wait_until_ended
from running_server import RunningServer, error_of, serving

from hotset.base.errors import EngineStopped
from hotset.engine.client import ReceivedStats
from hotset.engine.outputs import EngineStats
from hotset.serve.service import Load

TEXT = "/v1/completions"
STEP_TIMEOUT = 3
FLAGS = ["--load-format", "dummy", "--device", "cpu", "--step-timeout", str(STEP_TIMEOUT)]
SIZES = ["--device-kv-tokens", "16384", "--host-kv-tokens", "16384"]
WAIT_SECONDS = 60.0  # limit of each wait; only an overloaded machine needs that long


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 8000, "ignore_eos": True, **fields}


def workers_of(engine: int) -> list[int]:
    """Returns the worker processes of an engine, in the order of their numbers."""
    spawned = (pid for pid in descendants_of(engine) if is_spawned(pid))
    return sorted(spawned)


def wait_for_503(server: RunningServer) -> dict[str, Any]:
    """Waits until /health reports an error. Each answer must come at once, though the engine does not run."""
    deadline = time.monotonic() + WAIT_SECONDS
    while (answer := plain_http.get(f"{server.url}/health", timeout=WAIT_SECONDS)).status_code == 200:
        assert time.monotonic() < deadline, f"/health still reports {answer.json()}"
        assert answer.json()["status"] == "ok"
        time.sleep(0.05)
    return error_of(answer, 503)


def assert_fails_and_exits(server: RunningServer, reason: str) -> None:
    """Waits until the server reports `reason`, and checks that it fails requests and exits with 1."""
    family = {server.process.pid, *descendants_of(server.process.pid)}
    shared = shared_memory_of(family)
    error = wait_for_503(server)
    assert error["code"] == "engine_stopped" and re.search(reason, error["message"]), error
    with ThreadPoolExecutor(2) as clients:  # at the same time, because the server ends soon
        late = clients.submit(plain_http.post, server.url + TEXT, json=body_of(), timeout=WAIT_SECONDS)
        metrics = clients.submit(plain_http.get, f"{server.url}/metrics", timeout=WAIT_SECONDS)
        late_error = error_of(late.result(), 503)
        assert "hotset_engine_up 0.0" in metrics.result().text
    assert (late_error["code"], late_error["message"]) == (error["code"], error["message"])
    assert server.process.wait(WAIT_SECONDS) == 1
    wait_until_ended(family)
    assert not any(path.exists() for path in shared), "a process has left shared memory"
    assert f"error: {error['message']}\n" in server.log() and "Traceback" not in server.log()


def test_a_stopped_engine_fails_its_requests_and_ends_the_server_with_1(tiny_model: str, tmp_path: Path) -> None:
    with serving(tmp_path, tiny_model, *FLAGS) as server, ThreadPoolExecutor(1) as client:
        idle = plain_http.get(f"{server.url}/health", timeout=WAIT_SECONDS).json()
        assert (idle["steps"], idle["seconds_since_step"], idle["open_requests"]) == (0, None, 0)
        pending = client.submit(plain_http.post, server.url + TEXT, json=body_of(), timeout=WAIT_SECONDS)
        deadline = time.monotonic() + WAIT_SECONDS
        while not (busy := plain_http.get(f"{server.url}/health", timeout=WAIT_SECONDS).json())["steps"]:
            assert time.monotonic() < deadline
        assert busy["open_requests"] == 1 and busy["seconds_without_progress"] < STEP_TIMEOUT
        pause(server.engine_pid())
        assert_fails_and_exits(server, f"the engine process has shown no sign of life for {STEP_TIMEOUT} s")
        assert error_of(pending.result(), 503)["code"] == "engine_stopped"


@pytest.mark.slow
@pytest.mark.parametrize("when", ["idle", "prefill", "decode"])
@pytest.mark.parametrize("stopped", ["engine", "worker"])
def test_a_stopped_process_of_an_engine_with_workers_ends_the_server_with_1(
    tiny_model: str, tmp_path: Path, stopped: str, when: str
) -> None:
    flags = [*FLAGS, *SIZES, "--pipeline-parallel-size", "2", "--max-num-batched-tokens", "4"]
    with serving(tmp_path, tiny_model, *flags) as server, ThreadPoolExecutor(1) as client:
        body = body_of(prompt=[1] * (7000 if when == "prefill" else 3), max_tokens=900)
        if when != "idle":
            pending = client.submit(plain_http.post, server.url + TEXT, json=body, timeout=2 * WAIT_SECONDS)
            tokens = "hotset_tokens_prefilled_total" if when == "prefill" else "hotset_tokens_generated_total"
            assert server.wait_for_gauge(tokens, lambda count: count > 0) > 0
        engine = server.engine_pid()
        pause(engine if stopped == "engine" else workers_of(engine)[1])
        name = "the engine process" if stopped == "engine" else r"worker 1 \(stage 1 of 2, rank 0 of 1\)"
        assert_fails_and_exits(server, f"{name} has shown no sign of life for {STEP_TIMEOUT} s")
        if when != "idle":
            assert error_of(pending.result(), 503)["code"] == "engine_stopped"


@pytest.mark.slow
def test_long_steps_on_a_busy_machine_are_not_taken_for_hung_ones(tiny_model: str, tmp_path: Path) -> None:
    flags = ["--step-timeout", "2", "--max-num-batched-tokens", "8192", "--load-format", "dummy", "--device", "cpu"]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        with serving(tmp_path, tiny_model, *flags, *SIZES) as server, ThreadPoolExecutor(2) as clients:
            body = body_of(prompt=[1] * 4000, max_tokens=20)
            began = time.monotonic()
            while time.monotonic() - began < 30:
                posts = [clients.submit(plain_http.post, server.url + TEXT, json=body, timeout=300) for _ in range(2)]
                assert [post.result().status_code for post in posts] == [200, 200]
            assert server.process.poll() is None
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stopped_engine_and_worker_processes_end_when_the_server_is_killed(
    tiny_model: str, tmp_path: Path, workers: int
) -> None:
    with serving(tmp_path, tiny_model, *FLAGS, *SIZES, "--pipeline-parallel-size", str(workers)) as server:
        engine = server.engine_pid()
        family = descendants_of(server.process.pid)
        try:
            for pid in (*workers_of(engine), engine):
                pause(pid)
            os.kill(server.process.pid, signal.SIGKILL)
            wait_until_ended(family)
        finally:
            for pid in filter(is_running, family):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_router_takes_out_a_worker_whose_engine_is_stopped(tiny_model: str, tmp_path: Path) -> None:
    with ExitStack() as running:

        def start(name: str, *arguments: str, command: str = "serve") -> RunningServer:
            (tmp_path / name).mkdir()
            return running.enter_context(serving(tmp_path / name, *arguments, command=command))

        prefill = start("prefill", tiny_model, "--role", "prefill", *FLAGS, *SIZES)
        decodes = [start(f"decode{n}", tiny_model, "--role", "decode", *FLAGS, *SIZES) for n in (1, 2)]
        urls = [decode.url for decode in decodes]
        router = start("router", "--prefill", prefill.url, "--decode", *urls, command="router")
        deadline = time.monotonic() + WAIT_SECONDS
        health: httpx.Response
        while (health := plain_http.get(f"{router.url}/health", timeout=30)).json().get("decode") != 2:
            assert time.monotonic() < deadline, health.text
            time.sleep(0.05)
        pause(decodes[0].engine_pid())
        assert decodes[0].process.wait(WAIT_SECONDS) == 1
        while (health := plain_http.get(f"{router.url}/health", timeout=30)).json().get("decode") != 1:
            assert time.monotonic() < deadline + WAIT_SECONDS, health.text
            time.sleep(0.05)
        for _ in range(4):
            body = body_of(max_tokens=3)
            assert plain_http.post(router.url + TEXT, json=body, timeout=WAIT_SECONDS).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["engine", "worker", "router"])
def test_disaggregated_serving_ends_with_1_and_names_the_process_that_is_stopped(
    tiny_model: str, tmp_path: Path, stopped: str
) -> None:
    with serving(tmp_path, tiny_model, "--disaggregate", "1P1D", *FLAGS, *SIZES) as server:
        family = descendants_of(server.process.pid)
        arguments = {pid: command_line(pid).split(b"\0") for pid in family}
        decode = next(pid for pid, words in arguments.items() if words[3:4] == [b"serve"] and b"decode" in words)
        router = next(pid for pid, words in arguments.items() if words[3:4] == [b"router"])
        (engine,) = workers_of(decode)
        pause({"engine": engine, "worker": decode, "router": router}[stopped])
        assert server.process.wait(2 * WAIT_SECONDS) == 1
        wait_until_ended(family)
        limit = f"for {STEP_TIMEOUT} s (--step-timeout)"
        errors = {
            "engine": f"decode 1 ended (exit code 1): the engine process has shown no sign of life {limit}",
            "worker": f"decode 1 has not answered {limit}",
            "router": f"router has not answered {limit}",
        }
        assert f"error: {errors[stopped]}" in server.log()


class SilentClient:
    """An engine client whose engine has answered once and then fails to."""

    def __init__(self, stats: EngineStats) -> None:
        self.newest_stats = ReceivedStats(stats, time.monotonic())
        self.calls = 0

    async def stats(self) -> EngineStats:
        self.calls += 1
        raise EngineStopped("it has stopped")


def test_the_load_of_a_worker_that_does_not_answer_is_the_newest_one_known() -> None:
    async def scenario() -> None:
        client: Any = SilentClient(EngineStats(tokens_to_prefill=700))
        load = Load()
        for _ in range(3):
            assert load.stats(client).tokens_to_prefill == 700, "a busy worker must not look idle"
            await asyncio.sleep(0)
        assert client.calls == 3

    asyncio.run(scenario())
