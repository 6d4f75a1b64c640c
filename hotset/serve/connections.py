"""The connections of an HTTP server: how many may be open, and how long a client may take to send or to read.

The server *waits* for a client that has not yet sent a complete request. If the limit of connections is reached, the
connection of the client that has been waited for longest is closed when another client connects. A connection whose
request is being answered is never closed for this reason. If all are being answered, new clients wait in the kernel's
queue until one is free.
"""

import asyncio
import fcntl
import logging
import socket
import sys
import termios
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from hotset.base.descriptors import descriptor_limit, free_descriptors, raise_descriptor_limit
from hotset.base.errors import ConfigError, RequestTimeout
from hotset.base.serve_config import MIN_CONNECTIONS, HttpSettings
from hotset.serve.access_log import ErrorLines
from hotset.serve.errors import error_body

logger = logging.getLogger("hotset.serve")
# For uvicorn's messages about connections. It warns of every request that is not HTTP; `ErrorLines` limits these lines.
uvicorn_logger = logging.getLogger("hotset.serve.uvicorn")
uvicorn_logger.setLevel(logging.ERROR)

BACKLOG = 2048  # connections that the kernel queues
ACCEPTS_PER_TURN = 64  # so that a flood of connections does not keep the event loop from other work
RETRY_SECONDS = 0.5  # pause after a failed `accept`, for example because the machine has no more file descriptors
CHECK_SECONDS = 1.0  # interval between two checks of the time limits
LOG_SECONDS = 60.0  # warnings about connections are logged at most this often
RESERVED_DESCRIPTORS = 128  # kept free for everything other than connections of clients
SPARE_CONNECTIONS = 64  # kept free for requests other than completions

Config = TypeVar("Config", bound=HttpSettings)


def fit_to_descriptors(config: Config, *, to_workers: bool = False) -> Config:
    """Raises the limit of open files, and lowers the limits of connections and requests to what it allows.

    Fewer completion requests than connections are allowed, so that `/health` is answered while all of them run. With
    `to_workers`, each request needs a second connection. Raises ConfigError if hardly any connection would be left.
    """
    raise_descriptor_limit()
    available = free_descriptors() - RESERVED_DESCRIPTORS
    if to_workers:
        available -= SPARE_CONNECTIONS
        connections = min(config.max_connections, max(available * 2 // 3, available - config.max_concurrency))
        requests = min(config.max_concurrency, available - connections)
    else:
        connections, requests = min(config.max_connections, available), config.max_concurrency
    requests = min(requests, connections - min(SPARE_CONNECTIONS, connections // 4))
    if connections < MIN_CONNECTIONS or requests < 1:
        raise ConfigError(
            f"the limit of {descriptor_limit()} open files leaves too few for {MIN_CONNECTIONS} connections; raise it "
            "with ulimit -n"
        )
    if (connections, requests) != (config.max_connections, config.max_concurrency):
        logger.warning(
            "serving at most %d connections (--max-connections %d) and %d completion requests at a time "
            "(--max-concurrency %d); the limit of open files is %d (ulimit -n)",
            connections,
            config.max_connections,
            requests,
            config.max_concurrency,
            descriptor_limit(),
        )
    return replace(config, max_connections=connections, max_concurrency=requests)


class Connections:
    """Accepts connections on one socket, and closes those that exceed the limits.

    asyncio's own server cannot be used. It accepts without a limit, and if no file descriptor is left, it tries again
    without end and logs a traceback for each attempt.
    """

    def __init__(self, config: HttpSettings) -> None:
        self.config = config
        limits = config.receive_timeout_seconds, config.send_timeout_seconds
        self._check_seconds = min(CHECK_SECONDS, *(seconds / 4 for seconds in limits))
        self.errors = ErrorLines()  # of requests that do not reach the application
        self.waiting: dict[LimitedProtocol, None] = {}  # the connections that the server waits for, longest first
        self._open: set[LimitedProtocol] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listener: socket.socket | None = None
        self._paused = True
        self._next_warning = 0.0

    def start(self, listener: socket.socket, new_protocol: "Callable[[], LimitedProtocol]") -> None:
        """Listens and accepts connections until `close`. The caller keeps ownership of `listener`."""
        self._loop = asyncio.get_running_loop()
        self._new_protocol = new_protocol
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._listener = listener
        self._check_timer = self._loop.call_later(self._check_seconds, self._check)
        self.resume()

    def close(self) -> None:
        """Accepts no more connections. Open ones continue, within their time limits."""
        self._pause()
        self._listener = None

    def stop(self) -> None:
        """Stops checking time limits. Called when the server has ended all connections."""
        self._check_timer.cancel()

    def resume(self) -> None:
        """Accepts connections again after a pause. Called whenever there may be room for one."""
        if self._paused and self._listener is not None:
            self._paused = False
            self._loop.add_reader(self._listener, self._accept)

    def on_lost(self, protocol: "LimitedProtocol") -> None:
        self._open.discard(protocol)
        self.waiting.pop(protocol, None)
        self.resume()

    def _pause(self) -> None:
        if not self._paused and self._listener is not None:
            self._paused = True
            self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(ACCEPTS_PER_TURN):
            is_full = len(self._open) >= self.config.max_connections
            if is_full and not self.waiting:
                self._pause()  # until a connection ends, or the server waits for its client again
                return
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._warn("cannot accept connections: %s; trying again every %g s", error.strerror, RETRY_SECONDS)
                self._pause()
                self._loop.call_later(RETRY_SECONDS, self.resume)
                return
            if is_full:
                self._warn("the limit of %d connections is reached (--max-connections)", self.config.max_connections)
                self._close_longest_waiting()
            self._serve(client)

    def _close_longest_waiting(self) -> None:
        # The socket is closed in the next turn of the event loop. RESERVED_DESCRIPTORS suffice for one turn.
        longest = next(iter(self.waiting))
        del self.waiting[longest]
        self._open.discard(longest)
        longest.transport.abort()

    def _serve(self, client: socket.socket) -> None:
        protocol = self._new_protocol()
        self._open.add(protocol)

        def on_connected(task: "asyncio.Task[Any]") -> None:
            self._tasks.discard(task)
            if task.cancelled() or task.exception() is not None:
                client.close()
                self.on_lost(protocol)

        task = self._loop.create_task(self._loop.connect_accepted_socket(lambda: protocol, client))
        self._tasks.add(task)
        task.add_done_callback(on_connected)

    def _check(self) -> None:
        for protocol in [*self._open]:
            if protocol.connected:
                protocol.check()
        self._check_timer = self._loop.call_later(self._check_seconds, self._check)

    def _warn(self, text: str, *values: object) -> None:
        if self._loop.time() >= self._next_warning:
            self._next_warning = self._loop.time() + LOG_SECONDS
            logger.warning(text, *values)


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, with time limits for what the client has yet to send and to read.

    uvicorn itself closes connections that are idle between two requests. The middleware `BodyLimit` limits the time of
    a body, because it can answer with an error that names the limit.
    """

    def __init__(
        self, connections: Connections, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any]
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.connected = False
        self.logger = uvicorn_logger
        self._connections = connections
        self._limits = connections.config
        self._receiving_since: float | None = None  # None: idle between two requests, or a request is being answered
        self._received_anything = False
        self._unsent_bytes = 0  # at the last check
        self._send_progress_at = 0.0  # when the number of unsent bytes last changed

    @property
    def _answering(self) -> bool:
        """Whether a request has been received completely and its response is not complete."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.connected = True
        self._receiving_since = self.loop.time()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connections.on_lost(self)

    def data_received(self, data: bytes) -> None:
        self._received_anything = True
        if self._receiving_since is None:
            self._receiving_since = self.loop.time()
        super().data_received(data)
        if self._answering:
            self._receiving_since = None
            self._connections.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._answering:  # else the client had already sent its next request
            self._receiving_since = None
            if not self.transport.is_closing() and not self.transport.get_write_buffer_size():
                self._wait()

    def check(self) -> None:
        """Closes the connection if a time limit has passed."""
        now, unsent_bytes = self.loop.time(), self._count_unsent()
        if unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._send_progress_at = unsent_bytes, now
        stalled_seconds = now - self._send_progress_at if unsent_bytes else 0.0
        between_requests = self.cycle is None or self.cycle.response_complete
        if stalled_seconds > self._limits.send_timeout_seconds:
            self.transport.abort()
        elif not between_requests:
            pass
        elif self._receiving_since is not None and now - self._receiving_since > self._limits.receive_timeout_seconds:
            self._receive_timed_out()
        elif not unsent_bytes or stalled_seconds:
            self._wait()

    def _count_unsent(self) -> int:
        """Returns the number of bytes that the client has not received, or 0 if the kernel has taken all of them.

        The kernel's part counts too: a slow reader may receive megabytes of it before the kernel takes more from us.
        """
        buffered_bytes = self.transport.get_write_buffer_size()
        if not buffered_bytes:
            return 0
        in_kernel = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return buffered_bytes + int.from_bytes(in_kernel, sys.byteorder)

    def _wait(self) -> None:
        """Notes that the server waits for the client. A connection that waits already keeps its place."""
        self._connections.waiting.setdefault(self)
        self._connections.resume()

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not an HTTP request."""
        self._connections.errors.write(400, f"400: {msg}")
        super().send_400_response(msg)

    def _receive_timed_out(self) -> None:
        """Answers 408 if a part of the request's headers has arrived. Otherwise there is nothing to answer."""
        if self.conn.our_state is h11.IDLE and self._received_anything:
            error = RequestTimeout(f"the headers did not arrive within {self._limits.receive_timeout_seconds:g} s")
            self._connections.errors.write(408, f"408: {error}")
            body = error_body(error).model_dump_json().encode()
            head = "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
            self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
