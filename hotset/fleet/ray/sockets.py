"""The connection between the controller and workers on other nodes: commands and reports over ZeroMQ.

The controller listens on two ports. Through one socket it sends commands (ROUTER). Through the other, a thread receives
reports and signs of life (PULL). CURVE encrypts all messages. A worker connects only to the controller whose key it
knows, and the controller accepts only workers whose keys it was given. Messages are pickled, so no other process may be
able to send them.

A lost connection is final: each side then treats the process at the other end as dead. ZeroMQ sends and answers
heartbeats on every connection, from threads that do not need Python's lock. A process in a long step therefore keeps
its connections. A process that is stopped, or a node that is cut off, loses them.
"""

import contextlib
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from hotset.base.address import Address
from hotset.base.errors import StartupError
from hotset.engine.progress import Progress
from hotset.engine.workers.messages import WorkerCommand, WorkerReport

REPORT, BEAT, EXIT = range(3)  # the kinds of messages from workers
HEADER = struct.Struct("<BI")  # kind and number of the worker; one frame with a header is cheaper than three frames
HEARTBEAT_MS, SILENT_MS = 1000, 6000  # interval of heartbeats, and time without an answer after which a peer is lost
GOODBYE_MS = 1000  # time to deliver the last messages of a worker
EXIT_CODE = struct.Struct("<q")
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where ZeroMQ asks whether a key is allowed


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A key pair of CURVE, in Z85."""

    public: bytes
    secret: bytes

    @classmethod
    def create(cls) -> "CurveKeys":
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True, slots=True)
class ControllerEndpoint:
    """The addresses and the key with which a worker connects to its controller."""

    commands: str  # like tcp://10.0.0.1:40001
    reports: str
    key: bytes  # the controller's public key


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """Implements `ConnectionAddress`. It contains a secret key, so it may only be sent over an encrypted connection."""

    controller: ControllerEndpoint
    number: int
    keys: CurveKeys

    def open(self) -> "WorkerSockets":
        return WorkerSockets(self.controller, self.number, self.keys)


class RemoteWorker:
    """Implements `WorkerProcess` and `WorkerPipe` for a worker whose messages come over the network."""

    def __init__(
        self, pid: int, progress: Progress, send: Callable[[WorkerCommand], None], kill: Callable[[], None]
    ) -> None:
        self.pid = pid
        self.exitcode: int | None = None
        self.progress = progress
        self.connected = threading.Event()
        self.send, self.kill = send, kill
        self.sentinel, self._open_while_running = os.pipe()
        self._reports, self._forward = Pipe()  # the receiving thread forwards reports to the controller's main thread
        self._ended = threading.Event()

    def fileno(self) -> int:
        return self._reports.fileno()

    def poll(self, timeout: float | None = 0.0) -> bool:
        return self._reports.poll(timeout)

    def recv(self) -> Any:
        return self._reports.recv()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def close(self) -> None:
        self._reports.close()
        self.end()
        os.close(self.sentinel)

    def forward(self, report: memoryview) -> None:
        """Passes a pickled report on. Only the receiving thread calls this."""
        with contextlib.suppress(OSError):  # the controller has closed this worker
            self._forward.send_bytes(report)

    def end(self) -> None:
        """Marks the worker as ended: its reports end, and the sentinel becomes readable. Idempotent."""
        if not self._ended.is_set():
            self._ended.set()
            self._forward.close()
            os.close(self._open_while_running)


class ControllerSockets:
    """The controller's end of the connections to all workers. `send` may be called from any thread."""

    def __init__(self, host: str) -> None:
        """Listens on two free ports of `host`. Raises StartupError if that is impossible."""
        keys = CurveKeys.create()
        self.host = host
        self._workers: dict[int, RemoteWorker] = {}
        self._allowed: set[bytes] = set()  # public keys of workers, as ZeroMQ reports them: 32 bytes
        self._number_of: dict[int, int] = {}  # descriptor of a connection -> number of the worker
        self._sending = threading.Lock()
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP_ENDPOINT)
        self._commands, self._reports = self._context.socket(zmq.ROUTER), self._context.socket(zmq.PULL)
        self._commands.router_mandatory = True  # a command for a worker that is gone is an error
        bound = []
        try:
            for each in (self._commands, self._reports):
                each.ipv6 = ":" in host
                each.sndhwm = each.rcvhwm = 0  # plans in flight are limited elsewhere; nothing may block or be dropped
                each.linger = 0
                _send_heartbeats(each)
                each.curve_server, each.curve_secretkey, each.zap_domain = True, keys.secret, b"hotset"
                bound.append(f"tcp://{host}:{each.bind_to_random_port(f'tcp://{host}')}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StartupError(f"cannot listen at {host} for workers: {error.strerror}") from None
        self.endpoint = ControllerEndpoint(bound[0], bound[1], keys.public)
        self._monitor = self._reports.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._receive, name="hotset-reports", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> list[Address]:
        """The two addresses at which this process listens."""
        bound = (Address.parse(url.removeprefix("tcp://")) for url in (self.endpoint.commands, self.endpoint.reports))
        return [address for address in bound if address is not None]

    def allow(self, number: int, key: bytes, worker: RemoteWorker) -> None:
        """Allows the worker with this public key to connect."""
        self._workers[number] = worker
        self._allowed.add(z85.decode(key))

    def wait_connected(self, number: int, seconds: float) -> bool:
        """Waits until both connections of a worker exist. Returns False if one is missing after `seconds`."""
        deadline = time.monotonic() + seconds
        greeting = b""
        while greeting != _identity(number):
            remaining = deadline - time.monotonic()
            with self._sending:
                if remaining <= 0 or not self._commands.poll(int(1000 * remaining)):
                    return False
                greeting = self._commands.recv_multipart()[0]
        return self._workers[number].connected.wait(max(0.0, deadline - time.monotonic()))

    def send(self, number: int, command: WorkerCommand) -> None:
        """Sends a command to a worker. Never blocks for long. Raises OSError if the worker is no longer connected."""
        try:
            pickled = pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
            with self._sending:
                self._commands.send(_identity(number), zmq.SNDMORE)
                self._commands.send(pickled)
        except zmq.ZMQError as error:
            raise OSError(error.errno, str(error)) from error

    def close(self) -> None:
        """Closes all connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wake_sender.send(b"!")
        self._thread.join()
        for worker in self._workers.values():
            worker.end()
        self._reports.disable_monitor()
        with self._sending:
            self._context.destroy(linger=0)
        self._wake_receiver.close()
        self._wake_sender.close()

    def _receive(self) -> None:
        """Receives messages until `close`."""
        poller = zmq.Poller()
        for source in (self._reports, self._monitor, self._zap, self._wake_receiver):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake_receiver.fileno() in ready:
                return
            if self._zap in ready:
                self._authenticate()
            if self._reports in ready:
                self._read_message()
            if self._monitor in ready:
                while self._reports.poll(0):  # a worker reports before it ends
                    self._read_message()
                event = parse_monitor_message(self._monitor.recv_multipart())
                if (number := self._number_of.pop(event["value"], None)) is not None:
                    self._workers[number].end()

    def _authenticate(self) -> None:
        """Answers ZeroMQ's question whether the key of a new connection is allowed."""
        version, request, *_, key = self._zap.recv_multipart()
        status = (b"200", b"OK") if key in self._allowed else (b"400", b"this key is not allowed")
        self._zap.send_multipart([version, request, *status, b"", b""])

    def _read_message(self) -> None:
        frame = self._reports.recv(copy=False)
        kind, number = HEADER.unpack_from(frame.buffer)
        payload = frame.buffer[HEADER.size :]
        worker = self._workers[number]
        if not worker.connected.is_set():
            self._number_of[frame.get(zmq.SRCFD)] = number
            worker.connected.set()
        if kind == REPORT:
            worker.forward(payload)
        elif kind == BEAT:
            worker.progress.set_counters(_unpack(payload))
        else:
            (worker.exitcode,) = EXIT_CODE.unpack(payload)


class WorkerSockets:
    """Implements `Messages`: a worker's end of the connection. `send` and `beat` may be called by any thread."""

    def __init__(self, controller: ControllerEndpoint, number: int, keys: CurveKeys) -> None:
        self._number = number
        self._sending = threading.Lock()
        self._closed = False
        # Two contexts, because the last reports are delivered while another thread still waits for commands.
        self._command_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._report_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._commands = self._command_context.socket(zmq.DEALER)
        self._reports = self._report_context.socket(zmq.PUSH)
        self._commands.routing_id = _identity(number)
        self._monitor = self._commands.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        for each, url in ((self._commands, controller.commands), (self._reports, controller.reports)):
            each.ipv6 = "[" in url
            each.sndhwm = each.rcvhwm = 0
            each.reconnect_ivl = -1  # never
            _send_heartbeats(each)
            each.curve_serverkey, each.curve_publickey, each.curve_secretkey = controller.key, keys.public, keys.secret
            each.connect(url)
        self._commands.linger, self._reports.linger = 0, GOODBYE_MS
        self._poller = zmq.Poller()
        self._poller.register(self._commands, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        with contextlib.suppress(zmq.Again):  # the connection has already ended, which `recv` notices
            self._commands.send(b"", zmq.NOBLOCK)  # the controller needs a message before it can send commands
        self.beat([])

    def recv(self) -> Any:
        """Waits for the next command. Raises EOFError if the controller is dead. Only one thread calls this."""
        if self._commands not in dict(self._poller.poll()):
            raise EOFError("the connection to the controller has ended")
        return pickle.loads(self._commands.recv())

    def send(self, obj: WorkerReport) -> None:
        """Sends a report. Never blocks. Raises BrokenPipeError if the controller is dead."""
        self._send(REPORT, pickle.dumps(obj, pickle.HIGHEST_PROTOCOL))

    def beat(self, counters: Sequence[int]) -> None:
        with contextlib.suppress(BrokenPipeError):  # `recv` notices it too
            self._send(BEAT, struct.pack(f"<{len(counters)}q", *counters))

    def close(self, exit_code: int = 0) -> None:
        """Delivers the messages sent so far and the exit code of this process, within GOODBYE_MS. Idempotent."""
        with contextlib.suppress(BrokenPipeError):
            self._send(EXIT, EXIT_CODE.pack(exit_code))
        with self._sending:
            if not self._closed:
                self._closed = True
                self._reports.close()
                self._report_context.term()

    def _send(self, kind: int, payload: bytes) -> None:
        with self._sending:
            if self._closed:
                return
            try:
                self._reports.send(HEADER.pack(kind, self._number) + payload, zmq.NOBLOCK)
            except zmq.Again:
                raise BrokenPipeError("the connection to the controller has ended") from None


def _send_heartbeats(each: "zmq.Socket[bytes]") -> None:
    each.heartbeat_ivl, each.heartbeat_timeout = HEARTBEAT_MS, SILENT_MS


def _identity(number: int) -> bytes:
    return str(number).encode()


def _unpack(counters: memoryview) -> Sequence[int]:
    return struct.unpack(f"<{len(counters) // 8}q", counters)
