"""The agent of a decode worker: it introduces the worker to prefill workers, drives the receiver, and cuts off
prefill workers that are lost."""

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Unpack

from hotset.base.errors import InternalError
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.agent import AgentOptions, HandoffAgent, HandoffEvent
from hotset.fleet.handoff.layout import check_peers
from hotset.fleet.handoff.links import MAX_LINKS, EndpointClosed, EndpointOpened, Endpoints, Links
from hotset.fleet.handoff.messages import Hello, Message, Store
from hotset.fleet.handoff.receiver import OPEN_PHASES, UNREPORTED_PHASES, Receiver
from hotset.schedule.handoffs import CancelFetch, HandoffKey

if TYPE_CHECKING:
    from hotset.fleet.handoff.channel import Channel

# The time for the open handoffs of a living peer to end before the peer is cut off. New handoffs wait meanwhile.
HOLD_SECONDS = 10.0


@dataclass(slots=True)
class _Introduction:
    """A Hello that is not answered yet. Fetches from this peer wait here until it is answered."""

    since: float  # time of the first Hello; until it is sent, when the wait for an endpoint began
    sent_at: float  # time of the newest Hello
    sent: bool = False  # False while the endpoint is being opened, or is held
    fetches: dict[HandoffKey, msg.Fetch] = field(default_factory=dict)


class DecodeAgent(HandoffAgent):
    """Connects engine, receiver and peers.

    Each peer writes through a link of its own. When the peer is lost, its link is retired. The link is closed as soon
    as this cuts the peer off (see links.py). The peer's failed handoffs are then quiesced.
    """

    def __init__(
        self,
        receiver: Receiver,
        hello: Hello,
        channel: "Channel",
        endpoints: Endpoints,
        **options: Unpack[AgentOptions],
    ) -> None:
        super().__init__(receiver, hello, channel, options)
        self._receiver = receiver
        self._introductions: dict[str, _Introduction] = {}
        # Peers that have answered Hello with Welcome and were not lost since. The value is the number of the last Ping
        # before the Welcome.
        self._introduced: dict[str, int] = {}
        self._links = Links(endpoints, hello, self._enqueue)
        self._fetches: dict[HandoffKey, msg.Fetch] = {}  # fetches passed to the receiver; some may have ended
        # The number of pieces that are being unpacked, by handoff, and the events that wait for these copies.
        self._unpacking: dict[HandoffKey, int] = {}
        self._held_events: dict[HandoffKey, list[msg.ReceiverEvent]] = {}
        self._outcomes = {"landed": 0, "failed": 0, "failed, not quiesced": 0, "quiesced later": 0}

    def _handle_command(self, command: object, now: float) -> None:
        match command:
            case msg.Fetch():
                self._fetch(command, now)
            case CancelFetch(key):
                self._cancel(key, now)
            case EndpointOpened():
                self._on_endpoint_opened(command, now)
            case EndpointClosed():
                self._receiver.end_writers(self._links.on_closed(command), now)
            case _:
                raise InternalError(f"{command!r} is not a command for a decode worker")

    def _handle_message(self, peer: str, message: Message, now: float) -> bool:
        """Handles a message from a peer. Returns False for a message that only a prefill worker handles."""
        match message:
            case Hello():
                self._send(
                    peer, msg.Refused(f"{self._hello.control} is a decode worker and computes no prompts for peers")
                )
            case msg.Welcome():
                self._on_welcome(peer, message, now)
            case msg.Refused(reason):  # a delayed or replayed copy of Refused must not affect handoffs
                self._end_introduction(peer, f"{peer} refused: {reason}")
            case msg.HandoffAccepted() | msg.Progress() | msg.HandoffDone() | msg.HandoffFailed() | msg.Cancelled():
                self._receiver.handle_message(peer, message, now)
            case msg.LeaseRequest() | msg.PieceWritten():
                self._receiver.handle_message(peer, message, now)
            case _:
                return False
        return True

    def _on_pong(self, peer: str, pong: msg.Pong, now: float) -> None:
        """Handles a peer that has forgotten this worker, for example because this worker was silent for too long. The
        handoffs can be retried after another introduction. The answer to a Ping from before the introduction is
        ignored."""
        if not pong.connected and pong.number > self._introduced.get(peer, pong.number):
            self._lose(peer, f"{peer} has forgotten this worker, and its handoffs", now, retry=True)

    def _on_peer_restarted(self, peer: str, now: float) -> None:
        """Handles a new process at a peer's address. Fetches that wait for an introduction can still be sent to it."""
        self._lose(peer, f"{peer} was restarted", now)

    def _on_peer_lost(self, peer: str, reason: str, now: float) -> None:
        if peer in self._watched_peers():
            self._emit(msg.PeerLost(peer, reason))
        self._end_introduction(peer, f"{reason} (a worker with another handoff secret stays silent too)")
        self._lose(peer, reason, now)

    def _begin_drain(self, now: float) -> None:
        """Cancels all open handoffs."""
        for key in [key for introduction in self._introductions.values() for key in introduction.fetches]:
            self._cancel(key, now)
        for key in self._receiver.phases():
            self._receiver.cancel(key, now)

    def _end_drain(self, now: float) -> bool:
        """Returns False, because `close` has cancelled every handoff, and the agent no longer waits for answers."""
        return False

    @property
    def _busy(self) -> bool:
        """Returns whether the engine still waits for the end of a handoff."""
        return self._num_open > 0 or bool(self._unpacking)

    @property
    def _num_open(self) -> int:
        waiting = sum(len(introduction.fetches) for introduction in self._introductions.values())
        return waiting + sum(phase in UNREPORTED_PHASES for phase in self._receiver.phases().values())

    def _watched_peers(self) -> set[str]:
        """Returns the peers on which an open handoff or an introduction depends."""
        phases = self._receiver.phases()
        self._fetches = {key: fetch for key, fetch in self._fetches.items() if key in phases}
        in_use = {fetch.peer for key, fetch in self._fetches.items() if phases[key] in OPEN_PHASES}
        return self._introductions.keys() | in_use

    def _tick(self, now: float) -> None:
        for peer, entry in list(self._introductions.items()):
            limit = self._introduction_limit(entry)
            if now - entry.since >= limit:
                waited = (
                    f"{peer} is alive, but has not answered Hello" if entry.sent else "no transfer endpoint was opened"
                )
                self._end_introduction(peer, f"{waited} within {limit:g} s", retry=True)
        for peer, introduction in self._introductions.items():
            if now - introduction.sent_at >= self._timing.hello_every:
                self._greet(peer, introduction, now)
        self._receiver.tick(now)
        self._cut_off_unconfirmed(now)
        self._links.close_retired(self._receiver.unconfirmed_keys(), now)

    def _next_deadline(self) -> float:
        hellos = [
            min(entry.sent_at + self._timing.hello_every, entry.since + self._introduction_limit(entry))
            for entry in self._introductions.values()
        ]
        holds = [link.held_since + HOLD_SECONDS for link in self._links.current if link.held_since is not None]
        return min([*hellos, *holds, self._receiver.next_deadline(), self._links.observe_at])

    def _introduction_limit(self, introduction: _Introduction) -> float:
        return self._timing.hello_timeout if introduction.sent else self._timing.open_timeout

    def _run_actions(self) -> None:
        for action in self._receiver.take_actions():
            match action:
                case msg.SendMessage(peer, message):
                    self._send(peer, message)
                case msg.UnpackPiece():
                    self._begin_unpack(action)
                case msg.Landed(key) | msg.FetchFailed(key) | msg.Quiesced(key) if key in self._unpacking:
                    self._held_events.setdefault(key, []).append(action)
                case _:
                    self._emit(action)

    def _begin_unpack(self, action: msg.UnpackPiece) -> None:
        self._unpacking[action.key] = self._unpacking.get(action.key, 0) + 1
        self._begin_copy(
            partial(self._piece_copies().unpack, action.piece), partial(self._on_unpacked, action.key, action.number)
        )

    def _on_unpacked(self, key: HandoffKey, number: int) -> None:
        self._unpacking[key] -= 1
        if not self._unpacking[key]:
            del self._unpacking[key]
            for event in self._held_events.pop(key, ()):
                self._emit(event)
        self._receiver.on_unpacked(key, number)

    def _fetch(self, fetch: msg.Fetch, now: float) -> None:
        peer, key = fetch.peer, fetch.request.key
        introduction = self._introductions.get(peer)
        if self._closing:
            self._fail(key, "this worker is stopping")
        elif introduction is not None:
            introduction.fetches.setdefault(key, fetch)
        elif self._is_ready(peer, now):
            self._begin(fetch, now)
        elif self._links.full and self._links.get(peer) is None:
            reason = f"this worker has {MAX_LINKS} transfer endpoints for other prefill workers, which is the limit"
            self._fail(key, reason)
        else:
            self._introductions[peer] = introduction = _Introduction(now, now, fetches={key: fetch})
            self._greet(peer, introduction, now)

    def _is_ready(self, peer: str, now: float) -> bool:
        """Returns whether a handoff with this peer can begin without a new Hello. It cannot if the peer was silent,
        because it may have been restarted, or if its link is held, because that will be retired."""
        link = self._links.get(peer)
        heard = self._liveness.heard_recently(peer, now) or bool(self._receiver.open_keys(peer))
        return peer in self._introduced and heard and link is not None and link.held_since is None

    def _greet(self, peer: str, introduction: _Introduction, now: float) -> None:
        """Sends Hello if the peer's link is open and not held. Begins to open a link if the peer has none."""
        introduction.sent_at = now
        link = self._links.get(peer)
        hello = None if link is None or link.held_since is not None else link.hello
        if introduction.sent != (hello is not None):
            introduction.since, introduction.sent = now, hello is not None
        if link is None:
            self._links.open(peer)
        elif hello is not None:
            self._send(peer, hello)

    def _on_endpoint_opened(self, opened: EndpointOpened, now: float) -> None:
        link = self._links.on_opened(opened)
        introduction = None if link is None else self._introductions.get(link.peer)
        if link is None or introduction is None:
            return
        if opened.error is None:
            self._greet(link.peer, introduction, now)
        else:
            self._end_introduction(link.peer, opened.error, retry=True)

    def _lose(self, peer: str, reason: str, now: float, *, retry: bool = False) -> None:
        """Ends all handoffs with a peer, and retires its link. An introduction in progress opens a new link."""
        self._introduced.pop(peer, None)
        self._receiver.peer_lost(peer, reason, now, retry=retry)
        self._links.retire(peer, self._receiver.unconfirmed_keys(peer))
        if (introduction := self._introductions.get(peer)) is not None:
            self._greet(peer, introduction, now)

    def _cut_off_unconfirmed(self, now: float) -> None:
        """Cuts off peers that are alive, but cannot confirm that they have stopped writing for a failed handoff. Their
        other handoffs get HOLD_SECONDS to end. Does nothing for a peer that can write without its link."""
        unconfirmed = self._receiver.unconfirmed_keys() - self._links.retired_keys
        for link in self._links.current:
            affected = bool(unconfirmed) and not unconfirmed.isdisjoint(self._receiver.unconfirmed_keys(link.peer))
            if not affected or self._links.needs_end_of_process(link):
                link.held_since = None
                continue
            link.held_since = now if link.held_since is None else link.held_since
            if not self._receiver.open_keys(link.peer) or now - link.held_since >= HOLD_SECONDS:
                reason = f"the endpoint of {link.peer} was closed after a write in unknown state"
                self._lose(link.peer, reason, now, retry=True)

    def _begin(self, fetch: msg.Fetch, now: float) -> None:
        self._fetches.setdefault(fetch.request.key, fetch)
        self._receiver.fetch(fetch, now)

    def _cancel(self, key: HandoffKey, now: float) -> None:
        for introduction in self._introductions.values():
            if introduction.fetches.pop(key, None) is not None:
                self._fail(key, "cancelled")
                return
        self._receiver.cancel(key, now)

    def _on_welcome(self, peer: str, welcome: msg.Welcome, now: float) -> None:
        link, hello = self._links.get(peer), welcome.hello
        expected = link is not None and link.number == welcome.endpoint and link.held_since is None
        if link is None or not expected or peer not in self._introductions:
            return  # no introduction waits for this answer, or it answers the Hello of an earlier endpoint
        mismatch = check_peers(self._hello, hello)
        if mismatch is not None:
            self._end_introduction(peer, f"{peer} does not match: {mismatch}")
            return
        if link.process not in (None, hello.process):
            self._lose(peer, f"{peer} was restarted", now)  # the new process gets an endpoint of its own
            return
        link.process, link.writers = hello.process, hello.writers
        self._introduced[peer] = self._liveness.num_pings
        self._receiver.add_peer(peer, hello)
        self._add_routes(peer, welcome.routes)
        if welcome.routes:
            self._emit(msg.RoutesMeasured(peer, welcome.routes))
        for fetch in self._introductions.pop(peer).fetches.values():
            self._begin(fetch, now)

    def _end_introduction(self, peer: str, reason: str, *, retry: bool = False) -> None:
        introduction = self._introductions.pop(peer, None)
        for key in introduction.fetches if introduction else ():
            self._fail(key, reason, retry=retry)
        if introduction is not None and peer not in self._introduced:
            self._links.retire(peer, self._receiver.unconfirmed_keys(peer))

    def _fail(self, key: HandoffKey, reason: str, *, retry: bool = False) -> None:
        """Fails a fetch that was not passed to the receiver."""
        self._emit(msg.FetchFailed(key, quiesced=True, retry=retry, reason=reason))

    def _emit(self, event: HandoffEvent) -> None:
        super()._emit(event)
        match event:
            case msg.Landed(key):
                self._outcomes["landed"] += 1
                self._nbytes += self._context_bytes(self._fetches.pop(key).request)
            case msg.FetchFailed(quiesced=quiesced):
                self._outcomes["failed" if quiesced else "failed, not quiesced"] += 1
            case msg.Quiesced():
                self._outcomes["quiesced later"] += 1

    def _context_bytes(self, request: msg.HandoffRequest) -> int:
        store: Store = self._hello.stores[request.landing]
        spans = [*(shard.span for shard in store.shards), *store.all_keys]
        return (len(request.prompt) - request.first) * sum(len(span.bases) * span.row_bytes for span in spans)
