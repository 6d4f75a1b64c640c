"""How much was written, and how fast."""

import threading
import time
from collections.abc import Callable

from hotset.transfer.api import Measured


class Meter:
    """Counts the bytes that arrived and the seconds in which anything was under way. Calls may come from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0
        self._seconds = 0.0
        self._nbytes = 0

    def begin(self) -> None:
        with self._lock:
            if not self._under_way:
                self._since = self._clock()
            self._under_way += 1

    def end(self, nbytes: int) -> None:
        """One that began has ended; `nbytes` of it arrived."""
        with self._lock:
            assert self._under_way, "more ended than began"
            self._under_way -= 1
            self._nbytes += nbytes
            if not self._under_way:
                self._seconds += self._clock() - self._since

    def read(self) -> Measured:
        with self._lock:
            running = self._clock() - self._since if self._under_way else 0.0
            return Measured(self._nbytes, self._seconds + running)
