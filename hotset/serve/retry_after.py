"""Estimates when a client that was refused because of the load should try again."""

import math
import time
from collections import deque
from collections.abc import Callable

# The openai client ignores or refuses longer times (60 s in versions before 3, 120 s since).
MAX_RETRY_AFTER_SECONDS = 60
MAX_DEPARTURES = 64  # the rate is measured over so many departures


class Turnover:
    """Counts requests that are present, for example in a queue, and measures how fast they leave.

    Only the time since the last moment without any request counts: an idle hour says nothing about the rate.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.present = 0
        self._clock = clock
        # The times of the most recent departures, oldest first. The first entry only marks the start: it is the time at
        # which the first request arrived, or an older departure.
        self._times: deque[float] = deque(maxlen=MAX_DEPARTURES + 1)

    def arrive(self) -> None:
        if not self.present:
            self._times.clear()
            self._times.append(self._clock())
        self.present += 1

    def leave(self) -> None:
        self.present -= 1
        self._times.append(self._clock())

    def seconds_until(self, departures: int) -> int:
        """Estimates the time until this many requests have left, in whole seconds from 1 to MAX_RETRY_AFTER_SECONDS.

        If none has left yet, the estimate is made as if one left now.
        """
        elapsed = self._clock() - self._times[0] if self._times else 0.0
        departed = max(1, len(self._times) - 1)
        seconds = elapsed * departures / departed
        return min(max(1, math.ceil(seconds)), MAX_RETRY_AFTER_SECONDS)
