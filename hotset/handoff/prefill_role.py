"""The prefill worker's part of an agent: lets decode workers in, drives the sender, and hands its writes on."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Thread

from hotset.base.errors import TransferError
from hotset.handoff.layout import check_peers
from hotset.handoff.messages import (
    Cancel,
    Cancelled,
    FirstTokenSampled,
    HandoffAck,
    HandoffDone,
    HandoffFailed,
    HandoffKey,
    HandoffRequest,
    Hello,
    LeaseGranted,
    Message,
    PackedPiece,
    PieceUnpacked,
    PrefillFailed,
    Refused,
    RowsComputed,
    SenderEvent,
    SendMessage,
    StartPrefill,
    StartWrites,
    SubmitWrites,
    Welcome,
)
from hotset.handoff.sender import Sender
from hotset.handoff.timers import Timing
from hotset.transfer.api import Throughput, Transfer, WriteState, WriteTicket

LOGGER = logging.getLogger("hotset.handoff")

MAX_CONNECTING = 16  # peers at a time; the others say Hello again
MAX_WARNINGS = 256
MAX_HUNG_CONNECTS = 64  # connections that do not end: a thread each
STOPPING = "the prefill worker is stopping"


@dataclass(frozen=True, slots=True)
class ConnectFinished:
    """A peer's memory can be written to, or why it cannot. Comes from another thread, by the agent's inbox."""

    peer: str
    number: int
    flaw: str | None


@dataclass(slots=True)
class _Connecting:
    number: int
    hello: Hello
    since: float
    gone: bool = False  # that process is, meanwhile


@dataclass(frozen=True, slots=True)
class _Write:
    peer: str
    key: HandoffKey
    ticket: WriteTicket


class PrefillRole:
    """Joins engine, sender, transfer and peers. One thread calls it; time comes as an argument."""

    def __init__(
        self,
        sender: Sender,
        hello: Hello,
        transfer: Transfer,
        timing: Timing,
        say: Callable[[str, Message], None],
        later: Callable[[ConnectFinished], None],
        pack: Callable[[PackedPiece], None],
    ) -> None:
        """`later` carries a connection made in another thread to `obey`."""
        self._sender, self._hello, self._transfer, self._say, self._later = sender, hello, transfer, say, later
        self._pack = pack
        self._timing = timing
        self._peers: dict[str, Hello] = {}  # whom we can write to
        self._connecting: dict[str, _Connecting] = {}
        self._connections = 0  # begun
        self._unended = 0  # of these; those that take too long are no longer among the ones above
        self._writes: list[_Write] = []
        self._untold: set[tuple[str, HandoffKey]] = set()  # handoffs of which no end was told yet
        self._closing = False
        self._refused: dict[str, str] = {}  # why, of those that the log knows about
        self.pieces = 0  # packed
        self.ring_quarantined = 0  # a prefill worker has none
        self.outcomes = {"done": 0, "failed": 0, "stopped": 0, "peer lost": 0}

    def obey(self, command: object, now: float) -> None:
        match command:
            case ConnectFinished():
                self._connected(command)
            case RowsComputed() | FirstTokenSampled() | PrefillFailed():
                self._sender.tell(command, now)
            case _:
                raise AssertionError(f"{command!r} is no command for a prefill worker")

    def take(self, peer: str, message: Message, now: float) -> bool:
        """What a peer says. False: it is nothing that a prefill worker is told."""
        match message:
            case Hello():
                self._let_in(peer, message, now)
            case HandoffRequest() if peer not in self._peers:
                self._say(peer, Refused("this worker does not know you, or no longer: say Hello first"))
            case HandoffRequest(key) if self._closing and key not in self._sender.open_keys(peer):
                self._say(peer, HandoffFailed(key, quiesced=False, retry=False, reason=STOPPING))
            case HandoffRequest() | StartWrites() | HandoffAck() | Cancel() | LeaseGranted() | PieceUnpacked():
                self._sender.take(peer, message, now)
            case _:
                return False
        return True

    def restarted(self, peer: str, now: float) -> None:
        self.lost(peer, f"{peer} was restarted", now)

    def lost(self, peer: str, reason: str, now: float) -> None:
        if peer in self._connecting:
            self._connecting[peer].gone = True
        self._peers.pop(peer, None)
        self._sender.peer_lost(peer, reason, now)
        self._transfer.forget(peer)

    def close(self, now: float) -> None:
        """Begins nothing more; what is under way goes on."""
        self._closing = True

    def cut(self, now: float) -> bool:
        """There is no time left to finish: peers are told, so that they need not take us for dead."""
        self._sender.end_all(STOPPING, now)
        return True

    @property
    def busy(self) -> bool:
        """Something is under way: pages here are read, or a peer does not know yet how it ended."""
        return bool(self._writes) or bool(self._sender.phases())

    @property
    def open(self) -> int:
        return len(self._sender.phases())

    def watched(self) -> set[str]:
        """The peers that have to be alive."""
        phases = self._sender.phases()
        for name in self._untold - phases.keys():
            self._count(name, "peer lost")
        return {peer for peer, _ in phases if peer in self._peers}

    def tick(self, now: float) -> None:
        limit = self._timing.introduced_within
        for peer in [peer for peer, each in self._connecting.items() if now - each.since >= limit]:
            LOGGER.warning("connecting to the memory of %s has not ended within %g s", peer, limit)
            del self._connecting[peer]
        self._sender.tick(now)

    def next_deadline(self) -> float | None:
        ends = [each.since + self._timing.introduced_within for each in self._connecting.values()]
        sender = self._sender.next_deadline()
        return min([*ends, *([] if sender is None else [sender])], default=None)

    @property
    def polls(self) -> bool:
        """Writes or forward passes are under way, and have to be looked at."""
        return bool(self._writes) or self._sender.looks

    def poll(self, now: float) -> None:
        """Looks which writes have ended, and which forward passes that the sender waits for."""
        if self._sender.looks:
            self._sender.look(now)
        pending = []
        for write in self._writes:
            state = self._transfer.poll(write.ticket)
            if state is WriteState.PENDING:
                pending.append(write)
            else:
                self._sender.ended(write.peer, write.key, write.ticket, state, now)
        self._writes = pending

    def act(self) -> list[SenderEvent]:
        """Says and submits what the sender wants said and written. Returns what the engine is to be told."""
        facts: list[SenderEvent] = []
        for action in self._sender.take_actions():
            match action:
                case SendMessage(peer, message):
                    self._note(peer, message)
                    self._say(peer, message)
                case SubmitWrites(peer, key, writes, after, pack):
                    if pack is not None:
                        self._pack(pack)
                        self.pieces += 1
                    ticket = self._transfer.submit(peer, writes, after)
                    self._sender.submitted(peer, key, ticket)
                    self._writes.append(_Write(peer, key, ticket))
                case _:
                    if isinstance(action, StartPrefill):
                        self._untold.add((action.peer, action.key))
                    facts.append(action)
        return facts

    @property
    def nbytes(self) -> int:
        """Written to peers."""
        return self._transfer.throughput().nbytes

    @property
    def throughput(self) -> Throughput | None:
        return self._transfer.throughput()

    @property
    def seconds(self) -> Mapping[str, float]:
        return {phase.value: seconds for phase, seconds in self._sender.table.seconds.items()}

    @property
    def resent(self) -> int:
        return self._sender.resent

    def audit(self) -> None:
        self._sender.audit()

    def _let_in(self, peer: str, hello: Hello, now: float) -> None:
        """Answers at once where that can be; else when its memory is connected. It says Hello again meanwhile."""
        flaw = check_peers(self._hello, hello)
        if flaw is None and self._closing:
            flaw = STOPPING
        if flaw is not None:
            self._refuse(peer, flaw)
        elif self._peers.get(peer) == hello:
            self._say(peer, Welcome(self._hello))
        elif self._unended >= MAX_HUNG_CONNECTS:
            self._refuse(peer, f"{self._unended} connections to the memory of peers hang here; restart me")
        elif peer not in self._connecting and len(self._connecting) < MAX_CONNECTING:
            if peer in self._peers:
                self.lost(peer, f"{peer} introduced itself anew", now)
            self._connections += 1
            self._unended += 1
            self._connecting[peer] = _Connecting(self._connections, hello, now)
            # Connecting may wait for the network, and the thread that keeps time must not.
            arguments = (peer, hello, self._connections)
            Thread(target=self._connect, args=arguments, name=f"connect to {peer}", daemon=True).start()

    def _connect(self, peer: str, hello: Hello, number: int) -> None:
        """In another thread."""
        flaw = None
        try:
            self._transfer.connect(peer, hello.description)
        except TransferError as error:
            flaw = f"its memory cannot be reached: {error}"
        except Exception as error:
            # Not to vanish with this thread: the peer hears of it, as of any other reason.
            flaw = f"connecting to its memory failed: {error!r}"
        self._later(ConnectFinished(peer, number, flaw))

    def _connected(self, made: ConnectFinished) -> None:
        self._unended -= 1
        peer, under_way = made.peer, self._connecting.get(made.peer)
        if under_way is None or under_way.number != made.number:
            if under_way is None and peer not in self._peers:
                self._transfer.forget(peer)  # it took too long: nobody waits for it
            return
        del self._connecting[peer]
        if under_way.gone:
            self._transfer.forget(peer)  # its successor says Hello again
        elif made.flaw is not None:
            self._refuse(peer, made.flaw)
        else:
            self._peers[peer] = under_way.hello
            self._sender.peer_known(peer, under_way.hello)
            self._say(peer, Welcome(self._hello))

    def _refuse(self, peer: str, flaw: str) -> None:
        if self._refused.get(peer) != flaw and len(self._refused) < MAX_WARNINGS:
            self._refused[peer] = flaw
            LOGGER.warning("refused %s: %s (logged once)", peer, flaw)
        self._say(peer, Refused(flaw))

    def _note(self, peer: str, message: Message) -> None:
        match message:
            case HandoffDone(key):
                self._count((peer, key), "done")
            case HandoffFailed(key):
                self._count((peer, key), "failed")
            case Cancelled(key):
                self._count((peer, key), "stopped")

    def _count(self, name: tuple[str, HandoffKey], outcome: str) -> None:
        """Of one handoff the first."""
        if name in self._untold:
            self._untold.remove(name)
            self.outcomes[outcome] += 1
