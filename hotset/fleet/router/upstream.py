"""One attempt to get an answer from a decode worker, up to the first byte that the client receives."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import aiohttp
from starlette.requests import Request
from yarl import URL

from hotset.base.errors import EngineStopped, HandoffLost, NoRoomLeft
from hotset.base.units import show_bytes
from hotset.fleet.router.prefixes import BYTES_PER_TOKEN
from hotset.serve.page_marks import PAGE_MARKS_HEADER
from hotset.serve.prefill_header import PREFILL_HEADER, SIGNATURE_HEADER
from hotset.serve.protocol import REQUEST_ID_HEADER

RawHeaders = Sequence[tuple[bytes, bytes]]

MAX_RESPONSE_BYTES = 256 << 20  # limit for a response that is not streamed
MAX_ERROR_BYTES = 1 << 16  # a longer response is no error of the worker itself
# Hop-by-hop headers belong to one connection and are not forwarded (RFC 9110, 7.6.1).
HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
# These headers are not forwarded either. The router and its HTTP library set their own.
DROPPED_REQUEST_HEADERS = HOP_BY_HOP | {"host", "content-length", "expect"}
DROPPED_REQUEST_HEADERS |= {PREFILL_HEADER, SIGNATURE_HEADER, PAGE_MARKS_HEADER, REQUEST_ID_HEADER}
DROPPED_RESPONSE_HEADERS = HOP_BY_HOP | {"content-length", "date", "server", PAGE_MARKS_HEADER, REQUEST_ID_HEADER}
# aiohttp would add these headers if the client did not send them.
SKIPPED_AUTO_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


@dataclass(frozen=True)
class UpstreamRequest:
    """A client's request in the form in which it is sent to a worker."""

    request_id: str
    method: str
    target: str  # path and query, still percent-encoded
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def tokens(self) -> int:
        """The estimated number of prompt tokens."""
        return max(1, len(self.body) // BYTES_PER_TOKEN)


@dataclass(frozen=True)
class FullResponse:
    """A worker's response that is not streamed."""

    status: int
    headers: RawHeaders
    body: bytes


@dataclass(frozen=True)
class StreamedResponse:
    """A worker's event stream after its first bytes. The owner must close `response`; this aborts a running request."""

    response: aiohttp.ClientResponse
    headers: RawHeaders
    first: bytes


@dataclass(frozen=True)
class FailedAttempt:
    """An attempt that failed before the client received anything. `response` is the worker's own error, if any."""

    reason: Literal["prefill_lost", "decode_lost"]
    error: str
    response: FullResponse | None = None


async def read_request(request: Request) -> UpstreamRequest:
    """Reads a client's request, including its body."""
    query = request.scope["query_string"].decode("latin-1")
    path = request.scope["raw_path"].decode("latin-1")
    kept_headers = ((name, value) for name, value in request.headers.items() if name not in DROPPED_REQUEST_HEADERS)
    return UpstreamRequest(
        request_id=request.headers[REQUEST_ID_HEADER],  # set by the middleware RequestId
        method=request.method,
        target=f"{path}?{query}" if query else path,
        headers=tuple(kept_headers),
        body=await request.body(),
    )


async def attempt(
    session: aiohttp.ClientSession,
    request: UpstreamRequest,
    url: str,
    extra_headers: Sequence[tuple[str, str]],
    track: Callable[[aiohttp.ClientResponse], None],
) -> FullResponse | StreamedResponse | FailedAttempt:
    """Sends `request` to the decode worker at `url`, with `extra_headers`. Returns the full response, the beginning of
    a stream, or the reason for the failure.

    `track` is called with the open response when its status line and headers have arrived, so that a shutdown can close
    it.
    """
    headers = [*request.headers, (REQUEST_ID_HEADER, request.request_id), *extra_headers]
    response: aiohttp.ClientResponse | None = None
    keep_open = False
    try:
        response = await session.request(
            request.method,
            URL(url + request.target, encoded=True),
            data=request.body or None,
            headers=headers,
            skip_auto_headers=SKIPPED_AUTO_HEADERS,
            allow_redirects=False,
        )
        track(response)
        kept_headers = tuple(
            pair for pair in response.raw_headers if pair[0].decode("latin-1").lower() not in DROPPED_RESPONSE_HEADERS
        )
        if response.status == 200 and response.content_type == "text/event-stream":
            first = await response.content.readany()
            if not first:
                return FailedAttempt("decode_lost", "the stream ended before its first byte")
            keep_open = True
            return StreamedResponse(response, kept_headers, first)
        body = await _read_body(response)
        if body is None:
            return FailedAttempt("decode_lost", f"the response is longer than {show_bytes(MAX_RESPONSE_BYTES)}")
        return _checked_for_failure(FullResponse(response.status, kept_headers, body))
    except (aiohttp.ClientError, OSError) as error:
        return FailedAttempt("decode_lost", f"{type(error).__name__}: {error}"[:200])
    finally:
        if response is not None and not keep_open:
            response.close()


async def _read_body(response: aiohttp.ClientResponse) -> bytes | None:
    """Returns the body, or None if it is longer than MAX_RESPONSE_BYTES."""
    body = bytearray()
    while piece := await response.content.readany():
        body += piece
        if len(body) > MAX_RESPONSE_BYTES:
            return None
    return bytes(body)


def _checked_for_failure(response: FullResponse) -> FullResponse | FailedAttempt:
    """Returns a failed attempt if another worker could answer the request, else the response itself."""
    if 300 <= response.status < 400:
        return FailedAttempt("decode_lost", f"a worker must not redirect, but it answered {response.status}")
    if response.status != 503 or len(response.body) > MAX_ERROR_BYTES:
        return response
    try:
        error = json.loads(response.body)["error"]
        # On the paths of /v1/messages, errors have Anthropic's format.
        code, message = error["details"]["error_code"] if "details" in error else error["code"], str(error["message"])
    except (ValueError, KeyError, TypeError):
        return response
    if code == HandoffLost.code:
        return FailedAttempt("prefill_lost", message, response)
    if code == EngineStopped.code:
        return FailedAttempt("decode_lost", "its engine has stopped", response)
    if code == NoRoomLeft.code:
        return FailedAttempt("decode_lost", message, response)
    return response
