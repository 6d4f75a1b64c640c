"""Middleware of the server and the router: request ids, API key, web pages, and limits on requests and bodies."""

import asyncio
import hmac
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotset.base.errors import (
    AmbiguousLength,
    BodyTooLarge,
    HotsetError,
    NotAllowed,
    QueueFull,
    RequestTimeout,
    WrongApiKey,
)
from hotset.base.serve_config import HttpSettings
from hotset.base.units import MIB
from hotset.serve.access_log import REQUEST_ID, AccessLog, HttpMetrics
from hotset.serve.errors import REMOVED_PATHS, error_response
from hotset.serve.http_middleware import HttpMiddleware
from hotset.serve.messages_api.errors import MessagesErrors
from hotset.serve.protocol import IGNORED_TOOLS_HEADER, REQUEST_ID_HEADER
from hotset.serve.retry_after import Turnover

DOCS_PATHS = (
    "/docs",
    "/docs/start.js",
    "/docs/swagger-ui-bundle.js",
    "/docs/swagger-ui.css",
    "/docs/favicon-32x32.png",
)
PUBLIC_PATHS = frozenset(
    {"/", "/health", "/ping", "/version", "/metrics", "/handoff", "/openapi.json", *DOCS_PATHS, *REMOVED_PATHS}
)


def middleware_of(config: HttpSettings, metrics: HttpMetrics) -> list[Middleware]:
    """Returns the middleware, outermost first. CORS precedes the key because preflight requests carry no key."""
    layers = [
        Middleware(RequestId),
        Middleware(MessagesErrors),
        Middleware(AccessLog, metrics=metrics),
        Middleware(UnambiguousLength),
        Middleware(CanonicalRequest),
    ]
    if config.cors_origin is not None:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=[config.cors_origin],
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=[REQUEST_ID_HEADER, "retry-after", IGNORED_TOOLS_HEADER],
        )
        layers.append(cors)
    if config.api_key is not None:
        layers.append(Middleware(ApiKey, api_key=config.api_key))
    layers.append(Middleware(ConcurrencyLimit, max_concurrency=config.max_concurrency))
    layers.append(Middleware(JsonBody, allowed_origin=config.cors_origin))
    body_limits = {"max_body_mib": config.max_body_mib, "receive_timeout_seconds": config.receive_timeout_seconds}
    layers.append(Middleware(BodyLimit, **body_limits))
    return layers


class RequestId(HttpMiddleware):
    """Gives every request an id: the client's x-request-id if it is valid, else a new one.

    The id replaces the header of the request, and is a header of the response.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        MutableHeaders(scope=scope)[REQUEST_ID_HEADER] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class Guard(HttpMiddleware):
    """Middleware that refuses requests by their headers."""

    def check(self, scope: Scope) -> None:
        """Raises the HotsetError with which the request is refused."""
        raise NotImplementedError

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.check(scope)
        except HotsetError as error:
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class UnambiguousLength(Guard):
    """Rejects a request that has both a Content-Length and a Transfer-Encoding, and closes its connection.

    A proxy in front of the server may follow one header and the server the other. Bytes that the proxy considers part
    of this request would then be a second request for the server (request smuggling; RFC 9112, 6.1).
    """

    def check(self, scope: Scope) -> None:
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            raise AmbiguousLength("a request must not have both a Content-Length and a Transfer-Encoding header")


class CanonicalRequest(HttpMiddleware):
    """Answers HEAD like GET, and a path with a slash at its end like the path without it.

    The HTTP server sends no body in response to HEAD.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].rstrip("/") and scope["raw_path"].endswith(b"/"):
            scope["path"], scope["raw_path"] = scope["path"].rstrip("/"), scope["raw_path"].rstrip(b"/")
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        inner = {**scope, "method": "GET"}
        try:
            await self._app(inner, receive, send)
        finally:
            scope["route"] = inner.get("route")  # for the access log


class ApiKey(Guard):
    """Requires the API key on every path that is not public, as a bearer token or in the header x-api-key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        super().__init__(app)
        self._api_key = api_key.encode()

    def check(self, scope: Scope) -> None:
        if scope["path"] in PUBLIC_PATHS:
            return
        headers = dict(scope["headers"])
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        bearer = token.strip() if scheme.lower() == b"bearer" else b""
        if not any(hmac.compare_digest(key, self._api_key) for key in (bearer, headers.get(b"x-api-key", b""))):
            raise WrongApiKey("missing or wrong API key; send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'")


class ConcurrencyLimit(HttpMiddleware):
    """Rejects a POST request to `/v1/…` if the limit of requests in progress is reached, before reading its body.

    A request is in progress until its response has been sent or its client has disconnected.
    """

    def __init__(self, app: ASGIApp, max_concurrency: int) -> None:
        super().__init__(app)
        self._limit = max_concurrency
        self._requests = Turnover()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
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


class JsonBody(Guard):
    """Treats bodies of every content type as JSON, except those that a web page of another origin may have sent.

    Many clients send no content type, or the content type of a form (curl -d). But every web page can make the browser
    of its visitor send such a body to this server, without asking the server first. Browsers ask only before they send
    application/json, with a preflight request that `--cors-origin` allows. They name the page in the header Origin.
    """

    def __init__(self, app: ASGIApp, allowed_origin: str | None) -> None:
        super().__init__(app)
        self._allowed_origin = allowed_origin

    def check(self, scope: Scope) -> None:
        headers = MutableHeaders(scope=scope)
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] in ("GET", "OPTIONS") or content_type == "application/json":
            return
        origin = headers.get("origin")
        if origin is not None and self._allowed_origin not in ("*", origin):
            raise NotAllowed(
                f"a web page of {origin} sent this request, with a body that is not declared as application/json; "
                "pages of other origins need --cors-origin"
            )
        headers["content-type"] = "application/json"


class BodyLimit(HttpMiddleware):
    """Reads the whole body before it is parsed, and rejects one that is larger than the limit or takes too long.

    The declared length, if any, is checked first; every body is counted as it arrives. The inner application receives
    the body as one message, after which its `receive` reports only that the client has disconnected.
    """

    def __init__(self, app: ASGIApp, max_body_mib: float, receive_timeout_seconds: float) -> None:
        super().__init__(app)
        self._timeout_seconds = receive_timeout_seconds
        self._limit_bytes = int(max_body_mib * MIB)
        self._message = f"the request body exceeds the limit of {max_body_mib:g} MiB"

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
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
