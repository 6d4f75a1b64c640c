"""Combines the transfer endpoints of all processes of an engine into one `Transfer`.

A process can register only its own memory. An engine with worker processes therefore has one endpoint in each worker
process, for the memory of the worker's GPU, and one in its own process, which has mapped the host stores.
`WorkerTransfers` directs all of them. A worker runs a `TransferServer`, and `RemoteTransfer` represents its endpoint in
the engine's process.

Addresses that leave a process are *engine addresses*. Their upper bits are the number of the process within its engine,
and their lower bits are the address within this process. The engine itself is process 0, so the addresses of an engine
without worker processes are ordinary addresses. Writes are divided by the processes at both ends.
"""

import base64
import contextlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotset.base.errors import EngineStopped, InternalError, TransferError
from hotset.engine.ports import Messages, Throughput
from hotset.fleet.transfer.api import Region, Transfer, Writes, WriteState, WriteTicket
from hotset.schedule.handoffs import DeviceEvent

log = logging.getLogger(__name__)

PROCESS_SHIFT = 52  # addresses of a process are smaller than 1 << PROCESS_SHIFT
PROCESS_MASK = (1 << PROCESS_SHIFT) - 1  # the bits of an address within its process
MAX_PROCESSES = 1 << (63 - PROCESS_SHIFT)  # limit of the processes of an engine; addresses are computed in int64
OPEN_S, CONNECT_S, CLOSE_S = 1800.0, 60.0, 15.0  # limits for a worker's answer; opening registers its memory
COPY_THREADS = 2  # of a worker
POLL_S = 0.0005  # interval at which a worker checks its lists of writes
WORST_FIRST = (WriteState.FAILED_UNKNOWN, WriteState.FAILED_QUIESCED, WriteState.DONE)


def engine_address(process: int, address: int) -> int:
    return process << PROCESS_SHIFT | address


def process_and_address(engine_address: int) -> tuple[int, int]:
    return engine_address >> PROCESS_SHIFT, engine_address & PROCESS_MASK


class WorkerTransfers:
    """Implements `Transfer` over one endpoint per process of this engine. Peers may have several processes, too."""

    def __init__(self, endpoints: Sequence[Transfer]) -> None:
        """`endpoints[n]` is the endpoint of process n."""
        self.name = endpoints[0].name
        self._endpoints = tuple(endpoints)
        self._peers: dict[str, int] = {}  # the number of processes of each peer

    def register(self, region: Region) -> None:
        raise InternalError("memory is registered with the endpoint of its process")

    def describe(self) -> bytes:
        return json.dumps([base64.b64encode(part.describe()).decode() for part in self._endpoints]).encode()

    def connect(self, name: str, description: bytes) -> None:
        """Connects every process of this engine with every process of the peer."""
        self.forget(name)
        try:
            parts = [base64.b64decode(part, validate=True) for part in json.loads(description)]
        except (ValueError, TypeError, RecursionError) as error:
            raise TransferError("the peer's description of its processes cannot be parsed") from error
        if not 1 <= len(parts) <= MAX_PROCESSES:
            raise TransferError(f"the peer describes {len(parts)} processes")
        self._peers[name] = len(parts)

        def connect_all(endpoint: Transfer) -> None:
            for process, part in enumerate(parts):
                endpoint.connect(_name(name, process), part)

        with ThreadPoolExecutor(len(self._endpoints)) as threads:
            list(threads.map(connect_all, self._endpoints))

    def forget(self, name: str) -> None:
        for process in range(self._peers.pop(name, 0)):
            for endpoint in self._endpoints:
                endpoint.forget(_name(name, process))

    def submit(self, peer: str, writes: Writes, after: DeviceEvent | None = None) -> WriteTicket:
        ends = writes[:, :2] >> PROCESS_SHIFT  # [writes, 2]: process of this engine, process of the peer
        local_writes = writes.copy()
        local_writes[:, :2] &= PROCESS_MASK
        pairs = ends[:, 0] * MAX_PROCESSES + ends[:, 1]
        lists: list[tuple[Transfer, WriteTicket]] = []
        for pair in np.unique(pairs).tolist():
            source, target = divmod(pair, MAX_PROCESSES)
            endpoint = self._endpoints[min(source, len(self._endpoints) - 1)]  # a wrong address is not registered there
            lists.append((endpoint, endpoint.submit(_name(peer, target), local_writes[pairs == pair], after)))
        return WriteTicket(int(writes[:, 2].sum()), lists)

    def poll(self, ticket: WriteTicket) -> WriteState:
        """Returns the worst state of the lists, when all have ended."""
        states = {endpoint.poll(part) for endpoint, part in ticket.handle}
        if WriteState.PENDING in states:
            return WriteState.PENDING
        return next((state for state in WORST_FIRST if state in states), WriteState.DONE)

    def transport(self) -> str:
        return self._endpoints[0].transport()

    def throughput(self) -> Throughput:
        parts = [endpoint.throughput() for endpoint in self._endpoints]
        return Throughput(sum(part.nbytes for part in parts), max(part.seconds for part in parts))

    def close(self) -> bool:
        with ThreadPoolExecutor(len(self._endpoints)) as threads:  # each may take seconds
            return all(list(threads.map(lambda endpoint: endpoint.close(), self._endpoints)))


def _name(peer: str, process: int) -> str:
    return peer if process == 0 else f"{peer} process {process}"


@dataclass(frozen=True, slots=True)
class _Call:
    number: int
    method: str  # 'open', 'copy', or a method of an endpoint
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Reply:
    number: int  # number of the call
    result: Any
    throughput: Throughput | None = None  # of the endpoint, with the end of a list of writes


class WorkerConnection:
    """The engine's end of a connection to the `TransferServer` of a worker."""

    def __init__(self, connection: Messages) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # guards the fields below, and sending
        self._calls: dict[int, Future[Any]] = {}  # calls that are not answered
        self._numbers = itertools.count()
        self._ended = False
        threading.Thread(target=self._read, name="transfer replies", daemon=True).start()

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        """Begins a call, and returns its future. The future raises an exception if the worker raised one or ended."""
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._calls[number] = future
            try:
                if self._ended:
                    raise OSError
                self._connection.send(_Call(number, method, arguments))
            except OSError:
                del self._calls[number]
                future.set_exception(EngineStopped("the worker has ended"))
        return future

    def close(self) -> None:
        """Makes the worker close its endpoints and its end of the connection. Idempotent."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send(None)

    def _read(self) -> None:
        while True:
            try:
                reply: _Reply = self._connection.recv()
            except (EOFError, OSError):
                break
            with self._lock:
                future = self._calls.pop(reply.number)
            if isinstance(reply.result, Exception):
                future.set_exception(reply.result)
            else:
                future.set_result(reply)
        with self._lock:
            self._ended = True
            unanswered = list(self._calls.values())
            self._calls.clear()
            self._connection.close()
        for future in unanswered:
            future.set_exception(EngineStopped("the worker has ended"))


@dataclass(slots=True)
class _RemoteList:
    """A list of writes that a worker submits."""

    peer: str
    writes: Writes
    after: DeviceEvent | None  # observed here, because events cannot be sent
    deadline: float
    ended: "Future[Any] | None" = None  # None until the list is sent to the worker


class RemoteTransfer:
    """Implements `Transfer` for an endpoint in a worker process, which registers its own memory."""

    def __init__(self, worker: WorkerConnection, deadline_s: float) -> None:
        """Opens the endpoint. Raises StartupError if that fails."""
        self._worker, self._deadline_s = worker, deadline_s
        opened: tuple[int, str, bytes] = worker.call("open").result(OPEN_S).result
        self._number, self.name, self._description = opened
        self._throughput = Throughput(0, 0.0)
        self._closed: bool | None = None

    def register(self, region: Region) -> None:
        raise InternalError("a worker registers its own memory")

    def describe(self) -> bytes:
        return self._description

    def connect(self, name: str, description: bytes) -> None:
        try:
            self._worker.call("connect", self._number, name, description).result(CONNECT_S)
        except TimeoutError:
            raise TransferError(f"a worker has not connected to {name} within {CONNECT_S:g} s") from None

    def forget(self, name: str) -> None:
        self._worker.call("forget", self._number, name)

    def submit(self, peer: str, writes: Writes, after: DeviceEvent | None = None) -> WriteTicket:
        submitted = _RemoteList(peer, writes, after, time.monotonic() + self._deadline_s)
        ticket = WriteTicket(int(writes[:, 2].sum()), submitted)
        self.poll(ticket)  # sends the list now if it need not wait
        return ticket

    def poll(self, ticket: WriteTicket) -> WriteState:
        waiting: _RemoteList = ticket.handle
        if waiting.ended is None:
            if waiting.after is not None and not waiting.after.query():
                expired = time.monotonic() > waiting.deadline
                return WriteState.FAILED_QUIESCED if expired else WriteState.PENDING
            waiting.ended = self._worker.call("submit", self._number, waiting.peer, waiting.writes)
        if not waiting.ended.done():
            return WriteState.PENDING
        if waiting.ended.exception() is not None:
            return WriteState.FAILED_UNKNOWN
        reply: _Reply = waiting.ended.result()
        if reply.throughput is not None and reply.throughput.nbytes > self._throughput.nbytes:
            self._throughput = reply.throughput  # lists can be polled in another order than they ended
        state: WriteState = reply.result
        return state

    def transport(self) -> str:
        return "another process"

    def throughput(self) -> Throughput:
        return self._throughput

    def close(self) -> bool:
        if self._closed is None:
            try:
                self._closed = bool(self._worker.call("close", self._number).result(CLOSE_S).result)
            except TimeoutError:
                self._closed = False
            except EngineStopped:
                self._closed = True  # the process has ended, and its memory is gone
        return self._closed


class TransferServer:
    """Opens, uses and closes endpoints in a worker process, as the engine commands."""

    def __init__(
        self, connection: Messages, open_endpoint: Callable[[], Transfer], copy: Callable[..., None] | None = None
    ) -> None:
        """`open_endpoint` opens an endpoint and registers the memory of this process with it. `copy` copies within this
        memory. It receives the arguments of the engine's call."""
        self._connection, self._open_endpoint, self._copy = connection, open_endpoint, copy
        self._numbers = itertools.count()
        self._sending = threading.Lock()
        self._changed = threading.Condition()  # guards the fields below
        self._open: dict[int, Transfer] = {}
        self._submitted: list[tuple[_Call, Transfer, WriteTicket]] = []  # lists of writes whose ends are not reported
        self._ended = False

    def serve(self) -> None:
        """Serves until the engine closes the connection or ends."""
        threading.Thread(target=self._report_ends, name="transfer polls", daemon=True).start()
        copies = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="transfer copy")
        try:
            while (call := self._connection.recv()) is not None:
                if call.method == "submit":
                    self._submit(call)
                elif call.method == "forget":
                    self._run(call)
                elif call.method == "copy":
                    copies.submit(self._run, call)
                else:  # the other calls may block
                    name = f"transfer {call.method}"
                    threading.Thread(target=self._run, args=(call,), name=name, daemon=True).start()
        except (EOFError, OSError):
            pass  # the engine has ended
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify()
            copies.shutdown(cancel_futures=True)
            for endpoint in self._open.values():
                endpoint.close()
            self._connection.close()

    def _submit(self, call: _Call) -> None:
        number, peer, writes = call.arguments
        endpoint = self._open.get(number)
        if endpoint is None:
            self._reply(call, WriteState.FAILED_QUIESCED)
            return
        with self._changed:
            self._submitted.append((call, endpoint, endpoint.submit(peer, writes)))
            self._changed.notify()

    def _run(self, call: _Call) -> None:
        try:
            self._reply(call, self._result_of(call))
        except Exception as error:
            self._reply(call, error)

    def _result_of(self, call: _Call) -> Any:
        match call.method, call.arguments:
            case "open", _:
                opened, number = self._open_endpoint(), next(self._numbers)
                with self._changed:
                    self._open[number] = opened
                return number, opened.name, opened.describe()
            case "connect", (number, name, description):
                self._open[number].connect(name, description)
            case "forget", (number, name) if number in self._open:
                self._open[number].forget(name)
            case "close", (number,):
                with self._changed:
                    endpoint = self._open.pop(number)
                return endpoint.close()
            case "copy", arguments:
                assert self._copy is not None
                self._copy(*arguments)
        return None

    def _report_ends(self) -> None:
        """Reports the ends of lists of writes."""
        while not self._ended:
            with self._changed:
                self._changed.wait_for(lambda: self._submitted or self._ended)
                entries, self._submitted = self._submitted, []
            pending = []
            for call, endpoint, ticket in entries:
                state = endpoint.poll(ticket)
                if state is WriteState.PENDING:
                    pending.append((call, endpoint, ticket))
                else:
                    self._reply(call, state, endpoint.throughput())
            with self._changed:
                self._submitted += pending
            if pending:
                time.sleep(POLL_S)

    def _reply(self, call: _Call, result: Any, throughput: Throughput | None = None) -> None:
        with self._sending:
            try:
                self._connection.send(_Reply(call.number, result, throughput))
            except OSError:
                log.debug("the engine has ended before a call was answered")
