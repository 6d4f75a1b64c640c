"""The access log of server and router: one line and the metrics of every request, with the message of every error."""

import asyncio
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotset.serve.errors import MAX_MESSAGE_CHARACTERS, error_response
from hotset.serve.http_middleware import HttpMiddleware
from hotset.serve.protocol import REQUEST_ID_HEADER

logger = logging.getLogger("hotset.serve")

CLIENT_CLOSED_REQUEST = 499  # the status that nginx logs for a client that disconnected
REQUEST_ID = re.compile(r"[!-~]{1,128}")  # no characters that could forge a log line
MAX_PATH_CHARACTERS = 200
MAX_ERROR_BYTES = 1 << 16  # a longer body is not one of our errors
QUIET_PATHS = frozenset(
    {"/handoff", "/health", "/ping"}
)  # success is logged at DEBUG level, because these paths are polled
# The starts of events that end a stream with an error. Text inside an event cannot contain them: JSON escapes quotes.
ERROR_EVENT = re.compile(rb'data: (?={"error":|{"type":"error"|{"type":"response.failed")')
LINES_PER_SECOND = 10  # of errors with the same status
SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class HttpMetrics:
    """The metrics that the access log updates for every request. They are in a registry of their own, so that two
    servers in one process do not mix."""

    def __init__(self, prefix: str) -> None:
        self._registry = CollectorRegistry()
        self.http_requests = prometheus_client.Counter(
            f"{prefix}_http_requests", "HTTP requests answered.", ("endpoint", "status"), registry=self._registry
        )
        self.request_seconds = self._histogram(
            f"{prefix}_http_request_seconds",
            "Time from a request's arrival to the last byte of its response.",
            labels=("endpoint",),
        )

    def _histogram(
        self, name: str, help: str, buckets: Sequence[float] = SECONDS_BUCKETS, labels: Sequence[str] = ()
    ) -> Histogram:
        return Histogram(name, help, labels, buckets=buckets, registry=self._registry)


class ErrorLines:
    """Writes the log lines of errors. If a status occurs too often within a second, the further lines are only counted,
    and one line reports their number."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()  # by status, in the current second

    def write(self, status: int, line: str) -> None:
        """Logs the line, or counts it. Must be called on an event loop."""
        if not self._counts:
            asyncio.get_running_loop().call_later(1.0, self._end_second)
        self._counts[status] += 1
        if self._counts[status] <= LINES_PER_SECOND:
            logger.info("%s", line)

    def _end_second(self) -> None:
        for status, count in sorted(self._counts.items()):
            if count > LINES_PER_SECOND:
                logger.info("%d more requests were answered with %d within a second", count - LINES_PER_SECOND, status)
        self._counts.clear()


class AccessLog(HttpMiddleware):
    """Writes one log line and updates the metrics for each request. It handles uncaught errors.

    The line of a refused request, and of a stream that ends with an error, includes the error's message and field.
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        super().__init__(app)
        self._metrics = metrics
        self._errors = ErrorLines()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        status: int | None = None
        error_body = b""

        async def watched_send(message: Message) -> None:
            nonlocal status, error_body
            body = message.get("body", b"")
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status is not None and status >= 400:
                error_body += body[: MAX_ERROR_BYTES - len(error_body)]
            elif (failed := ERROR_EVENT.search(body)) is not None:
                error_body = body[failed.end() :]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            status = CLIENT_CLOSED_REQUEST
        except Exception as error:
            response = error_response(error)
            if status is None:  # else the status line is already sent, and the body can only be cut short
                await response(scope, receive, watched_send)
        finally:
            self._record(scope, status, time.monotonic() - began, error_body)

    def _record(self, scope: Scope, status: int | None, seconds: float, error_body: bytes) -> None:
        # The raw path is percent-encoded, so it cannot forge a log line.
        path = scope.get("raw_path", b"").decode("latin-1")
        endpoint = getattr(scope.get("route"), "path_format", "other")
        self._metrics.http_requests.labels(endpoint, str(status)).inc()
        self._metrics.request_seconds.labels(endpoint).observe(seconds)
        request_id = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        suffix = f" {request_id}" if REQUEST_ID.fullmatch(request_id) else ""
        if len(path) > MAX_PATH_CHARACTERS:
            path = f"{path[:MAX_PATH_CHARACTERS]}... ({len(path)} characters)"
        line = f"{scope['method']} {path} {status} {seconds * 1e3:.0f} ms{suffix}"
        if error_body or (status is not None and status >= 400):
            self._errors.write(status or 0, line + _reason(error_body))
        else:
            level = logging.DEBUG if path in QUIET_PATHS and status == 200 else logging.INFO
            logger.log(level, "%s", line)


def _reason(body: bytes) -> str:
    """Returns the message and the field of an error body in the form in which a log line ends with them."""
    text = body.decode("utf-8", "replace")
    try:
        # A stream's error event may be followed by further bytes.
        parsed: Any = json.JSONDecoder().raw_decode(text)[0]
        error = parsed.get("response", parsed)["error"]  # a failed response contains its error
        message, param = str(error["message"]), error.get("details", error).get("param")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # not written by Hotset
        message, param = text, None
    field = "" if param is None else f" (field {_printable(str(param))})"
    return f": {_printable(message)}{field}" if message else ""


def _printable(text: str) -> str:
    """Truncates text from a client or a worker, and escapes what could forge or garble a log line."""
    truncated = text if len(text) <= MAX_MESSAGE_CHARACTERS else text[:MAX_MESSAGE_CHARACTERS] + "..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in truncated)
