"""A server with every limit set enforces its limits exactly, and frees everything that a request held when the
request ends.

These tests are in one file because they share one server.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import plain_http
import pytest
from idle_connections import DESCRIPTORS, exchange, health_seconds, many_idle_connections
from running_server import API_KEY, ORIGIN, RunningServer, error_of, serving

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 8000, "ignore_eos": True}
LONG_CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8000, "ignore_eos": True}
SHORT = {"model": "tiny", "prompt": "hello", "max_tokens": 1}
JSON = {"Content-Type": "application/json"}
SEATS = QUEUE = CONCURRENCY = 3


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("limited")
    key_file = folder / "key.txt"
    key_file.write_text(f"{API_KEY}\n")
    numbers = ["--max-num-seqs", str(SEATS), "--max-queue", str(QUEUE), "--max-concurrency", str(CONCURRENCY)]
    access = ["--api-key-file", str(key_file), "--cors-origin", ORIGIN, "--max-body-mib", "0.01"]
    flags = ["--load-format", "dummy", "--served-model-name", "renamed", *numbers, *access]
    with serving(folder, tiny_model, *flags, few_descriptors=True) as server:
        yield server


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    """A client with the API key. After each test, the server must run no request."""
    with plain_http.Client(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {API_KEY}"}) as http:
        yield http
    assert server.wait_for_gauge("hotset_requests_running", lambda count: count == 0) == 0


def start_long_answer(http: httpx.Client, streams: ExitStack, **changes: Any) -> Iterator[str]:
    """Starts a long streamed answer and returns its lines. The client disconnects when `streams` is closed, or when the
    returned iterator is closed or deleted."""
    answer = streams.enter_context(http.stream("POST", TEXT, json={**LONG, "stream": True, **changes}))
    assert answer.status_code == 200
    lines = answer.iter_lines()
    assert next(lines).startswith("data: ")
    return lines


def assert_rejected(answer: httpx.Response, message: str) -> None:
    """Checks that a response is a 429 with `message` as a part of its error message."""
    error = error_of(answer, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    assert message in error["message"]


def finished(server: RunningServer, reason: str) -> float:
    """Returns the number of choices that ended for this reason."""
    text = plain_http.get(f"{server.url}/metrics", timeout=30).text
    return sum(map(float, re.findall(rf'^hotset_requests_finished_total\{{reason="{reason}"\}} (\S+)$', text, re.M)))


@contextmanager
def must_abort(server: RunningServer, num_choices: int) -> Iterator[None]:
    """Checks that this many choices are aborted in the block, that none ends by its length, and that nothing is held
    afterwards."""
    before = {reason: finished(server, reason) for reason in ("abort", "length")}
    yield
    assert_nothing_is_held(server)
    assert finished(server, "abort") - before["abort"] == num_choices
    assert finished(server, "length") == before["length"], "the disconnect must end the request, not its last token"


def assert_nothing_is_held(server: RunningServer) -> None:
    assert server.wait_for_gauge("hotset_device_pages_held", lambda pages: pages == 0) == 0
    assert server.gauge("hotset_requests_running") == server.gauge("hotset_requests_waiting") == 0
    assert "Traceback" not in server.log()


def test_without_the_right_key_health_and_metrics_are_accessible_and_the_api_is_not(http: httpx.Client) -> None:
    body = {**SHORT, "model": "renamed"}
    for authorization in (
        None,
        "Bearer wrong",
        f"Basic {API_KEY}",
        API_KEY,
        "Bearer",
        f"Bearer {API_KEY}x",
        "Bearer \xff",
    ):
        headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
        with plain_http.Client(base_url=http.base_url, headers=headers) as stranger:
            for answer in (stranger.post(TEXT, json=body), stranger.get("/v1/models"), stranger.post("/tokenize")):
                assert error_of(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            assert stranger.get("/health").status_code == stranger.get("/metrics").status_code == 200
    assert http.post(TEXT, json=body).status_code == 200
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["renamed"]


def test_a_body_over_the_limit_is_rejected_with_and_without_a_declared_length(http: httpx.Client) -> None:
    body = json.dumps({"model": "renamed", "prompt": "a" * 20_000}).encode()
    assert error_of(http.post(TEXT, content=body, headers=JSON), 413)["code"] == "request_too_large"
    chunks = (body[start : start + 1000] for start in range(0, len(body), 1000))
    assert error_of(http.post(TEXT, content=chunks, headers=JSON), 413)["code"] == "request_too_large"
    assert http.get("/health").status_code == 200, "the connection must remain usable"


def test_with_more_idle_connections_than_file_descriptors_health_answers_within_1_s(
    server: RunningServer, http: httpx.Client
) -> None:
    lines_before = server.log().count("\n")
    with many_idle_connections(server.url):
        assert health_seconds(server.url) < 1.0
        assert http.post(TEXT, json={**SHORT, "model": "renamed"}).status_code == 200
    assert server.log().count("\n") - lines_before <= 100
    assert re.search(r"Max open files +(\d+) +(\d+)", Path(f"/proc/{server.process.pid}/limits").read_text())[1] == str(
        DESCRIPTORS
    ), "the soft limit of open files must be raised"
    assert "the limit of open files is 1024" in server.log()


@pytest.mark.parametrize("line", ["POST /v1/completions", "GET /health"])
def test_a_request_with_a_length_and_a_chunked_encoding_is_refused_and_its_connection_closed(
    server: RunningServer, line: str
) -> None:
    headers = "Host: a\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n"
    answer = exchange(server.url, f"{line} HTTP/1.1\r\n{headers}\r\n0\r\n\r\nG".encode())
    assert answer.startswith(b"HTTP/1.1 400 ") and b"ambiguous_length" in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_a_long_path_is_cut_in_the_log(server: RunningServer, http: httpx.Client) -> None:
    assert http.get("/" + "p" * 30_000).status_code == 404
    http.get("/health")  # on the same connection, so the previous request has been logged
    (line,) = [line for line in server.log().splitlines() if "ppp" in line]
    assert len(line) < 400 and "30001 characters" in line


def test_only_pages_of_the_configured_origin_may_call_the_server(http: httpx.Client) -> None:
    preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    with plain_http.Client(base_url=http.base_url) as browser:
        allowed = browser.options(CHAT, headers=preflight)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert browser.options(CHAT, headers={**preflight, "Origin": "http://other.example"}).status_code == 400


def test_one_request_more_than_the_limit_gets_429_until_another_ends(server: RunningServer, http: httpx.Client) -> None:
    with ExitStack() as streams:
        running = [start_long_answer(http, streams) for _ in range(CONCURRENCY)]
        assert_rejected(http.post(TEXT, json=SHORT), "in progress")
        assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200
        assert http.get("/v1/models").status_code == http.get("/health").status_code == 200
        running.clear()
    assert server.wait_for_gauge("hotset_requests_running", lambda count: count == 0) == 0
    bodies = [SHORT, {**SHORT, "prompt": []}] * (CONCURRENCY + 1)
    assert [http.post(TEXT, json=body).status_code for body in bodies] == [200, 400] * (CONCURRENCY + 1)


def test_a_full_queue_answers_429_and_waiting_requests_still_finish(server: RunningServer, http: httpx.Client) -> None:
    answered: list[httpx.Response] = []
    waiter = threading.Thread(target=lambda: answered.append(http.post(TEXT, json={**SHORT, "n": QUEUE})))
    with ExitStack() as streams:
        running = start_long_answer(http, streams, n=SEATS)
        waiter.start()
        assert server.wait_for_gauge("hotset_requests_waiting", lambda count: count == QUEUE) == QUEUE
        assert_rejected(http.post(TEXT, json=SHORT), "choices are waiting")
        del running
    waiter.join(30)
    assert [answer.status_code for answer in answered] == [200]
    assert http.post(TEXT, json=SHORT).status_code == 200


def test_choices_that_overfill_the_queue_get_429_unless_the_queue_is_empty(
    server: RunningServer, http: httpx.Client
) -> None:
    many = {**SHORT, "n": QUEUE + 1}
    assert len(http.post(TEXT, json=many).json()["choices"]) == QUEUE + 1
    answered: list[httpx.Response] = []
    waiter = threading.Thread(target=lambda: answered.append(http.post(TEXT, json=SHORT)))
    with ExitStack() as streams:
        running = start_long_answer(http, streams, n=SEATS)
        waiter.start()
        assert server.wait_for_gauge("hotset_requests_waiting", lambda count: count == 1) == 1
        assert_rejected(http.post(TEXT, json={**SHORT, "n": QUEUE}), "choices are waiting")
        assert_rejected(http.post(TEXT, json={**SHORT, "prompt": ["a"] * QUEUE}), "choices are waiting")
        chat = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1, "n": QUEUE}
        assert_rejected(http.post(CHAT, json=chat), "choices are waiting")
        del running
    waiter.join(30)
    assert [answer.status_code for answer in answered] == [200]


@pytest.mark.parametrize(("path", "body"), [(TEXT, LONG), (CHAT, LONG_CHAT)], ids=["text", "chat"])
def test_disconnecting_from_a_stream_frees_its_pages(
    server: RunningServer, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    with must_abort(server, 1), http.stream("POST", path, json={**body, "stream": True}) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        assert server.gauge("hotset_device_pages_held") > 0


@pytest.mark.parametrize(
    ("change", "num_choices"),
    [({}, 1), ({"n": 3}, 3), ({"prompt": ["a", "b", "c"]}, 3)],
    ids=["one", "n", "prompts"],
)
def test_disconnecting_before_a_full_response_frees_its_pages(
    server: RunningServer, http: httpx.Client, change: dict[str, Any], num_choices: int
) -> None:
    with must_abort(server, num_choices), pytest.raises(httpx.ReadTimeout):
        http.post(TEXT, json={**LONG, **change}, timeout=1.0)


def test_disconnecting_while_queued_frees_the_place_in_the_queue(server: RunningServer, http: httpx.Client) -> None:
    with must_abort(server, SEATS + 1), ExitStack() as streams:
        running = start_long_answer(http, streams, n=SEATS)
        with pytest.raises(httpx.ReadTimeout):
            http.post(TEXT, json={**LONG, "stream": True}, timeout=0.5)
        assert server.wait_for_gauge("hotset_requests_waiting", lambda count: count == 0) == 0
        assert server.gauge("hotset_requests_running") == SEATS, "the running request must continue"
        del running
