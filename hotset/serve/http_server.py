"""Code that server and router share: the HTTP server, its settings, and work that a disconnect cancels."""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvicorn
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive

from hotset.base.address import is_loopback
from hotset.base.errors import InternalError
from hotset.base.listeners import check_listeners, listening_address
from hotset.base.serve_config import HttpSettings
from hotset.serve.connections import Connections, LimitedProtocol

logger = logging.getLogger("hotset.serve")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Time for complete responses to reach their clients after the drain.
FLUSH_SECONDS = 5.0
# Longer than clients usually keep an idle connection open. If the server closed the connection just as the client sends
# a request, that request would fail.
KEEP_ALIVE_SECONDS = 75
# Time for cancelled work to end. It takes milliseconds; a request does not wait longer for work that hangs.
CLEANUP_SECONDS = 10.0

T = TypeVar("T")


class HttpServer(uvicorn.Server):
    """uvicorn with limits on its connections.

    uvicorn's signal handling is disabled: it would end the process by the signal instead of with exit code 0.
    """

    def __init__(self, app: ASGIApp, config: HttpSettings, on_ready: Callable[[], None]) -> None:
        super().__init__(_uvicorn_config(app, config.drain_seconds))
        self._connections = Connections(config)
        self._on_ready = on_ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts connections on the one given socket. uvicorn would use asyncio's server, which has no limits."""
        if sockets is None or len(sockets) != 1:
            raise InternalError("server and router listen on one socket")
        self.servers = []
        self._connections.start(sockets[0], self._new_protocol)
        self.started = True
        check_listeners("the HTTP server", addresses=[listening_address(sockets[0])])
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._connections.close()
        try:
            await super().shutdown(sockets)
        finally:
            self._connections.stop()

    def _new_protocol(self) -> LimitedProtocol:
        return LimitedProtocol(self._connections, self.config, self.server_state, self.lifespan.state)


def _uvicorn_config(app: ASGIApp, drain_seconds: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(drain_seconds + FLUSH_SECONDS),
    )


def warn_if_open_to_all(host: str, api_key: str | None) -> None:
    """Logs a warning if other machines can send requests without a key."""
    if api_key is None and not is_loopback(host):
        logger.warning(
            "other machines can reach --host %s, and no API key is required: anyone who can connect can use the model; "
            "set a key with --api-key-file or the environment variable HOTSET_API_KEY",
            host,
        )


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. If the client disconnects first, cancels `work` and raises ClientDisconnect.

    When this function returns or raises, `work` and its cleanup have ended, even if the caller was cancelled again
    during the cleanup. It waits for the cleanup for at most CLEANUP_SECONDS.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnection(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await _wait_until_ended(working, watching)


async def _wait_until_ended(*tasks: asyncio.Task[Any]) -> None:
    """Waits until the tasks have ended. If this task is cancelled meanwhile, raises CancelledError afterwards."""
    cancelled: asyncio.CancelledError | None = None
    deadline = time.monotonic() + CLEANUP_SECONDS
    while not all(task.done() for task in tasks) and (left := deadline - time.monotonic()) > 0:
        try:
            await asyncio.wait(tasks, timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.done():
            logger.error("the work for a request has not ended %g s after it was cancelled", CLEANUP_SECONDS)
        elif not task.cancelled():
            task.exception()  # otherwise asyncio would log the error as never retrieved
    if cancelled is not None:
        raise cancelled


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
