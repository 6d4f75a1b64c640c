"""A server drains on a signal, exits with 1 when its engine dies, and reports start-up errors in one line."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import plain_http
import pytest
from running_server import serving

from hotset.cli import main

TEXT = "/v1/completions"
DRAIN_SECONDS = 4


def events_of(stream: httpx.Response) -> list[Any]:
    """Returns all events of a stream, parsed except for [DONE]."""
    data = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


def body_of(max_tokens: int) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}


def wait_until_refused(url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if plain_http.refuses_connections(url):
            return
        time.sleep(0.02)
    raise AssertionError(f"{url} still accepts connections")


def test_sigterm_drains_running_requests_and_exits_with_0(tiny_model: str, tmp_path: Path) -> None:
    with (
        serving(tmp_path, tiny_model, "--load-format", "dummy", "--drain-seconds", str(DRAIN_SECONDS)) as server,
        plain_http.Client(base_url=server.url, timeout=60) as http,
        http.stream("POST", TEXT, json=body_of(8000)) as endless,
        http.stream("POST", TEXT, json=body_of(10)) as short,
        http.stream("GET", "/live") as page,
    ):
        watched = page.iter_lines()
        assert "hello" in json.loads(next(watched))
        server.process.send_signal(signal.SIGTERM)
        assert not any("hello" in json.loads(line) for line in watched), "an open page must not delay the end"
        finished = events_of(short)
        assert finished[-1] == "[DONE]" and finished[-2]["choices"][0]["finish_reason"] == "length"
        wait_until_refused(server.url)
        assert server.process.poll() is None, "the server must refuse new connections while it drains"
        # A stream that outlasts the drain ends with an error event.
        assert events_of(endless)[-1]["error"]["code"] == "engine_stopped"
        assert server.process.wait(90) == 0
        assert "Traceback" not in server.log()


def test_death_of_the_engine_fails_its_requests_and_ends_the_server_with_1(tiny_model: str, tmp_path: Path) -> None:
    with serving(tmp_path, tiny_model, "--load-format", "dummy") as server:
        with (
            plain_http.Client(base_url=server.url, timeout=60) as http,
            http.stream("POST", TEXT, json=body_of(8000)) as stream,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
        ):
            endless = {"model": "tiny", "prompt": [1], "max_tokens": 8000, "extra_body": {"ignore_eos": True}}
            chunks = client.completions.create(**endless, stream=True)
            next(chunks)
            os.kill(server.engine_pid(), signal.SIGKILL)
            *_, last = events_of(stream)
            assert (last["error"]["code"], last["error"]["type"]) == ("engine_stopped", "service_unavailable_error")
            with pytest.raises(openai.APIError) as raised:
                list(chunks)
            assert (raised.value.code, raised.value.message) == ("engine_stopped", last["error"]["message"])
            for answer in (http.get("/health"), http.post(TEXT, json=body_of(1))):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stopped")
            assert "hotset_engine_up 0.0" in http.get("/metrics").text
        assert server.process.wait(90) == 1
        assert "Traceback" not in server.log()
        cut = re.findall(rf"POST {TEXT} 200 \d+ ms \S+: (.*)\n", server.log())
        assert cut == [last["error"]["message"]] * 2, "the log has the reason why the streams ended"


def start_up_error(*arguments: str) -> str:
    command = [sys.executable, "-m", "hotset", "serve", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    return ended.stderr


def test_start_up_errors_are_one_line(tmp_path: Path) -> None:
    error = start_up_error(str(tmp_path / "nothing"), "--port", "0")
    assert error.startswith("error: ") and error.count("\n") == 1 and "nothing" in error


def test_a_port_in_use_is_found_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = ["serve", "embedded", "--port", str(taken.getsockname()[1])]
        monkeypatch.setattr(sys, "argv", ["hotset", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    output, error = capsys.readouterr()
    assert (ended.value.code, output) == (1, "")
    assert error.startswith("error: cannot listen on 127.0.0.1 port") and error.count("\n") == 1
