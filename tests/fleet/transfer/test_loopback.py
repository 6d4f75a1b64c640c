"""Tests of the faults of the loopback engine. test_handoffs_under_faults.py compares two runs with the same seed.

The numbers in names like `test_defect_13_…` refer to the defects in scripts/sabotage.d.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from loopback import Faults, Hub, Loopback

from hotset.fleet.transfer.api import Region, WriteState, WriteTicket

NBYTES, POISON = 4096, 0xAB


@dataclass
class Pair:
    """Two endpoints of one hub. The test moves the clock of the hub."""

    faults: Faults = field(default_factory=Faults)
    seed: int = 0
    deadline_s: float = 10.0

    def __post_init__(self) -> None:
        self.hub = Hub(self.faults, self.seed)
        self.near, self.far = Loopback(self.hub, deadline_s=self.deadline_s), Loopback(self.hub)
        self.source = np.random.default_rng(3).integers(1, POISON, NBYTES).astype(np.uint8)  # contains no poison
        self.target = np.full(NBYTES, POISON, np.uint8)
        self.near.register(Region(self.source.ctypes.data, NBYTES))
        self.far.register(Region(self.target.ctypes.data, NBYTES))
        self.near.connect("far", self.far.describe())

    def submit(self, first: int = 0, last: int = NBYTES, step: int = 64) -> WriteTicket:
        """Submits source bytes [first, last) in blocks of `step` bytes.

        The target has the blocks in reverse order: block 0 of the source goes to the last block of the target. No two
        writes can therefore be merged.
        """
        starts = np.arange(first, last, step)
        offsets = np.stack([starts, NBYTES - step - starts], axis=1)
        spans = np.concatenate([offsets, np.full((len(starts), 1), step)], axis=1)
        return self.near.submit("far", spans + np.array([self.source.ctypes.data, self.target.ctypes.data, 0]))

    @property
    def expected(self) -> np.ndarray:
        """Returns the expected target after all of it was written in blocks of 64 bytes."""
        return self.source.reshape(-1, 64)[::-1].reshape(-1)

    @property
    def num_landed(self) -> int:
        """Returns the number of bytes written so far, and asserts that each of them is correct."""
        written = self.target != POISON
        assert np.array_equal(self.target[written], self.expected[written])
        return int(written.sum())


def test_no_byte_arrives_before_the_clock_reaches_its_delay() -> None:
    pair = Pair(Faults(delay_s=(2.0, 2.0)))
    ticket = pair.submit()
    pair.hub.advance(1.9)
    assert (pair.near.poll(ticket), pair.num_landed) == (WriteState.PENDING, 0)
    assert pair.hub.next_due() == 2.0
    pair.hub.advance(2.0)
    assert (pair.near.poll(ticket), pair.num_landed) == (WriteState.DONE, NBYTES)
    assert pair.near.throughput().nbytes == NBYTES
    assert pair.near.throughput().seconds == 2.0


def test_a_cut_list_arrives_in_part_and_nothing_of_it_arrives_later() -> None:
    landed_counts = set()
    for seed in range(20):
        pair = Pair(Faults(cut=1.0, delay_s=(0.0, 1.0)), seed)
        ticket = pair.submit()
        pair.hub.advance(1.0)
        assert pair.near.poll(ticket) is WriteState.FAILED_QUIESCED
        landed_counts.add(pair.num_landed)
        pair.target[:] = POISON
        pair.hub.advance(1000.0)
        assert pair.num_landed == 0
    assert len(landed_counts) > 10 and max(landed_counts) < NBYTES
    assert any(count % 64 for count in landed_counts), "no list was cut in the middle of a write"


def test_a_silent_list_is_pending_until_its_deadline() -> None:
    pair = Pair(Faults(silent=1.0))
    ticket = pair.submit()
    pair.hub.advance(9.9)
    assert pair.near.poll(ticket) is WriteState.PENDING
    pair.hub.advance(10.0)
    assert pair.near.poll(ticket) is WriteState.FAILED_UNKNOWN


def test_defect_13_a_late_list_fails_first_and_its_last_bytes_arrive_afterwards() -> None:
    pair = Pair(Faults(late=1.0, late_s=(3.0, 3.0)))
    ticket = pair.submit()
    pair.hub.advance(0.0)
    assert pair.near.poll(ticket) is WriteState.FAILED_UNKNOWN
    assert pair.num_landed < NBYTES
    pair.hub.advance(2.9)
    assert pair.num_landed < NBYTES
    pair.hub.advance(3.0)
    assert (pair.near.poll(ticket), pair.num_landed) == (WriteState.FAILED_UNKNOWN, NBYTES)


def test_a_list_fails_at_its_deadline_and_its_bytes_still_arrive_after_their_delay() -> None:
    pair = Pair(Faults(delay_s=(20.0, 20.0)))
    ticket = pair.submit()
    pair.hub.advance(15.0)
    assert (pair.near.poll(ticket), pair.num_landed) == (WriteState.FAILED_UNKNOWN, 0)
    pair.hub.advance(20.0)
    assert (pair.near.poll(ticket), pair.num_landed) == (WriteState.FAILED_UNKNOWN, NBYTES)


def test_reordered_and_duplicated_writes_all_arrive_before_done() -> None:
    partly_landed = 0
    for seed in range(30):
        pair = Pair(Faults(reorder=1.0, duplicate=1.0, delay_s=(0.0, 1.0)), seed)
        ticket = pair.submit()
        while pair.near.poll(ticket) is WriteState.PENDING:
            partly_landed += 0 < pair.num_landed < NBYTES
            due = pair.hub.next_due()
            assert due is not None
            pair.hub.advance(due)
        assert (pair.near.poll(ticket), pair.num_landed) == (WriteState.DONE, NBYTES)
        pair.target[:] = POISON
        pair.hub.advance(1000.0)
        assert pair.num_landed == 0, "a duplicate arrived after the list had ended"
    assert partly_landed > 10


@pytest.mark.parametrize("closed", ["near", "far"])
def test_no_byte_moves_once_an_endpoint_is_closed(closed: str) -> None:
    """The memory of a closed endpoint may have been freed."""
    pair = Pair(Faults(late=0.5, delay_s=(1.0, 1.0)))
    tickets = [pair.submit() for _ in range(8)]
    pair.hub.advance(0.5)
    (pair.near if closed == "near" else pair.far).close()
    pair.hub.advance(100.0)
    assert {pair.near.poll(ticket) for ticket in tickets} == {WriteState.FAILED_UNKNOWN}
    assert pair.num_landed == 0


def test_defect_23_nothing_is_written_through_a_closed_endpoint_although_its_memory_has_a_new_one() -> None:
    """Bytes that were on their way do not arrive, nor do those of lists that are submitted with the old keys."""
    pair = Pair(Faults(delay_s=(2.0, 2.0)))
    on_its_way = pair.submit()
    pair.hub.advance(1.0)
    assert pair.far.close()
    successor = Loopback(pair.hub)
    successor.register(Region(pair.target.ctypes.data, NBYTES))
    late = pair.submit()
    pair.hub.advance(30.0)
    assert pair.num_landed == 0
    assert [pair.near.poll(ticket) for ticket in (on_its_way, late)] == [WriteState.FAILED_UNKNOWN] * 2
    pair.near.connect("far", successor.describe())
    ticket = pair.submit()
    pair.hub.advance(40.0)
    assert pair.near.poll(ticket) is WriteState.DONE and pair.num_landed == NBYTES
