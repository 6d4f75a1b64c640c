"""The times of an open loop have the requested rate and spread, and depend only on the seed."""

import math
import statistics
from itertools import islice, pairwise
from random import Random

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.lab.bench.runner import arrival_times

COUNT = 4000
EXAMPLES = examples(20)


def times(rate: float, burstiness: float = 1.0, seed: int = 0, count: int = COUNT) -> list[float]:
    return list(islice(arrival_times(rate, burstiness, Random(seed)), count))


@EXAMPLES
@given(st.floats(0.01, 1e4), st.floats(0.1, 100), st.integers(0, 10**6))
def test_times_begin_at_zero_never_decrease_and_depend_only_on_the_seed(
    rate: float, burstiness: float, seed: int
) -> None:
    found = times(rate, burstiness, seed, count=50)
    assert found[0] == 0.0 and all(earlier <= later for earlier, later in pairwise(found))
    assert found == times(rate, burstiness, seed, count=50)
    # The rate only stretches the times.
    assert times(rate * 2, burstiness, seed, count=50) == pytest.approx([time / 2 for time in found])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_of_a_gamma_distribution(burstiness: float, seed: int) -> None:
    """The coefficient of variation is 1 / sqrt(shape): 1 for a Poisson process, above it for bursts."""
    found = times(8.0, burstiness, seed)
    gaps = [later - earlier for earlier, later in pairwise(found)]
    spread = 1 / math.sqrt(burstiness)
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=6 * spread / math.sqrt(COUNT))
    assert statistics.stdev(gaps) * 8 == pytest.approx(spread, rel=0.25)


def test_an_infinite_burstiness_spaces_requests_evenly_and_an_infinite_rate_sends_them_at_once() -> None:
    assert times(4.0, math.inf, count=5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert times(math.inf, count=5) == [0.0] * 5
