"""The ring allocator agrees with a list of its bytes, although messages are lost and repeated."""

import itertools
import random

from examples import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hotset.fleet.handoff.ring import Lease, Ring

OWNERS = 12


class RingMachine(RuleBasedStateMachine):
    """Compares the ring with `lease_at`, which contains the lease number of every byte, or None for a free byte."""

    @initialize(nbytes=st.sampled_from([1, 7, 16, 40, 61, 64]), align=st.sampled_from([1, 1, 4, 8]))
    def start(self, nbytes: int, align: int) -> None:
        self.ring = Ring(nbytes, align)
        self.lease_at: list[int | None] = [None] * nbytes
        self.live: dict[int, Lease] = {}
        self.quarantined: dict[int, Lease] = {}
        self.numbers: set[int] = set()
        self.queue: list[tuple[int, int]] = []  # (owner, bytes) of the requests that should be waiting

    @rule(owner=st.integers(0, OWNERS - 1), eighths=st.sampled_from([1, 1, 2, 2, 3, 5, 8, 9]), minus=st.integers(0, 4))
    def request(self, owner: int, eighths: int, minus: int) -> None:
        """Requests a size between -4 and more than the whole ring. The owner may already wait or have a lease."""
        nbytes = self.ring.nbytes * eighths // 8 - minus
        known = owner in self.owners() or owner in dict(self.queue)
        possible = self.ring.request(owner, nbytes)
        assert possible == (known or 1 <= nbytes <= self.ring.nbytes)
        if possible and not known:
            self.queue.append((owner, nbytes))
        self.take_granted()

    @rule(sizes=st.lists(st.integers(1, 64), max_size=6))
    def request_several(self, sizes: list[int]) -> None:
        new = [owner for owner in range(OWNERS) if owner not in self.owners() and owner not in dict(self.queue)]
        for owner, nbytes in zip(new, sizes, strict=False):
            if self.ring.request(owner, nbytes):
                self.queue.append((owner, nbytes))
        self.take_granted()

    @rule(data=st.data(), from_queue=st.booleans())
    def withdraw(self, data: st.DataObject, from_queue: bool) -> None:
        """Withdraws an owner that waits or has a lease, if there is one, else any. Other requests may then be
        granted."""
        known = [owner for owner, _ in self.queue] if from_queue else list(self.owners())
        owner = data.draw(st.sampled_from(known or list(range(OWNERS))))
        self.ring.withdraw(owner)
        self.queue = [entry for entry in self.queue if entry[0] != owner]
        self.end(self.live.pop(self.owners().get(owner, -1), None))

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.numbers) or [0]))
        self.ring.quarantine(number)
        if number in self.live:
            self.quarantined[number] = self.live.pop(number)
        self.take_granted()

    @rule(data=st.data())
    def end_quarantine(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.numbers) or [0]))
        self.ring.end_quarantine(number)
        self.end(self.quarantined.pop(number, None))

    def owners(self) -> dict[int, int]:
        return {lease.owner: number for number, lease in self.live.items()}  # type: ignore[misc]

    def end(self, lease: Lease | None) -> None:
        """Frees the bytes of a lease, if one is given. Then takes the leases that the ring has granted."""
        if lease is not None:
            self.lease_at[lease.first : lease.first + lease.nbytes] = [None] * lease.nbytes
        self.take_granted()

    def take_granted(self) -> None:
        """Takes new leases. Checks that they are granted in queue order, on free bytes, and with the requested size."""
        for lease in self.ring.take_granted():
            assert (lease.owner, lease.nbytes) == self.queue.pop(0), "a request was granted out of order"
            assert lease.number not in self.numbers, "a number was used twice"
            assert lease.first % self.ring.align == 0
            previous = self.lease_at[lease.first : lease.first + lease.nbytes]
            assert previous == [None] * lease.nbytes, "two leases overlap, or one is not inside the ring"
            self.lease_at[lease.first : lease.first + lease.nbytes] = [lease.number] * lease.nbytes
            self.live[lease.number] = lease
            self.numbers.add(lease.number)

    def fits(self, nbytes: int) -> bool:
        firsts = range(0, self.ring.nbytes - nbytes + 1, self.ring.align)
        return any(self.lease_at[first : first + nbytes] == [None] * nbytes for first in firsts)

    @invariant()
    def first_in_queue_does_not_fit_and_counts_agree(self) -> None:
        if not hasattr(self, "ring"):
            return
        self.ring.audit()
        assert not self.queue or not self.fits(self.queue[0][1]), "the first request of the queue waits but fits"
        assert self.ring.waiting == len(self.queue)
        assert all(self.ring.lease_of(lease.owner) == lease for lease in self.live.values())
        leased = sum(number is not None for number in self.lease_at)
        padding = self.ring.held - leased  # bytes after leases, up to the next multiple of the alignment
        assert 0 <= padding <= (self.ring.align - 1) * (len(self.live) + len(self.quarantined))
        if not self.live:
            assert self.ring.quarantined == self.ring.held
            assert not (self.queue and self.ring.fits(self.queue[0][1]))

    def teardown(self) -> None:
        """Ends all leases in random order. Every waiting request must be granted. All bytes must be free at the end."""
        if not hasattr(self, "ring"):
            return
        order = random.Random(len(self.numbers))
        while self.live or self.quarantined:
            number = order.choice(sorted({**self.live, **self.quarantined}))
            if number in self.live:
                self.ring.withdraw(self.live[number].owner)
            else:
                self.ring.end_quarantine(number)
            self.end(self.live.pop(number, None) or self.quarantined.pop(number, None))
            self.ring.audit()
        assert not self.queue, "a request was never granted"
        assert self.ring.free == self.ring.nbytes and self.ring.waiting == 0


TestRing = RingMachine.TestCase
TestRing.settings = examples(40, stateful_step_count=40)


def test_defect_09_an_empty_ring_grants_the_whole_ring_after_leases_of_any_sizes() -> None:
    for before, nbytes in itertools.product(range(1, 31), repeat=2):
        ring = Ring(30, align=1)
        assert ring.request("before", before) and ring.request("after", nbytes)
        ring.withdraw("before")
        lease = ring.lease_of("after")
        assert lease is not None and lease.nbytes == nbytes
        ring.withdraw("after")
        assert ring.request("whole", 30)
        assert ring.lease_of("whole") == Lease(2, "whole", 0, 30)


def test_leases_are_placed_in_ring_order_so_that_released_bytes_are_reused_last() -> None:
    ring = Ring(1000, align=100)
    firsts = []
    for owner in range(8):
        assert ring.request(owner, 290)
        (lease,) = ring.take_granted()
        firsts.append(lease.first)
        ring.withdraw(owner - 1)
    assert firsts == [0, 300, 600, 0, 300, 600, 0, 300]


def test_take_granted_leaves_out_a_lease_that_was_withdrawn_before() -> None:
    ring = Ring(1000)
    assert ring.request("a", 1000) and ring.request("b", 1000)
    ring.withdraw("a")
    assert [lease.owner for lease in ring.take_granted()] == ["b"] and ring.take_granted() == []


def test_bytes_of_a_lost_writer_stay_quarantined_until_it_has_stopped() -> None:
    ring = Ring(1024)
    assert ring.request("a", 256) and ring.request("b", 256)
    lost, _ = ring.take_granted()
    ring.quarantine(lost.number)
    ring.withdraw("a")
    assert ring.lease_of("a") is None
    assert ring.request("a", 1024), "the owner of a quarantined lease can request another"
    assert not ring.fits(1024) and ring.quarantined == 256
    ring.withdraw("b")
    assert not ring.fits(1024) and ring.take_granted() == []
    ring.end_quarantine(lost.number)
    assert [lease.nbytes for lease in ring.take_granted()] == [1024]
