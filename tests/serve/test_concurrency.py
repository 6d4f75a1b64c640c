"""The limits on concurrent requests are exact, use the common error format, and free up when a request ends."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from running_server import RunningServer, serving

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LONG = {"model": "tiny", "prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}
SHORT = {"model": "tiny", "prompt": "a", "max_tokens": 1}
SEATS = QUEUE = CONCURRENCY = 3


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    limits = ["--max-concurrency", str(CONCURRENCY), "--max-queue", str(QUEUE), "--max-num-seqs", str(SEATS)]
    with serving(tmp_path_factory.mktemp("busy"), tiny_model, "--load-format", "dummy", *limits) as server:
        yield server


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http
    assert server.gauge_becomes("hotset_requests_running", lambda count: count == 0) == 0


def busy(http: httpx.Client, streams: ExitStack, **changes: Any) -> Iterator[str]:
    """Starts a long answer and returns its lines. It ends when the lines or `streams` are closed."""
    answer = streams.enter_context(http.stream("POST", TEXT, json={**LONG, **changes}))
    assert answer.status_code == 200
    lines = answer.iter_lines()
    assert next(lines).startswith("data: ")
    return lines


def refused(answer: httpx.Response, why: str) -> bool:
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    return why in error["message"]


def test_one_request_more_than_the_limit_gets_429_until_another_ends(server: RunningServer, http: httpx.Client) -> None:
    with ExitStack() as streams:
        running = [busy(http, streams) for _ in range(CONCURRENCY)]
        assert refused(http.post(TEXT, json=SHORT), "in progress")
        assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200
        assert http.get("/v1/models").status_code == http.get("/health").status_code == 200
        running.clear()
    assert server.gauge_becomes("hotset_requests_running", lambda count: count == 0) == 0
    bodies = [SHORT, {**SHORT, "prompt": []}] * (CONCURRENCY + 1)
    assert [http.post(TEXT, json=body).status_code for body in bodies] == [200, 400] * (CONCURRENCY + 1)


def test_choices_that_overfill_the_queue_get_429_unless_the_queue_is_empty(
    server: RunningServer, http: httpx.Client
) -> None:
    many = {**SHORT, "n": QUEUE + 1}
    assert len(http.post(TEXT, json=many).json()["choices"]) == QUEUE + 1
    answered: list[httpx.Response] = []
    waiter = threading.Thread(target=lambda: answered.append(http.post(TEXT, json=SHORT)))
    with ExitStack() as streams:
        running = busy(http, streams, n=SEATS)
        waiter.start()
        assert server.gauge_becomes("hotset_requests_waiting", lambda count: count == 1) == 1
        assert refused(http.post(TEXT, json={**SHORT, "n": QUEUE}), "choices are waiting")
        assert refused(http.post(TEXT, json={**SHORT, "prompt": ["a"] * QUEUE}), "choices are waiting")
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "n": QUEUE}
        assert refused(http.post(CHAT, json=chat), "choices are waiting")
        del running
    waiter.join(30)
    assert [answer.status_code for answer in answered] == [200]
