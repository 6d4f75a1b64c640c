"""The number of engines follows a target within its bounds, and does not swing."""

import random

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.fleet.cluster.scaling import Load, Scaler
from hotset.fleet.cluster.spec import Target

TARGET = Target.model_validate({"min": 1, "max": 6, "waiting-requests": 4.0, "up-seconds": 10.0, "down-seconds": 60.0})


def counts_over(scaler: Scaler, requests: list[int], seconds: float = 1.0, count: int = 1) -> list[int]:
    """Returns the count after each decision. `requests` has the number of waiting requests for each."""
    counts = []
    for index, waiting in enumerate(requests):
        share, rest = divmod(waiting, count)
        loads = [Load(waiting_requests=share + (engine < rest)) for engine in range(count)]
        count = scaler.count(count, loads, index * seconds)
        counts.append(count)
    return counts


def test_engines_are_added_after_the_load_was_high_for_a_while() -> None:
    counts = counts_over(Scaler(TARGET), [16] * 30)
    assert counts[:10] == [1] * 10 and counts[10:] == [4] * 20


def test_a_short_peak_changes_nothing() -> None:
    assert set(counts_over(Scaler(TARGET), ([40] * 9 + [4]) * 5)) == {1}


def test_engines_are_removed_one_by_one_after_a_long_idle_time() -> None:
    counts = counts_over(Scaler(TARGET), [0] * 200, count=4)
    assert counts[59] == 4 and counts[60] == 3 and counts[121] == 2 and counts[182] == 1 and counts[199] == 1


def test_loads_near_the_target_change_nothing() -> None:
    for waiting in (11, 12, 13):
        assert set(counts_over(Scaler(TARGET), [waiting] * 500, count=3)) == {3}


def test_without_ready_engines_nothing_is_decided() -> None:
    scaler = Scaler(TARGET)
    assert [scaler.count(3, [], float(second)) for second in range(100)] == [3] * 100


def test_the_measure_that_needs_most_engines_decides() -> None:
    target = Target.model_validate({"max": 8, "waiting-requests": 4.0, "kv-usage": 0.5, "up-seconds": 1.0})
    scaler = Scaler(target)
    loads = [Load(waiting_requests=1, kv_usage=0.99)] * 2
    assert [scaler.count(2, loads, float(second)) for second in range(2)] == [2, 4]


@examples(30)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_the_count_stays_within_its_bounds_and_the_load_near_the_target(seed: int, start: int) -> None:
    """An independent check: with a constant load, the count settles where no rule applies."""
    waiting = random.Random(seed).randrange(0, 60)
    counts = counts_over(Scaler(TARGET), [waiting] * 600, count=start)
    assert all(TARGET.min <= count <= TARGET.max for count in counts)
    final = counts[-1]
    assert set(counts[-100:]) == {final}
    assert final == TARGET.max or waiting <= final * 4 * 1.1
    assert final == TARGET.min or waiting >= (final - 1) * 4 * 0.9
