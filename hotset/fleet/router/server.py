"""Runs the router until a signal, then lets requests in flight finish."""

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import aiohttp

from hotset.base.listeners import url_of
from hotset.base.logs import log_to_stderr
from hotset.fleet.router.app import create_app
from hotset.fleet.router.config import RouterConfig, worker_url
from hotset.fleet.router.fleet import Fleet
from hotset.fleet.router.metrics import RouterMetrics
from hotset.fleet.router.relay import Relay
from hotset.fleet.router.workers_file import apply_workers, follow_workers_file, read_workers
from hotset.serve.connections import SPARE_CONNECTIONS, fit_to_descriptors
from hotset.serve.http_server import STOP_SIGNALS, HttpServer, warn_if_open_to_all

logger = logging.getLogger("hotset.router")

CONNECT_SECONDS = 3.0  # time limit for a connection to a worker
# Less than KEEP_ALIVE_SECONDS of the workers: a worker must not close a connection that the router is about to use.
KEEP_ALIVE_SECONDS = 30.0
MAX_HEADER_BYTES = 1 << 16


def run(config: RouterConfig, listener: socket.socket) -> None:
    """Runs the router until SIGTERM or SIGINT, and returns after the drain, complete or not.

    `listener` is a socket that is bound to the configured address; this call closes it. Raises StartupError if start-up
    fails.
    """
    log_to_stderr()
    warn_if_open_to_all(config.host, config.api_key)
    with listener:
        asyncio.run(_serve(fit_to_descriptors(config, to_workers=True), listener))


async def _serve(config: RouterConfig, listener: socket.socket) -> None:
    # Health checks have a separate session, because they must not wait until a request frees a connection.
    async with _session(config.max_concurrency + SPARE_CONNECTIONS) as session, _session(0) as health_check_session:
        fleet = Fleet(health_check_session, config.poll_seconds, config.health_timeout_seconds, config.allow_workers)
        for url in config.prefill:
            fleet.add(worker_url(url), "prefill")
        for url in config.decode:
            fleet.add(worker_url(url), "decode")
        following: asyncio.Task[None] | None = None
        if config.workers_file is not None:
            path = Path(config.workers_file)
            apply_workers(fleet, read_workers(path))
            following = asyncio.create_task(follow_workers_file(path, fleet, config.poll_seconds))
        metrics = RouterMetrics(fleet)
        relay = Relay(fleet, session, config, metrics)
        app = create_app(fleet, relay, config, metrics)
        server = HttpServer(app, config, lambda: _announce(fleet, listener))
        shutdown = _Shutdown(server, relay, config.drain_seconds, app.state.close_streams)
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, shutdown.on_signal)
        try:
            await server.serve(sockets=[listener])
        finally:
            shutdown.close()
            if following is not None:
                following.cancel()
            await fleet.close()


def _session(limit: int) -> aiohttp.ClientSession:
    """Creates a session that relays bytes unchanged and keeps no cookies. Only connecting has a timeout.

    The session opens at most `limit` connections at a time; 0 means no limit.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=limit, keepalive_timeout=KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
    )


class _Shutdown:
    """The first signal starts a drain. A second one, or the end of the drain time, aborts open requests."""

    def __init__(
        self, server: HttpServer, relay: Relay, drain_seconds: float, close_streams: Callable[[], None]
    ) -> None:
        self._server = server
        self._close_streams = close_streams
        self._relay = relay
        self._drain_seconds = drain_seconds
        self._drain: asyncio.TimerHandle | None = None

    def on_signal(self) -> None:
        self._server.should_exit = True
        self._close_streams()
        if self._drain is None:
            logger.info("shutting down: requests in flight have %g s to finish", self._drain_seconds)
            self._drain = asyncio.get_running_loop().call_later(self._drain_seconds, self._relay.abort_all)
        else:
            self._relay.abort_all()

    def close(self) -> None:
        if self._drain is not None:
            self._drain.cancel()


def _announce(fleet: Fleet, listener: socket.socket) -> None:
    roles = [worker.role for worker in fleet.workers]
    workers = f"{roles.count('prefill')} prefill and {roles.count('decode')} decode workers"
    print(f"Hotset listens at {url_of(listener)} and routes to {workers}", flush=True)
