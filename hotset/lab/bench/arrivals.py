"""The times at which an open loop sends its requests."""

import math
from collections.abc import Iterator
from random import Random


def arrival_times(rate: float, burstiness: float, random: Random) -> Iterator[float]:
    """Yields the times of requests in seconds, beginning with 0, without end.

    The gaps follow a gamma distribution with mean 1 / `rate` and shape `burstiness`. Shape 1 is the exponential
    distribution of a Poisson process; as the shape grows, the gaps approach their mean.
    """
    now = 0.0
    while True:
        yield now
        now += _gap(rate, burstiness, random)


def _gap(rate: float, burstiness: float, random: Random) -> float:
    if math.isinf(rate):
        return 0.0
    if math.isinf(burstiness):
        return 1.0 / rate
    return random.gammavariate(burstiness, 1.0 / (rate * burstiness))
