"""A stream of JSON lines to everyone who watches a server or a router: the live page, and `hotset top`.

A message is encoded once for all watchers. A watcher that reads too slowly gets the whole state again instead of what
it has missed.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hotset.base.errors import QueueFull
from hotset.serve.http_server import unless_disconnected

MAX_WATCHERS = 64
MAX_BEHIND = 8  # messages that a watcher may be behind
HEARTBEAT_SECONDS = 2.0  # interval between messages if nothing is published

Json = dict[str, Any]


class Feed:
    """Streams messages to watchers, one JSON object per line. `state` returns the first message of a stream."""

    def __init__(self, state: Callable[[], Json], heartbeat: Callable[[], Json]) -> None:
        self._state, self._heartbeat = state, heartbeat
        self._watchers: set[asyncio.Queue[bytes | None]] = set()
        self._closed = asyncio.Event()

    @property
    def watched(self) -> bool:
        return bool(self._watchers)

    def publish(self, message: Json) -> None:
        """Sends a message to all watchers. Never waits for them."""
        line = _line(message)
        for queue in self._watchers:
            if queue.full():
                _empty(queue)
                queue.put_nowait(None)  # it has missed messages
            else:
                queue.put_nowait(line)

    def close(self) -> None:
        """Ends all streams. Otherwise the server would wait for them when it stops."""
        self._closed.set()

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Yields the whole state, and then what is published, until the feed is closed."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_BEHIND)
        self._watchers.add(queue)
        closed = asyncio.create_task(self._closed.wait())
        try:
            yield _line(self._state())
            while not closed.done():
                received = asyncio.create_task(queue.get())
                try:
                    await asyncio.wait(
                        (received, closed), timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED
                    )
                    if received.done():
                        line = received.result()
                        if line is None:
                            _empty(queue)  # the state includes these messages
                            line = _line(self._state())
                        yield line
                    elif not closed.done():
                        yield _line(self._heartbeat())
                finally:
                    received.cancel()
        finally:
            closed.cancel()
            self._watchers.discard(queue)

    def response(self) -> Response:
        """Returns the response that streams to one more watcher. Raises QueueFull if there are too many."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise QueueFull(f"{MAX_WATCHERS} pages are open, which is the limit; close one", retry_after_s=5)
        return _FeedResponse(self.watch())


class _FeedResponse(Response):
    """Streams lines until the client disconnects or the feed is closed."""

    media_type = "application/x-ndjson"

    def __init__(self, lines: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self._lines = lines
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        finally:
            await self._lines.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for line in self._lines:
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _empty(queue: asyncio.Queue[Any]) -> None:
    while not queue.empty():
        queue.get_nowait()


def _line(message: Json) -> bytes:
    return json.dumps({"t": round(time.time(), 3), **message}, separators=(",", ":")).encode() + b"\n"
