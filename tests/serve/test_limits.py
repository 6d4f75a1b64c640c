"""A server with every limit set enforces its limits exactly, and frees everything that a request held when the
request ends.

These tests are in one file because they share one server.
"""

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from html.parser import HTMLParser
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import openai
import plain_http
import pytest
from idle_connections import DESCRIPTORS, exchange, health_seconds, many_idle_connections
from processes import pause
from running_server import API_KEY, ORIGIN, RunningServer, error_of, metrics_of, serving
from waiting import wait_until

from hotset.serve.app import IDLE_ENGINE_SECONDS
from hotset.serve.retry_after import MAX_RETRY_AFTER_SECONDS

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
    server.wait_for_gauge("hotset_requests_running", 0)


def start_long_answer(http: httpx.Client, streams: ExitStack, **changes: Any) -> Iterator[str]:
    """Starts a long streamed answer and returns its lines. The client disconnects when `streams` is closed, or when the
    returned iterator is closed or deleted."""
    answer = streams.enter_context(http.stream("POST", TEXT, json={**LONG, "stream": True, **changes}))
    assert answer.status_code == 200
    lines = answer.iter_lines()
    assert next(lines).startswith("data: ")
    return lines


@contextmanager
def disconnecting(server: RunningServer, body: dict[str, Any]) -> Iterator[None]:
    """Sends a request, and disconnects at the end of the block without having read anything."""
    client = HTTPConnection(server.url.removeprefix("http://"))
    client.request("POST", TEXT, json.dumps(body), {**JSON, "Authorization": f"Bearer {API_KEY}"})
    try:
        yield
    finally:
        client.close()


@contextmanager
def full_seats(server: RunningServer, http: httpx.Client, waiting: int) -> Iterator[ExitStack]:
    """Occupies all seats, and lets a request with `waiting` choices wait.

    When the block ends or the yielded stack is closed, the seats become free, and the waiting request must be answered.
    """
    with ThreadPoolExecutor(1) as threads:
        with ExitStack() as streams:
            running = start_long_answer(http, streams, n=SEATS)
            answer = threads.submit(http.post, TEXT, json={**SHORT, "n": waiting})
            server.wait_for_gauge("hotset_requests_waiting", waiting)
            yield streams
            del running
        assert answer.result(60).status_code == 200


def assert_rejected(answer: httpx.Response, message: str) -> None:
    """Checks that a response is a 429 with `message` as a part of its error message."""
    error = error_of(answer, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    seconds = int(answer.headers["retry-after"])
    assert 1 <= seconds <= MAX_RETRY_AFTER_SECONDS
    assert message in error["message"] and error["message"].endswith(f"; try again in {seconds} s")


@contextmanager
def must_abort(server: RunningServer, num_choices: int) -> Iterator[None]:
    """Checks that this many choices are aborted in the block, that none ends by its length, and that nothing is held
    afterwards."""
    before = metrics_of(server.url)
    yield
    assert_nothing_is_held(server)
    aborted, ended = (
        metrics_of(server.url).get(name, 0) - before.get(name, 0)
        for name in ("hotset_requests_finished_total/abort", "hotset_requests_finished_total/length")
    )
    assert aborted == num_choices
    assert ended == 0, "the disconnect must end the request, not its last token"


def assert_nothing_is_held(server: RunningServer) -> None:
    server.wait_for_gauge("hotset_device_pages_held", 0)
    assert server.gauge("hotset_requests_running") == server.gauge("hotset_requests_waiting") == 0
    assert "Traceback" not in server.log()


def test_without_the_right_key_health_and_metrics_are_accessible_and_the_api_is_not(http: httpx.Client) -> None:
    body = {**SHORT, "model": "renamed"}
    wrong = ("Bearer wrong", f"Basic {API_KEY}", API_KEY, "Bearer", f"Bearer {API_KEY}x", "Bearer \xff")
    for headers in ({}, *({"Authorization": value.encode("latin-1")} for value in wrong)):
        with plain_http.Client(base_url=http.base_url, headers=headers) as stranger:
            for answer in (stranger.post(TEXT, json=body), stranger.get("/v1/models"), stranger.post("/tokenize")):
                assert error_of(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            refused = stranger.post("/v1/messages", json={})
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
            assert stranger.get("/health").status_code == stranger.get("/metrics").status_code == 200
        with plain_http.Client(base_url=http.base_url, headers={"x-api-key": f"{API_KEY}x"}) as stranger:
            assert error_of(stranger.get("/v1/models/"), 401)["code"] == "invalid_api_key"
    with plain_http.Client(base_url=http.base_url, headers={"x-api-key": API_KEY}) as friend:
        assert friend.post(TEXT, json=body).status_code == 200
    assert http.post(TEXT, json=body).status_code == 200
    assert [(model["id"], model["root"]) for model in http.get("/v1/models").json()["data"]] == [("renamed", "tiny")]


def test_a_body_over_the_limit_is_rejected_with_and_without_a_declared_length(http: httpx.Client) -> None:
    body = json.dumps({"model": "renamed", "prompt": "a" * 20_000}).encode()
    assert error_of(http.post(TEXT, content=body, headers=JSON), 413)["code"] == "request_too_large"
    chunks = (body[start : start + 1000] for start in range(0, len(body), 1000))
    assert error_of(http.post(TEXT, content=chunks, headers=JSON), 413)["code"] == "request_too_large"
    refused = http.post("/v1/messages", content=body, headers=JSON)
    assert (refused.status_code, refused.json()["error"]["type"]) == (413, "request_too_large")
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
    assert len(line) < 900 and "30001 characters" in line


class LoadedFiles(HTMLParser):
    """Collects the addresses that a browser loads for a page, and the text of scripts inside it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.inline = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        self.inline += "".join(value or "" for name, value in attrs if name == "style" or name.startswith("on"))

    def handle_data(self, data: str) -> None:
        self.inline += data.strip() if self.cdata_elem in ("script", "style") else ""


def test_the_documentation_loads_everything_from_this_server_without_a_key(http: httpx.Client) -> None:
    with plain_http.Client(base_url=http.base_url) as browser:
        page = browser.get("/docs")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = dict(rule.split(maxsplit=1) for rule in page.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'self'" and policy["img-src"] == "'self' data:"
        assert "script-src" not in policy and "connect-src" not in policy, "default-src applies to them"
        loaded = LoadedFiles(page.text)
        assert loaded.inline == "", "the policy forbids scripts and styles inside the page"
        assert all(re.fullmatch(r"/[\w.-]+(/[\w.-]+)?", address) for address in loaded.addresses)
        files = {address: browser.get(address) for address in loaded.addresses}
        assert all(answer.status_code == 200 for answer in files.values())
        assert {address.rpartition(".")[2] for address in files} == {"js", "css", "png", "json"}
        style = files["/docs/swagger-ui.css"].text
        assert "@import" not in style and set(re.findall(r"url\([\"']?(.{5})", style)) == {"data:"}
        start = files["/docs/start.js"].text
        assert "http" not in start and "validatorUrl: null" in start, "the default is a service of its authors"
        assert "SwaggerUIBundle" in files["/docs/swagger-ui-bundle.js"].text
        assert browser.get("/docs/__init__.py").status_code == 401
    assert http.get("/docs/__init__.py").status_code == 404


def test_only_pages_of_the_configured_origin_may_call_the_server(http: httpx.Client) -> None:
    preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    with plain_http.Client(base_url=http.base_url) as browser:
        allowed = browser.options(CHAT, headers=preflight)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert browser.options(CHAT, headers={**preflight, "Origin": "http://other.example"}).status_code == 400
        private = browser.options(CHAT, headers={**preflight, "Access-Control-Request-Private-Network": "true"})
        assert (private.status_code, private.headers["access-control-allow-private-network"]) == (200, "true")
    assert http.post(TEXT, content=json.dumps(SHORT).encode(), headers={"Origin": ORIGIN}).status_code == 200
    other = http.post(TEXT, content=json.dumps(SHORT).encode(), headers={"Origin": "http://other.example"})
    assert error_of(other, 403)["code"] == "not_allowed"


def test_one_request_more_than_the_limit_gets_429_until_another_ends(server: RunningServer, http: httpx.Client) -> None:
    with ExitStack() as streams:
        running = [start_long_answer(http, streams) for _ in range(CONCURRENCY)]
        assert_rejected(http.post(TEXT, json=SHORT), "in progress")
        refused = http.post("/v1/messages", json={})
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) > 0
        assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200
        assert http.get("/v1/models").status_code == http.get("/health").status_code == 200
        running.clear()
    server.wait_for_gauge("hotset_requests_running", 0)
    bodies = [SHORT, {**SHORT, "prompt": []}] * (CONCURRENCY + 1)
    assert [http.post(TEXT, json=body).status_code for body in bodies] == [200, 400] * (CONCURRENCY + 1)


def test_choices_that_overfill_the_queue_get_429_unless_the_queue_is_empty(
    server: RunningServer, http: httpx.Client
) -> None:
    assert len(http.post(TEXT, json={**SHORT, "n": QUEUE + 1}).json()["choices"]) == QUEUE + 1
    with full_seats(server, http, waiting=QUEUE):
        assert_rejected(http.post(TEXT, json=SHORT), "choices are waiting")
    with full_seats(server, http, waiting=1):
        assert_rejected(http.post(TEXT, json={**SHORT, "n": QUEUE}), "choices are waiting")
        assert_rejected(http.post(TEXT, json={**SHORT, "prompt": ["a"] * QUEUE}), "choices are waiting")
        chat = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1, "n": QUEUE}
        assert_rejected(http.post(CHAT, json=chat), "choices are waiting")
    assert http.post(TEXT, json=SHORT).status_code == 200


def test_the_openai_client_waits_for_the_retry_after_time_and_then_succeeds(
    server: RunningServer, http: httpx.Client
) -> None:
    attempts: list[tuple[int, float, str]] = []  # status, time and Retry-After of each answer

    def on_answer(answer: Any) -> None:
        attempts.append((answer.status_code, time.monotonic(), answer.headers.get("retry-after", "")))
        streams.close()  # the running request ends, so the queue has room when the client comes back

    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, timeout=60) as client,
        full_seats(server, http, waiting=QUEUE) as streams,
    ):
        client._client.event_hooks["response"].append(on_answer)
        assert client.completions.create(**SHORT).choices
    (refused, refused_at, seconds), (accepted, accepted_at, _) = attempts
    assert (refused, accepted) == (429, 200)
    assert accepted_at - refused_at >= int(seconds) >= 1


def test_every_refusal_is_logged_with_its_reason_but_without_keys_and_prompts(
    server: RunningServer, http: httpx.Client
) -> None:
    bad = {**SHORT, "prompt": "a confidential prompt", "temperature": -5}
    assert http.post(TEXT, json=bad, headers={"X-Request-Id": "refused-1"}).status_code == 400
    assert http.get("/v1/models", headers={"Authorization": "Bearer a-stolen-key"}).status_code == 401
    assert http.post(TEXT, json={**SHORT, "model": "a\nb"}).status_code == 404
    assert exchange(server.url, b"\x16\x03\x01 no HTTP\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    http.get("/health")  # on the same connection, so the previous requests have been logged
    log = server.log()
    assert re.search(r"POST /v1/completions 400 \d+ ms refused-1: temperature .*\(field temperature\)\n", log), log
    assert re.search(r"GET /v1/models 401 \d+ ms \S+: missing or wrong API key", log)
    assert re.search(r"404 \d+ ms \S+: model 'a\\nb' does not exist; .* \(field model\)\n", log), log
    assert "400: Invalid HTTP request received." in log
    assert all(secret not in log for secret in ("confidential", "a-stolen-key", API_KEY))


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
    with must_abort(server, num_choices), disconnecting(server, {**LONG, **change}):
        server.wait_for_gauge("hotset_requests_running", num_choices)


def test_disconnecting_while_queued_frees_the_place_in_the_queue(server: RunningServer, http: httpx.Client) -> None:
    with must_abort(server, SEATS + 1), ExitStack() as streams:
        running = start_long_answer(http, streams, n=SEATS)
        with disconnecting(server, {**LONG, "stream": True}):
            server.wait_for_gauge("hotset_requests_waiting", 1)
        server.wait_for_gauge("hotset_requests_waiting", 0)
        assert server.gauge("hotset_requests_running") == SEATS, "the running request must continue"
        del running


def test_metrics_do_not_wait_for_a_running_step(server: RunningServer, http: httpx.Client) -> None:
    before = server.gauge("hotset_tokens_generated_total")
    with ExitStack() as streams:
        running = start_long_answer(http, streams)
        reported = wait_until(lambda: server.gauge("hotset_tokens_generated_total") > before + 1)
        assert reported, "the engine must report statistics while it works"
        engine = server.engine_pid()
        pause(engine)  # from now on its step takes long
        try:
            server.gauge("hotset_steps_total")  # reports that were on their way have arrived
            times, stopped_at = [time.monotonic()], []
            for _ in range(5):
                stopped_at.append(server.gauge("hotset_tokens_generated_total"))
                times.append(time.monotonic())
            shortest = min(after - before for before, after in itertools.pairwise(times))  # on a busy machine, too
            assert shortest < IDLE_ENGINE_SECONDS / 2, "every scrape waited for the engine"
            assert len(set(stopped_at)) == 1 and stopped_at[0] > before + 1
            assert server.gauge("hotset_engine_up") == 1
        finally:
            os.kill(engine, signal.SIGCONT)
        assert wait_until(lambda: server.gauge("hotset_tokens_generated_total") > stopped_at[0])
        del running
