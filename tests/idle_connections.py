"""Opens many idle connections to a server, and measures whether the server still answers."""

import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import plain_http

from hotset.base.descriptors import raise_descriptor_limit

NUM_IDLE = 1100
DESCRIPTORS = 1024  # the limit of open files of the server, lower than the number of connections
TRIES = 10  # on a busy machine, a single request can take long


def with_few_descriptors(command: Sequence[str]) -> list[str]:
    """Returns a command that runs with a limit of DESCRIPTORS open files, of which the soft limit is half."""
    limits = f"ulimit -S -n {DESCRIPTORS // 2} && ulimit -H -n {DESCRIPTORS}"
    return ["sh", "-c", f"{limits} && exec {shlex.join(command)}"]


@contextmanager
def many_idle_connections(url: str) -> Iterator[None]:
    """Holds NUM_IDLE connections. Most send nothing; every tenth sends the beginning of a request."""
    raise_descriptor_limit()
    address = urlsplit(url)
    with ExitStack() as clients:
        for number in range(NUM_IDLE):
            client = socket.create_connection((address.hostname, address.port), timeout=60)
            clients.enter_context(client)
            if number % 10 == 0:
                client.sendall(b"GET /health HTTP/1.1\r\n")
        yield


def health_seconds(url: str) -> float:
    """Returns the shortest time in which a new connection got an answer from /health."""
    return min(_seconds(url) for _ in range(TRIES))


def exchange(url: str, request: bytes) -> bytes:
    """Sends bytes on a new connection and returns everything up to the end of the connection."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as client:
        client.sendall(request)
        answer = b""
        while piece := client.recv(1 << 16):
            answer += piece
    return answer


def _seconds(url: str) -> float:
    began = time.monotonic()
    assert plain_http.get(f"{url}/health", timeout=60).status_code in (200, 503)
    return time.monotonic() - began
