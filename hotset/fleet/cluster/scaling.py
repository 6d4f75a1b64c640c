"""Decides how many engines of a role there should be, from the load that they report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hotset.fleet.cluster.spec import Target

TOLERANCE = 0.1  # smaller differences from the target change nothing


@dataclass(frozen=True, slots=True)
class Load:
    """What one engine reports about its load. The shares are from 0 to 1."""

    running: int = 0
    waiting_requests: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0  # share of the KV memory that requests use
    tier_pressure: float = 0.0  # share of the admitted requests that are tiered or parked


class Scaler:
    """Follows the target of one role. It waits before it changes the number of engines, so that it does not follow
    every short change of the load."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._above_since: float | None = None
        self._below_since: float | None = None

    def count(self, count: int, loads: Sequence[Load], now: float) -> int:
        """Returns the number of engines that there should be. `count` is the number wanted so far. `loads` are the
        loads of the ready engines."""
        if not loads:
            self._above_since = self._below_since = None
            return count
        needed = max(
            sum(getattr(load, measure) for load in loads) / value for measure, value in self._target.measures.items()
        )
        is_above, is_below = needed > count * (1 + TOLERANCE), needed < (count - 1) * (1 - TOLERANCE)
        self._above_since = (now if self._above_since is None else self._above_since) if is_above else None
        self._below_since = (now if self._below_since is None else self._below_since) if is_below else None
        wanted = count
        if self._above_since is not None and now - self._above_since >= self._target.up_seconds:
            wanted, self._above_since = math.ceil(needed / (1 + TOLERANCE)), None
        elif self._below_since is not None and now - self._below_since >= self._target.down_seconds:
            wanted, self._below_since = count - 1, None
        return max(self._target.min, min(self._target.max, wanted))
