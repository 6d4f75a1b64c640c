"""Errors become responses and lines of the access log, with their status and reason, and with escaped text. The log has
neither secrets nor forged lines, and few lines if there are many errors."""

import asyncio
import json
import logging

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from waiting import until

from hotset.base import errors
from hotset.serve.access_log import LINES_PER_SECOND, AccessLog, ErrorLines
from hotset.serve.errors import (
    ERROR_KINDS,
    REMOVED_PATHS,
    error_body,
    error_kind,
    error_response,
    http_error_response,
)
from hotset.serve.messages_api.errors import ERROR_TYPES, MessagesErrors
from hotset.serve.metrics import Metrics
from hotset.serve.middleware import ApiKey
from hotset.serve.streams import event_of


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "hotset.serve")
    return caplog


async def send_to(app: ASGIApp, path: str = "/x", **headers: str) -> list[Message]:
    """Sends a request without a body, and returns the messages that `app` sends to the client."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    raw = [
        (name.replace("_", "-").encode(), value.encode()) for name, value in {"x_request_id": "r1", **headers}.items()
    ]
    await app({"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "headers": raw}, receive, send)
    return sent


def sent_by(app: ASGIApp, path: str = "/x", **headers: str) -> list[Message]:
    """Returns the messages that `app` sends to a client through the outermost middleware."""
    return asyncio.run(send_to(MessagesErrors(AccessLog(app, Metrics())), path, **headers))


def answering(error: Exception) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(error)(scope, receive, send)

    return app


def sending(status: int, *bodies: bytes) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        for number, body in enumerate(bodies, 1):
            await send({"type": "http.response.body", "body": body, "more_body": number < len(bodies)})

    return app


def test_an_unexpected_error_is_logged_and_hidden_from_the_client(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("the secret is 42")

    start, body = sent_by(broken)
    assert start["status"] == 500
    assert json.loads(body["body"])["error"]["code"] == "internal_error"
    assert b"secret" not in body["body"]
    assert "the secret is 42" in caplog.text


@pytest.mark.parametrize("path", REMOVED_PATHS)
def test_a_path_of_an_earlier_version_is_answered_with_what_replaces_it(path: str) -> None:
    response = http_error_response(HTTPException(404), "GET", path)
    error = json.loads(bytes(response.body))["error"]
    assert (response.status_code, error["type"]) == (404, "not_found_error")
    assert error["message"] == f"the path {path} does not exist; run {REMOVED_PATHS[path]}"


@pytest.mark.parametrize("kind", ERROR_KINDS)
def test_every_error_has_the_shape_of_anthropic_on_the_paths_of_messages(kind: type[Exception]) -> None:
    if not issubclass(kind, Exception):
        kind = RuntimeError

    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise kind("the reason")

    start, message = sent_by(broken, "/v1/messages")
    body = json.loads(message["body"])
    assert (body["type"], body["request_id"], dict(start["headers"])[b"request-id"]) == ("error", "r1", b"r1")
    expected = ERROR_TYPES.get(start["status"], "api_error" if start["status"] >= 500 else "invalid_request_error")
    assert body["error"]["type"] == expected and body["error"]["message"] and body["error"]["details"]["error_code"]
    assert dict(start["headers"])[b"content-length"] == str(len(message["body"])).encode()
    assert json.loads(sent_by(broken)[1]["body"]).keys() == {"error"}, "other paths have the shape of OpenAI"


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"error": 3}', b'{"type": "error", "error": {}}', b""])
def test_an_error_body_that_is_not_ours_is_sent_as_it_is(body: bytes) -> None:
    _, message = sent_by(sending(502, body[:3], body[3:]), "/v1/messages/count_tokens")
    assert message["body"] == body


TOKEN = b'data: {"choices":[{"text":"data: {\\"error\\": 1}"}]}\n\n'


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error":{"message":"it broke","param":null}}\n\n',
        b'event: error\ndata: {"type":"error","error":{"type":"t","message":"it broke","details":{}}}\n\n',
        b'event: response.failed\ndata: {"type":"response.failed","response":{"error":{"message":"it broke"}}}\n\n',
    ],
)
def test_an_error_that_ends_a_stream_is_logged_in_every_api(event: bytes, log: pytest.LogCaptureFixture) -> None:
    for bodies in ((TOKEN, event), (TOKEN + event,), (TOKEN, b"data: [DONE]\n\n")):
        sent_by(sending(200, *bodies, b""))
    assert [line.partition("r1")[2] for line in log.messages] == [": it broke"] * 2 + [""]


def test_an_error_after_the_status_line_sends_no_second_status_line(caplog: pytest.LogCaptureFixture) -> None:
    async def breaks_later(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("too late")

    assert [message["type"] for message in sent_by(breaks_later)] == ["http.response.start"]
    assert "too late" in caplog.text


def test_a_client_that_disconnects_is_not_logged_as_an_error(log: pytest.LogCaptureFixture) -> None:
    async def abandoned(scope: Scope, receive: Receive, send: Send) -> None:
        raise ClientDisconnect

    assert sent_by(abandoned) == []
    assert [record.levelname for record in log.records] == ["INFO"]
    assert "GET /x 499" in log.text


def test_every_error_has_its_http_status() -> None:
    statuses = {
        errors.RequestError("m"): 400,
        errors.ContextLengthExceeded("m"): 400,
        errors.UnsupportedField("m"): 400,
        errors.WrongApiKey("m"): 401,
        errors.NotAllowed("m"): 403,
        errors.UnknownModel("m"): 404,
        errors.AmbiguousLength("m"): 400,
        errors.RequestTimeout("m"): 408,
        errors.WrongRole("m"): 409,
        errors.BodyTooLarge("m"): 413,
        errors.QueueFull("m"): 429,
        errors.EngineStopped("m"): 503,
        errors.HandoffLost("m"): 503,
        errors.NoRoomLeft("m"): 503,
        errors.NoWorkers("m"): 503,
        errors.WorkerLost("m"): 503,
        errors.DeadlineExceeded("m"): 504,
        errors.IllegalTransition("a", "b"): 500,
    }
    assert {error: error_kind(error).status for error in statuses} == statuses
    assert {kind.status for kind in ERROR_KINDS.values()} == set(statuses.values())


def test_text_from_clients_is_escaped_and_truncated_in_errors() -> None:
    hostile = errors.RequestError("\ud800" + "x" * 10_000, param="\udfff" * 10_000)
    assert len(error_body(hostile).model_dump_json().encode()) < 8_000


def test_the_line_of_a_refused_request_has_the_message_and_the_field(log: pytest.LogCaptureFixture) -> None:
    error = errors.ContextLengthExceeded("the prompt has 9000 tokens, and the context holds 8192", param="messages")
    sent_by(answering(error), "/v1/completions")
    (line,) = log.messages
    start, _, reason = line.partition(": ")
    assert reason == "the prompt has 9000 tokens, and the context holds 8192 (field messages)"
    method, path, status, _, unit, request_id = start.split()
    assert (method, path, status, unit, request_id) == ("GET", "/v1/completions", "400", "ms", "r1")


@pytest.mark.parametrize("body", [b"Disallowed CORS origin", b"[" * 100_000, b'{"error": 1}', b"\xff"])
def test_an_error_that_is_not_in_our_format_is_logged_as_text(body: bytes, log: pytest.LogCaptureFixture) -> None:
    sent_by(sending(400, body))
    (line,) = log.messages
    assert f" r1: {body[:20].decode('utf-8', 'replace')}" in line and len(line) < 700


def test_neither_keys_nor_line_breaks_from_a_client_reach_the_log(log: pytest.LogCaptureFixture) -> None:
    locked = ApiKey(answering(errors.RequestError("unreachable")), "right-key")
    sent_by(locked, "/v1/models", authorization="Bearer wrong-key", x_request_id="a\nb")
    hostile = errors.RequestError(
        "\n2026-01-01 INFO GET /forged 200\r\x1b[2J\u2028\u202e" + "x" * 10_000, param="\n" * 1_000
    )
    sent_by(answering(hostile))
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
            await send_to(lambda scope, *channels: app({**scope, "error": error}, *channels))

        for _ in range(1000):
            await one(errors.WrongApiKey("no key"))
        await one(errors.RequestError("a rare error"))
        await until(lambda: "more requests" in log.text)

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
            await until(lambda logged=logged: len(log.messages) > logged)

    asyncio.run(two_seconds())
    second = [f"line {number}" for number in range(LINES_PER_SECOND)] + [
        "3 more requests were answered with 429 within a second"
    ]
    assert log.messages == second * 2


@pytest.mark.parametrize("end", ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"])
def test_no_character_of_a_text_ends_the_line_of_its_event(end: str) -> None:
    """httpx splits lines like str.splitlines, at more characters than the event stream format does."""
    stream = httpx.Response(200, content=event_of(error_body(errors.RequestError(f"one{end}two"))))
    (line,) = [line for line in stream.iter_lines() if line]
    assert json.loads(line.removeprefix("data: "))["error"]["message"] == f"one{end}two"
