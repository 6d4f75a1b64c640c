"""Middleware of the server and the router: API key, and limits on requests and bodies."""

import asyncio
import hmac

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotset.base.errors import AmbiguousLength, BodyTooLarge, QueueFull, RequestTimeout, WrongApiKey
from hotset.base.units import MIB
from hotset.serve.errors import error_response
from hotset.serve.retry_after import Turnover

DOCS_PATHS = (
    "/docs",
    "/docs/start.js",
    "/docs/swagger-ui-bundle.js",
    "/docs/swagger-ui.css",
    "/docs/favicon-32x32.png",
)
PUBLIC_PATHS = frozenset({"/", "/health", "/metrics", "/handoff", "/openapi.json", *DOCS_PATHS})


class UnambiguousLength:
    """Rejects a request that has both a Content-Length and a Transfer-Encoding, and closes its connection.

    A proxy in front of the server may follow one header and the server the other. Bytes that the proxy considers part
    of this request would then be a second request for the server (request smuggling; RFC 9112, 6.1).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]} if scope["type"] == "http" else set()
        if {b"content-length", b"transfer-encoding"} <= names:
            message = "a request must not have both a Content-Length and a Transfer-Encoding header"
            await error_response(AmbiguousLength(message))(scope, receive, send)
            return
        await self._app(scope, receive, send)


class ApiKey:
    """Requires the bearer token on every path that is not public."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS:
            scheme, _, token = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._api_key):
                message = "missing or wrong API key; send it as 'Authorization: Bearer KEY'"
                await error_response(WrongApiKey(message))(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ConcurrencyLimit:
    """Rejects a POST request to `/v1/…` if the limit of requests in progress is reached, before reading its body.

    A request is in progress until its response has been sent or its client has disconnected.
    """

    def __init__(self, app: ASGIApp, max_concurrency: int) -> None:
        self._app = app
        self._limit = max_concurrency
        self._requests = Turnover()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        if self._requests.present >= self._limit:
            message = f"{self._requests.present} requests are in progress, which is the limit (--max-concurrency)"
            error = QueueFull(message, retry_after_s=self._requests.seconds_until(1))
            await error_response(error)(scope, receive, send)
            return
        self._requests.arrive()
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests.leave()


class BodyLimit:
    """Reads the whole body before it is parsed, and rejects one that is larger than the limit or takes too long.

    The declared length, if any, is checked first; every body is counted as it arrives. The inner application receives
    the body as one message, after which its `receive` reports only that the client has disconnected.
    """

    def __init__(self, app: ASGIApp, max_body_mib: float, receive_timeout_seconds: float) -> None:
        self._app = app
        self._timeout_seconds = receive_timeout_seconds
        self._limit_bytes = int(max_body_mib * MIB)
        self._message = f"the request body exceeds the limit of {max_body_mib:g} MiB"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_seconds):
                body = await self._read(Headers(scope=scope), receive)
        except BodyTooLarge as error:
            await error_response(error)(scope, receive, send)
            return
        except TimeoutError:
            message = f"the body did not arrive within {self._timeout_seconds:g} s (--receive-timeout-seconds)"
            await error_response(RequestTimeout(message))(scope, receive, send)
            return
        await self._app(scope, _replayed(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._limit_bytes:
            raise BodyTooLarge(self._message)
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > self._limit_bytes:
                raise BodyTooLarge(self._message)
            if not message.get("more_body", False):
                return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that yields the whole body once and then the messages that follow it."""
    delivered = False

    async def replay() -> Message:
        nonlocal delivered
        if delivered:
            return await receive()
        delivered = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
