"""Handoffs of one worker: the thread that owns its state machine, its control channel and its writes.

The engine gives commands and takes facts, and never waits:

    agent = HandoffAgent(Receiver(), hello, channel, transfer, wake=loop.wake)
    agent.start()
    agent.put(Fetch(peer, ask))         # any thread
    for fact in agent.facts(): ...      # Landed, Lost, Calm; for a Sender: Prefill, Drop
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

from hotset.base.errors import EngineStopped, MissingDependency
from hotset.handoff.decode_role import DecodeRole
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
from hotset.handoff.timers import Liveness, Timing
from hotset.transfer.api import Throughput, Transfer

LOGGER = logging.getLogger("hotset.handoff")
STOP_SECONDS = 5.0  # for the thread to end after its drain
NOTIFY_SECONDS = 5.0  # at most, after a drain: writes under way end, and peers are told of what was not finished
IDLE_SECONDS = 60.0  # between looks at peers on which nothing depends

HandoffCommand = ReceiverCommand | SenderCommand
HandoffEvent = ReceiverEvent | SenderEvent


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """Since the start, but for `open` and `peers`."""

    outcomes: Mapping[str, int]
    open: int  # handoffs whose end is not known to all that must know it
    peers: int  # on which something depends now
    nbytes: int  # landed here, or written to peers
    throughput: Throughput | None  # of the transfer, where this side writes
    seconds: Mapping[str, float]  # that handoffs have spent in each phase
    resent: int  # messages that had to be said again
    dropped: Mapping[str, int]  # messages, by cause
    pieces: int = 0  # of contexts, that were packed or unpacked here
    ring_quarantined: int = 0  # bytes of the ring, now


class ControlChannel(Protocol):
    """One process's end of the control channel. All calls but `wake` come from one thread at a time.

    Nothing waits for a peer and nothing is promised: what cannot be queued is dropped, and whoever needs an answer asks
    again.
    """

    address: str  # at which peers reach this process: `host:port`

    @property
    def dropped(self) -> Mapping[str, int]:
        """Messages, by cause."""

    def send(self, peer: str, message: Message) -> None:
        """Queues it for the incarnation heard last at this address; questions of who is there go to any."""

    def receive(self) -> list[ChannelEvent]:
        """What has come, in its order, a limited number at a time. Never waits."""

    def wait(self, seconds: float) -> None:
        """Until something has come, somebody called `wake`, or so long."""

    def wake(self) -> None:
        """Ends the `wait` of the owner, now or the next. From any thread, at any time."""

    def forget(self, peer: str) -> None:
        """Drops what is queued for it, and its incarnation."""

    def close(self, last_words_s: float = 0.2) -> None:
        """Gives messages just sent so long to leave, then closes. Idempotent."""


class HandoffRole(Protocol):
    """What the two roles do differently. All of it in the agent's thread."""

    outcomes: dict[str, int]
    pieces: int

    def obey(self, command: object, now: float) -> None: ...
    def take(self, peer: str, message: Message, now: float) -> bool: ...
    def act(self) -> Sequence[HandoffEvent]: ...
    def restarted(self, peer: str, now: float) -> None: ...
    def lost(self, peer: str, reason: str, now: float) -> None: ...
    def watched(self) -> set[str]: ...
    def tick(self, now: float) -> None: ...
    def next_deadline(self) -> float | None: ...
    def poll(self, now: float) -> None: ...
    def close(self, now: float) -> None: ...
    def cut(self, now: float) -> bool:
        """The drain is over. Whether peers are now to be told of its end, and waited for."""

    def audit(self) -> None: ...
    @property
    def busy(self) -> bool: ...
    @property
    def polls(self) -> bool: ...
    @property
    def open(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def throughput(self) -> Throughput | None: ...
    @property
    def seconds(self) -> Mapping[str, float]: ...
    @property
    def resent(self) -> int: ...
    @property
    def ring_quarantined(self) -> int: ...


def open_channel(bind: str, *, secret: str | None = None, advertise: str | None = None) -> ControlChannel:
    """A control channel. MissingDependency where the packages that it needs are not installed."""
    try:
        from hotset.handoff.channel import Channel
    except ModuleNotFoundError as error:
        raise MissingDependency(f"handoff needs {error.name}: pip install 'hotset[transfer]'") from error
    return Channel(bind, secret=secret, advertise=advertise)


def _pack(piece: PackedPiece) -> None:
    from hotset.handoff.packing import pack  # only whoever stages needs torch

    pack(piece)


def _unpack(piece: PackedPiece) -> None:
    from hotset.handoff.packing import unpack

    unpack(piece)


class HandoffAgent:
    """One worker's handoffs. `put`, `facts`, `stats`, `audit` and `close` are for the engine, from any thread.

    Owns the channel, and closes it. The transfer stays its maker's, who closes it after the agent: until then a peer
    or a write of ours may still use the memory that it registered.
    """

    def __init__(
        self,
        machine: Receiver | Sender,
        hello: Hello,
        channel: ControlChannel,
        transfer: Transfer,
        *,
        wake: Callable[[], None],
        timing: Timing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hello` introduces this worker: at the channel's address, with the store that contexts land in or come from.
        `wake` is called by the agent's thread whenever there is a fact, and when the thread has ended; it must not
        wait."""
        assert hello.control == channel.address, f"{hello.control} is not {channel.address}"
        assert hello.stores, "peers could not be compared with this worker"
        self._channel, self._wake, self._clock = channel, wake, clock
        self._timing = timing or Timing()
        self._liveness = Liveness(self._timing)
        self._inbox: queue.SimpleQueue[HandoffCommand | ConnectFinished] = queue.SimpleQueue()
        self._facts: deque[HandoffEvent] = deque()
        self._turn = threading.Lock()  # held while the thread works, not while it waits
        self._drain_until: float | None = None
        self._farewell = 0.0  # seconds after the drain
        self._closing = self._cut = self._ended = False
        self._failure: BaseException | None = None
        self._watch_at = 0.0
        self._pings = 0  # sent
        self._misplaced = 0
        self._side: HandoffRole
        if isinstance(machine, Receiver):
            self._side = DecodeRole(machine, hello, self._liveness, self._timing, channel.send, _unpack)
        else:
            self._side = PrefillRole(machine, hello, transfer, self._timing, channel.send, self._put, _pack)
        self._thread = threading.Thread(target=self._run, name="handoff", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, command: HandoffCommand) -> None:
        """Never waits. While the agent drains, what is under way can still be told of, and a Fetch is lost at once.
        EngineStopped when the agent's thread has ended."""
        self._check()
        if self._ended:
            raise EngineStopped("handoffs are closed")
        self._put(command)

    def facts(self) -> list[HandoffEvent]:
        """What has become known since the last call, in its order. Never waits. EngineStopped, with the cause, if the
        agent's thread has died: then nothing can be known of any handoff any more."""
        self._check()
        return [self._facts.popleft() for _ in range(len(self._facts))]

    def stats(self) -> HandoffStats:
        with self._turn:
            side, dropped = self._side, dict(self._channel.dropped)
            if self._misplaced:
                dropped["not for this role"] = self._misplaced
            return HandoffStats(
                outcomes=dict(side.outcomes),
                open=side.open,
                peers=len(side.watched()),
                nbytes=side.nbytes,
                throughput=side.throughput,
                seconds=dict(side.seconds),
                resent=side.resent,
                dropped=dropped,
                pieces=side.pieces,
                ring_quarantined=side.ring_quarantined,
            )

    def audit(self) -> None:
        """Proves that every handoff has an end in sight."""
        with self._turn:
            self._side.audit()

    def close(self, drain_seconds: float = 5.0) -> None:
        """Begins nothing more. A decode worker gives up what is open, and waits so long at most until both sides know.
        A prefill worker finishes what is open; after so long it ends the rest as failed, and tells peers when writes
        have ended, for as long again but FAREWELL_SECONDS at the most. Then the thread ends and the channel is closed.
        What has no end by then gets none: its pages may still be written to, or read. Called again, it may shorten the
        drain."""
        until = self._clock() + drain_seconds
        if self._drain_until is None or until < self._drain_until:
            self._farewell = min(NOTIFY_SECONDS, drain_seconds)
            self._drain_until = until
            self._channel.wake()
        if self._thread.ident is None:
            self._channel.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(drain_seconds + NOTIFY_SECONDS + STOP_SECONDS)
            if self._thread.is_alive():
                LOGGER.error("the handoff thread does not end; it is left behind")

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineStopped(f"the handoff thread died: {self._failure!r}") from self._failure

    def _put(self, command: HandoffCommand | ConnectFinished) -> None:
        self._inbox.put(command)
        self._channel.wake()

    def _run(self) -> None:
        try:
            while not self._finished():
                self._channel.wait(self._pause())
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
            with self._turn:
                self._side.close(self._clock())
            self._work()
        if not self._cut and self._clock() >= drain_until:
            self._cut = True
            with self._turn:
                if not self._side.cut(self._clock()):
                    self._farewell = 0.0
            self._work()
        return not self._side.busy or self._clock() >= drain_until + self._farewell

    def _pause(self) -> float:
        """Until there is something to do by the clock alone."""
        now = self._clock()
        times = [self._watch_at, self._side.next_deadline()]
        if self._drain_until is not None:
            times.append(self._drain_until + self._farewell if self._cut else self._drain_until)
        if self._side.polls:
            times.append(now + self._timing.poll_every)
        return max(0.0, min(at for at in times if at is not None) - now)

    def _work(self) -> None:
        with self._turn:
            facts = self._take_turn(self._clock())
            self._facts.extend(facts)
        if facts:
            self._wake()

    def _take_turn(self, now: float) -> list[HandoffEvent]:
        """Hears everybody first, so that nobody who spoke is taken for silent."""
        events = self._channel.receive()
        if events or not self._inbox.empty():
            self._watch_at = min(self._watch_at, now + self._timing.ping_every / 2)
        for event in events:
            self._hear(event, now)
        while not self._inbox.empty():
            self._side.obey(self._inbox.get(), now)
        self._side.poll(now)
        self._side.tick(now)
        facts = [*self._side.act()]
        if now >= self._watch_at:
            self._watch(now)
            facts += self._side.act()
        return facts

    def _hear(self, event: ChannelEvent, now: float) -> None:
        match event:
            case PeerRestarted(peer):
                self._side.restarted(peer, now)
            case ProtocolMismatch(peer, _, protocol):
                self._channel.send(peer, Refused(f"protocol version {PROTOCOL} here, {protocol} there"))
            case MessageReceived(peer, message):
                self._liveness.heard(peer, now)
                match message:
                    case Ping(number):
                        self._channel.send(peer, Pong(number))
                    case Pong():
                        pass
                    case _:
                        self._misplaced += not self._side.take(peer, message, now)

    def _watch(self, now: float) -> None:
        """Asks those on whom something depends whether they are there, and gives up those who are not."""
        self._watch_at = now + (self._timing.ping_every / 2 if self._side.busy else IDLE_SECONDS)
        for peer in self._liveness.watch(self._side.watched(), now):
            self._pings += 1
            self._channel.send(peer, Ping(self._pings))
        for peer in self._liveness.silent(now):
            LOGGER.warning("%s has not been heard for %g s: lost", peer, self._timing.lost_after)
            self._side.lost(peer, f"{peer} has not been heard for {self._timing.lost_after:g} s", now)
            self._liveness.forget(peer)
        for peer in self._liveness.long_silent(now):
            self._side.lost(peer, f"{peer} has been silent for long", now)
            self._liveness.forget(peer)
            self._channel.forget(peer)
