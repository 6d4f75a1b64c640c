"""Errors as responses: status, escaping of text, and internal errors, whose details are only in the log."""

import asyncio
import json
import logging
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotset.base import errors
from hotset.serve.access_log import AccessLog
from hotset.serve.errors import ERROR_KINDS, error_body, error_kind
from hotset.serve.metrics import Metrics


def sent_by(app: ASGIApp) -> list[Message]:
    """Returns the messages that `app` sends to a client through the outermost middleware."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/x", "raw_path": b"/x", "headers": []}
    asyncio.run(AccessLog(app, Metrics())(scope, receive, send))
    return sent


def test_an_unexpected_error_is_logged_and_hidden_from_the_client(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("the secret is 42")

    start, body = sent_by(broken)
    assert start["status"] == 500
    assert json.loads(body["body"])["error"]["code"] == "internal_error"
    assert b"secret" not in body["body"]
    assert "the secret is 42" in caplog.text


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
