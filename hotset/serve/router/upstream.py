"""One request to one decode worker: what is sent, and what comes back before anything goes out to the client."""

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import aiohttp
from starlette.requests import Request
from yarl import URL

from hotset.base.errors import EngineStopped, HandoffLost, NoRoomLeft
from hotset.base.units import show_bytes
from hotset.serve.middleware import REQUEST_ID
from hotset.serve.protocol import PREFILL_HEADER, REQUEST_ID_HEADER
from hotset.serve.router.fleet import Worker

RawHeaders = Sequence[tuple[bytes, bytes]]

BYTES_PER_TOKEN = 4  # of a request's body, roughly; the router has no tokenizer
MOST_ANSWER_BYTES = 256 << 20  # of an answer in one piece
# These are between two neighbours on the road, not between client and worker (RFC 9110, 7.6.1).
HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
    *("transfer-encoding", "upgrade"),
}
# What a client may not say in the router's name, or what the router's own HTTP library says.
NOT_SENT_ON = HOP_BY_HOP | {"host", "content-length", "expect", PREFILL_HEADER, REQUEST_ID_HEADER}
NOT_PASSED_BACK = HOP_BY_HOP | {"content-length", "date", "server", REQUEST_ID_HEADER}
# Headers that aiohttp would add by itself.
NOT_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


@dataclass(frozen=True)
class Asked:
    """A client's request, as it will be sent to whichever worker."""

    request_id: str
    method: str
    target: str  # path and query, still encoded
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def tokens(self) -> int:
        return max(1, len(self.body) // BYTES_PER_TOKEN)


@dataclass(frozen=True)
class Whole:
    """An answer in one piece."""

    status: int
    headers: RawHeaders
    body: bytes


@dataclass(frozen=True)
class Streaming:
    """An answer that has begun. Its owner closes `response`, which also aborts what the worker still computes."""

    response: aiohttp.ClientResponse
    headers: RawHeaders
    first: bytes


@dataclass(frozen=True)
class Lost:
    """An attempt of which the client has seen nothing. `answer`: what the worker said, where it said something."""

    reason: Literal["prefill_lost", "decode_lost"]
    trouble: str
    answer: Whole | None = None


async def asked_of(request: Request) -> Asked:
    """What a client sent, body and all."""
    query = request.scope["query_string"].decode("latin-1")
    path = request.scope["raw_path"].decode("latin-1")
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return Asked(
        request_id=given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex,
        method=request.method,
        target=f"{path}?{query}" if query else path,
        headers=tuple((name, value) for name, value in request.headers.items() if name not in NOT_SENT_ON),
        body=await request.body(),
    )


async def attempt(
    session: aiohttp.ClientSession,
    asked: Asked,
    decode: Worker,
    prefill: Worker | None,
    track: Callable[[aiohttp.ClientResponse], None],
) -> Whole | Streaming | Lost:
    """Sends `asked` and returns when there is something for the client, or when it is clear that there will not be.

    `track` sees the response while it is open, so that somebody else may close it.
    """
    headers = [*asked.headers, (REQUEST_ID_HEADER, asked.request_id)]
    if prefill is not None:
        headers.append((PREFILL_HEADER, prefill.control))
    response: aiohttp.ClientResponse | None = None
    kept = False
    try:
        response = await session.request(
            asked.method,
            URL(decode.url + asked.target, encoded=True),
            data=asked.body or None,
            headers=headers,
            skip_auto_headers=NOT_ADDED,
            allow_redirects=False,
        )
        track(response)
        passed = tuple(
            pair for pair in response.raw_headers if pair[0].decode("latin-1").lower() not in NOT_PASSED_BACK
        )
        if response.status == 200 and response.content_type == "text/event-stream":
            first = await response.content.readany()
            if not first:
                return Lost("decode_lost", "the stream ended before it began")
            kept = True
            return Streaming(response, passed, first)
        body = await _read(response)
        if body is None:
            return Lost("decode_lost", f"the answer is longer than {show_bytes(MOST_ANSWER_BYTES)}")
        return _judged(Whole(response.status, passed, body))
    except (aiohttp.ClientError, OSError) as error:
        return Lost("decode_lost", f"{type(error).__name__}: {error}"[:200])
    finally:
        if response is not None and not kept:
            response.close()


async def _read(response: aiohttp.ClientResponse) -> bytes | None:
    """The body; None where it is too long to be held."""
    body = bytearray()
    while piece := await response.content.readany():
        body += piece
        if len(body) > MOST_ANSWER_BYTES:
            return None
    return bytes(body)


def _judged(whole: Whole) -> Whole | Lost:
    """An answer, unless it says that somebody else could give a better one."""
    if whole.status != 503:
        return whole
    try:
        error = json.loads(whole.body)["error"]
        code, said = error["code"], str(error["message"])
    except (ValueError, KeyError, TypeError):
        return whole
    if code == HandoffLost.code:
        return Lost("prefill_lost", said, whole)
    if code == EngineStopped.code:
        return Lost("decode_lost", "its engine has stopped", whole)
    if code == NoRoomLeft.code:
        return Lost("decode_lost", said, whole)
    return whole
