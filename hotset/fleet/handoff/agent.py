"""The agent runs the handoffs of one worker: its thread drives the state machine, the control channel and the writes.

`DecodeAgent` and `PrefillAgent` are the agents of the two roles. The engine puts commands and takes events. Neither
blocks:

    agent = DecodeAgent(Receiver(), hello, channel, endpoints, wake=loop.wake)
    agent.start()
    agent.put(Fetch(peer, request))            # any thread
    for event in agent.take_events(): ...      # Landed, FetchFailed, Quiesced; at a prefill worker StartPrefill, ...
    agent.close(drain_seconds=5.0)
"""

import logging
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict

from hotset.base.address import Address
from hotset.base.errors import EngineStopped, InternalError, MissingDependency
from hotset.engine.ports import HandoffStats, Route, Throughput
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.receiver import Receiver
from hotset.fleet.handoff.sender import Sender
from hotset.fleet.handoff.timers import MAX_PEERS, Liveness, PeerTiming

if TYPE_CHECKING:
    from hotset.fleet.handoff.channel import Channel

LOGGER = logging.getLogger("hotset.fleet.handoff")
STOP_SECONDS = 5.0  # time for the thread to end after its drain, and then for copies in progress to end
NOTIFY_SECONDS = 5.0  # maximum time after the drain for writes in flight to end and for peers to be notified
IDLE_SECONDS = 60.0  # maximum interval between checks of peers while no handoff is open
TICK_SECONDS = 0.02  # minimum interval between checks of the timers of all handoffs
SHORTEST_POLL = 0.2  # after a message or a copy, writes in flight are polled after this share of the usual interval
COPY_THREADS = 2  # threads that pack or unpack pieces
SWITCH_SECONDS = 1e-4  # Python's switch interval: how long one thread can keep another waiting; its default is 5 ms

HandoffCommand = msg.ReceiverCommand | msg.SenderCommand
HandoffEvent = msg.ReceiverEvent | msg.SenderEvent


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """A piece is packed or unpacked. The copying thread puts this into the agent's inbox."""

    copy: "Future[None]"
    on_copied: Callable[[], None]  # called in the agent's thread, unless the copy has raised an exception


def open_channel(bind: str, *, secret: str | None = None, advertise: str | None = None) -> "Channel":
    """Opens a control channel. Raises MissingDependency if the packages that it needs are not installed."""
    try:
        from hotset.fleet.handoff.channel import Channel
    except ModuleNotFoundError as error:
        raise MissingDependency(f"handoff needs {error.name}: pip install 'hotset[transfer]'") from error
    return Channel(bind, secret=secret, advertise=advertise)


class PieceCopies(Protocol):
    """Copies staged pieces. The methods block, and are called in separate threads."""

    def pack(self, piece: msg.PackedPiece) -> None: ...

    def unpack(self, piece: msg.PackedPiece) -> None: ...


class AgentOptions(TypedDict):
    """Arguments of every agent."""

    wake: Callable[[], None]  # called when there is an event, and when the thread ends; must not block
    timing: NotRequired[PeerTiming]
    clock: NotRequired[Callable[[], float]]
    copies: NotRequired["PieceCopies"]  # by default, this process copies all pieces


class HandoffAgent(ABC):
    """Runs the handoffs of one worker. The public methods may be called from any thread. Only the agent's thread calls
    the private methods, which the two roles implement.

    The agent owns the channel and closes it. The caller owns the transfer engine and closes it after the agent. Until
    then, peers may write to the registered memory, and writes of this worker may read it.
    """

    def __init__(
        self,
        machine: Receiver | Sender,
        hello: msg.Hello,
        channel: "Channel",
        options: AgentOptions,
    ) -> None:
        """`hello` introduces this worker to peers. A decode worker leaves out `description`, which differs for each
        peer and is added later."""
        if hello.control != channel.address:
            raise InternalError(f"hello has address {hello.control}, the channel {channel.address}")
        if not hello.stores:
            raise InternalError("hello has no store")
        self._machine, self._hello, self._channel = machine, hello, channel
        self._wake, self._clock = options["wake"], options.get("clock", time.monotonic)
        self._timing = options.get("timing", PeerTiming())
        self._liveness = Liveness(self._timing)
        self._send = channel.send
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()  # commands, and results of other threads
        self._events: deque[HandoffEvent] = deque()
        self._has_new_events = False  # the engine must be woken
        self._lock = threading.Lock()  # held while the agent's thread works, not while it waits
        self._drain_until: float | None = None
        self._notify_seconds = 0.0  # time after the drain in which peers are notified
        self._closing = self._drained = self._ended = False
        self._failure: BaseException | None = None
        self._next_check = 0.0  # time of the next check of peers
        self._next_tick = 0.0  # time of the next check of timers; messages and results of threads can change it
        self._next_poll = float("inf")  # time of the next poll of writes in flight
        # The interval between polls. It starts short, because writes of GPU memory end soon, and then doubles.
        self._poll_pause = self._timing.poll_every
        self._num_unexpected = 0  # messages that this role does not handle
        self._outcomes: dict[str, int] = {}
        self._nbytes = 0  # bytes of contexts that have landed here, or of lists of writes that ended as DONE
        self._num_pieces = 0  # pieces that were packed or unpacked here
        self._routes: dict[str, tuple[Route, ...]] = {}  # by peer; the newest is last
        # These threads pack or unpack pieces, so that the agent's thread never waits for a copy.
        self._copy_threads = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="handoff copy")
        self._pieces = options.get("copies")
        self._copies: set[Future[None]] = set()  # copies that have not ended, or whose CopyEnded is not handled yet
        self._thread = threading.Thread(target=self._run, name="handoff", daemon=True)

    @abstractmethod
    def _handle_command(self, command: object, now: float) -> None:
        """Handles a command of the engine, or the result of another thread."""

    @abstractmethod
    def _handle_message(self, peer: str, message: msg.Message, now: float) -> bool:
        """Handles a message from a peer. Returns False for a message that only the other role handles."""

    @abstractmethod
    def _on_peer_restarted(self, peer: str, now: float) -> None: ...

    @abstractmethod
    def _on_peer_lost(self, peer: str, reason: str, now: float) -> None: ...

    @abstractmethod
    def _watched_peers(self) -> set[str]:
        """Returns the peers on which a handoff depends."""

    @abstractmethod
    def _run_actions(self) -> None:
        """Runs the actions of the state machine."""

    @abstractmethod
    def _begin_drain(self, now: float) -> None:
        """Begins no more handoffs."""

    @abstractmethod
    def _end_drain(self, now: float) -> bool:
        """Handles the end of the drain. Returns whether the role needs more time to notify peers."""

    @property
    @abstractmethod
    def _busy(self) -> bool:
        """Returns whether the agent must still run although it is closed."""

    @property
    @abstractmethod
    def _num_open(self) -> int: ...

    # Only one of the two roles overrides each of the following methods.

    @property
    def _throughput(self) -> Throughput | None:
        """The throughput of writes. It is None at a decode worker, which writes nothing."""
        return None

    def _poll(self, now: float) -> bool:
        """Checks which writes and which forward passes have ended. Returns whether it must be called again soon."""
        return False

    def _connected_to(self, peer: str) -> bool:
        """Returns the value of `connected` in the Pong that answers a Ping of this peer."""
        return True

    def _on_pong(self, peer: str, pong: msg.Pong, now: float) -> None:
        """Handles the answer to a Ping."""
        return

    def _tick(self, now: float) -> None:
        self._machine.tick(now)

    def _next_deadline(self) -> float:
        """Returns when `_tick` must be called next, if nothing else happens."""
        return self._machine.next_deadline()

    def start(self) -> None:
        """Starts the thread. Also shortens the switch interval of Python's threads, so that the work for handoffs does
        not delay the steps of the engine."""
        sys.setswitchinterval(SWITCH_SECONDS)
        self._thread.start()

    def put(self, command: HandoffCommand) -> None:
        """Queues a command. Never blocks. During the drain, commands for open handoffs are still executed, and a Fetch
        fails at once. Raises EngineStopped if the agent's thread has ended."""
        self._check_thread()
        if self._ended:
            raise EngineStopped("the handoff agent is closed")
        self._enqueue(command)

    def take_events(self) -> list[HandoffEvent]:
        """Returns the events since the last call, in order. Never blocks. If the agent's thread has died, raises
        EngineStopped with the cause, because no handoff will report its end any more."""
        self._check_thread()
        return [self._events.popleft() for _ in range(len(self._events))]

    @property
    def address(self) -> str:
        """The address at which peers reach this worker."""
        return self._channel.address

    @property
    def listens_on(self) -> Address:
        return self._channel.listens_on

    def stats(self) -> HandoffStats:
        with self._lock:
            dropped = dict(self._channel.dropped)
            if self._num_unexpected:
                dropped["not for this role"] = self._num_unexpected
            return HandoffStats(
                outcomes=dict(self._outcomes),
                num_open=self._num_open,
                num_peers=len(self._watched_peers()),
                nbytes=self._nbytes,
                throughput=self._throughput,
                phase_seconds={phase.value: seconds for phase, seconds in self._machine.table.seconds.items()},
                num_retransmits=self._machine.num_retransmits,
                dropped=dropped,
                num_pieces=self._num_pieces,
                ring_quarantined_bytes=self._machine.ring_quarantined_bytes,
                routes=dict(self._routes),
            )

    def audit(self) -> None:
        """Asserts that the state machine is consistent, and that every handoff will end."""
        with self._lock:
            self._machine.audit()

    def close(self, drain_seconds: float = 5.0) -> None:
        """Begins no more handoffs, drains for at most `drain_seconds`, ends the thread and closes the channel.

        A decode worker cancels its open handoffs and waits until the peers have confirmed. A prefill worker finishes
        its open handoffs. After the drain, it ends the unfinished ones as failed, and notifies the peer of each when
        its writes have ended. This takes at most `drain_seconds` or NOTIFY_SECONDS more, whichever is less. If a
        handoff has not ended by then, the transfer engine may still write or read its pages. This agent copies no more
        pieces; the log has an error if a copy still runs. A second call can shorten the drain.
        """
        until = self._clock() + drain_seconds
        if self._drain_until is None or until < self._drain_until:
            self._notify_seconds = min(NOTIFY_SECONDS, drain_seconds)
            self._drain_until = until
            self._channel.wake()
        if self._thread.ident is None:
            self._copy_threads.shutdown(wait=False, cancel_futures=True)
            self._channel.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(drain_seconds + NOTIFY_SECONDS + STOP_SECONDS)
            if self._thread.is_alive():
                LOGGER.error("the handoff thread did not end and is abandoned")
        # The caller may release the memory afterwards. A copy in progress would then crash the process.
        if wait([copy for copy in self._copies if not copy.cancelled()], STOP_SECONDS).not_done:
            LOGGER.error("a piece is still being copied after %g s", STOP_SECONDS)

    def _add_routes(self, peer: str, routes: tuple[Route, ...]) -> None:
        self._routes.pop(peer, None)
        self._routes[peer] = routes
        if len(self._routes) > MAX_PEERS:
            del self._routes[next(iter(self._routes))]

    def _check_thread(self) -> None:
        if self._failure is not None:
            raise EngineStopped(f"the handoff thread died: {self._failure!r}") from self._failure

    def _enqueue(self, command: object) -> None:
        """Passes a command, or the result of another thread, to `_handle_command` in the agent's thread."""
        self._inbox.put(command)
        self._channel.wake()

    def _piece_copies(self) -> PieceCopies:
        if self._pieces is None:
            from hotset.fleet.handoff import packing  # imports torch, which only staging needs

            return packing
        return self._pieces

    def _begin_copy(self, copy: Callable[[], None], on_copied: Callable[[], None]) -> None:
        """Runs `copy` in a copying thread, and then `on_copied` in the agent's thread."""
        future = self._copy_threads.submit(copy)
        self._copies.add(future)
        future.add_done_callback(lambda ended: self._enqueue(CopyEnded(ended, on_copied)))

    def _handle_inbox(self, now: float) -> bool:
        """Handles commands, and results of other threads. Returns whether the inbox had any."""
        if self._inbox.empty():
            return False
        while not self._inbox.empty():
            match self._inbox.get():
                case CopyEnded(copy, on_copied):
                    self._copies.remove(copy)
                    copy.result()  # raises the exception of the copy
                    self._num_pieces += 1
                    on_copied()
                case command:
                    self._handle_command(command, now)
        return True

    def _run(self) -> None:
        try:
            while not self._finished():
                self._channel.wait(self._seconds_to_wait())
                self._work()
        except BaseException as error:
            LOGGER.exception("the handoff thread died")
            self._failure = error
        finally:
            self._ended = True
            self._copy_threads.shutdown(wait=False, cancel_futures=True)  # `close` waits for running copies
            try:
                self._channel.close()
            finally:
                self._wake()

    def _finished(self) -> bool:
        drain_until = self._drain_until
        if drain_until is None:
            return False
        if not self._closing:
            self._closing, self._next_tick = True, 0.0
            with self._lock:
                self._begin_drain(self._clock())
            self._work()
        if not self._drained and self._clock() >= drain_until:
            self._drained, self._next_tick = True, 0.0
            with self._lock:
                if not self._end_drain(self._clock()):
                    self._notify_seconds = 0.0
            self._work()
        return not self._busy or self._clock() >= drain_until + self._notify_seconds

    def _seconds_to_wait(self) -> float:
        """Returns the time until the next timer or poll of writes is due."""
        times = [self._next_check, self._next_tick, self._next_poll]
        if self._drain_until is not None:
            times.append(self._drain_until + self._notify_seconds if self._drained else self._drain_until)
        return max(0.0, min(times) - self._clock())

    def _work(self) -> None:
        with self._lock:
            self._run_once(self._clock())
            has_events, self._has_new_events = self._has_new_events, False
        if has_events:
            self._wake()

    def _emit(self, event: HandoffEvent) -> None:
        """Passes an event to the engine."""
        self._events.append(event)
        self._has_new_events = True

    def _run_once(self, now: float) -> None:
        """Handles messages, commands and timers once.

        Peers are checked after the messages, so a peer whose message was just received does not count as silent.
        """
        received = self._channel.receive()
        for event in received:
            self._handle_channel_event(event, now)
        active = self._handle_inbox(now) or bool(received)
        if active:
            self._next_check = min(self._next_check, now + self._timing.ping_every / 2)
            self._next_tick = min(self._next_tick, now + TICK_SECONDS)
        self._next_poll = float("inf")
        if self._poll(now):
            longest = self._timing.poll_every
            self._poll_pause = longest * SHORTEST_POLL if active else min(2 * self._poll_pause, longest)
            self._next_poll = now + self._poll_pause
            self._next_tick = min(self._next_tick, now + TICK_SECONDS)
        if now >= self._next_tick:
            self._tick(now)
            self._next_tick = self._next_deadline()
        self._run_actions()
        if now >= self._next_check:
            self._check_peers(now)
            self._next_tick = now
            self._run_actions()

    def _handle_channel_event(self, event: msg.ChannelEvent, now: float) -> None:
        match event:
            case msg.PeerRestarted(peer):
                self._on_peer_restarted(peer, now)
            case msg.ProtocolMismatch(peer, _, protocol):
                self._channel.send(
                    peer, msg.Refused(f"the protocol versions differ: {msg.PROTOCOL} here, {protocol} there")
                )
            case msg.MessageReceived(peer, message):
                self._liveness.mark_heard(peer, now)
                match message:
                    case msg.Ping(number):
                        self._channel.send(peer, msg.Pong(number, self._connected_to(peer)))
                    case msg.Pong():
                        self._on_pong(peer, message, now)
                    case _:
                        self._num_unexpected += not self._handle_message(peer, message, now)

    def _check_peers(self, now: float) -> None:
        """Pings the peers on which handoffs depend, and reports peers that have timed out as lost. Forgets
        other peers that have been silent for `forget_after` seconds."""
        self._next_check = now + (self._timing.ping_every / 2 if self._busy else IDLE_SECONDS)
        for peer, number in self._liveness.watch(self._watched_peers(), now).items():
            self._channel.send(peer, msg.Ping(number))
        limit = self._timing.peer_timeout
        for peer in self._liveness.timed_out(now):
            LOGGER.warning("no message from %s for %g s: it is treated as lost", peer, limit)
            self._on_peer_lost(peer, f"no message from {peer} for {limit:g} s", now)
            self._liveness.forget(peer)
        for peer in self._liveness.expired(now):
            self._on_peer_lost(peer, f"no message from {peer} for {self._timing.forget_after:g} s", now)
            self._liveness.forget(peer)
            self._channel.forget(peer)
