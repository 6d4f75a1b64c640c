"""A receiver and senders with real memory. The test delivers messages and performs writes by hand."""

import ctypes
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sharded_memory import Sharded

from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.handoff.layout import check_peers, pages_for
from hotset.handoff.messages import (
    Fetch,
    FirstTokenSampled,
    HandoffKey,
    HandoffRequest,
    Hello,
    Message,
    ModelIdentity,
    ReceiverEvent,
    ReleasePages,
    RowsComputed,
    SendMessage,
    StartPrefill,
    SubmitWrites,
    UnpackPiece,
)
from hotset.handoff.packing import StagingMemory, pack, unpack
from hotset.handoff.receiver import Receiver
from hotset.handoff.sender import Sender
from hotset.handoff.staging import ReceiverStaging
from hotset.memory.pages import PageAllocator
from hotset.transfer.api import WriteState, WriteTicket

HEADS = 4
DECODE = "decode:1"
MODEL = ModelIdentity("m", 3, "any", "5 bytes", 2, "w")


class Event:
    """The event of a forward pass."""

    def __init__(self, happened: bool = True) -> None:
        self.happened = happened

    def query(self) -> bool:
        return self.happened


@dataclass
class Write:
    peer: str
    submit: SubmitWrites
    ticket: WriteTicket


@dataclass
class Context:
    """A context at the prefill engine."""

    prompt: StartPrefill
    pages: list[int]
    told: int = 0


class PrefillEnd:
    def __init__(self, name: str, ranks: int, staging_bytes: int, page_rows: int = 16) -> None:
        self.name = name
        self.memory = Sharded(ranks, HEADS, page_rows=page_rows, pages=200, seed=ranks)
        self.staging = StagingMemory(staging_bytes)
        self.sender = Sender(self.memory.store, buffers=self.staging.sender_buffers)
        self.hello = Hello(name, MODEL, {"host": self.memory.store}, "loopback", b"")
        self.contexts: dict[HandoffKey, Context] = {}
        self.dropped: list[HandoffKey] = []
        self.pages = PageAllocator(200)


class World:
    """Messages wait in `messages` until `carry` delivers them, writes in `writes` until `write` ends them."""

    def __init__(self, ring_bytes: int = 8192, ranks: int = 4, prefills: Iterable[int] = (2,)) -> None:
        self.now, self.tickets = 0.0, 0
        self.memory = Sharded(ranks, HEADS, page_rows=8, pages=400)
        self.row_bytes = 3 * 2 * HEADS * self.memory.head_bytes + 2 * 5
        self.ring_memory = StagingMemory(ring_bytes)
        stores = {"host": self.memory.store}
        self.staging = ReceiverStaging(self.ring_memory.memory_range, stores)
        self.receiver = Receiver(staging=self.staging)
        self.hello = Hello(DECODE, MODEL, stores, "loopback", b"", self.ring_memory.memory_range)
        self.prefills = {
            f"prefill:{at}": PrefillEnd(f"prefill:{at}", each, 8192) for at, each in enumerate(prefills, 1)
        }
        self.pages = PageAllocator(400)
        self.messages: deque[tuple[str, str, Message]] = deque()  # from, to
        self.writes: list[Write] = []
        self.written = 0
        self.events: dict[HandoffKey, list[ReceiverEvent]] = {}
        self.requests: dict[HandoffKey, HandoffRequest] = {}
        self.lose: dict[type, int] = {}  # how many messages of this kind will still be lost
        self.twice = False
        self.sent: list[tuple[str, str, Message]] = []  # all messages so far
        for end in self.prefills.values():
            self.introduce(end)

    @property
    def ring(self) -> Any:
        return self.staging.ring

    def introduce(self, end: PrefillEnd) -> None:
        assert check_peers(end.hello, self.hello) is None and check_peers(self.hello, end.hello) is None
        end.sender.add_peer(DECODE, self.hello)
        self.receiver.add_peer(end.name, end.hello)

    def fetch(self, rows: int, name: str = "r", at: int = 1) -> HandoffKey:
        key, count = HandoffKey(name, 1), pages_for(self.memory.store.shards[0].span, rows)
        pages = self.pages.allocate(count)
        assert pages is not None
        self.memory.poison(pages, pages)
        seed = len(self.requests)
        request = HandoffRequest(
            key, PromptSpec(tuple(range(seed, seed + rows)), SamplingParams()), "host", tuple(pages), tuple(pages)
        )
        self.requests[key], self.events[key] = request, []
        self.receiver.fetch(Fetch(f"prefill:{at}", request), self.now)
        return key

    def compute(self, key: HandoffKey, last: int | None = None, after: Event | None = None, at: int = 1) -> None:
        """Computes the next rows, up to `last`. By default it computes all and samples the first token."""
        end = self.prefills[f"prefill:{at}"]
        context, request = end.contexts[key], self.requests[key]
        total, first = len(request.prompt), context.told
        until = total if last is None else last
        if first < until:
            end.memory.compute(context.pages, first, until, seed=request.prompt.token_ids[0])
            context.told = until
            end.sender.handle_command(RowsComputed(DECODE, key, first, until, tuple(context.pages), after), self.now)
        if until == total:
            end.sender.handle_command(FirstTokenSampled(DECODE, key, 7, None), self.now)
        self.act()

    def act(self) -> None:
        """Runs the actions of the state machines. Messages and writes are only queued."""
        for action in self.receiver.take_actions():
            match action:
                case SendMessage(peer, message):
                    self._say(DECODE, peer, message)
                case UnpackPiece(piece):
                    unpack(piece)
                case event:
                    self.events[event.key].append(event)
        for end in self.prefills.values():
            for action in end.sender.take_actions():
                self._obey(end, action)
        self.receiver.audit()
        for end in self.prefills.values():
            end.sender.audit()

    def _obey(self, end: PrefillEnd, action: Any) -> None:
        match action:
            case SendMessage(_, message):
                self._say(end.name, DECODE, message)
            case SubmitWrites(_, key):
                if action.pack is not None:
                    assert key not in end.dropped, "read after its pages were given back"
                    pack(action.pack)
                self.tickets += 1
                ticket = WriteTicket(self.tickets, 0)
                end.sender.on_submitted(DECODE, key, ticket)
                self.writes.append(Write(end.name, action, ticket))
            case StartPrefill():
                pages = end.pages.allocate(pages_for(end.memory.store.shards[0].span, len(action.prompt)))
                assert pages is not None
                end.contexts[action.key] = Context(action, pages)
            case ReleasePages(_, key):
                end.dropped.append(key)

    def _say(self, origin: str, to: str, message: Message) -> None:
        self.sent.append((origin, to, message))
        if self.lose.get(type(message), 0) > 0:
            self.lose[type(message)] -= 1
            return
        for _ in range(2 if self.twice else 1):
            self.messages.append((origin, to, message))

    def deliver(self, origin: str, to: str, message: Message) -> None:
        machine = self.receiver if to == DECODE else self.prefills[to].sender
        machine.handle_message(origin, message, self.now)
        self.act()

    def carry(self, *but: type) -> None:
        """Delivers all messages, and the answers to them, except for some kinds, which stay queued."""
        self.act()
        kept = []
        while self.messages:
            envelope = self.messages.popleft()
            if isinstance(envelope[2], but):
                kept.append(envelope)
            else:
                self.deliver(*envelope)
        self.messages.extend(kept)

    def write(self, state: WriteState = WriteState.DONE, number: int = 0) -> None:
        """Ends a write, by default the oldest."""
        write = self.writes.pop(number)
        if state is WriteState.DONE:
            for here, there, nbytes in write.submit.writes.tolist():
                ctypes.memmove(there, here, nbytes)
                self.written += 1
        self.prefills[write.peer].sender.on_write_ended(DECODE, write.submit.key, write.ticket, state, self.now)
        self.act()

    def finish(self) -> None:
        """Delivers messages and performs writes until nothing is left to do."""
        for _ in range(100_000):
            self.carry()
            if self.writes:
                self.write()
            elif not self.messages:
                return
        raise AssertionError("it does not end")

    def look(self) -> None:
        for end in self.prefills.values():
            end.sender.poll_events(self.now)
        self.act()

    def pass_time(self, seconds: float, *but: type) -> None:
        """Ticks at every deadline on the way, as an agent does, and delivers the messages."""
        end = self.now + seconds
        machines = [self.receiver, *(each.sender for each in self.prefills.values())]
        while True:
            times = [at for machine in machines if (at := machine.next_deadline()) is not None and at <= end]
            self.now = max(self.now, min(times, default=end))
            for machine in machines:
                machine.tick(self.now)
            self.carry(*but)
            if not times:
                return

    def check(self, key: HandoffKey) -> None:
        """Asserts that the context has landed, byte for byte."""
        request = self.requests[key]
        assert [type(event).__name__ for event in self.events[key]] == ["Landed"], self.events[key]
        self.memory.check_rows(
            request.row_pages, request.key_pages, len(request.prompt), seed=request.prompt.token_ids[0]
        )

    def check_calm(self) -> None:
        """Asserts that no lease, buffer or handoff is left."""
        assert self.receiver.phases() == {} and self.ring.held == 0 and not self.ring.waiting
        for end in self.prefills.values():
            assert end.sender.phases() == {} and not end.sender._buffers.users
            assert sorted(map(str, end.dropped)) == sorted(map(str, end.contexts)), "Drop comes once for every Prefill"
