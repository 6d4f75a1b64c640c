"""Runs the router: until a signal, after which what is under way may finish."""

import asyncio
import logging
import socket
import sys

import aiohttp

from hotset.base.errors import StartupError
from hotset.base.logs import log_to_stderr
from hotset.serve.listening import (
    INTERRUPTED,
    STOP_SIGNALS,
    HttpServer,
    bound_socket,
    http_settings,
    url_of,
)
from hotset.serve.router.app import create_app
from hotset.serve.router.config import RouterConfig, worker_url
from hotset.serve.router.fleet import Fleet
from hotset.serve.router.metrics import RouterMetrics
from hotset.serve.router.relay import Relay

logger = logging.getLogger("hotset.router")

CONNECT_SECONDS = 3.0
KEEP_ALIVE_SECONDS = 30.0  # less than workers keep a connection: they must not close it while a request is on its way
SPARE_CONNECTIONS = 64  # beside those of generating requests
HEADER_BYTES = 1 << 16


def run(config: RouterConfig) -> int:
    """Routes until told to stop. Returns the exit code: 0 after a drain, 1 where start-up failed."""
    log_to_stderr()
    try:
        with bound_socket(config.host, config.port) as listener:
            return asyncio.run(_serve(config, listener))
    except StartupError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


async def _serve(config: RouterConfig, listener: socket.socket) -> int:
    # Two sessions: looks at workers must not wait for a connection that a request holds.
    async with _session(config.max_concurrency + SPARE_CONNECTIONS) as session, _session(0) as looks:
        fleet = Fleet(looks, config.poll_seconds)
        for url in config.prefill:
            fleet.add(worker_url(url), "prefill")
        for url in config.decode:
            fleet.add(worker_url(url), "decode")
        metrics = RouterMetrics(fleet)
        relay = Relay(fleet, session, config, metrics)
        app = create_app(fleet, relay, config, metrics)
        server = HttpServer(http_settings(app, config.drain_seconds), lambda: _announce(config, listener))
        stopping = _Stopping(server, relay, config.drain_seconds)
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, stopping.on_signal)
        try:
            await server.serve(sockets=[listener])
        finally:
            stopping.close()
            await fleet.close()
    return 0


def _session(limit: int) -> aiohttp.ClientSession:
    """Passes bytes on as they are, keeps no cookies, and sets no time limit of its own but for connecting."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=limit, keepalive_timeout=KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        max_line_size=HEADER_BYTES,
        max_field_size=HEADER_BYTES,
    )


class _Stopping:
    """The first signal drains; a second one, or the end of the drain, cuts what is still under way."""

    def __init__(self, server: HttpServer, relay: Relay, drain_seconds: float) -> None:
        self._server = server
        self._relay = relay
        self._drain_seconds = drain_seconds
        self._drain: asyncio.TimerHandle | None = None

    def on_signal(self) -> None:
        self._server.should_exit = True
        if self._drain is None:
            logger.info("stopping: running requests have %g s to finish", self._drain_seconds)
            self._drain = asyncio.get_running_loop().call_later(self._drain_seconds, self._relay.cut)
        else:
            self._relay.cut()

    def close(self) -> None:
        if self._drain is not None:
            self._drain.cancel()


def _announce(config: RouterConfig, listener: socket.socket) -> None:
    workers = f"{len(config.prefill)} prefill and {len(config.decode)} decode workers"
    print(f"Hotset routes to {workers} at {url_of(listener)}", flush=True)
