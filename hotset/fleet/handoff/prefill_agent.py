"""The agent of a prefill worker: it connects to decode workers, drives the sender and submits its writes."""

import logging
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Unpack

from hotset.base.errors import InternalError, TransferError
from hotset.engine.ports import Route, Throughput
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.agent import AgentOptions, HandoffAgent
from hotset.fleet.handoff.layout import check_peers
from hotset.fleet.handoff.messages import Hello, Message
from hotset.fleet.handoff.routes import measure_routes
from hotset.fleet.handoff.sender import Sender
from hotset.fleet.transfer.api import Transfer, WriteState, WriteTicket
from hotset.schedule.handoffs import FirstTokenSampled, PrefillFailed, RowsComputed

if TYPE_CHECKING:
    from hotset.fleet.handoff.channel import Channel

LOGGER = logging.getLogger("hotset.fleet.handoff")

MAX_CONNECTING = 16  # peers that are being connected at a time; further peers retransmit Hello until it is their turn
MAX_WARNINGS = 256
MAX_HUNG_CONNECTS = 64  # limit of running connects, including those that timed out; each holds a thread
STOPPING = "the prefill worker is stopping"


@dataclass(frozen=True, slots=True)
class ConnectFinished:
    """The result of connecting to a peer's memory. The connecting thread puts it into the agent's inbox."""

    peer: str
    number: int  # identifies the connect
    routes: tuple[Route, ...]
    error: str | None


@dataclass(slots=True)
class _Connecting:
    number: int
    hello: Hello
    since: float
    peer_gone: bool = False  # the process that sent Hello has died or restarted


@dataclass(slots=True, eq=False)
class _ListInFlight:
    action: msg.SubmitWrites
    ticket: WriteTicket | None = None  # None while a piece is being packed
    peer_lost: bool = False


class PrefillAgent(HandoffAgent):
    """Connects engine, sender, transfer engine and peers."""

    def __init__(
        self, sender: Sender, hello: Hello, channel: "Channel", transfer: Transfer, **options: Unpack[AgentOptions]
    ) -> None:
        super().__init__(sender, hello, channel, options)
        self._sender, self._transfer = sender, transfer
        self._connecting: dict[str, _Connecting] = {}
        self._num_connects = 0  # connects begun since the start
        self._connects_running = 0  # includes connects that timed out, which are no longer in `_connecting`
        self._lists: list[_ListInFlight] = []
        self._refused: dict[str, str] = {}  # the last logged reason, by peer
        self._outcomes = sender.outcomes

    def _handle_command(self, command: object, now: float) -> None:
        match command:
            case ConnectFinished():
                self._on_connect_finished(command)
            case RowsComputed() | FirstTokenSampled() | PrefillFailed():
                self._sender.handle_command(command, now)
            case _:
                raise InternalError(f"{command!r} is not a command for a prefill worker")

    def _handle_message(self, peer: str, message: Message, now: float) -> bool:
        """Handles a message from a peer. Returns False for a message that only a decode worker handles."""
        match message:
            case Hello():
                self._on_hello(peer, message, now)
            case msg.HandoffRequest() if peer not in self._sender.peers:
                pass  # the peer learns from the next Pong that this worker has no Hello from it, or has forgotten it
            case msg.HandoffRequest(key) if self._closing and key not in self._sender.open_keys(peer):
                self._send(peer, msg.HandoffFailed(key, quiesced=False, retry=False, reason=STOPPING))
            case (
                msg.HandoffRequest()
                | msg.StartWrites()
                | msg.HandoffAck()
                | msg.Cancel()
                | msg.LeaseGranted()
                | msg.PieceUnpacked()
            ):
                self._sender.handle_message(peer, message, now)
            case _:
                return False
        return True

    def _connected_to(self, peer: str) -> bool:
        """Returns whether handoffs with this peer are possible without a new Hello."""
        return peer in self._sender.peers

    def _on_peer_restarted(self, peer: str, now: float) -> None:
        self._on_peer_lost(peer, f"{peer} was restarted", now)

    def _on_peer_lost(self, peer: str, reason: str, now: float) -> None:
        # Waiting writes must be submitted now: the peer's next endpoint will have the same name as this one.
        self._run_actions()
        for entry in self._lists:
            entry.peer_lost |= entry.action.peer == peer
        if peer in self._connecting:
            self._connecting[peer].peer_gone = True
        self._sender.peer_lost(peer, reason, now)
        self._transfer.forget(peer)

    def _begin_drain(self, now: float) -> None:
        """Does nothing, because open handoffs continue. `_closing` makes this worker refuse new ones."""

    def _end_drain(self, now: float) -> bool:
        """Ends the open handoffs as failed. Returns True, because the peers must still be notified."""
        self._sender.fail_all(STOPPING, now)
        return True

    @property
    def _busy(self) -> bool:
        """Returns whether writes are in flight, or a handoff is not closed."""
        return bool(self._lists) or bool(self._sender.phases())

    @property
    def _num_open(self) -> int:
        return len(self._sender.phases())

    def _watched_peers(self) -> set[str]:
        """Returns the connected peers on which a handoff depends."""
        return {peer for peer, _ in self._sender.phases() if peer in self._sender.peers}

    def _tick(self, now: float) -> None:
        limit = self._timing.hello_timeout
        for peer in [peer for peer, entry in self._connecting.items() if now - entry.since >= limit]:
            LOGGER.warning("connecting to the memory of %s has not finished within %g s", peer, limit)
            del self._connecting[peer]
        self._sender.tick(now)

    def _next_deadline(self) -> float:
        ends = [entry.since + self._timing.hello_timeout for entry in self._connecting.values()]
        return min([*ends, self._sender.next_deadline()])

    def _poll(self, now: float) -> bool:
        """Checks which writes and which forward passes have ended, and passes this to the sender."""
        awaits_pass = self._sender.has_pending_events
        if awaits_pass:
            self._sender.poll_events(now)
        pending = []
        for entry in self._lists:
            state = WriteState.PENDING if entry.ticket is None else self._transfer.poll(entry.ticket)
            if entry.ticket is None or state is WriteState.PENDING:
                pending.append(entry)
            else:
                self._nbytes += entry.ticket.nbytes if state is WriteState.DONE else 0
                self._report_end(entry, state, now)
        self._lists = pending
        return awaits_pass or any(entry.ticket is not None for entry in pending)

    def _run_actions(self) -> None:
        for action in self._sender.take_actions():
            match action:
                case msg.SendMessage(peer, message):
                    self._send(peer, message)
                case msg.SubmitWrites():
                    self._begin_writes(action)
                case _:
                    self._emit(action)

    def _begin_writes(self, action: msg.SubmitWrites) -> None:
        """Submits a list to the transfer engine. If a piece must be packed first, submits the list afterwards."""
        entry = _ListInFlight(action)
        self._lists.append(entry)
        if action.pack is None:
            self._next_poll = min(self._next_poll, self._clock() + self._timing.poll_every)
            self._submit(entry)
        else:
            self._begin_copy(partial(self._piece_copies().pack, action.pack), partial(self._on_packed, entry))

    def _on_packed(self, entry: _ListInFlight) -> None:
        if not entry.peer_lost:
            self._submit(entry)
            return
        # The peer's next endpoint may already have the same name, and this list must not be written there.
        self._lists.remove(entry)
        self._report_end(entry, WriteState.FAILED_QUIESCED, self._clock())

    def _submit(self, entry: _ListInFlight) -> None:
        entry.ticket = self._transfer.submit(entry.action.peer, entry.action.writes, entry.action.after)

    def _report_end(self, entry: _ListInFlight, state: WriteState, now: float) -> None:
        action = entry.action
        self._sender.on_write_ended(action.peer, action.key, action.number, state, now)

    @property
    def _throughput(self) -> Throughput | None:
        return self._transfer.throughput()

    def _on_hello(self, peer: str, hello: Hello, now: float) -> None:
        """Answers now if the peer is refused or already connected. Otherwise begins to connect to the peer's memory,
        and answers when it is connected. Does nothing while this peer, or MAX_CONNECTING others, are being connected:
        the peer retransmits Hello until it has an answer."""
        reason = check_peers(self._hello, hello)
        if reason is None and self._closing:
            reason = STOPPING
        if reason is not None:
            self._refuse(peer, reason)
        elif self._sender.peers.get(peer) == hello:
            self._welcome(peer, hello)
        elif self._connects_running >= MAX_HUNG_CONNECTS:
            count = self._connects_running
            unfinished = f"{count} attempts to connect to the memory of peers have not ended here"
            self._refuse(peer, f"{unfinished}; if they hang, restart this worker")
        elif peer not in self._connecting and len(self._connecting) < MAX_CONNECTING:
            if peer in self._sender.peers:
                self._on_peer_lost(peer, f"{peer} introduced itself again", now)
            self._num_connects += 1
            self._connects_running += 1
            self._connecting[peer] = _Connecting(self._num_connects, hello, now)
            # Connecting may wait for the network, but this thread runs the timers and must not wait.
            arguments = (peer, hello, self._num_connects)
            Thread(target=self._connect, args=arguments, name=f"connect to {peer}", daemon=True).start()

    def _connect(self, peer: str, hello: Hello, number: int) -> None:
        """Connects to a peer's memory. Runs in a separate thread."""
        routes: tuple[Route, ...] = ()
        reason = None
        try:
            self._transfer.connect(peer, hello.description)
            routes = measure_routes(self._transfer, peer, self._hello.probes, hello.probes)
        except TransferError as error:
            reason = f"its memory cannot be reached: {error}"
        except Exception as error:
            # An exception that is not reported here would be lost when this thread ends.
            reason = f"connecting to its memory failed: {error!r}"
        self._enqueue(ConnectFinished(peer, number, routes, reason))

    def _on_connect_finished(self, finished: ConnectFinished) -> None:
        self._connects_running -= 1
        peer, connecting = finished.peer, self._connecting.get(finished.peer)
        if connecting is None or connecting.number != finished.number:
            if connecting is None and peer not in self._sender.peers:
                self._transfer.forget(peer)  # the connect had timed out
            return
        del self._connecting[peer]
        if connecting.peer_gone:
            self._transfer.forget(peer)  # the new process at that address must send Hello
        elif finished.error is not None:
            self._transfer.forget(peer)
            self._refuse(peer, finished.error)
        else:
            self._add_routes(peer, finished.routes)
            self._sender.add_peer(peer, connecting.hello, finished.routes)
            self._welcome(peer, connecting.hello)

    def _welcome(self, peer: str, hello: Hello) -> None:
        self._send(peer, msg.Welcome(self._hello, hello.endpoint, self._routes.get(peer, ())))

    def _refuse(self, peer: str, reason: str) -> None:
        if self._refused.get(peer) != reason and len(self._refused) < MAX_WARNINGS:
            self._refused[peer] = reason
            LOGGER.warning("refused %s: %s (logged once)", peer, reason)
        self._send(peer, msg.Refused(reason))
