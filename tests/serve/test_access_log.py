"""The access log states the reason of every error, in few lines, without secrets and without forged lines."""

import asyncio
import json
import logging
import time
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotset.base.errors import ContextLengthExceeded, HandoffLost, RequestError, WrongApiKey
from hotset.serve.access_log import LINES_PER_SECOND, AccessLog, ErrorLines
from hotset.serve.errors import error_body, error_response
from hotset.serve.metrics import Metrics
from hotset.serve.middleware import ApiKey


async def request(app: ASGIApp, headers: dict[str, str] | None = None, path: bytes = b"/v1/completions") -> None:
    """Sends one request without a body to an application."""

    async def send(message: Message) -> None:
        pass

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    raw_headers = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path.decode(), "raw_path": path}
    await app({**scope, "headers": raw_headers}, receive, send)


def answering(error: Exception) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(error)(scope, receive, send)

    return app


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "hotset.serve")
    return caplog


def test_the_line_of_a_refused_request_has_the_message_and_the_field(log: pytest.LogCaptureFixture) -> None:
    error = ContextLengthExceeded("the prompt has 9000 tokens, and the context holds 8192", param="messages")
    asyncio.run(request(AccessLog(answering(error), Metrics()), {"X-Request-Id": "abc-1"}))
    (line,) = log.messages
    start, _, reason = line.partition(": ")
    assert reason == "the prompt has 9000 tokens, and the context holds 8192 (field messages)"
    method, path, status, _, unit, request_id = start.split()
    assert (method, path, status, unit, request_id) == ("POST", "/v1/completions", "400", "ms", "abc-1")


def test_a_stream_that_ends_with_an_error_is_logged_with_its_message(log: pytest.LogCaptureFixture) -> None:
    token = b'data: {"choices":[{"text":"data: {\\"error\\": 1}"}]}\n\n'
    last = f"data: {error_body(HandoffLost('the prefill worker was lost')).model_dump_json()}\n\n".encode()

    async def stream(scope: Scope, receive: Receive, send: Send, *bodies: bytes) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for body in bodies:
            await send({"type": "http.response.body", "body": body, "more_body": True})

    for bodies in [(token, last), (token + last,), (token, b"data: [DONE]\n\n")]:
        asyncio.run(request(AccessLog(lambda *arguments, sent=bodies: stream(*arguments, *sent), Metrics())))
    assert [line.partition("ms")[2] for line in log.messages] == [": the prefill worker was lost"] * 2 + [""]


@pytest.mark.parametrize("body", [b"Disallowed CORS origin", b"[" * 100_000, b'{"error": 1}', b"\xff"])
def test_an_error_that_is_not_in_our_format_is_logged_as_text(body: bytes, log: pytest.LogCaptureFixture) -> None:
    async def other(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    asyncio.run(request(AccessLog(other, Metrics())))
    (line,) = log.messages
    assert f" ms: {body[:20].decode('utf-8', 'replace')}" in line and len(line) < 700


def test_neither_keys_nor_line_breaks_from_a_client_reach_the_log(log: pytest.LogCaptureFixture) -> None:
    locked = AccessLog(ApiKey(answering(RequestError("unreachable")), "right-key"), Metrics())
    asyncio.run(request(locked, {"Authorization": "Bearer wrong-key", "X-Request-Id": "a\nb"}, b"/v1/models"))
    hostile = RequestError("\n2026-01-01 INFO GET /forged 200\r\x1b[2J\u2028\u202e" + "x" * 10_000, param="\n" * 1_000)
    asyncio.run(request(AccessLog(answering(hostile), Metrics())))
    refused, forged = log.messages
    assert " 401 " in refused and "missing or wrong API key" in refused
    assert "wrong-key" not in log.text and "right-key" not in log.text
    assert forged.isprintable() and len(forged) < 6_000 and "\\n2026-01-01" in forged


def test_a_storm_of_errors_is_counted_in_one_line_and_does_not_hide_other_statuses(
    log: pytest.LogCaptureFixture,
) -> None:
    async def storm() -> None:
        app = AccessLog(lambda scope, *channels: answering(scope["error"])(scope, *channels), Metrics())

        async def one(error: Exception) -> None:
            await request(lambda scope, *channels: app({**scope, "error": error}, *channels))

        for _ in range(1000):
            await one(WrongApiKey("no key"))
        await one(RequestError("a rare error"))
        deadline = time.monotonic() + 30
        while "more requests" not in log.text and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    asyncio.run(storm())
    assert sum("no key" in line for line in log.messages) == LINES_PER_SECOND
    assert sum("a rare error" in line for line in log.messages) == 1
    (summary,) = [line for line in log.messages if "more requests" in line]
    assert summary == f"{1000 - LINES_PER_SECOND} more requests were answered with 401 within a second"


def test_after_a_second_errors_are_logged_again(log: pytest.LogCaptureFixture) -> None:
    async def two_seconds() -> None:
        lines = ErrorLines()
        for _ in range(2):
            for number in range(LINES_PER_SECOND + 3):
                lines.write(429, f"line {number}")
            logged = len(log.messages)
            deadline = time.monotonic() + 30
            while len(log.messages) == logged and time.monotonic() < deadline:
                await asyncio.sleep(0.01)

    asyncio.run(two_seconds())
    second = [f"line {number}" for number in range(LINES_PER_SECOND)] + [
        "3 more requests were answered with 429 within a second"
    ]
    assert log.messages == second * 2


def test_error_bodies_keep_the_openai_form() -> None:
    body = json.loads(error_body(RequestError("m", param="p", code="c")).model_dump_json())
    assert body == {"error": {"message": "m", "type": "invalid_request_error", "param": "p", "code": "c"}}
