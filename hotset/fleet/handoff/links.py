"""The links of a decode worker. It has one endpoint for each prefill worker, so that it can cut off a single one.

A prefill worker that is lost may still write. When its endpoint is closed, the memory is no longer registered for it,
and the threads and sockets that would receive its bytes are gone. This is enough for a peer on another machine, whose
bytes can only arrive through the endpoint: over TCP, threads of the endpoint copy them from its sockets, and over RDMA,
the network card refuses keys that are no longer registered.

Closing the endpoint is not enough for a peer on the same machine. UCX then writes with `process_vm_writev` (its
transport `cma`), or maps the memory. Such a write does not use the endpoint, so the peer's process must also have
ended. The end of the process alone is not enough either: bytes that it sent through sockets or shared memory may wait
for the threads of the endpoint. The endpoint is therefore closed after the process has ended. A process in another pid
namespace cannot be observed. UCX does not use `cma` with such a process, so closing the endpoint is enough.

Opening an endpoint registers all memory again, which takes minutes with RDMA and a terabyte. One endpoint for all peers
would avoid this, but no library can close a single connection at the end that is written to. NIXL releases a peer to
which this agent has connected (`invalidateRemoteMD`), and that peer still writes (test_engines.py). Mooncake has no
such call. An endpoint is therefore closed only if a failed handoff needs it. Otherwise it stays registered, for the
next peer.
"""

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from hotset.base.processes import ProcessIdentity, has_ended, is_observable
from hotset.fleet.handoff.messages import Hello
from hotset.fleet.transfer.api import Transfer
from hotset.schedule.handoffs import HandoffKey

LOGGER = logging.getLogger("hotset.fleet.handoff")

MAX_LINKS = 64  # including retired ones; the endpoint of each has about 16 file descriptors and 2 threads
OBSERVE_SECONDS = 0.2  # interval at which the process of a lost peer is observed


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
    """Opens and closes endpoints in separate threads, because both may block. The methods may be called from any
    thread. The owner calls `close` at the end."""

    def __init__(self, open_endpoint: Callable[[], Transfer]) -> None:
        """`open_endpoint` opens an endpoint and registers the worker's memory with it. The first endpoint is opened
        now, so that StartupError is raised here if the transfer engine cannot be used."""
        self._open_endpoint = open_endpoint
        self._opening = threading.Lock()  # endpoints are opened one after another
        self._lock = threading.Lock()  # guards the fields below
        self._unused = [open_endpoint()]
        self.name = self._unused[0].name
        self._open: dict[int, Transfer] = {}
        self._closed = False

    def __len__(self) -> int:
        """Returns the number of endpoints that are in use."""
        with self._lock:
            return len(self._open)

    def start_opening(self, number: int, report: Callable[[EndpointResult], None]) -> None:
        """Opens an endpoint with this number, or gives the number to one that is not in use. `report` is called before
        this returns if no endpoint must be opened, and in another thread otherwise."""
        unused = self._take_unused()
        if unused is not None:
            self._add(number, unused, report)
        else:
            threading.Thread(target=self._open_one, args=(number, report), name="open endpoint", daemon=True).start()

    def put_back(self, number: int) -> None:
        """Keeps an endpoint for the next peer: to open another one would register all memory again."""
        with self._lock:
            if (endpoint := self._open.pop(number, None)) is not None:
                self._unused.append(endpoint)

    def start_closing(self, number: int, report: Callable[[EndpointResult], None]) -> None:
        """Closes an endpoint. `report` is called in another thread."""
        threading.Thread(target=self._close_one, args=(number, report), name="close endpoint", daemon=True).start()

    def close(self) -> None:
        """Closes all endpoints. Idempotent."""
        with self._lock:
            self._closed = True
            remaining = [*self._open.values(), *self._unused]
            self._open.clear()
            self._unused.clear()
        with ThreadPoolExecutor(max_workers=len(remaining) + 1) as threads:  # closing an endpoint may take seconds
            list(threads.map(lambda endpoint: endpoint.close(), remaining))

    def _take_unused(self) -> Transfer | None:
        with self._lock:
            return self._unused.pop() if self._unused else None

    def _open_one(self, number: int, report: Callable[[EndpointResult], None]) -> None:
        try:
            with self._opening:
                unused = self._take_unused()  # another peer may have gone while this thread waited
                endpoint = self._open_endpoint() if unused is None else unused
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


@dataclass(slots=True, eq=False)
class Link:
    """The endpoint of one peer."""

    number: int
    peer: str
    hello: Hello | None = None  # introduces this worker with this endpoint; None until the endpoint is open
    process: ProcessIdentity | None = None  # the peer's process; known after Welcome
    writers: tuple[ProcessIdentity, ...] = ()  # further processes of the peer that may write
    held_since: float | None = None  # since this time, no new handoff uses the link, which will be retired
    # Set when the link is retired: failed handoffs whose memory the peer may still write.
    unconfirmed: set[HandoffKey] = field(default_factory=set)
    closing: bool = False


class Links:
    """One link for each peer that is in use, and the retired links of lost peers until their endpoints are closed. A
    lost peer that returns gets a new link, with the endpoint of another peer if that is no longer in use."""

    def __init__(self, endpoints: Endpoints, hello: Hello, report: Callable[[EndpointResult], None]) -> None:
        """`hello` introduces this worker, and lacks the endpoint. `endpoints` calls `report`, from any thread, with
        results that the owner must pass to `on_opened` and `on_closed`."""
        self._endpoints, self._hello, self._report = endpoints, hello, report
        self._links: dict[str, Link] = {}  # by peer
        self._retired: dict[int, Link] = {}  # by number
        self._numbers = itertools.count(1)
        self.observe_at = float("inf")  # when `close_retired` must be called next

    @property
    def full(self) -> bool:
        return len(self._links) + len(self._retired) >= MAX_LINKS

    @property
    def current(self) -> list[Link]:
        """Returns the links that are not retired."""
        return list(self._links.values())

    def get(self, peer: str) -> Link | None:
        return self._links.get(peer)

    def open(self, peer: str) -> None:
        """Begins to open a link."""
        link = self._links[peer] = Link(next(self._numbers), peer)
        self._endpoints.start_opening(link.number, self._report)

    def on_opened(self, opened: EndpointOpened) -> Link | None:
        """Records that an endpoint is open, or removes its link if it could not be opened. Returns the link, or None if
        it was retired meanwhile."""
        link = next((link for link in self._links.values() if link.number == opened.number), None)
        known = link or self._retired[opened.number]
        if opened.error is None:
            known.hello = replace(self._hello, description=opened.description, endpoint=known.number)
            if link is None:
                self._put_back(known)
        elif link is not None:
            LOGGER.error("%s", opened.error)
            del self._links[link.peer]
        else:
            del self._retired[opened.number]
        return link

    def retire(self, peer: str, unconfirmed: set[HandoffKey]) -> None:
        """Retires the peer's link, if it has one. Its endpoint is kept for another peer if none of the handoffs needs
        that it is closed. `unconfirmed` are all the peer's failed handoffs for which bytes may
        still be written."""
        link = self._links.pop(peer, None)
        if link is not None:
            link.unconfirmed = unconfirmed - self.retired_keys
            self._retired[link.number] = link
            self.observe_at = 0.0  # now
            self._put_back(link)

    @property
    def retired_keys(self) -> set[HandoffKey]:
        """Returns the failed handoffs that end when a retired link is closed."""
        return {key for link in self._retired.values() for key in link.unconfirmed}

    def needs_end_of_process(self, link: Link) -> bool:
        """Returns whether a process of the peer can write although the endpoint is closed."""
        writers = [*([] if link.process is None else [link.process]), *link.writers]
        return any(is_observable(each, self._hello.process) and not has_ended(each) for each in writers)

    def close_retired(self, unconfirmed: set[HandoffKey], now: float) -> None:
        """Begins to close the endpoints of retired links whose peers may still write to a handoff in `unconfirmed`.

        Waits while the peer's process could, without the endpoint, write to such a handoff. The endpoints of other
        retired links are kept for other peers.
        """
        waiting = False
        for link in list(self._retired.values()):
            link.unconfirmed &= unconfirmed
            if link.hello is None or link.closing:
                continue  # the endpoint is being opened or closed
            if self._put_back(link):
                continue
            if self.needs_end_of_process(link):
                waiting = True
                continue
            link.closing = True
            self._endpoints.start_closing(link.number, self._report)
        self.observe_at = now + OBSERVE_SECONDS if waiting else float("inf")

    def _put_back(self, link: Link) -> bool:
        """Keeps the endpoint of a retired link for another peer, if it is open and no failed handoff needs that it is
        closed. Returns whether it did."""
        if link.hello is None or link.unconfirmed or link.closing:
            return False
        del self._retired[link.number]
        self._endpoints.put_back(link.number)
        return True

    def on_closed(self, closed: EndpointClosed) -> set[HandoffKey]:
        """Returns the failed handoffs for which nothing can be written any more."""
        link = self._retired.pop(closed.number)
        if not closed.closed:
            pages = f"memory of {len(link.unconfirmed)} handoffs stays unused until this worker is restarted"
            LOGGER.error("the transfer endpoint of %s cannot be closed: %s", link.peer, pages)
            return set()
        if link.unconfirmed:
            LOGGER.info("%s is cut off, which ends %d failed handoffs", link.peer, len(link.unconfirmed))
        return link.unconfirmed
