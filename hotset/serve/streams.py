"""Responses that are sent in pieces, and the events of streams."""

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hotset.serve.http_server import unless_disconnected
from hotset.serve.json_pieces import json_pieces

T = TypeVar("T")

# These characters are valid in JSON and do not end a line of an event stream, but many clients split lines at them.
LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}


def json_response(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


class PiecewiseResponse(Response):
    """A body that is sent in pieces, each when the client has room for it. Owns `pieces` and the generators `sources`
    from which they are made, and closes all of them on every exit path."""

    media_type = "application/json"
    own_headers: Mapping[str, str] = {}

    def __init__(self, pieces: AsyncGenerator[bytes, None], *sources: AsyncGenerator[Any, None]) -> None:
        self.status_code = 200
        self.background = None
        self._pieces = pieces
        self._sources = sources
        self.init_headers(self.own_headers)

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


class EventStream(PiecewiseResponse):
    """A stream of server-sent events."""

    media_type = "text/event-stream"
    own_headers: Mapping[str, str] = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


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
