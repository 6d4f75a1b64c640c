"""Responses that are sent in pieces: streams of events, and long JSON bodies that are never in memory as a whole."""

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hotset.serve.http_server import unless_disconnected

T = TypeVar("T")
PIECE_BYTES = 1 << 16  # of a long JSON body

# These characters are valid in JSON and do not end a line of an event stream, but many clients split lines at them.
LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}


def json_response(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


class PiecewiseResponse(Response):
    """A body that is sent in pieces, each when the client has room for it. Owns `pieces` and the generators `sources`
    from which they are made, and closes all of them on every exit path."""

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        *sources: AsyncGenerator[Any, None],
        media_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self._pieces = pieces
        self._sources = sources
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The sending task cannot close the generators: it may be cancelled before it has started to run.
        async with AsyncExitStack() as stack:
            for generator in (*self._sources, self._pieces):
                await stack.enter_async_context(aclosing(generator))
            await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event_stream(events: AsyncGenerator[bytes, None], *sources: AsyncGenerator[Any, None]) -> Response:
    """Returns a stream of server-sent events."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return PiecewiseResponse(events, *sources, media_type="text/event-stream", headers=headers)


def event_of(body: BaseModel, name: str | None = None) -> bytes:
    """Returns one event of a stream. Some APIs name their events."""
    line = b"" if name is None else f"event: {name}\n".encode()
    return line + b"data: " + _without_line_ends(body.model_dump_json().encode()) + b"\n\n"


def event_pieces(body: BaseModel) -> Iterator[bytes]:
    """Yields the bytes of `event_of(body)` in pieces."""
    yield b"data: "
    for piece in json_pieces(body):
        yield _without_line_ends(piece)
    yield b"\n\n"


def _without_line_ends(json: bytes) -> bytes:
    for end, escaped in LINE_ENDS.items():
        json = json.replace(end, escaped)
    return json


async def chained(first: T, others: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    yield first
    async for other in others:
        yield other


def json_pieces(body: BaseModel) -> Iterator[bytes]:
    """Yields the bytes of `body.model_dump_json()` in pieces. Each has at least PIECE_BYTES, but the last may have
    fewer. Iterators in the body are read while their items are written."""
    piece = bytearray()
    for part in _parts(body):
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


def _parts(value: object) -> Iterator[bytes]:
    if isinstance(value, BaseModel):
        separator = b"{"
        for name, field in type(value).model_fields.items():
            item = getattr(value, name)
            if field.exclude_if is None or not field.exclude_if(item):
                yield separator + to_json(name) + b":"
                yield from _parts(item)
                separator = b","
        yield b"}"
    elif isinstance(value, Iterator):
        separator = b"["
        for item in value:
            yield separator
            yield from _parts(item)
            separator = b","
        yield b"]" if separator == b"," else b"[]"
    else:
        yield to_json(value, inf_nan_mode="null")
