"""Retry-After is estimated from the number of waiting requests and the rate at which they leave."""

from waiting import Clock

from hotset.serve.retry_after import MAX_DEPARTURES, MAX_RETRY_AFTER_SECONDS, Turnover
from hotset.serve.service import ServerLoad


def test_the_estimate_follows_the_rate_at_which_requests_leave() -> None:
    clock = Clock(1000.0)
    queue = Turnover(clock)
    for _ in range(20):
        queue.arrive()
    for _ in range(4):
        clock.now += 0.5
        queue.leave()
    assert (queue.present, queue.seconds_until(1), queue.seconds_until(16)) == (16, 1, 8)
    clock.now += 6.0  # nothing leaves: the rate falls to 4 in 8 s
    assert queue.seconds_until(16) == 32


def test_the_estimate_is_at_least_1_s_and_at_most_what_clients_obey() -> None:
    clock = Clock(1000.0)
    queue = Turnover(clock)
    assert queue.seconds_until(0) == queue.seconds_until(1) == 1
    queue.arrive()
    assert queue.seconds_until(1) == 1
    clock.now += 20.0
    assert (queue.seconds_until(1), queue.seconds_until(2)) == (20, 40), "as if one left now"
    queue.arrive()
    queue.leave()
    assert (queue.seconds_until(1), queue.seconds_until(500)) == (20, MAX_RETRY_AFTER_SECONDS)


def test_time_without_requests_does_not_count_and_old_departures_are_forgotten() -> None:
    clock = Clock(1000.0)
    queue = Turnover(clock)
    for _ in range(3):
        queue.arrive()
        clock.now += 0.1
        queue.leave()
        clock.now += 3600.0
    queue.arrive()
    clock.now += 0.1
    assert queue.seconds_until(1) == 1
    for seconds in [100.0] + [0.125] * MAX_DEPARTURES:
        queue.arrive()
        clock.now += seconds
        queue.leave()
    assert queue.seconds_until(80) == 10, "only the newest departures count"


def test_a_request_leaves_the_queue_once_with_its_first_token_or_without_any() -> None:
    load = ServerLoad()
    with load.waiting(10) as first_started, load.waiting(20):
        assert (load.queue.present, load.waiting_tokens) == (2, 30)
        for _ in range(3):
            first_started()
        assert (load.queue.present, load.waiting_tokens) == (1, 20)
    assert (load.queue.present, load.waiting_tokens) == (0, 0)
