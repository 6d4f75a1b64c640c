"""Runs the server: engine first, then HTTP; on a signal it drains, and on the engine's death it gives up."""

import asyncio
import logging
import socket
import sys

from hotset.base.config import EngineConfig, ServeConfig
from hotset.base.errors import StartupError
from hotset.base.logs import log_to_stderr
from hotset.engine.client import EngineClient
from hotset.engine.process import EngineProcess
from hotset.serve.app import create_app
from hotset.serve.listening import (
    INTERRUPTED,
    STOP_SIGNALS,
    HttpServer,
    bound_socket,
    http_settings,
    url_of,
)

logger = logging.getLogger("hotset.serve")

LIVENESS_SECONDS = 0.2
# After the engine's death the port stays open this long: in-flight requests get their errors, /health its 503.
LAST_WORDS_SECONDS = 2.0


def run(engine_config: EngineConfig, serve_config: ServeConfig, process: EngineProcess | None = None) -> int:
    """Serves until told to stop. Returns the exit code: 0 after a drain, 1 where start-up failed or the engine died.

    `process`: an engine process of this configuration that is starting already; it ends with this call.
    """
    log_to_stderr()
    try:
        # The port first: one that is taken should not cost the time that a model takes to load.
        with bound_socket(serve_config.host, serve_config.port) as listener:
            client = EngineClient.start(engine_config, process)
            return asyncio.run(_serve(client, engine_config, serve_config, listener))
    except StartupError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if process is not None:
            process.end(0.0)


async def _serve(
    client: EngineClient, engine_config: EngineConfig, config: ServeConfig, listener: socket.socket
) -> int:
    """Owns the client from here on: it is closed on every way out."""
    app = create_app(client, config, aliases=frozenset({engine_config.model, client.model.name}))
    server = HttpServer(http_settings(app, config.drain_seconds), lambda: _announce(client, config, listener))
    stopping = _Stopping(client, server, config.drain_seconds)
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stopping.on_signal)
    watch = asyncio.create_task(stopping.on_engine_death())
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()
        await stopping.finish()
    return 1 if stopping.engine_died else 0


class _Stopping:
    """The ways in which a server ends. All of them stop the HTTP side; the engine drains meanwhile."""

    def __init__(self, client: EngineClient, server: HttpServer, drain_seconds: float) -> None:
        self.engine_died = False
        self._client = client
        self._server = server
        self._drain_seconds = drain_seconds
        self._drain: asyncio.Task[None] | None = None

    def on_signal(self) -> None:
        """The first signal drains; a second one, from someone who will not wait, stops at once."""
        self._server.should_exit = True
        if self._drain is None:
            logger.info("stopping: running requests have %g s to finish", self._drain_seconds)
            self._drain = asyncio.create_task(self._client.close(self._drain_seconds))
        else:
            self._server.force_exit = True

    async def on_engine_death(self) -> None:
        """Watches the engine; returns once it is dead and the HTTP side has been told to stop."""
        while self._client.alive or self._drain is not None:
            await asyncio.sleep(LIVENESS_SECONDS)
        self.engine_died = True
        logger.error("the engine has died; the server stops")
        await asyncio.sleep(LAST_WORDS_SECONDS)
        self._server.should_exit = True

    async def finish(self) -> None:
        """Called when the HTTP side is down: waits for the drain, or closes the engine at once where none is due."""
        if self._drain is not None and not self._server.force_exit:
            await self._drain
            return
        if self._drain is not None:
            self._drain.cancel()
            await asyncio.gather(self._drain, return_exceptions=True)
        await self._client.close(0.0)


def _announce(client: EngineClient, config: ServeConfig, listener: socket.socket) -> None:
    card = client.model
    name = config.served_model_name or card.name
    facts = [card.device, card.dtype, f"context {card.max_model_len}"]
    if client.control is not None:
        facts += [f"{client.role} worker", f"control {client.control}"]
    print(f"Hotset serves {name} at {url_of(listener)} ({', '.join(facts)})", flush=True)
