"""A receiver and senders with real memory. The test decides when messages are delivered and when writes end."""

import ctypes
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sharded_memory import ShardedMemory

from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.fleet.handoff.deliveries import Sources
from hotset.fleet.handoff.layout import check_peers, landing_pages
from hotset.fleet.handoff.messages import (
    Fetch,
    HandoffRequest,
    Hello,
    Message,
    ModelIdentity,
    ReceiverEvent,
    ReleasePages,
    SendMessage,
    StartPrefill,
    SubmitWrites,
    UnpackPiece,
)
from hotset.fleet.handoff.packing import StagingMemory, pack, unpack
from hotset.fleet.handoff.receiver import Receiver
from hotset.fleet.handoff.sender import Sender
from hotset.fleet.handoff.staging import ReceiverStaging
from hotset.fleet.transfer.api import WriteState, WriteTicket
from hotset.memory.pages import PageAllocator
from hotset.schedule.handoffs import FirstTokenSampled, HandoffKey, RowsComputed

HEADS = 4
DECODE = "decode:1"


def model(groups: int) -> ModelIdentity:
    return ModelIdentity("m", 3, "any", "5 bytes" if groups else None, groups, "w")


class Event:
    """The event of a forward pass. The test sets `happened`."""

    def __init__(self, happened: bool = True) -> None:
        self.happened = happened

    def query(self) -> bool:
        return self.happened


@dataclass
class Write:
    """A list of writes in flight."""

    sender: str  # name of the prefill worker
    action: SubmitWrites
    ticket: WriteTicket


@dataclass
class Context:
    """A context at the prefill engine."""

    pages: list[int]
    num_announced: int = 0  # rows for which RowsComputed was sent


class PrefillWorker:
    """A sender, and the memory and contexts of its engine."""

    def __init__(self, name: str, ranks: int, staging_bytes: int, page_rows: int = 16, groups: int = 2) -> None:
        self.name = name
        self.memory = ShardedMemory(ranks, HEADS, page_rows=page_rows, pages=200, groups=groups, seed=ranks)
        self.staging = StagingMemory(staging_bytes)
        store = self.staging.beside(self.memory.store)
        self.sender = Sender(Sources(store))
        self.hello = Hello(name, model(groups), {"host": store}, "loopback", b"")
        self.contexts: dict[HandoffKey, Context] = {}
        self.released: list[HandoffKey] = []  # one entry for each ReleasePages
        self.pages = PageAllocator(200)

    def check_released(self) -> None:
        released, started = sorted(map(str, self.released)), sorted(map(str, self.contexts))
        assert released == started, "ReleasePages must be sent exactly once for every StartPrefill"


class World:
    """One decode worker with `ranks` ranks, and several prefill workers. `prefills` has each one's number of ranks.

    Messages wait in `messages` until `deliver_messages` delivers them. Lists of writes wait in `writes` until
    `end_write` ends them.
    """

    def __init__(self, ring_bytes: int = 8192, ranks: int = 4, prefills: Iterable[int] = (2,), groups: int = 2) -> None:
        self.now, self.tickets = 0.0, 0
        self.memory = ShardedMemory(ranks, HEADS, page_rows=8, pages=400, groups=groups)
        self.row_bytes = 3 * 2 * HEADS * self.memory.head_bytes + groups * 5
        self.ring_memory = StagingMemory(ring_bytes)
        stores = {"host": self.ring_memory.beside(self.memory.store)}
        self.staging = ReceiverStaging(stores)
        self.receiver = Receiver(staging=self.staging)
        self.hello = Hello(DECODE, model(groups), stores, "loopback", b"")
        self.prefills = {
            f"prefill:{number}": PrefillWorker(f"prefill:{number}", ranks, 8192, groups=groups)
            for number, ranks in enumerate(prefills, 1)
        }
        self.pages = PageAllocator(400)
        self.messages: deque[tuple[str, str, Message]] = deque()  # (from, to, message), not delivered yet
        self.writes: list[Write] = []
        self.num_written = 0  # writes in the lists that ended as DONE
        self.events: dict[HandoffKey, list[ReceiverEvent]] = {}
        self.requests: dict[HandoffKey, HandoffRequest] = {}
        self.lose: dict[type, int] = {}  # the number of further messages of each type that will be lost
        self.duplicate = False  # whether every message that is not lost is delivered twice
        self.sent: list[tuple[str, str, Message]] = []  # (from, to, message) of every message, including lost ones
        for worker in self.prefills.values():
            self.introduce(worker)

    @property
    def ring(self) -> Any:
        return self.staging.ring

    def introduce(self, worker: PrefillWorker) -> None:
        """Exchanges the Hello messages of the decode worker and this prefill worker."""
        assert check_peers(worker.hello, self.hello) is None and check_peers(self.hello, worker.hello) is None
        worker.sender.add_peer(DECODE, self.hello)
        self.receiver.add_peer(worker.name, worker.hello)

    def fetch(self, rows: int, name: str = "r", prefill: int = 1, first: int = 0) -> HandoffKey:
        """Poisons target pages, and begins a handoff of rows [first, rows) from prefill worker number `prefill`."""
        span = self.memory.store.shards[0].span
        key, count = HandoffKey(name, 1), span.pages_for(rows) - span.pages_before(first)
        pages = self.pages.allocate(count)
        assert pages is not None
        self.memory.poison(pages, pages)
        seed = len(self.requests)
        prompt = PromptSpec(tuple(range(seed, seed + rows)), SamplingParams())
        request = HandoffRequest(key, prompt, "host", tuple(pages), tuple(pages), first)
        self.requests[key], self.events[key] = request, []
        self.receiver.fetch(Fetch(f"prefill:{prefill}", request), self.now)
        return key

    def compute(self, key: HandoffKey, last: int | None = None, after: Event | None = None, prefill: int = 1) -> None:
        """Writes and announces the rows from the first unannounced one up to `last`, by default up to the end of the
        prompt. `after` is their event. If the prompt is then complete, also reports the first token."""
        worker = self.prefills[f"prefill:{prefill}"]
        context, request = worker.contexts[key], self.requests[key]
        total, first = len(request.prompt), context.num_announced
        until = total if last is None else last
        if first < until:
            worker.memory.compute(context.pages, first, until, seed=request.prompt.token_ids[0])
            context.num_announced = until
            worker.sender.handle_command(RowsComputed(DECODE, key, first, until, tuple(context.pages), after), self.now)
        if until == total:
            worker.sender.handle_command(FirstTokenSampled(DECODE, key, 7, None), self.now)
        self.run_actions()

    def run_actions(self) -> None:
        """Runs the actions of all state machines, and then audits them. Messages and writes are only queued."""
        while actions := self.receiver.take_actions():
            for action in actions:
                match action:
                    case SendMessage(peer, message):
                        self._queue(DECODE, peer, message)
                    case UnpackPiece(key, number, piece):
                        unpack(piece)
                        self.receiver.on_unpacked(key, number)
                    case event:
                        self.events[event.key].append(event)
        for worker in self.prefills.values():
            for action in worker.sender.take_actions():
                self._run_sender_action(worker, action)
        self.receiver.audit()
        for worker in self.prefills.values():
            worker.sender.audit()

    def _run_sender_action(self, worker: PrefillWorker, action: Any) -> None:
        match action:
            case SendMessage(_, message):
                self._queue(worker.name, DECODE, message)
            case SubmitWrites(_, key):
                if action.pack is not None:
                    assert key not in worker.released, f"pages of {key} are read after ReleasePages"
                    pack(action.pack)
                self.tickets += 1
                ticket = WriteTicket(self.tickets, 0)
                worker.sender.on_submitted(DECODE, key, ticket)
                self.writes.append(Write(worker.name, action, ticket))
            case StartPrefill():
                pages = worker.pages.allocate(worker.memory.store.shards[0].span.pages_for(len(action.prompt)))
                assert pages is not None
                worker.contexts[action.key] = Context(pages)
            case ReleasePages(_, key):
                worker.released.append(key)

    def _queue(self, origin: str, to: str, message: Message) -> None:
        self.sent.append((origin, to, message))
        if self.lose.get(type(message), 0) > 0:
            self.lose[type(message)] -= 1
            return
        for _ in range(2 if self.duplicate else 1):
            self.messages.append((origin, to, message))

    def deliver(self, origin: str, to: str, message: Message) -> None:
        """Delivers one message and runs the actions that follow. The answers are only queued."""
        machine = self.receiver if to == DECODE else self.prefills[to].sender
        machine.handle_message(origin, message, self.now)
        self.run_actions()

    def deliver_messages(self, *held_back: type) -> None:
        """Delivers all messages and the answers to them. Messages of the types `held_back` stay queued."""
        self.run_actions()
        kept = []
        while self.messages:
            envelope = self.messages.popleft()
            if isinstance(envelope[2], held_back):
                kept.append(envelope)
            else:
                self.deliver(*envelope)
        self.messages.extend(kept)

    def end_write(self, state: WriteState = WriteState.DONE, number: int = 0) -> None:
        """Ends a list of writes, by default the oldest. Copies its bytes if `state` is DONE."""
        write = self.writes.pop(number)
        if state is WriteState.DONE:
            for local, remote, nbytes in write.action.writes.tolist():
                ctypes.memmove(remote, local, nbytes)
                self.num_written += 1
        self.prefills[write.sender].sender.on_write_ended(DECODE, write.action.key, write.ticket, state, self.now)
        self.run_actions()

    def finish(self) -> None:
        """Delivers messages and performs writes until there are none left."""
        for _ in range(100_000):
            self.deliver_messages()
            if self.writes:
                self.end_write()
            elif not self.messages:
                return
        raise AssertionError("messages and writes do not end")

    def poll_events(self) -> None:
        """Lets the senders check which forward passes have finished."""
        for worker in self.prefills.values():
            worker.sender.poll_events(self.now)
        self.run_actions()

    def pass_time(self, seconds: float, *held_back: type) -> None:
        """Advances the clock. Ticks the state machines at each of their deadlines, as an agent does, and delivers
        messages after each tick, except for the types `held_back`."""
        end = self.now + seconds
        machines = [self.receiver, *(worker.sender for worker in self.prefills.values())]
        while True:
            deadlines = [deadline for machine in machines if (deadline := machine.next_deadline()) <= end]
            self.now = max(self.now, min(deadlines, default=end))
            for machine in machines:
                machine.tick(self.now)
            self.deliver_messages(*held_back)
            if not deadlines:
                return

    def check_landed(self, key: HandoffKey) -> None:
        """Asserts that the context has landed and that every byte of it is correct."""
        request = self.requests[key]
        assert [type(event).__name__ for event in self.events[key]] == ["Landed"], self.events[key]
        pages, seed = landing_pages(request, self.memory.store), request.prompt.token_ids[0]
        self.memory.check_rows(pages.rows, pages.keys, request.first, len(request.prompt), seed=seed)

    def check_unlisted_pages(self, key: HandoffKey, before: Any) -> None:
        """Asserts that only pages that the request lists differ from `before`, a copy of the memory."""
        listed = self.requests[key].row_pages
        self.memory.poison(listed, listed)
        assert (self.memory.memory == before).all(), "a page that the request does not list was written"

    def check_idle(self) -> None:
        """Asserts that all handoffs are closed, that no lease is held or requested, that no buffer is in use, and that
        all source pages are released."""
        assert self.receiver.phases() == {} and self.ring.held == 0 and not self.ring.waiting
        for worker in self.prefills.values():
            assert worker.sender.phases() == {} and not worker.sender._buffers.users
            worker.check_released()
