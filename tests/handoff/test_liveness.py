"""When peers are treated as lost."""

from hotset.handoff.timers import MAX_PEERS, Liveness, PeerTiming

TIMING = PeerTiming(ping_every=1.0, peer_timeout=4.0, forget_after=100.0)


def test_watched_peers_are_pinged_every_second_and_others_not_at_all() -> None:
    liveness = Liveness(TIMING)
    assert liveness.watch({"a", "b"}, 0.0) == ["a", "b"]
    assert liveness.watch({"a", "b"}, 0.5) == []
    assert liveness.watch({"a"}, 1.0) == ["a"]
    assert liveness.watch({"a", "b"}, 1.5) == ["b"]


def test_a_peer_is_lost_after_four_seconds_of_silence() -> None:
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


def test_a_peer_that_is_no_longer_watched_is_not_lost() -> None:
    liveness = Liveness(TIMING)
    liveness.watch({"a"}, 0.0)
    liveness.watch(set(), 1.0)
    assert liveness.timed_out(99.0) == []
    liveness.watch({"a"}, 99.0)
    assert liveness.timed_out(100.0) == []


def test_an_introduction_is_valid_while_messages_arrive() -> None:
    liveness = Liveness(TIMING)
    assert not liveness.heard_recently("a", 0.0)
    liveness.mark_heard("a", 0.0)
    assert liveness.heard_recently("a", 4.0) and not liveness.heard_recently("a", 4.1)
    liveness.forget("a")
    assert not liveness.heard_recently("a", 0.0)


def test_only_unwatched_peers_expire() -> None:
    liveness = Liveness(TIMING)
    liveness.mark_heard("a", 0.0)
    liveness.mark_heard("b", 0.0)
    liveness.watch({"b"}, 0.0)
    assert liveness.expired(100.0) == []
    assert liveness.expired(100.1) == ["a"]


def test_peers_that_come_and_go_take_bounded_memory() -> None:
    liveness = Liveness(TIMING)
    for number in range(3 * MAX_PEERS):
        liveness.mark_heard(str(number), 0.0)
    assert len(liveness._heard) == MAX_PEERS
    assert liveness.heard_recently(str(3 * MAX_PEERS - 1), 0.0)
