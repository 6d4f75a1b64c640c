"""Errors as responses: status, escaping of text, and internal errors, whose details are only in the log."""

import asyncio
import json
import logging
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotset.base import errors
from hotset.serve.access_log import AccessLog
from hotset.serve.errors import ERROR_KINDS, REMOVED_PATHS, error_body, error_kind, http_error_response
from hotset.serve.messages_api.errors import ERROR_TYPES, MessagesErrors
from hotset.serve.metrics import Metrics


def sent_by(app: ASGIApp, path: str = "/x") -> list[Message]:
    """Returns the messages that `app` sends to a client through the outermost middleware."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    headers = [(b"x-request-id", b"r1")]
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": path, "raw_path": b"/x", "headers": headers}
    asyncio.run(MessagesErrors(AccessLog(app, Metrics()))(scope, receive, send))
    return sent


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
    async def odd(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 502, "headers": []})
        await send({"type": "http.response.body", "body": body[:3], "more_body": True})
        await send({"type": "http.response.body", "body": body[3:]})

    _, message = sent_by(odd, "/v1/messages/count_tokens")
    assert message["body"] == body


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error":{"message":"it broke","param":null}}',
        b'event: error\ndata: {"type":"error","error":{"type":"t","message":"it broke","details":{}}}',
        b'event: response.failed\ndata: {"type":"response.failed","response":{"error":{"message":"it broke"}}}',
    ],
)
def test_an_error_that_ends_a_stream_is_logged_in_every_api(event: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def fails_late(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": event + b"\n\n", "more_body": True})

    with caplog.at_level(logging.INFO, "hotset.serve"):
        sent_by(fails_late)
    assert caplog.text.rstrip().endswith("r1: it broke")


def test_an_error_after_the_status_line_sends_no_second_status_line(caplog: pytest.LogCaptureFixture) -> None:
    async def breaks_later(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("too late")

    assert [message["type"] for message in sent_by(breaks_later)] == ["http.response.start"]
    assert "too late" in caplog.text


def test_a_client_that_disconnects_is_not_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def abandoned(scope: Scope, receive: Receive, send: Send) -> None:
        raise ClientDisconnect

    with caplog.at_level(logging.INFO, "hotset.serve"):
        assert sent_by(abandoned) == []
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "GET /x 499" in caplog.text


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
