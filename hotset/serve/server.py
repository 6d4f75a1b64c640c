"""Runs the server: starts the engine, then HTTP. Drains on a signal, and exits with an error if the engine dies or
hangs."""

import asyncio
import logging
import socket

from hotset.base.config import EngineConfig
from hotset.base.errors import EngineStopped
from hotset.base.listeners import url_of
from hotset.base.logs import log_to_stderr
from hotset.base.serve_config import ServeConfig
from hotset.base.status_line import StatusLine
from hotset.engine.client import EngineClient
from hotset.engine.process import EngineProcess
from hotset.serve.app import create_app
from hotset.serve.connections import fit_to_descriptors
from hotset.serve.http_server import STOP_SIGNALS, HttpServer, warn_if_open_to_all
from hotset.serve.service import fingerprint

logger = logging.getLogger("hotset.serve")

LIVENESS_POLL_SECONDS = 0.2
# After the engine's death the port stays open this long: requests in flight get an error, /health returns 503.
ERROR_REPORT_SECONDS = 2.0


def run(
    engine_config: EngineConfig, serve_config: ServeConfig, process: EngineProcess, listener: socket.socket
) -> None:
    """Serves until SIGTERM or SIGINT, and returns after the drain, complete or not.

    `process` is an engine process with this configuration that is already starting, and `listener` a socket that is
    bound to the configured address. This call ends the process and closes the socket. Raises StartupError if start-up
    fails, and EngineStopped if the engine dies or hangs.
    """
    log_to_stderr()
    warn_if_open_to_all(serve_config.host, serve_config.api_key)
    try:
        with listener:
            fitted_config = fit_to_descriptors(serve_config)
            with StatusLine("Starting the engine") as status:
                client = EngineClient.start(engine_config, process, status.show)
            asyncio.run(_serve(client, engine_config, fitted_config, listener))
    finally:
        process.end(0.0)


async def _serve(
    client: EngineClient, engine_config: EngineConfig, config: ServeConfig, listener: socket.socket
) -> None:
    """Serves with `client`, which it owns and closes on every exit path."""
    client.listen()
    aliases = frozenset({engine_config.model, client.model.name})
    app = create_app(
        client,
        config,
        aliases=aliases,
        handoff_secret=engine_config.handoff_secret,
        fingerprint=fingerprint(engine_config, client.model),
    )
    server = HttpServer(app, config, lambda: _announce(client, config, listener))
    shutdown = _Shutdown(client, server, config.drain_seconds)
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, shutdown.on_signal)
    watch = asyncio.create_task(shutdown.on_engine_death())
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()
        await shutdown.finish()
        if app.state.traces is not None:
            await app.state.traces.close()
    if shutdown.failure is not None:
        raise EngineStopped(shutdown.failure)


class _Shutdown:
    """Ends the server after a signal or the engine's death. The HTTP server stops while the engine drains."""

    def __init__(self, client: EngineClient, server: HttpServer, drain_seconds: float) -> None:
        self.failure: str | None = None  # why the engine died
        self._client = client
        self._server = server
        self._drain_seconds = drain_seconds
        self._drain: asyncio.Task[None] | None = None

    def on_signal(self) -> None:
        """Starts a drain at the first signal, and stops at once at the second."""
        self._server.should_exit = True
        if self._drain is None:
            logger.info("shutting down: requests in flight have %g s to finish", self._drain_seconds)
            self._drain = asyncio.create_task(self._client.close(self._drain_seconds))
        else:
            self._server.force_exit = True

    async def on_engine_death(self) -> None:
        """Waits until the engine dies or hangs, then stops the HTTP server. During a drain, the engine's end is
        expected."""
        while (failure := self._client.failure) is None or self._drain is not None:
            await asyncio.sleep(LIVENESS_POLL_SECONDS)
        self.failure = failure
        logger.error("%s; the server is shutting down", failure)
        await asyncio.sleep(ERROR_REPORT_SECONDS)
        self._server.should_exit = True

    async def finish(self) -> None:
        """Waits for the drain. If no drain was started, or after a second signal, closes the engine at once.

        Called after the HTTP server has stopped.
        """
        if self._drain is not None and not self._server.force_exit:
            await self._drain
            return
        if self._drain is not None:
            self._drain.cancel()
            await asyncio.gather(self._drain, return_exceptions=True)
        await self._client.close(0.0)


def _announce(client: EngineClient, config: ServeConfig, listener: socket.socket) -> None:
    model = client.model
    name = config.served_model_name or model.name
    details = [model.device, model.dtype, f"context {model.max_model_len}"]
    if model.page_hasher is not None:
        details.append("prefix cache")
    if client.control is not None:
        details += [f"{client.role} worker", f"control {client.control}"]
    print(f"Hotset serves {name} at {url_of(listener)} ({', '.join(details)})", flush=True)
