"""The role of a decode worker's agent: it introduces the worker to prefill workers and drives the receiver."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hotset.handoff.layout import check_peers
from hotset.handoff.messages import (
    CancelFetch,
    Cancelled,
    Fetch,
    FetchFailed,
    HandoffAccepted,
    HandoffDone,
    HandoffFailed,
    HandoffKey,
    HandoffRequest,
    Hello,
    Landed,
    LeaseRequest,
    Message,
    PackedPiece,
    PieceWritten,
    Progress,
    Quiesced,
    ReceiverEvent,
    Refused,
    SendMessage,
    Store,
    UnpackPiece,
    Welcome,
)
from hotset.handoff.receiver import OPEN_PHASES, Receiver
from hotset.handoff.timers import Liveness, PeerTiming
from hotset.transfer.api import Throughput


@dataclass(slots=True)
class _Introduction:
    """A Hello that is not answered yet. Fetches from this peer wait here, and their requests are not sent yet."""

    since: float  # time of the first Hello
    sent_at: float  # time of the newest Hello
    fetches: dict[HandoffKey, Fetch] = field(default_factory=dict)


class DecodeRole:
    """Connects engine, receiver and peers. One thread calls it, and passes the current time."""

    def __init__(
        self,
        receiver: Receiver,
        hello: Hello,
        liveness: Liveness,
        timing: PeerTiming,
        send: Callable[[str, Message], None],
        unpack: Callable[[PackedPiece], None],
    ) -> None:
        self._receiver, self._hello, self._liveness, self._timing, self._send = receiver, hello, liveness, timing, send
        self._unpack = unpack
        self._introductions: dict[str, _Introduction] = {}
        self._introduced: set[str] = set()  # peers that answered Hello with Welcome and were not lost since
        self._fetches: dict[HandoffKey, Fetch] = {}  # fetches passed to the receiver; some may have ended
        self._events: list[ReceiverEvent] = []
        self._closing = False
        self.outcomes = {"landed": 0, "failed": 0, "failed, not quiesced": 0, "quiesced later": 0}
        self.nbytes = 0  # bytes that have landed
        self.num_pieces = 0  # pieces unpacked

    def handle_command(self, command: object, now: float) -> None:
        match command:
            case Fetch():
                self._fetch(command, now)
            case CancelFetch(key):
                self._cancel(key, now)
            case _:
                raise AssertionError(f"{command!r} is not a command for a decode worker")

    def handle_message(self, peer: str, message: Message, now: float) -> bool:
        """Handles a message from a peer. Returns False for a message that only a prefill worker handles."""
        match message:
            case Hello():
                self._send(peer, Refused(f"{self._hello.control} is a decode worker and computes no prompts for peers"))
            case Welcome(hello):
                self._on_welcome(peer, hello, now)
            case Refused(reason):
                self._on_refused(peer, f"{peer} refused: {reason}", now)
            case HandoffAccepted() | Progress() | HandoffDone() | HandoffFailed() | Cancelled():
                self._receiver.handle_message(peer, message, now)
            case LeaseRequest() | PieceWritten():
                self._receiver.handle_message(peer, message, now)
            case _:
                return False
        return True

    def peer_restarted(self, peer: str, now: float) -> None:
        """Handles a new process at a peer's address. Fetches that wait for an introduction can still be sent to it."""
        self._introduced.discard(peer)
        self._receiver.peer_lost(peer, f"{peer} was restarted", now)

    def peer_lost(self, peer: str, reason: str, now: float) -> None:
        self._introduced.discard(peer)
        self._end_introduction(peer, f"{reason} (a worker with another handoff secret stays silent too)")
        self._receiver.peer_lost(peer, reason, now)

    def close(self, now: float) -> None:
        """Cancels all open handoffs, and begins no more."""
        self._closing = True
        for key in [key for introduction in self._introductions.values() for key in introduction.fetches]:
            self._cancel(key, now)
        for key in self._receiver.phases():
            self._receiver.cancel(key, now)

    def end_drain(self, now: float) -> bool:
        """Returns False: `close` has cancelled every handoff, and the agent does not wait any longer for answers."""
        return False

    @property
    def busy(self) -> bool:
        """Returns whether the engine still waits for the end of a handoff."""
        return self.num_open > 0

    @property
    def num_open(self) -> int:
        waiting = sum(len(introduction.fetches) for introduction in self._introductions.values())
        return waiting + sum(phase in OPEN_PHASES for phase in self._receiver.phases().values())

    def watched_peers(self) -> set[str]:
        """Returns the peers on which an open handoff or an introduction depends."""
        phases = self._receiver.phases()
        self._fetches = {key: fetch for key, fetch in self._fetches.items() if key in phases}
        in_use = {fetch.peer for key, fetch in self._fetches.items() if phases[key] in OPEN_PHASES}
        return self._introductions.keys() | in_use

    def tick(self, now: float) -> None:
        limit = self._timing.hello_timeout
        for peer in [peer for peer, entry in self._introductions.items() if now - entry.since >= limit]:
            self._end_introduction(peer, f"{peer} is alive, but has not answered Hello within {limit:g} s", retry=True)
        for peer, introduction in self._introductions.items():
            if now - introduction.sent_at >= self._timing.hello_every:
                introduction.sent_at = now
                self._send(peer, self._hello)
        self._receiver.tick(now)

    def next_deadline(self) -> float | None:
        timing = self._timing
        hellos = [
            min(entry.sent_at + timing.hello_every, entry.since + timing.hello_timeout)
            for entry in self._introductions.values()
        ]
        receiver = self._receiver.next_deadline()
        return min([*hellos, *([] if receiver is None else [receiver])], default=None)

    @property
    def needs_polling(self) -> bool:
        return False

    def poll(self, now: float) -> None:
        """Does nothing: a decode worker has no writes of its own."""

    def run_actions(self) -> list[ReceiverEvent]:
        """Runs the receiver's actions. Returns the events for the engine."""
        for action in self._receiver.take_actions():
            match action:
                case SendMessage(peer, message):
                    self._send(peer, message)
                case UnpackPiece(piece):
                    self._unpack(piece)
                    self.num_pieces += 1
                case _:
                    self._events.append(action)
        events, self._events = self._events, []
        for event in events:
            self._count(event)
        return events

    @property
    def throughput(self) -> Throughput | None:
        return None

    @property
    def phase_seconds(self) -> Mapping[str, float]:
        return {phase.value: seconds for phase, seconds in self._receiver.table.seconds.items()}

    @property
    def num_retransmits(self) -> int:
        return self._receiver.num_retransmits

    @property
    def ring_quarantined_bytes(self) -> int:
        return self._receiver.ring_quarantined_bytes

    def audit(self) -> None:
        self._receiver.audit()

    def _fetch(self, fetch: Fetch, now: float) -> None:
        peer, key = fetch.peer, fetch.request.key
        # A peer that was silent may have been restarted. It gets a new Hello before a handoff depends on it.
        if self._closing:
            self._events.append(FetchFailed(key, quiesced=True, retry=False, reason="this worker is stopping"))
        elif peer in self._introduced and (self._liveness.heard_recently(peer, now) or self._receiver.open_keys(peer)):
            self._begin(fetch, now)
        elif peer in self._introductions:
            self._introductions[peer].fetches.setdefault(key, fetch)
        else:
            self._introductions[peer] = _Introduction(now, now, {key: fetch})
            self._send(peer, self._hello)

    def _begin(self, fetch: Fetch, now: float) -> None:
        self._fetches.setdefault(fetch.request.key, fetch)
        self._receiver.fetch(fetch, now)

    def _cancel(self, key: HandoffKey, now: float) -> None:
        for introduction in self._introductions.values():
            if introduction.fetches.pop(key, None) is not None:
                self._events.append(FetchFailed(key, quiesced=True, retry=False, reason="cancelled"))
                return
        self._receiver.cancel(key, now)

    def _on_welcome(self, peer: str, hello: Hello, now: float) -> None:
        if peer not in self._introductions:
            return
        mismatch = check_peers(self._hello, hello)
        if mismatch is not None:
            self._end_introduction(peer, f"{peer} does not match: {mismatch}")
            return
        self._introduced.add(peer)
        self._receiver.add_peer(peer, hello)
        for fetch in self._introductions.pop(peer).fetches.values():
            self._begin(fetch, now)

    def _on_refused(self, peer: str, reason: str, now: float) -> None:
        """Handles a peer that refuses this worker, or has forgotten it together with all handoffs."""
        if peer in self._introductions:
            self._end_introduction(peer, reason)
        elif peer in self._introduced:
            self.peer_lost(peer, reason, now)

    def _end_introduction(self, peer: str, reason: str, *, retry: bool = False) -> None:
        introduction = self._introductions.pop(peer, None)
        for key in introduction.fetches if introduction else ():
            self._events.append(FetchFailed(key, quiesced=True, retry=retry, reason=reason))

    def _count(self, event: ReceiverEvent) -> None:
        match event:
            case Landed(key):
                self.outcomes["landed"] += 1
                self.nbytes += self._context_bytes(self._fetches.pop(key).request)
            case FetchFailed(quiesced=quiesced):
                self.outcomes["failed" if quiesced else "failed, not quiesced"] += 1
            case Quiesced():
                self.outcomes["quiesced later"] += 1

    def _context_bytes(self, request: HandoffRequest) -> int:
        store: Store = self._hello.stores[request.landing]
        spans = [*(shard.span for shard in store.shards), *([store.keys] if store.keys is not None else [])]
        return len(request.prompt) * sum(len(span.bases) * span.row_bytes for span in spans)
