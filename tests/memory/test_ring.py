"""The ring allocator against a plain list of cells, and with messages that are lost and repeated."""

import itertools
import random
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hotset.memory.ring import Lease, Ring

OWNERS = 12


class RingMachine(RuleBasedStateMachine):
    """Every byte of the ring is a cell that holds the number of its lease, or None."""

    @initialize(nbytes=st.sampled_from([1, 7, 16, 40, 61, 64]), align=st.sampled_from([1, 1, 4, 8]))
    def start(self, nbytes: int, align: int) -> None:
        self.ring = Ring(nbytes, align)
        self.cells: list[int | None] = [None] * nbytes
        self.live: dict[int, Lease] = {}
        self.quarantined: dict[int, Lease] = {}
        self.numbers: set[int] = set()
        self.queue: list[tuple[int, int]] = []  # (owner, bytes) of expected waiting requests

    @rule(owner=st.integers(0, OWNERS - 1), eighths=st.sampled_from([1, 1, 2, 2, 3, 5, 8, 9]), less=st.integers(0, 4))
    def request(self, owner: int, eighths: int, less: int) -> None:
        """Requests small and large sizes, up to the whole ring and beyond. Waiting owners may repeat their request."""
        nbytes = self.ring.nbytes * eighths // 8 - less
        known = owner in self.owners() or owner in dict(self.queue)
        possible = self.ring.request(owner, nbytes)
        assert possible == (known or 1 <= nbytes <= self.ring.nbytes)
        if possible and not known:
            self.queue.append((owner, nbytes))
        self.take()

    @rule(sizes=st.lists(st.integers(1, 64), max_size=6))
    def request_several(self, sizes: list[int]) -> None:
        new = [owner for owner in range(OWNERS) if owner not in self.owners() and owner not in dict(self.queue)]
        for owner, nbytes in zip(new, sizes, strict=False):
            if self.ring.request(owner, nbytes):
                self.queue.append((owner, nbytes))
        self.take()

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Releases any lease that ever existed, including leases that have ended."""
        number = data.draw(st.sampled_from(sorted(self.numbers) or [0]))
        assert self.ring.release(number) == (number in self.live)
        self.ended(self.live.pop(number, None))

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """Withdraws a waiting request if there is one; requests behind it may then be granted."""
        waiting = [owner for owner, _ in self.queue]
        owner = data.draw(st.sampled_from(waiting or list(range(OWNERS))))
        self.ring.withdraw(owner)
        self.queue = [waiting for waiting in self.queue if waiting[0] != owner]
        self.ended(self.live.pop(self.owners().get(owner, -1), None))

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.numbers) or [0]))
        self.ring.quarantine(number)
        if number in self.live:
            self.quarantined[number] = self.live.pop(number)
        self.take()

    @rule(data=st.data())
    def end_quarantine(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.numbers) or [0]))
        self.ring.end_quarantine(number)
        self.ended(self.quarantined.pop(number, None))

    def owners(self) -> dict[int, int]:
        return {lease.owner: number for number, lease in self.live.items()}  # type: ignore[misc]

    def ended(self, lease: Lease | None) -> None:
        if lease is not None:
            for at in range(lease.first, lease.first + lease.nbytes):
                self.cells[at] = None
        self.take()

    def take(self) -> None:
        """Checks that leases are granted in the order of the queue, on free bytes, and with the requested size."""
        for lease in self.ring.take_granted():
            assert (lease.owner, lease.nbytes) == self.queue.pop(0), "a request was granted out of order"
            assert lease.number not in self.numbers, "a number was used twice"
            assert lease.first % self.ring.align == 0
            there = self.cells[lease.first : lease.first + lease.nbytes]
            assert there == [None] * lease.nbytes, "two leases overlap, or one leaves the ring"
            self.cells[lease.first : lease.first + lease.nbytes] = [lease.number] * lease.nbytes
            self.live[lease.number] = lease
            self.numbers.add(lease.number)

    def room_for(self, nbytes: int) -> bool:
        firsts = range(0, self.ring.nbytes - nbytes + 1, self.ring.align)
        return any(self.cells[first : first + nbytes] == [None] * nbytes for first in firsts)

    @invariant()
    def no_fitting_request_waits_and_nothing_leaks(self) -> None:
        if not hasattr(self, "ring"):
            return
        self.ring.audit()
        assert not self.queue or not self.room_for(self.queue[0][1]), "the first in the queue fits and still waits"
        assert self.ring.waiting == len(self.queue)
        assert all(self.ring.lease_of(lease.owner) == lease for lease in self.live.values())
        taken = sum(cell is not None for cell in self.cells)
        unused = self.ring.held - taken  # behind leases, up to the next multiple of the alignment
        assert 0 <= unused <= (self.ring.align - 1) * (len(self.live) + len(self.quarantined))
        if not self.live:
            assert self.ring.stuck == bool(self.queue) and self.ring.quarantined == self.ring.held

    def teardown(self) -> None:
        """When all leases end, in any order, every waiting request is granted, and in the end all bytes are free."""
        if not hasattr(self, "ring"):
            return
        order = random.Random(len(self.numbers))
        while self.live or self.quarantined:
            number = order.choice(sorted({**self.live, **self.quarantined}))
            (self.ring.release if number in self.live else self.ring.end_quarantine)(number)
            self.ended(self.live.pop(number, None) or self.quarantined.pop(number, None))
            self.ring.audit()
        assert not self.queue, "a request was never granted"
        assert self.ring.free == self.ring.nbytes and self.ring.waiting == 0


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=200, stateful_step_count=40, deadline=None, derandomize=True)


def test_defect_09_an_empty_ring_grants_any_size_wherever_the_last_lease_ended() -> None:
    for before, nbytes in itertools.product(range(1, 31), repeat=2):
        ring = Ring(30, align=1)
        assert ring.request("before", before) and ring.request("after", nbytes)
        ring.withdraw("before")
        lease = ring.lease_of("after")
        assert lease is not None and lease.nbytes == nbytes
        ring.withdraw("after")
        assert ring.request("whole", 30)
        assert ring.lease_of("whole") == Lease(2, "whole", 0, 30)


def test_defect_09_a_gap_around_the_front_is_granted_undivided_while_bytes_are_in_quarantine() -> None:
    ring = Ring(1024)
    assert all(ring.request(owner, nbytes) for owner, nbytes in (("lost", 256), ("a", 256)))
    lost, _ = ring.take_granted()
    ring.quarantine(lost.number)
    assert ring.request("rest", 768)
    ring.withdraw("a")  # the front stays in the middle of the gap
    assert [(lease.first, lease.nbytes) for lease in ring.take_granted()] == [(256, 768)]


def test_a_request_for_the_whole_ring_is_not_starved_by_small_ones() -> None:
    ring = Ring(1024)
    assert all(ring.request(owner, 256) for owner in range(4))
    assert ring.request("whole", 1024) and ring.request("late", 1)
    for owner in (2, 0, 3):
        ring.withdraw(owner)
        assert ring.lease_of("whole") is None and ring.lease_of("late") is None
    ring.withdraw(1)
    assert ring.lease_of("whole") is not None and ring.lease_of("late") is None
    ring.withdraw("whole")
    assert ring.lease_of("late") is not None


def test_a_withdrawn_request_no_longer_blocks_those_behind_it() -> None:
    ring = Ring(1024)
    assert ring.request("a", 512) and ring.request("large", 1024) and ring.request("small", 256)
    assert ring.lease_of("small") is None
    ring.withdraw("large")
    assert ring.lease_of("small") is not None


def test_leases_go_around_the_ring_and_released_bytes_are_reused_last() -> None:
    ring = Ring(1000, align=100)
    firsts = []
    for turn in range(8):
        assert ring.request(turn, 290)
        (lease,) = ring.take_granted()
        firsts.append(lease.first)
        ring.withdraw(turn - 1)
    assert firsts == [0, 300, 600, 0, 300, 600, 0, 300]


def test_an_empty_ring_begins_at_its_start() -> None:
    ring = Ring(1000, align=100)
    for owner in range(5):
        assert ring.request(owner, 300)
        (lease,) = ring.take_granted()
        assert lease.first == 0
        ring.release(lease.number)


def test_the_last_bytes_of_a_ring_that_alignment_does_not_divide_are_granted() -> None:
    ring = Ring(1000)
    assert ring.request("a", 700) and ring.request("b", 232) and ring.request("c", 1)
    assert [(lease.first, lease.nbytes) for lease in ring.take_granted()] == [(0, 700), (768, 232)]
    assert ring.free == 0 and ring.waiting == 1
    ring.audit()


def test_a_request_that_can_never_fit_is_refused_at_once_and_blocks_no_other() -> None:
    ring = Ring(1000)
    assert not ring.request("large", 1001) and not ring.request("nothing", 0) and not ring.request("less", -5)
    assert ring.request("whole", 1000) and ring.waiting == 0


def test_a_lease_that_was_withdrawn_before_it_was_reported_is_not_reported() -> None:
    ring = Ring(1000)
    assert ring.request("a", 1000) and ring.request("b", 1000)
    ring.withdraw("a")
    assert [lease.owner for lease in ring.take_granted()] == ["b"] and ring.take_granted() == []


def test_an_old_number_does_not_end_a_later_lease_of_the_same_owner_and_place() -> None:
    ring = Ring(1000)
    assert ring.request("a", 1000)
    (old,) = ring.take_granted()
    ring.quarantine(old.number)
    ring.end_quarantine(old.number)
    assert ring.request("a", 1000)
    (new,) = ring.take_granted()
    assert (new.first, new.owner) == (old.first, old.owner) and new.number != old.number
    ring.end_quarantine(old.number)
    ring.quarantine(old.number)
    ring.end_quarantine(new.number)  # it was never in quarantine
    assert not ring.release(old.number)
    assert ring.lease_of("a") == new and ring.free == 0


def test_bytes_of_a_lost_writer_stay_quarantined_until_it_has_stopped() -> None:
    ring = Ring(1024)
    assert ring.request("a", 256) and ring.request("b", 256)
    lost, fine = ring.take_granted()
    ring.quarantine(lost.number)
    assert not ring.release(lost.number) and ring.lease_of("a") is None
    assert ring.request("a", 1024), "its owner may request another lease"
    assert ring.stuck and ring.quarantined == 256
    ring.release(fine.number)
    assert ring.stuck and ring.take_granted() == []
    ring.end_quarantine(lost.number)
    assert [lease.nbytes for lease in ring.take_granted()] == [1024] and not ring.stuck


def test_a_ring_with_quarantine_in_two_places_stays_in_use_between_them() -> None:
    ring = Ring(1024)
    assert all(ring.request(owner, 256) for owner in range(4))
    leases = ring.take_granted()
    ring.quarantine(leases[0].number)
    ring.quarantine(leases[3].number)
    for turn in range(20):
        assert ring.request(("next", turn), 512) and not ring.stuck
        ring.withdraw(1 if turn == 0 else ("next", turn - 1))
        ring.withdraw(2)
        (lease,) = ring.take_granted()
        assert (lease.first, lease.nbytes) == (256, 512)


class Post:
    """Delivers messages in any order, twice, or not at all. Senders retransmit until they get an answer."""

    def __init__(self, draw: random.Random) -> None:
        self._draw, self._letters = draw, deque[tuple[str, tuple[int, ...]]]()

    def send(self, kind: str, *what: int) -> None:
        for _ in range(self._draw.choice([0, 1, 1, 2, 3])):
            self._letters.insert(self._draw.randint(0, len(self._letters)), (kind, what))

    def next(self) -> tuple[str, tuple[int, ...]] | None:
        return self._letters.popleft() if self._letters else None


@pytest.mark.parametrize("seed", range(20))
def test_leases_survive_lost_and_repeated_messages(seed: int) -> None:
    """Six senders send contexts of twelve chunks through a ring that holds about two. Each byte has one writer."""
    draw, post = random.Random(seed), Post(random.Random(seed + 1000))
    ring = Ring(64, align=1)
    sizes = [[draw.randint(1, 64) for _ in range(12)] for _ in range(6)]
    landed = [0] * 6  # chunks of each sender that the receiver has taken out of the ring
    known = [0] * 6  # those of them that the sender knows have landed
    for _round in range(20_000):
        for sender in range(6):
            if known[sender] < 12:
                post.send("ask", sender, known[sender])
        for _letter in range(draw.randint(0, 24)):
            if (letter := post.next()) is None:
                break
            kind, (sender, chunk, *rest) = letter
            if kind == "ask" and chunk < landed[sender]:
                post.send("taken", sender, landed[sender])
            elif kind == "ask" and chunk == landed[sender]:
                assert ring.request((sender, chunk), sizes[sender][chunk])
                lease = ring.lease_of((sender, chunk))
                if lease is not None:
                    post.send("grant", sender, chunk, lease.number)
            elif kind == "grant" and chunk == known[sender]:
                post.send("written", sender, chunk, *rest)
            elif kind == "written" and ring.release(rest[0]):
                assert chunk == landed[sender], "a lease ended twice"
                landed[sender] += 1
            elif kind == "taken":
                known[sender] = max(known[sender], chunk)
        ring.audit()
        if known == [12] * 6:
            break
    assert known == [12] * 6 and ring.free == 64 and ring.waiting == 0
