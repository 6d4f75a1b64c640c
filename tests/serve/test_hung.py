"""A server whose engine or worker process is stopped reports it, fails its requests, and exits with 1. No process
outlives it."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import plain_http
import pytest
from processes import command_line, descendants_of, is_running, is_spawned, pause, shared_memory_of, wait_until_ended
from running_server import RunningServer, error_of, serving
from waiting import WAIT_SECONDS, wait_until

TEXT = "/v1/completions"
STEP_TIMEOUT = 3
FLAGS = ["--load-format", "dummy", "--device", "cpu", "--step-timeout", str(STEP_TIMEOUT)]
SIZES = ["--device-kv-tokens", "16384", "--host-kv-tokens", "16384"]


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 8000, "ignore_eos": True, **fields}


def workers_of(engine: int) -> list[int]:
    """Returns the worker processes of an engine, in the order of their numbers."""
    spawned = (pid for pid in descendants_of(engine) if is_spawned(pid))
    return sorted(spawned)


def wait_for_503(server: RunningServer) -> dict[str, Any]:
    """Waits until /health reports an error. It must answer at once each time, although the engine does not run."""
    answers: list[httpx.Response] = []

    def reports_an_error() -> bool:
        answers.append(plain_http.get(f"{server.url}/health", timeout=WAIT_SECONDS))
        return answers[-1].status_code != 200

    assert wait_until(reports_an_error)
    assert all(answer.json()["status"] == "ok" for answer in answers[:-1])
    return error_of(answers[-1], 503)


def assert_fails_and_exits(server: RunningServer, reason: str) -> str:
    """Waits until the server reports `reason`, and checks that it fails requests and exits with 1. Returns the message
    of the errors."""
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
    return str(error["message"])


def test_a_stopped_engine_fails_its_requests_and_ends_the_server_with_1(tiny_model: str, tmp_path: Path) -> None:
    with (
        serving(tmp_path, tiny_model, *FLAGS) as server,
        plain_http.Client(base_url=server.url, timeout=WAIT_SECONDS) as http,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WAIT_SECONDS) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        idle = http.get("/health").json()
        assert (idle["steps"], idle["seconds_since_step"], idle["open_requests"]) == (0, None, 0)
        endless = {"model": "tiny", "prompt": [1], "max_tokens": 8000, "extra_body": {"ignore_eos": True}}
        chunks = client.completions.create(**endless, stream=True)
        next(chunks)
        pending = threads.submit(plain_http.post, server.url + TEXT, json=body_of(), timeout=WAIT_SECONDS)
        server.wait_for_gauge("hotset_requests_running", 2)
        busy = http.get("/health").json()
        assert busy["open_requests"] == 2 and busy["steps"] and busy["seconds_without_progress"] < STEP_TIMEOUT
        pause(server.engine_pid())
        message = assert_fails_and_exits(server, f"the engine process has shown no sign of life for {STEP_TIMEOUT} s")
        assert error_of(pending.result(), 503)["code"] == "engine_stopped"
        with pytest.raises(openai.APIError) as raised:
            list(chunks)
        assert (raised.value.code, raised.value.message) == ("engine_stopped", message)
        cut = re.findall(rf"POST {TEXT} 200 \d+ ms \S+: (.*)\n", server.log())
        assert cut == [message], "the log has the reason why the stream ended"


@pytest.mark.slow
def test_a_stopped_worker_of_an_engine_ends_the_server_with_1(tiny_model: str, tmp_path: Path) -> None:
    flags = [*FLAGS, *SIZES, "--pipeline-parallel-size", "2", "--max-num-batched-tokens", "4"]
    with serving(tmp_path, tiny_model, *flags) as server, ThreadPoolExecutor(1) as client:
        body = body_of(prompt=[1] * 7000, max_tokens=900)
        pending = client.submit(plain_http.post, server.url + TEXT, json=body, timeout=2 * WAIT_SECONDS)
        assert wait_until(lambda: server.gauge("hotset_tokens_prefilled_total") > 0)
        pause(workers_of(server.engine_pid())[1])
        name = r"worker 1 \(stage 1 of 2, rank 0 of 1\)"
        assert_fails_and_exits(server, f"{name} has shown no sign of life for {STEP_TIMEOUT} s")
        assert error_of(pending.result(), 503)["code"] == "engine_stopped"


@pytest.mark.slow
def test_long_steps_on_a_busy_machine_do_not_count_as_hung(tiny_model: str, tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_stopped_engine_and_worker_processes_end_when_the_server_is_killed(tiny_model: str, tmp_path: Path) -> None:
    with serving(tmp_path, tiny_model, *FLAGS, *SIZES, "--pipeline-parallel-size", "2") as server:
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
def test_disaggregated_serving_ends_with_1_and_names_the_process_that_is_stopped(
    tiny_model: str, tmp_path: Path
) -> None:
    with serving(tmp_path, tiny_model, "--disaggregate", "1P1D", *FLAGS, *SIZES) as server:
        family = descendants_of(server.process.pid)
        (decode,) = [pid for pid in family if b"\0decode\0" in command_line(pid)]
        (engine,) = workers_of(decode)
        pause(engine)
        assert server.process.wait(2 * WAIT_SECONDS) == 1
        wait_until_ended(family)
        reason = f"the engine process has shown no sign of life for {STEP_TIMEOUT} s (--step-timeout)"
        assert f"error: decode 1 ended (exit code 1): {reason}" in server.log()
