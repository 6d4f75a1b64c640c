"""Runs the server: engine first, then HTTP; on a signal it drains, and on the engine's death it gives up."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import uvicorn
from fastapi import FastAPI

from hotset.base.config import EngineConfig, ServeConfig
from hotset.base.errors import ConfigError, StartupError
from hotset.engine.client import EngineClient
from hotset.engine.process import EngineProcess
from hotset.serve.app import create_app

logger = logging.getLogger("hotset.serve")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # what a shell expects of a command that Ctrl-C ended
LIVENESS_SECONDS = 0.2
# After the engine's death the port stays open this long: in-flight requests get their errors, /health its 503.
LAST_WORDS_SECONDS = 2.0
# Answers that the engine has ended still have to reach their clients.
FLUSH_SECONDS = 5.0
# Longer than clients usually pool a connection: one that closes while a request is on its way fails that request.
KEEP_ALIVE_SECONDS = 75


def run(engine_config: EngineConfig, serve_config: ServeConfig, process: EngineProcess | None = None) -> int:
    """Serves until told to stop. Returns the exit code: 0 after a drain, 1 where start-up failed or the engine died.

    `process`: an engine process of this configuration that is starting already; it ends with this call.
    """
    _log_to_stderr()
    try:
        # The port first: one that is taken should not cost the time that a model takes to load.
        with _bound_socket(serve_config) as listener:
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
    server = _HttpServer(_http_settings(app, config), lambda: _announce(client, config, listener))
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

    def __init__(self, client: EngineClient, server: "_HttpServer", drain_seconds: float) -> None:
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


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process by the signal instead of with exit code 0."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()


def _http_settings(app: FastAPI, config: ServeConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(config.drain_seconds + FLUSH_SECONDS),
    )


def _announce(client: EngineClient, config: ServeConfig, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    card = client.model
    name = config.served_model_name or card.name
    print(f"Hotset serves {name} at {url} ({card.device}, {card.dtype}, context {card.max_model_len})", flush=True)


def _bound_socket(config: ServeConfig) -> socket.socket:
    """A socket that holds the port without listening yet: nobody can connect before the model is there."""
    with ExitStack() as undo:
        try:
            found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except (OSError, UnicodeError) as error:  # the latter for what cannot be a host name
            place, reason = f"{config.host} port {config.port}", getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"cannot listen on {place}: {reason}; choose another --host or --port") from error
        undo.pop_all()
    return listener


def _log_to_stderr() -> None:
    """Our own lines from INFO on, everybody else's from WARNING on."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("hotset").setLevel(logging.INFO)
