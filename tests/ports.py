"""Ports on which the processes of a test can listen one after another."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yields a free port of 127.0.0.1. No other process that asks the kernel for any free port gets this one.

    Without a reservation, another process could get the port between the end of one process and the start of the next.
    The reservation is a socket that is bound but does not listen. With SO_REUSEADDR, which servers and ZeroMQ set too,
    another socket may listen on its port.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]
