"""What every HTTP server of ours needs of the machine: a port, signals, and uvicorn set up as we want it."""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import uvicorn
from starlette.types import ASGIApp

from hotset.base.errors import ConfigError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # what a shell expects of a command that Ctrl-C ended
# Answers that have ended still have to reach their clients.
FLUSH_SECONDS = 5.0
# Longer than clients usually pool a connection: one that closes while a request is on its way fails that request.
KEEP_ALIVE_SECONDS = 75


class HttpServer(uvicorn.Server):
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


def http_settings(app: ASGIApp, drain_seconds: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(drain_seconds + FLUSH_SECONDS),
    )


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that holds the port without listening yet: nobody can connect before there is somebody to answer.

    ConfigError where the port is taken or the host is none of this machine's.
    """
    with ExitStack() as undo:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except (OSError, UnicodeError) as error:  # the latter for what cannot be a host name
            reason = getattr(error, "strerror", None) or str(error)
            message = f"cannot listen on {host} port {port}: {reason}; choose another --host or --port"
            raise ConfigError(message) from error
        undo.pop_all()
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
