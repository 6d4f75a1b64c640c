"""A stream of JSON lines to everyone who watches a server or a router: the live page, and `hotset top`.

A message is encoded once for all watchers. A watcher that reads too slowly gets the whole state again instead of what
it has missed. A watcher that never reads is not noticed for hours, because the kernel's buffers hold thousands of these
small messages. Therefore a new watcher replaces the oldest one when all places are taken; pages connect again.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from hotset.base.errors import QueueFull
from hotset.serve.streams import PiecewiseResponse

MAX_WATCHERS = 64
MAX_BEHIND = 8  # messages that a watcher may be behind
MIN_WATCH_SECONDS = 60.0  # time for which a watcher is not replaced by a new one
HEARTBEAT_SECONDS = 2.0  # interval between messages if nothing is published

Json = dict[str, Any]


@dataclass(eq=False, slots=True)
class _Watcher:
    """An open stream. Its messages are lines, or None if it has missed some."""

    messages: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(MAX_BEHIND))
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    since: float = field(default_factory=time.monotonic)


class Feed:
    """Streams messages to watchers, one JSON object per line. `state` returns the first message of a stream."""

    def __init__(self, state: Callable[[], Json], heartbeat: Callable[[], Json]) -> None:
        self._state, self._heartbeat = state, heartbeat
        self._watchers: dict[_Watcher, None] = {}  # in the order in which they came
        self._is_closed = False

    @property
    def watched(self) -> bool:
        return bool(self._watchers)

    def publish(self, message: Json) -> None:
        """Sends a message to all watchers. Never waits for them."""
        line = _line(message)
        for watcher in self._watchers:
            if watcher.messages.full():
                _empty(watcher.messages)
                watcher.messages.put_nowait(None)
            else:
                watcher.messages.put_nowait(line)

    def close(self) -> None:
        """Ends all streams. Otherwise the server would wait for them when it stops."""
        self._is_closed = True
        for watcher in self._watchers:
            watcher.ended.set()

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Yields the whole state, and then what is published, until the feed is closed or another watcher takes the
        place of this one."""
        watcher = _Watcher()
        self._watchers[watcher] = None
        ended = asyncio.create_task(watcher.ended.wait())
        try:
            yield _line(self._state())
            while not (self._is_closed or watcher.ended.is_set()):
                received = asyncio.create_task(watcher.messages.get())
                try:
                    await asyncio.wait(
                        (received, ended), timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED
                    )
                    if received.done():
                        line = received.result()
                        if line is None:
                            _empty(watcher.messages)  # the state includes these messages
                            line = _line(self._state())
                        yield line
                    elif not ended.done():
                        yield _line(self._heartbeat())
                finally:
                    received.cancel()
        finally:
            ended.cancel()
            self._watchers.pop(watcher, None)

    def response(self) -> Response:
        """Returns the response that streams to one more watcher. If all places are taken, it replaces the watcher that
        came first. Raises QueueFull if that one came less than MIN_WATCH_SECONDS ago."""
        if len(self._watchers) >= MAX_WATCHERS:
            oldest = next(iter(self._watchers))
            if time.monotonic() - oldest.since < MIN_WATCH_SECONDS:
                raise QueueFull(
                    f"{MAX_WATCHERS} pages are open, all for less than {MIN_WATCH_SECONDS:g} s; close one, or wait",
                    retry_after_s=5,
                )
            oldest.ended.set()
            del self._watchers[oldest]
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return PiecewiseResponse(self.watch(), media_type="application/x-ndjson", headers=headers)


def _empty(queue: asyncio.Queue[Any]) -> None:
    while not queue.empty():
        queue.get_nowait()


def _line(message: Json) -> bytes:
    return json.dumps({"t": round(time.time(), 3), **message}, separators=(",", ":")).encode() + b"\n"
