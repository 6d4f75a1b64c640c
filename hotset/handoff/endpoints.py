"""Opens and closes the transfer endpoints of a decode worker. `links.py` decides when."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hotset.transfer.api import Transfer

LOGGER = logging.getLogger("hotset.handoff")


@dataclass(frozen=True, slots=True)
class EndpointOpened:
    """The result of opening an endpoint. A thread of `Endpoints` puts it into the agent's inbox."""

    number: int
    description: bytes  # result of Transfer.describe
    error: str | None


@dataclass(frozen=True, slots=True)
class EndpointClosed:
    """The result of closing an endpoint. A thread of `Endpoints` puts it into the agent's inbox."""

    number: int
    closed: bool  # nothing can be written through the endpoint any more


EndpointResult = EndpointOpened | EndpointClosed


class Endpoints:
    """Opens and closes endpoints in threads of their own, because both may block. The methods may be called from any
    thread. The owner calls `close` at the end."""

    def __init__(self, open_endpoint: Callable[[], Transfer]) -> None:
        """`open_endpoint` opens an endpoint and registers the worker's memory with it. The first endpoint is opened
        now, so that StartupError is raised here if the transfer engine cannot be used."""
        self._open_endpoint = open_endpoint
        self._opening = threading.Lock()  # endpoints are opened one after another
        self._lock = threading.Lock()  # guards the fields below
        self._unused: Transfer | None = open_endpoint()
        self.name = self._unused.name
        self._open: dict[int, Transfer] = {}
        self._closed = False

    def __len__(self) -> int:
        """Returns the number of endpoints that are in use."""
        with self._lock:
            return len(self._open)

    def start_opening(self, number: int, report: Callable[[EndpointResult], None]) -> None:
        """Opens an endpoint and calls it `number`. `report` is called now if the first endpoint is not in use, else in
        another thread."""
        with self._lock:
            first, self._unused = self._unused, None
        if first is not None:
            self._add(number, first, report)
        else:
            threading.Thread(target=self._open_one, args=(number, report), name="open endpoint", daemon=True).start()

    def start_closing(self, number: int, report: Callable[[EndpointResult], None]) -> None:
        """Closes an endpoint. `report` is called in another thread."""
        threading.Thread(target=self._close_one, args=(number, report), name="close endpoint", daemon=True).start()

    def close(self) -> None:
        """Closes all endpoints. Idempotent."""
        with self._lock:
            self._closed = True
            remaining = [*self._open.values(), *([] if self._unused is None else [self._unused])]
            self._open.clear()
            self._unused = None
        with ThreadPoolExecutor(max_workers=len(remaining) + 1) as threads:  # each may take seconds
            list(threads.map(lambda endpoint: endpoint.close(), remaining))

    def _open_one(self, number: int, report: Callable[[EndpointResult], None]) -> None:
        try:
            with self._opening:
                endpoint = self._open_endpoint()
        except Exception as error:
            report(EndpointOpened(number, b"", f"this worker cannot open a transfer endpoint: {error}"))
        else:
            self._add(number, endpoint, report)

    def _add(self, number: int, endpoint: Transfer, report: Callable[[EndpointResult], None]) -> None:
        with self._lock:
            if not self._closed:
                self._open[number] = endpoint
        if self._closed:
            endpoint.close()
        else:
            report(EndpointOpened(number, endpoint.describe(), None))

    def _close_one(self, number: int, report: Callable[[EndpointResult], None]) -> None:
        with self._lock:
            endpoint = self._open.pop(number, None)
        try:
            closed = endpoint is not None and endpoint.close()
        except Exception:
            LOGGER.exception("a transfer endpoint could not be closed")
            closed = False
        report(EndpointClosed(number, closed))
