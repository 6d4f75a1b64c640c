"""Ledger and KV memory under random changes of residence, over poisoned memory: what attention reads is what was
written, byte for byte.

Commands are carried out with the next step, as in the engine: by then pages may have changed hands several times.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tiers.byte_model import SHAPES, Attention, Poison, SlotModel, Written, as_bytes

from hotset.memory.device_pool import DevicePool
from hotset.memory.host_store import HostStore
from hotset.memory.pages import PageAllocator
from hotset.tiers.commands import Command, Grant
from hotset.tiers.kv_memory import KvMemory
from hotset.tiers.ledger import Ledger, PageCounts
from hotset.tiers.residence import Holding, PageUse, Residence

CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)
class Request:
    prompt: int  # tokens that may be computed several at a time
    limit: int  # tokens after which it ends
    written: Written
    holding: Holding = field(default_factory=Holding)

    @property
    def length(self) -> int:
        return self.written.length

    @property
    def decoding(self) -> bool:
        return self.length >= self.prompt

    @property
    def rows(self) -> int:
        """Rows that it needs pages for: its whole prompt, then one more at a time."""
        return max(self.prompt, self.length + 1)


@dataclass(frozen=True, slots=True)
class Sit:
    """A request takes a seat."""

    seat: int


@dataclass(frozen=True, slots=True)
class Spoil:
    """Pages that a change has released. They must not be read after its commands."""

    device: list[int]
    host: list[int]


Books = list[tuple[Residence, int, list[list[int]], int]]


class TiersMachine(RuleBasedStateMachine):
    @initialize(
        shape=st.sampled_from([name for name in SHAPES for _ in range(1 if name == "gqa" else 3)]),
        page_rows=st.integers(1, 5),
        spare_slots=st.integers(0, 7),
        context=st.integers(24, 64),
        device_share=st.floats(0.7, 2.5),
        host_share=st.floats(1, 3.5),
        seats=st.integers(2, 4),
        seed=st.integers(0, 1 << 32),
    )
    def start(
        self, shape: str, page_rows: int, spare_slots: int, context: int, device_share: float, host_share: float,
        seats: int, seed: int,
    ) -> None:  # fmt: skip
        kv = SHAPES[shape]
        geometry = kv.geometry(page_rows, kv.topk + spare_slots if kv.groups else 0)
        device_pages = int(device_share * geometry.resident_pages(context)) + 1
        host_pages = int(host_share * geometry.row_pages(context)) + 1
        self.ledger = Ledger(geometry, PageAllocator(device_pages), PageAllocator(host_pages))
        self.capacity = self.room()
        self.pool = DevicePool(kv, geometry, device_pages, CPU)
        self.host = HostStore(kv, host_pages, page_rows, CPU)
        self.poison = Poison(self.pool, self.host)
        self.kv_memory = KvMemory(self.pool, self.host, seats, context)
        self.attention = Attention(kv, seed)
        self.slots = SlotModel(kv, geometry, seats)
        self.random = Random(seed)
        self.context = context
        self.free_seats = list(range(seats))
        self.requests: list[Request] = []
        self.pending: list[Command | Sit | Spoil] = []

    @rule(streamed=st.booleans())
    @precondition(lambda self: self.free_seats and len(self.within(Residence.PARKED)) < 2)
    def admit(self, streamed: bool) -> None:
        prompt = self.random.randint(1, self.random.choice([self.context // 2, self.context - 2]))
        limit = self.random.choice([self.random.randint(prompt + 1, self.context - 1), self.context - 1])
        request = Request(prompt, limit, Written(self.pool.shape, self.context))
        to = Residence.STREAMED if streamed and self.ledger.tiers else Residence.RESIDENT
        self.requests.append(request)
        seat = self.take_seat()
        if self.change(lambda: self.ledger.admit(request.holding, seat, to, prompt), Sit(seat)):
            SEEN[f"admitted {to.value}"] += 1
        else:
            self.free_seats.append(seat)
            self.requests.remove(request)

    @rule(rounds=st.integers(4, 20))
    @precondition(lambda self: self.seated())
    def run(self, rounds: int) -> None:
        """Runs several steps. If no request has pages for another step, one of them makes room."""
        for _ in range(rounds):
            if self.step():
                self.audit()
            elif demotable := self.demotable():
                self.demote(self.random.choice(demotable))
            elif seated := self.seated():
                self.park(self.random.choice(seated))

    @rule(data=st.data())
    @precondition(lambda self: self.demotable())
    def demote_one(self, data: st.DataObject) -> None:
        self.demote(data.draw(st.sampled_from(self.demotable())))

    @rule(data=st.data())
    @precondition(lambda self: self.within(Residence.TIERED))
    def promote(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.within(Residence.TIERED)))
        SEEN["promotions"] += self.change(lambda: self.ledger.promote(request.holding, request.length))

    @rule(data=st.data(), seldom=st.integers(0, 2))
    @precondition(lambda self: self.seated())
    def park_one(self, data: st.DataObject, seldom: int) -> None:
        if seldom == 0:
            self.park(data.draw(st.sampled_from(self.seated())))

    @rule(data=st.data(), resident=st.booleans())
    @precondition(lambda self: self.free_seats and self.within(Residence.PARKED))
    def resume(self, data: st.DataObject, resident: bool) -> None:
        request = data.draw(st.sampled_from(self.within(Residence.PARKED)))
        to = Residence.TIERED if request.decoding else Residence.STREAMED
        if resident or not self.ledger.tiers:
            to = Residence.RESIDENT
        seat = self.take_seat()
        resume = self.ledger.resume
        if self.change(lambda: resume(request.holding, seat, to, request.length, request.rows), Sit(seat)):
            SEEN[f"resumed {to.value}"] += 1
        else:
            self.free_seats.append(seat)

    @rule(data=st.data())
    @precondition(lambda self: self.growing())
    def grow(self, data: st.DataObject) -> None:
        """Grants pages for the next row, which may be computed only after other changes."""
        self.has_room(data.draw(st.sampled_from(self.growing())))

    @rule(data=st.data(), seldom=st.integers(0, 4))
    @precondition(lambda self: self.requests)
    def abort(self, data: st.DataObject, seldom: int) -> None:
        if seldom == 0:
            self.release(data.draw(st.sampled_from(self.requests)))
            SEEN["aborts"] += 1

    @torch.inference_mode()
    def step(self) -> bool:
        """Computes one batch in random order: a chunk of each prompt, one token of the others.

        Returns False if no request has pages for it.
        """
        batch = [each for each in self.seated() if self.random.random() < 0.85 and self.has_room(each)]
        if not batch:
            return False
        self.random.shuffle(batch)
        self.carry_out()
        seats, starts = [each.holding.seat for each in batch], [each.length for each in batch]
        counts = [self.chunk(each) for each in batch]
        for seat, start in zip(seats, starts, strict=True):
            self.slots.move_tail_to_slots(seat, start)
        view = self.kv_memory.view(seats, starts, counts)
        self.attention.forward(view, [each.written for each in batch])
        self.kv_memory.mirror_filled_pages(seats, starts, counts)
        for request in batch:
            self.slots.choose(request.holding.seat, request.length - 1, request.written.last_chosen)
        SEEN["steps"] += 1
        SEEN["mixed steps"] += len({each.holding.residence for each in batch}) > 1
        self.compare_host()
        for request in batch:
            self.after_step(request)
        return True

    def chunk(self, request: Request) -> int:
        left = 1 if request.decoding else request.prompt - request.length
        return left if self.random.random() < 0.1 else self.random.randint(1, min(left, 8))

    def after_step(self, request: Request) -> None:
        if request.length == request.limit:
            self.release(request)
            SEEN["finished"] += 1
        elif request.decoding and request.holding.residence is Residence.STREAMED:
            assert self.change(lambda: self.ledger.end_streaming(request.holding, request.length))

    def demote(self, request: Request) -> None:
        gain, free = self.ledger.pages_freed_by_demotion(request.holding, request.length), self.ledger.device.free
        assert self.change(lambda: self.ledger.demote(request.holding, request.length))
        assert self.ledger.device.free == free + gain, "a demotion does not free the pages that were predicted"
        SEEN["demotions"] += 1

    def park(self, request: Request) -> None:
        SEEN[f"parked {request.holding.residence.value}"] += 1
        self.free_seats.append(request.holding.seat)
        assert self.change(lambda: self.ledger.park(request.holding, request.length))

    def has_room(self, request: Request) -> bool:
        """Grants pages for the next row if necessary. Returns whether the request has them."""
        if request.length < request.holding.capacity:
            return True
        return self.change(lambda: self.ledger.grow(request.holding, request.rows))

    def change(self, act: Callable[[], list[Command] | None], *before: Sit) -> bool:
        """Queues the commands of a change and the poisoning of the pages that it released.

        Returns False if too few pages were free; then nothing may have changed.
        """
        books, room = self.books(), self.room()
        held = self.held()
        commands = act()
        if commands is None:
            assert self.books() == books and self.room() == room, "a change that was refused changed something"
            SEEN["refused"] += 1
            return False
        freed = Spoil(*(sorted(was - now) for was, now in zip(held, self.held(), strict=True)))
        self.pending += [*before, *commands, freed]
        return True

    def release(self, request: Request) -> None:
        if request.holding.residence is not Residence.PARKED:
            self.free_seats.append(request.holding.seat)

        def twice() -> list[Command]:
            self.ledger.release(request.holding)
            self.ledger.release(request.holding)
            return []

        assert self.change(twice)
        self.requests.remove(request)

    @torch.inference_mode()
    def carry_out(self) -> None:
        """Poisons granted pages, except the host pages that a resumed request already holds."""
        for command in self.pending:
            match command:
                case Sit(seat):
                    self.kv_memory.clear_seat(seat)
                    self.slots.leave(seat)
                case Spoil(device, host):
                    self.poison.spoil(device, host)
                case _:
                    if isinstance(command, Grant) and command.use is not PageUse.HOST:
                        self.poison.spoil(command.pages, [])
                    self.kv_memory.execute(command)
                    self.slots.follow(command)
        self.pending = []

    def compare_host(self) -> None:
        """The host store must have all full pages, all rows of streamed prompts, and everything of parked requests."""
        page_rows = self.pool.geometry.page_rows
        for request in self.requests:
            residence, length = request.holding.residence, request.length
            full = length // page_rows * page_rows
            rows = length if residence in (Residence.STREAMED, Residence.PARKED) else full
            keys = length if residence is Residence.PARKED else full
            positions = torch.arange(length)
            pages = torch.tensor(request.holding.pages[PageUse.HOST], dtype=torch.int64)
            at = pages[positions // page_rows] * page_rows + positions % page_rows
            same = torch.equal(as_bytes(self.host.rows[:, at[:rows]]), request.written.rows[:, :rows])
            assert same, f"rows of a {residence.value} request differ on the host"
            if self.host.keys is not None:
                same = torch.equal(as_bytes(self.host.keys[:, at[:keys]]), request.written.keys[:, :keys])
                assert same, f"index keys of a {residence.value} request differ on the host"

    @invariant()
    def go_on(self) -> None:
        """Runs some steps between two changes, or none, so that several changes reach the workers at once."""
        if not hasattr(self, "ledger"):
            return
        self.audit()
        for _ in range(self.random.choice([0, 0, 0, 1, 2, 6])):
            self.step()
            self.audit()

    def audit(self) -> None:
        self.ledger.audit([request.holding for request in self.requests])
        told_later = {command.seat for command in self.pending if not isinstance(command, Spoil)}
        tiered = {request.holding.seat: request.length for request in self.within(Residence.TIERED)}
        tiered = {seat: length for seat, length in tiered.items() if seat not in told_later}
        self.kv_memory.audit(tiered)
        for seat in tiered:
            for group, slots in enumerate(self.slots.slots[seat]):
                position_of, last_used, _ = self.kv_memory.hot_buffers.maps(seat, group)
                assert (position_of, last_used) == (slots.position_of, slots.last_used), "not the LRU slot"

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for request in tuple(self.requests):
            self.release(request)
        self.carry_out()
        assert not any(self.held()) and self.room() == self.capacity, "not all pages were released"
        traffic, slots = self.kv_memory.traffic(), self.slots
        if self.ledger.tiers:
            assert [[*traffic.lookups.values()], [*traffic.misses.values()]] == [slots.lookups, slots.misses]
        SEEN["misses"] += sum(slots.misses)
        SEEN["hits"] += sum(slots.lookups) - sum(slots.misses)

    def take_seat(self) -> int:
        return self.free_seats.pop(self.random.randrange(len(self.free_seats)))

    def within(self, *residences: Residence) -> list[Request]:
        return [request for request in self.requests if request.holding.residence in residences]

    def seated(self) -> list[Request]:
        return self.within(Residence.RESIDENT, Residence.STREAMED, Residence.TIERED)

    def growing(self) -> list[Request]:
        return [request for request in self.seated() if request.decoding and request.length >= request.holding.capacity]

    def demotable(self) -> list[Request]:
        seated = [request for request in self.seated() if request.decoding]
        return [
            request for request in seated if self.ledger.pages_freed_by_demotion(request.holding, request.length) > 0
        ]

    def books(self) -> Books:
        """Returns the whole state of the ledger, to check that it does not change."""
        holdings = [request.holding for request in self.requests]
        return [(each.residence, each.seat, [[*p] for p in each.pages.values()], each.capacity) for each in holdings]

    def room(self) -> PageCounts:
        assert self.ledger.host is not None
        return PageCounts(self.ledger.device.free, self.ledger.host.free)

    def held(self) -> tuple[set[int], set[int]]:
        """Returns the device pages and the host pages that are held."""
        pages = [item for each in self.requests for item in each.holding.pages.items()]
        device = {page for kind, held in pages if kind is not PageUse.HOST for page in held}
        return device, {page for kind, held in pages if kind is PageUse.HOST for page in held}


SEEN: Counter[str] = Counter()
CHANGES = ["demotions", "promotions", "misses", "hits", "mixed steps", "refused", "finished", "aborts"]
CHANGES += ["admitted resident", "admitted streamed", "parked resident", "parked tiered", "parked streamed"]
CHANGES += ["resumed resident", "resumed tiered", "resumed streamed"]
ROUND = settings(max_examples=20, stateful_step_count=50, deadline=None, database=None)


@pytest.mark.parametrize("steps", [1500, pytest.param(6000, marks=pytest.mark.slow)])
def test_attention_reads_the_bytes_that_were_written_whatever_moved_between(steps: int) -> None:
    """Examples come in rounds, each from a seed of its own, until every change has happened in this many steps."""
    SEEN.clear()
    for number in range(steps // 100):
        run_state_machine_as_test(seed(number)(TiersMachine), settings=ROUND)
        if SEEN["steps"] >= steps and all(SEEN[change] for change in CHANGES):
            return
    raise AssertionError(f"{SEEN}: something hardly ever happens, so the test has lost its point")
