"""Timers of phases: deadlines, and the times of retransmits."""

from enum import Enum

import pytest

from hotset.base.errors import IllegalTransition
from hotset.fleet.handoff.timers import PhaseTable, PhaseTimeout, PhaseTimer


class Phase(Enum):
    WAITING = "waiting"
    ENDED = "ended"


def make_timer(timeout: PhaseTimeout) -> PhaseTimer[Phase]:
    transitions = {Phase.WAITING: frozenset({Phase.ENDED}), Phase.ENDED: frozenset[Phase]()}
    return PhaseTimer(PhaseTable(transitions, {Phase.WAITING: timeout}), Phase.WAITING, now=10.0)


def retransmits(timer: PhaseTimer[Phase], count: int) -> list[float]:
    """Returns the times of the next retransmits, if the caller asks at exactly these times."""
    times = []
    for _ in range(count):
        times.append(timer.retransmit_at)
        assert not timer.retransmit_due(timer.retransmit_at - 0.01)
        assert timer.retransmit_due(timer.retransmit_at)
    return times


def test_a_message_is_repeated_at_equal_intervals() -> None:
    assert retransmits(make_timer(PhaseTimeout(60.0, retransmit_every=0.5)), 4) == [10.5, 11.0, 11.5, 12.0]


def test_intervals_double_until_they_have_reached_their_limit() -> None:
    timer = make_timer(PhaseTimeout(60.0, retransmit_every=0.5, doubles_until=4.0))
    assert retransmits(timer, 6) == [10.5, 11.5, 13.5, 17.5, 21.5, 25.5]


def test_a_phase_without_retransmits_repeats_nothing_and_keeps_its_deadline() -> None:
    timer = make_timer(PhaseTimeout(60.0))
    assert timer.retransmit_at == float("inf") and not timer.retransmit_due(1e9) and timer.deadline == 70.0
    timer.move(Phase.ENDED, 20.0)
    assert timer.retransmit_at == timer.deadline == float("inf")
    with pytest.raises(IllegalTransition):
        timer.move(Phase.WAITING, 21.0)


def test_a_table_needs_a_timeout_for_every_phase_that_can_be_left() -> None:
    transitions = {Phase.WAITING: frozenset({Phase.ENDED}), Phase.ENDED: frozenset[Phase]()}
    with pytest.raises(AssertionError, match="a phase without a timeout"):
        PhaseTable(transitions, {})
