"""An HTTP server limits its connections and the time that a client takes to send or to read. It does not cut answers
that the engine takes long to compute."""

import asyncio
import errno
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import pytest
from starlette.types import Receive, Scope, Send
from waiting import WAIT_SECONDS, wait_until

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.base.listeners import bound_socket
from hotset.base.serve_config import ServeConfig
from hotset.engine.process import EngineProcess
from hotset.fleet.router.config import RouterConfig
from hotset.fleet.router.server import run as run_router
from hotset.serve import connections
from hotset.serve.access_log import AccessLog, HttpMetrics
from hotset.serve.connections import LimitedProtocol, fit_to_descriptors
from hotset.serve.http_server import HttpServer
from hotset.serve.middleware import BodyLimit
from hotset.serve.server import run as run_server

LIMIT_SECONDS = 0.3
CHUNK = bytes(1 << 16)


@pytest.fixture(autouse=True)
def other_listeners_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """These servers run in the process of the tests, in which other tests may have left ports open."""
    monkeypatch.setattr("hotset.serve.http_server.check_listeners", lambda *_, **__: None)


@dataclass
class App:
    """Answers `/slow` when `release` is set, and `/late` in two parts, the second one when `release` is set. Streams
    `/stream` without end, and answers every other path at once."""

    release: asyncio.Event = field(default_factory=asyncio.Event)
    slow_requests: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    chunks_sent: int = 0
    ended: threading.Event = field(default_factory=threading.Event)  # a stream has ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            self.slow_requests.release()
            await self.release.wait()
        streams = scope["path"] == "/stream"
        headers = [] if streams else [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/late":
            await send({"type": "http.response.body", "body": b"o", "more_body": True})
            await self.release.wait()
            await send({"type": "http.response.body", "body": b"k"})
            return
        if not streams:
            await send({"type": "http.response.body", "body": b"ok"})
            return
        assert (await receive())["type"] == "http.request"
        gone = asyncio.create_task(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
            await asyncio.sleep(0)
            self.chunks_sent += 1
        self.ended.set()


@dataclass
class Server:
    app: App
    port: int
    http: HttpServer
    loop: asyncio.AbstractEventLoop

    def unsent(self) -> tuple[int, int]:
        """Returns how many bytes of the only connection are unsent: in the server, and in server and kernel."""
        protocol = next(iter(self.http.server_state.connections), None)
        if not isinstance(protocol, LimitedProtocol):
            return 0, 0
        return protocol.transport.get_write_buffer_size(), protocol._count_unsent()

    def connect_slow_reader(self) -> socket.socket:
        """Requests a stream with a small receive buffer."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(WAIT_SECONDS)
        client.connect(("127.0.0.1", self.port))
        client.sendall(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
        return client

    def connect(self, first_bytes: bytes = b"") -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_SECONDS)
        client.sendall(first_bytes)
        return client

    def release(self) -> None:
        self.loop.call_soon_threadsafe(self.app.release.set)


@contextmanager
def running(
    *,
    max_connections: int = 64,
    receive_seconds: float = LIMIT_SECONDS,
    send_seconds: float = WAIT_SECONDS,
    listener_type: type[socket.socket] | None = None,
) -> Iterator[Server]:
    """Runs a server with short limits in a thread."""
    app, listener = App(), bound_socket("127.0.0.1", 0)
    if listener_type is not None:
        listener = listener_type(fileno=listener.detach())
    ready, server_of = threading.Event(), {}

    async def serve() -> None:
        layers = AccessLog(BodyLimit(app, max_body_mib=1, receive_timeout_seconds=receive_seconds), HttpMetrics("test"))
        config = ServeConfig(
            max_connections=max_connections,
            receive_timeout_seconds=receive_seconds,
            send_timeout_seconds=send_seconds,
            drain_seconds=0.01,
        )
        server_of["server"] = HttpServer(layers, config, ready.set)
        server_of["loop"] = asyncio.get_running_loop()
        await server_of["server"].serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    with listener:
        thread.start()
        try:
            assert ready.wait(WAIT_SECONDS)
            yield Server(app, listener.getsockname()[1], server_of["server"], server_of["loop"])
        finally:
            server_of["loop"].call_soon_threadsafe(app.release.set)
            server_of["server"].should_exit = server_of["server"].force_exit = True
            thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def read_all(client: socket.socket) -> bytes:
    """Reads until the server closes the connection."""
    received = b""
    try:
        while piece := client.recv(1 << 16):
            received += piece
    except ConnectionResetError:
        pass
    return received


def get(client: socket.socket, path: str = "/") -> bytes:
    """Sends a request and reads its response."""
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    received = b""
    while not received.endswith(b"ok"):
        piece = client.recv(1 << 16)
        assert piece, f"the connection ended after {received!r}"
        received += piece
    return received


def send_slowly(client: socket.socket, piece: bytes) -> bytes:
    """Sends a piece again and again until the server answers or closes the connection. Returns what it answered."""
    client.settimeout(LIMIT_SECONDS / 20)
    deadline = time.monotonic() + WAIT_SECONDS
    received = b""
    while time.monotonic() < deadline:
        with suppress(BrokenPipeError, ConnectionResetError):  # the server has closed the connection after its answer
            client.sendall(piece)
        with suppress(TimeoutError):
            received = client.recv(1 << 16)
            break
    else:
        pytest.fail(f"the server still reads after {WAIT_SECONDS:g} s")
    client.settimeout(WAIT_SECONDS)
    return received + read_all(client)


@pytest.mark.parametrize("earlier_requests", [0, 1])
def test_headers_that_arrive_slowly_end_with_408_at_the_time_limit(
    earlier_requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hotset.serve")
    with running() as server:
        began = time.monotonic()  # the limit of the first request begins with the connection
        with server.connect() as client:
            for _ in range(earlier_requests):
                get(client)
                began = time.monotonic()
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nx-a: ")
            answer = send_slowly(client, b"a")
            assert time.monotonic() - began >= LIMIT_SECONDS
            assert answer.startswith(b"HTTP/1.1 408 ") and b"request_timeout" in answer
    assert "408: the headers did not arrive within" in caplog.text


def test_a_body_that_arrives_slowly_ends_with_408_at_the_time_limit() -> None:
    with running() as server:
        began = time.monotonic()  # before the server has the headers, with which the limit begins
        with server.connect(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9999\r\n\r\n") as client:
            answer = send_slowly(client, b"a")
        assert time.monotonic() - began >= LIMIT_SECONDS
        assert answer.startswith(b"HTTP/1.1 408 ") and b"--receive-timeout-seconds" in answer


def test_a_client_that_sends_nothing_is_disconnected() -> None:
    with running() as server, server.connect() as client:
        assert read_all(client) == b""


def test_time_limits_end_neither_long_answers_nor_connections_that_are_idle_between_two_requests() -> None:
    with running(send_seconds=LIMIT_SECONDS) as server, ExitStack() as clients:
        pool = clients.enter_context(ThreadPoolExecutor(2))
        connections = [clients.enter_context(server.connect()) for _ in range(2)]
        answers = [pool.submit(get, *pair) for pair in zip(connections, ("/slow", "/late"), strict=True)]
        assert not wait(answers, timeout=3 * LIMIT_SECONDS, return_when=FIRST_COMPLETED).done
        server.release()
        assert all(b"200 OK" in answer.result(WAIT_SECONDS) for answer in answers)
        time.sleep(3 * LIMIT_SECONDS)
        get(connections[0])


def test_a_client_that_stops_reading_is_disconnected_and_holds_little_memory() -> None:
    with running(send_seconds=LIMIT_SECONDS) as server, server.connect_slow_reader():
        assert server.app.ended.wait(WAIT_SECONDS)
        assert server.app.chunks_sent * len(CHUNK) < 64 << 20, "the server must not buffer what a client does not read"


@pytest.mark.slow
def test_a_slow_reader_that_continues_to_read_is_not_disconnected() -> None:
    with running(send_seconds=2.0) as server, server.connect_slow_reader() as client:
        deadline = time.monotonic() + 6.0
        while time.monotonic() < deadline:
            assert client.recv(1 << 16), "the stream was cut"
            time.sleep(0.005)
        assert not server.app.ended.is_set()


def test_bytes_that_a_slow_reader_takes_from_the_kernel_count_as_progress() -> None:
    with running() as server, server.connect_slow_reader() as client:
        samples: deque[tuple[int, int]] = deque(maxlen=100)  # equal if all buffers are full

        def is_stable() -> bool:
            samples.append(server.unsent())
            return len(samples) == 100 and len(set(samples)) == 1 and samples[0][0] > 0

        assert wait_until(is_stable)
        in_server, in_total = samples[0]
        received = len(client.recv(1 << 12))
        while server.unsent()[1] == in_total:
            received += len(client.recv(1 << 12))
            assert received < in_total - in_server
        assert server.unsent()[0] == in_server, "the kernel must not have taken more bytes from the server yet"


def test_at_the_limit_a_new_connection_replaces_the_one_that_has_waited_longest() -> None:
    with running(max_connections=8, receive_seconds=WAIT_SECONDS) as server, ExitStack() as clients:
        idle = [clients.enter_context(server.connect(b"GET / HT" * (number % 2))) for number in range(10)]
        assert b"200 OK" in get(clients.enter_context(server.connect()))
        assert [read_all(client) for client in idle[:3]] == [b"", b"", b""]
        for client in idle[3:]:
            client.settimeout(0.05)
            with pytest.raises(TimeoutError):
                client.recv(1)


def test_at_the_limit_a_request_that_is_being_answered_is_not_cut_and_the_next_client_waits() -> None:
    with running(max_connections=8, receive_seconds=WAIT_SECONDS) as server, ExitStack() as clients:
        pool = clients.enter_context(ThreadPoolExecutor(9))
        slow = [pool.submit(get, clients.enter_context(server.connect()), "/slow") for _ in range(8)]
        for _ in slow:
            assert server.app.slow_requests.acquire(timeout=WAIT_SECONDS)
        ninth = pool.submit(get, clients.enter_context(server.connect()))
        assert not wait([*slow, ninth], timeout=LIMIT_SECONDS, return_when=FIRST_COMPLETED).done
        server.release()
        assert all(b"200 OK" in answer.result(WAIT_SECONDS) for answer in (*slow, ninth))


class FullListener(socket.socket):
    """A listener that has no file descriptors left for its first calls of `accept`."""

    calls: list[float]
    failures = 2

    def accept(self) -> tuple[socket.socket, object]:
        self.calls.append(time.monotonic())
        if len(self.calls) <= self.failures:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_without_file_descriptors_accept_pauses_and_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    FullListener.calls = []
    with caplog.at_level(logging.WARNING), running(listener_type=FullListener) as server:
        with server.connect() as client:
            assert b"200 OK" in get(client)
        first, second, third = FullListener.calls[:3]
    assert min(second - first, third - second) >= 0.9 * connections.RETRY_SECONDS
    assert [record.message for record in caplog.records] == [
        "cannot accept connections: Too many open files; trying again every 0.5 s"
    ]


@pytest.mark.parametrize("free", [160, 300, 1000, 4000, 1 << 20])
@pytest.mark.parametrize("settings", [{}, {"max_connections": 100}, {"max_concurrency": 3}, {"max_concurrency": 9999}])
@pytest.mark.parametrize("config_type", [ServeConfig, RouterConfig])
def test_connections_and_requests_together_fit_into_the_file_descriptors(
    monkeypatch: pytest.MonkeyPatch, config_type: type, settings: dict[str, int], free: int
) -> None:
    wanted = config_type(**settings)
    to_workers = config_type is RouterConfig
    monkeypatch.setattr(connections, "raise_descriptor_limit", lambda: None)
    monkeypatch.setattr(connections, "free_descriptors", lambda: free)
    try:
        fitted = fit_to_descriptors(wanted, to_workers=to_workers)
    except ConfigError:
        assert free == 160
        return
    needed = fitted.max_connections + to_workers * (fitted.max_concurrency + connections.SPARE_CONNECTIONS)
    assert needed + connections.RESERVED_DESCRIPTORS <= free
    assert 1 <= fitted.max_concurrency < fitted.max_connections <= wanted.max_connections
    assert fitted.max_concurrency <= wanted.max_concurrency
    if free == 1 << 20:
        assert fitted.max_connections == wanted.max_connections


class NoProcess(EngineProcess):
    """An engine process that was not started."""

    def __init__(self) -> None:
        self.ended = False

    def end(self, seconds: float | None = None) -> None:
        self.ended = True


@pytest.mark.parametrize("api_key", [None, "k"])
@pytest.mark.parametrize("program", ["server", "router"])
def test_a_host_beyond_loopback_without_a_key_is_warned_about(
    program: str, api_key: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "free_descriptors", lambda: 0)  # so that neither program starts
    process, listener = NoProcess(), socket.socket()
    with pytest.raises(ConfigError):
        if program == "server":
            run_server(EngineConfig(), ServeConfig(host="192.0.2.1", api_key=api_key), process, listener)
        else:
            run_router(RouterConfig(host="192.0.2.1", api_key=api_key), listener)
    assert process.ended == (program == "server") and listener.fileno() == -1, "run owns both"
    warnings = [record.message for record in caplog.records if "no API key is required" in record.message]
    assert len(warnings) == (api_key is None)
