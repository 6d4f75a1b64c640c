"""The decode worker's part of an agent: introduces itself to prefill workers, and drives the receiver."""

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
from hotset.handoff.receiver import OPEN, Receiver
from hotset.handoff.timers import Liveness, Timing
from hotset.transfer.api import Throughput


@dataclass(slots=True)
class _Introduction:
    """Hello was said and is not answered yet. Fetches wait for that: nothing was sent of them."""

    since: float
    said: float
    fetches: dict[HandoffKey, Fetch] = field(default_factory=dict)


class DecodeRole:
    """Joins engine, receiver and peers. One thread calls it; time comes as an argument."""

    def __init__(
        self,
        receiver: Receiver,
        hello: Hello,
        liveness: Liveness,
        timing: Timing,
        say: Callable[[str, Message], None],
        unpack: Callable[[PackedPiece], None],
    ) -> None:
        self._receiver, self._hello, self._liveness, self._timing, self._say = receiver, hello, liveness, timing, say
        self._unpack = unpack
        self._introductions: dict[str, _Introduction] = {}
        self._introduced: set[str] = set()
        self._fetches: dict[HandoffKey, Fetch] = {}  # given to the receiver, which may have forgotten some
        self._facts: list[ReceiverEvent] = []
        self._closing = False
        self.outcomes = {"landed": 0, "lost": 0, "lost, not quiesced": 0, "calmed": 0}
        self.nbytes = 0  # landed
        self.pieces = 0  # unpacked

    def obey(self, command: object, now: float) -> None:
        match command:
            case Fetch():
                self._fetch(command, now)
            case CancelFetch(key):
                self._give_up(key, now)
            case _:
                raise AssertionError(f"{command!r} is no command for a decode worker")

    def take(self, peer: str, message: Message, now: float) -> bool:
        """What a peer says. False: it is nothing that a decode worker is told."""
        match message:
            case Hello():
                self._say(peer, Refused(f"{self._hello.control} is a decode worker: it is not asked for prompts"))
            case Welcome(hello):
                self._welcome(peer, hello, now)
            case Refused(reason):
                self._refused(peer, f"{peer} refused: {reason}", now)
            case (
                HandoffAccepted()
                | Progress()
                | HandoffDone()
                | HandoffFailed()
                | Cancelled()
                | LeaseRequest()
                | PieceWritten()
            ):
                self._receiver.take(peer, message, now)
            case _:
                return False
        return True

    def restarted(self, peer: str, now: float) -> None:
        """Another process answers there. Fetches that wait for an introduction are none of the one before."""
        self._introduced.discard(peer)
        self._receiver.peer_lost(peer, f"{peer} was restarted", now)

    def lost(self, peer: str, reason: str, now: float) -> None:
        self._introduced.discard(peer)
        self._end_introduction(peer, f"{reason} (nor would it be with another handoff secret)")
        self._receiver.peer_lost(peer, reason, now)

    def close(self, now: float) -> None:
        """Nobody wants anything any more."""
        self._closing = True
        for key in [key for each in self._introductions.values() for key in each.fetches]:
            self._give_up(key, now)
        for key in self._receiver.phases():
            self._receiver.give_up(key, now)

    def cut(self, now: float) -> bool:
        """All was given up when it closed; who has not answered by now is waited for no longer."""
        return False

    @property
    def busy(self) -> bool:
        """Something is under way of which the engine has not heard the end."""
        return self.open > 0

    @property
    def open(self) -> int:
        waiting = sum(len(each.fetches) for each in self._introductions.values())
        return waiting + sum(phase in OPEN for phase in self._receiver.phases().values())

    def watched(self) -> set[str]:
        """The peers that have to be alive."""
        phases = self._receiver.phases()
        self._fetches = {key: fetch for key, fetch in self._fetches.items() if key in phases}
        return self._introductions.keys() | {fetch.peer for key, fetch in self._fetches.items() if phases[key] in OPEN}

    def tick(self, now: float) -> None:
        limit = self._timing.introduced_within
        for peer in [peer for peer, each in self._introductions.items() if now - each.since >= limit]:
            self._end_introduction(peer, f"{peer} is there, but has not let us in within {limit:g} s", retry=True)
        for peer, introduction in self._introductions.items():
            if now - introduction.said >= self._timing.hello_again:
                introduction.said = now
                self._say(peer, self._hello)
        self._receiver.tick(now)

    def next_deadline(self) -> float | None:
        timing, introductions = self._timing, self._introductions.values()
        hellos = [min(each.said + timing.hello_again, each.since + timing.introduced_within) for each in introductions]
        receiver = self._receiver.next_deadline()
        return min([*hellos, *([] if receiver is None else [receiver])], default=None)

    @property
    def polls(self) -> bool:
        return False

    def poll(self, now: float) -> None:
        """There are no writes of its own to look at."""

    def act(self) -> list[ReceiverEvent]:
        """Unpacks and says what the receiver wants. Returns what the engine is to be told."""
        for action in self._receiver.take_actions():
            match action:
                case SendMessage(peer, message):
                    self._say(peer, message)
                case UnpackPiece(piece):
                    self._unpack(piece)
                    self.pieces += 1
                case _:
                    self._facts.append(action)
        facts, self._facts = self._facts, []
        for fact in facts:
            self._count(fact)
        return facts

    @property
    def throughput(self) -> Throughput | None:
        return None

    @property
    def seconds(self) -> Mapping[str, float]:
        return {phase.value: seconds for phase, seconds in self._receiver.table.seconds.items()}

    @property
    def resent(self) -> int:
        return self._receiver.resent

    @property
    def ring_quarantined(self) -> int:
        return self._receiver.ring_quarantined

    def audit(self) -> None:
        self._receiver.audit()

    def _fetch(self, fetch: Fetch, now: float) -> None:
        peer = fetch.peer
        # One that has been silent may have been replaced meanwhile: ask who is there before anything depends on it.
        if self._closing:
            self._facts.append(FetchFailed(fetch.ask.key, quiesced=True, retry=False, reason="this worker is stopping"))
        elif peer in self._introduced and (self._liveness.fresh(peer, now) or self._receiver.open_keys(peer)):
            self._begin(fetch, now)
        elif peer in self._introductions:
            self._introductions[peer].fetches.setdefault(fetch.ask.key, fetch)
        else:
            self._introductions[peer] = _Introduction(now, now, {fetch.ask.key: fetch})
            self._say(peer, self._hello)

    def _begin(self, fetch: Fetch, now: float) -> None:
        self._fetches.setdefault(fetch.ask.key, fetch)
        self._receiver.fetch(fetch, now)

    def _give_up(self, key: HandoffKey, now: float) -> None:
        for introduction in self._introductions.values():
            if introduction.fetches.pop(key, None) is not None:
                self._facts.append(FetchFailed(key, quiesced=True, retry=False, reason="given up"))
                return
        self._receiver.give_up(key, now)

    def _welcome(self, peer: str, hello: Hello, now: float) -> None:
        if peer not in self._introductions:
            return
        flaw = check_peers(self._hello, hello)
        if flaw is not None:
            self._end_introduction(peer, f"{peer} does not fit: {flaw}")
            return
        self._introduced.add(peer)
        self._receiver.peer_known(peer, hello)
        for fetch in self._introductions.pop(peer).fetches.values():
            self._begin(fetch, now)

    def _refused(self, peer: str, reason: str, now: float) -> None:
        """It will not work with us, or has forgotten us and with us everything that it had begun."""
        if peer in self._introductions:
            self._end_introduction(peer, reason)
        elif peer in self._introduced:
            self.lost(peer, reason, now)

    def _end_introduction(self, peer: str, reason: str, *, retry: bool = False) -> None:
        introduction = self._introductions.pop(peer, None)
        for key in introduction.fetches if introduction else ():
            self._facts.append(FetchFailed(key, quiesced=True, retry=retry, reason=reason))

    def _count(self, fact: ReceiverEvent) -> None:
        match fact:
            case Landed(key):
                self.outcomes["landed"] += 1
                self.nbytes += self._bytes_of(self._fetches.pop(key).ask)
            case FetchFailed(quiesced=quiesced):
                self.outcomes["lost" if quiesced else "lost, not quiesced"] += 1
            case Quiesced():
                self.outcomes["calmed"] += 1

    def _bytes_of(self, ask: HandoffRequest) -> int:
        store: Store = self._hello.stores[ask.landing]
        spans = [*(shard.span for shard in store.shards), *([store.keys] if store.keys is not None else [])]
        return len(ask.prompt) * sum(len(span.bases) * span.row_bytes for span in spans)
