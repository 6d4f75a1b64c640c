"""The agent runs the handoffs of one worker: its thread drives the state machine, the control channel and the writes.

The engine puts commands and takes events. Neither blocks:

    agent = HandoffAgent(Receiver(), hello, channel, transfer, wake=loop.wake)
    agent.start()
    agent.put(Fetch(peer, request))            # any thread
    for event in agent.take_events(): ...      # Landed, FetchFailed, Quiesced; of a Sender: StartPrefill, ReleasePages
    agent.close(drain_seconds=5.0)
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hotset.base.address import Address
from hotset.base.errors import EngineStopped, InternalError, MissingDependency
from hotset.handoff.decode_role import DecodeRole
from hotset.handoff.endpoints import EndpointResult, Endpoints
from hotset.handoff.messages import (
    PROTOCOL,
    ChannelEvent,
    Hello,
    Message,
    MessageReceived,
    PackedPiece,
    PeerRestarted,
    Ping,
    Pong,
    ProtocolMismatch,
    ReceiverCommand,
    ReceiverEvent,
    Refused,
    SenderCommand,
    SenderEvent,
)
from hotset.handoff.prefill_role import ConnectFinished, PrefillRole
from hotset.handoff.receiver import Receiver
from hotset.handoff.sender import Sender
from hotset.handoff.timers import Liveness, PeerTiming
from hotset.transfer.api import Throughput, Transfer

LOGGER = logging.getLogger("hotset.handoff")
STOP_SECONDS = 5.0  # time for the thread to end after its drain
NOTIFY_SECONDS = 5.0  # maximum time after the drain for writes in flight to end and for peers to be notified
IDLE_SECONDS = 60.0  # maximum interval between checks of peers while no handoff is open

HandoffCommand = ReceiverCommand | SenderCommand
HandoffEvent = ReceiverEvent | SenderEvent


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """Counters since the start; `num_open`, `num_peers` and `ring_quarantined_bytes` are current values."""

    outcomes: Mapping[str, int]
    num_open: int  # handoffs that have not ended
    num_peers: int  # peers on which a handoff depends
    nbytes: int  # bytes that have landed here, or were written to peers
    throughput: Throughput | None  # None at a decode worker, which writes nothing
    phase_seconds: Mapping[str, float]  # total time that handoffs have spent in each phase
    num_retransmits: int
    dropped: Mapping[str, int]  # dropped messages, by cause
    num_pieces: int = 0  # pieces that were packed or unpacked here
    ring_quarantined_bytes: int = 0


class ControlChannel(Protocol):
    """One process's end of the control channel. `channel.Channel` implements it over ZeroMQ.

    All methods except `wake` must be called by one thread at a time. Sending never waits for a peer, and delivery is
    not guaranteed: a message that cannot be queued is dropped. The caller retransmits messages that need an answer.
    """

    address: str  # `host:port` at which peers reach this process
    listens_on: Address  # where this process listens

    @property
    def dropped(self) -> Mapping[str, int]:
        """Returns the number of dropped messages, by cause."""

    def send(self, peer: str, message: Message) -> None:
        """Queues a message for the last known incarnation at this address. Hello and Ping go to any incarnation.
        Other messages are dropped if no incarnation is known."""

    def receive(self) -> list[ChannelEvent]:
        """Returns the messages and events that have arrived, in order, up to a limit. Never blocks."""

    def wait(self, seconds: float) -> None:
        """Blocks until a message arrives, `wake` is called, or the time has passed."""

    def wake(self) -> None:
        """Ends the current or the next `wait`. May be called from any thread, at any time."""

    def forget(self, peer: str) -> None:
        """Drops the messages that are queued for a peer, and forgets its incarnation."""

    def close(self, linger_s: float = 0.2) -> None:
        """Waits up to `linger_s` seconds for queued messages to be sent, then closes. Idempotent."""


class HandoffRole(Protocol):
    """The part of the agent that differs between decode and prefill workers. The agent's thread drives it. Other
    threads call it only through `stats` and `audit`, under the agent's lock."""

    outcomes: dict[str, int]
    num_pieces: int

    def handle_command(self, command: object, now: float) -> None: ...
    def handle_message(self, peer: str, message: Message, now: float) -> bool: ...
    def handle_pong(self, peer: str, pong: Pong, now: float) -> None: ...
    def connected_to(self, peer: str) -> bool:
        """Returns the value of `connected` in the Pong that answers a Ping of this peer."""

    def run_actions(self) -> Sequence[HandoffEvent]: ...
    def peer_restarted(self, peer: str, now: float) -> None: ...
    def peer_lost(self, peer: str, reason: str, now: float) -> None: ...
    def watched_peers(self) -> set[str]: ...
    def tick(self, now: float) -> None: ...
    def next_deadline(self) -> float | None: ...
    def poll(self, now: float) -> None: ...
    def close(self, now: float) -> None: ...
    def end_drain(self, now: float) -> bool:
        """Handles the end of the drain. Returns whether the role needs more time to notify peers."""

    def audit(self) -> None: ...
    @property
    def busy(self) -> bool: ...
    @property
    def needs_polling(self) -> bool: ...
    @property
    def num_open(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def throughput(self) -> Throughput | None: ...
    @property
    def phase_seconds(self) -> Mapping[str, float]: ...
    @property
    def num_retransmits(self) -> int: ...
    @property
    def ring_quarantined_bytes(self) -> int: ...


def open_channel(bind: str, *, secret: str | None = None, advertise: str | None = None) -> ControlChannel:
    """Opens a control channel. Raises MissingDependency if the packages that it needs are not installed."""
    try:
        from hotset.handoff.channel import Channel
    except ModuleNotFoundError as error:
        raise MissingDependency(f"handoff needs {error.name}: pip install 'hotset[transfer]'") from error
    return Channel(bind, secret=secret, advertise=advertise)


def _pack(piece: PackedPiece) -> None:
    from hotset.handoff.packing import pack  # imported here because it imports torch, which only staging needs

    pack(piece)


def _unpack(piece: PackedPiece) -> None:
    from hotset.handoff.packing import unpack

    unpack(piece)


class HandoffAgent:
    """Runs the handoffs of one worker. All methods may be called from any thread.

    The agent owns the channel and closes it. The caller owns `transfer` and closes it after the agent. Until
    `transfer` is closed, peers may write to the registered memory, and writes of this worker may read it. A decode
    worker passes `Endpoints`, and a prefill worker a `Transfer`.
    """

    def __init__(
        self,
        machine: Receiver | Sender,
        hello: Hello,
        channel: ControlChannel,
        transfer: Transfer | Endpoints,
        *,
        wake: Callable[[], None],
        timing: PeerTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hello` introduces this worker to peers. A decode worker leaves out `description`: it differs from peer to
        peer and is added later.

        The agent's thread calls `wake` when there is an event, and when the thread ends; `wake` must not block.
        """
        if hello.control != channel.address:
            raise InternalError(f"hello has address {hello.control}, the channel {channel.address}")
        if not hello.stores:
            raise InternalError("hello has no store")
        self._channel, self._wake, self._clock = channel, wake, clock
        self._timing = timing or PeerTiming()
        self._liveness = Liveness(self._timing)
        self._inbox: queue.SimpleQueue[HandoffCommand | ConnectFinished | EndpointResult] = queue.SimpleQueue()
        self._events: deque[HandoffEvent] = deque()
        self._lock = threading.Lock()  # held while the agent's thread works, not while it waits
        self._drain_until: float | None = None
        self._notify_seconds = 0.0  # time after the drain in which peers are notified
        self._closing = self._drained = self._ended = False
        self._failure: BaseException | None = None
        self._next_check = 0.0  # time of the next check of peers
        self._num_unexpected = 0  # messages that this role does not handle
        self._role: HandoffRole
        if isinstance(machine, Receiver):
            assert isinstance(transfer, Endpoints), "each peer of a decode worker needs an endpoint of its own"
            self._role = DecodeRole(
                machine, hello, self._liveness, self._timing, channel.send, _unpack, transfer, self._enqueue
            )
        else:
            assert not isinstance(transfer, Endpoints), "a prefill worker has one endpoint"
            self._role = PrefillRole(machine, hello, transfer, self._timing, channel.send, self._enqueue, _pack)
        self._thread = threading.Thread(target=self._run, name="handoff", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, command: HandoffCommand) -> None:
        """Queues a command. Never blocks. During the drain, commands about open handoffs still work, and a Fetch fails
        at once. Raises EngineStopped if the agent's thread has ended."""
        self._check_thread()
        if self._ended:
            raise EngineStopped("the handoff agent is closed")
        self._enqueue(command)

    def take_events(self) -> list[HandoffEvent]:
        """Returns the events since the last call, in order. Never blocks. Raises EngineStopped, with the cause, if the
        agent's thread has died, because handoffs will not report their ends any more."""
        self._check_thread()
        return [self._events.popleft() for _ in range(len(self._events))]

    def stats(self) -> HandoffStats:
        with self._lock:
            role, dropped = self._role, dict(self._channel.dropped)
            if self._num_unexpected:
                dropped["not for this role"] = self._num_unexpected
            return HandoffStats(
                outcomes=dict(role.outcomes),
                num_open=role.num_open,
                num_peers=len(role.watched_peers()),
                nbytes=role.nbytes,
                throughput=role.throughput,
                phase_seconds=dict(role.phase_seconds),
                num_retransmits=role.num_retransmits,
                dropped=dropped,
                num_pieces=role.num_pieces,
                ring_quarantined_bytes=role.ring_quarantined_bytes,
            )

    def audit(self) -> None:
        """Asserts that the state machine is consistent, and that every handoff will end."""
        with self._lock:
            self._role.audit()

    def close(self, drain_seconds: float = 5.0) -> None:
        """Begins no more handoffs, drains for at most `drain_seconds`, ends the thread and closes the channel.

        A decode worker cancels its open handoffs and waits until the peers have confirmed. A prefill worker finishes
        its open handoffs. After the drain, it ends the unfinished ones as failed, and notifies the peer of each when
        its writes have ended. This takes at most `drain_seconds` or NOTIFY_SECONDS more, whichever is less. The pages
        of a handoff that has not ended by then may still be written or read. A second call can shorten the drain.
        """
        until = self._clock() + drain_seconds
        if self._drain_until is None or until < self._drain_until:
            self._notify_seconds = min(NOTIFY_SECONDS, drain_seconds)
            self._drain_until = until
            self._channel.wake()
        if self._thread.ident is None:
            self._channel.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(drain_seconds + NOTIFY_SECONDS + STOP_SECONDS)
            if self._thread.is_alive():
                LOGGER.error("the handoff thread did not end and is abandoned")

    def _check_thread(self) -> None:
        if self._failure is not None:
            raise EngineStopped(f"the handoff thread died: {self._failure!r}") from self._failure

    def _enqueue(self, command: HandoffCommand | ConnectFinished | EndpointResult) -> None:
        self._inbox.put(command)
        self._channel.wake()

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
            try:
                self._channel.close()
            finally:
                self._wake()

    def _finished(self) -> bool:
        drain_until = self._drain_until
        if drain_until is None:
            return False
        if not self._closing:
            self._closing = True
            with self._lock:
                self._role.close(self._clock())
            self._work()
        if not self._drained and self._clock() >= drain_until:
            self._drained = True
            with self._lock:
                if not self._role.end_drain(self._clock()):
                    self._notify_seconds = 0.0
            self._work()
        return not self._role.busy or self._clock() >= drain_until + self._notify_seconds

    def _seconds_to_wait(self) -> float:
        """Returns the time until the next timer or poll of writes is due."""
        now = self._clock()
        times = [self._next_check, self._role.next_deadline()]
        if self._drain_until is not None:
            times.append(self._drain_until + self._notify_seconds if self._drained else self._drain_until)
        if self._role.needs_polling:
            times.append(now + self._timing.poll_every)
        return max(0.0, min(time for time in times if time is not None) - now)

    def _work(self) -> None:
        with self._lock:
            events = self._run_once(self._clock())
            self._events.extend(events)
        if events:
            self._wake()

    def _run_once(self, now: float) -> list[HandoffEvent]:
        """Handles messages, commands and timers once. Returns the events for the engine.

        Peers are checked after the messages, so a peer whose message was just received does not count as silent.
        """
        received = self._channel.receive()
        if received or not self._inbox.empty():
            self._next_check = min(self._next_check, now + self._timing.ping_every / 2)
        for event in received:
            self._handle_channel_event(event, now)
        while not self._inbox.empty():
            self._role.handle_command(self._inbox.get(), now)
        self._role.poll(now)
        self._role.tick(now)
        events = [*self._role.run_actions()]
        if now >= self._next_check:
            self._check_peers(now)
            events += self._role.run_actions()
        return events

    def _handle_channel_event(self, event: ChannelEvent, now: float) -> None:
        match event:
            case PeerRestarted(peer):
                self._role.peer_restarted(peer, now)
            case ProtocolMismatch(peer, _, protocol):
                self._channel.send(peer, Refused(f"the protocol versions differ: {PROTOCOL} here, {protocol} there"))
            case MessageReceived(peer, message):
                self._liveness.mark_heard(peer, now)
                match message:
                    case Ping(number):
                        self._channel.send(peer, Pong(number, self._role.connected_to(peer)))
                    case Pong():
                        self._role.handle_pong(peer, message, now)
                    case _:
                        self._num_unexpected += not self._role.handle_message(peer, message, now)

    def _check_peers(self, now: float) -> None:
        """Pings the peers on which handoffs depend, and reports peers that have timed out as lost. Forgets
        other peers that have been silent for `forget_after` seconds."""
        self._next_check = now + (self._timing.ping_every / 2 if self._role.busy else IDLE_SECONDS)
        for peer, number in self._liveness.watch(self._role.watched_peers(), now).items():
            self._channel.send(peer, Ping(number))
        limit = self._timing.peer_timeout
        for peer in self._liveness.timed_out(now):
            LOGGER.warning("no message from %s for %g s: it is treated as lost", peer, limit)
            self._role.peer_lost(peer, f"no message from {peer} for {limit:g} s", now)
            self._liveness.forget(peer)
        for peer in self._liveness.expired(now):
            self._role.peer_lost(peer, f"no message from {peer} for {self._timing.forget_after:g} s", now)
            self._liveness.forget(peer)
            self._channel.forget(peer)
