"""Phases have deadlines and retransmit times. `Liveness` decides which peers are pinged, and which are lost."""

from enum import Enum

import pytest

from hotset.base.errors import IllegalTransition
from hotset.fleet.handoff.timers import MAX_PEERS, Liveness, PeerTiming, PhaseTable, PhaseTimeout, PhaseTimer

TIMING = PeerTiming(ping_every=1.0, peer_timeout=4.0, forget_after=100.0)


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


def test_only_watched_peers_are_pinged_once_per_interval() -> None:
    liveness = Liveness(TIMING)
    assert liveness.watch({"a", "b"}, 0.0) == {"a": 1, "b": 2}
    assert liveness.watch({"a", "b"}, 0.5) == {}
    assert liveness.watch({"a"}, 1.0) == {"a": 3}
    assert liveness.watch({"a", "b"}, 1.5) == {"b": 4} and liveness.num_pings == 4


def test_a_watched_peer_times_out_after_four_seconds_of_silence() -> None:
    liveness = Liveness(TIMING)
    liveness.watch({"a"}, 10.0)
    assert liveness.timed_out(14.0) == []
    liveness.mark_heard("a", 14.0)
    assert liveness.timed_out(18.0) == []
    assert liveness.timed_out(18.1) == ["a"]


def test_silence_before_a_peer_is_watched_does_not_count() -> None:
    liveness = Liveness(TIMING)
    liveness.mark_heard("a", 0.0)
    liveness.watch({"a"}, 50.0)
    assert liveness.timed_out(54.0) == []
    assert liveness.timed_out(54.1) == ["a"]


def test_a_peer_that_is_no_longer_watched_does_not_time_out() -> None:
    liveness = Liveness(TIMING)
    liveness.watch({"a"}, 0.0)
    liveness.watch(set(), 1.0)
    assert liveness.timed_out(99.0) == []
    liveness.watch({"a"}, 99.0)
    assert liveness.timed_out(100.0) == []


def test_a_peer_counts_as_heard_recently_until_its_timeout() -> None:
    liveness = Liveness(TIMING)
    assert not liveness.heard_recently("a", 0.0)
    liveness.mark_heard("a", 0.0)
    assert liveness.heard_recently("a", 4.0) and not liveness.heard_recently("a", 4.1)
    liveness.forget("a")
    assert not liveness.heard_recently("a", 0.0)


def test_only_unwatched_peers_are_forgotten() -> None:
    liveness = Liveness(TIMING)
    liveness.mark_heard("a", 0.0)
    liveness.mark_heard("b", 0.0)
    liveness.watch({"b"}, 0.0)
    assert liveness.expired(100.0) == []
    assert liveness.expired(100.1) == ["a"]


def test_the_number_of_remembered_peers_is_bounded() -> None:
    liveness = Liveness(TIMING)
    for number in range(3 * MAX_PEERS):
        liveness.mark_heard(str(number), 0.0)
    assert len(liveness._heard) == MAX_PEERS
    assert liveness.heard_recently(str(3 * MAX_PEERS - 1), 0.0)
