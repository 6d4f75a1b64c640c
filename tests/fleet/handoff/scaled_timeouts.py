"""Scales the timeouts of the state machines for tests."""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from hotset.fleet.handoff.timers import PhaseTimeout

P = TypeVar("P", bound=Enum)


def scaled(timeouts: Mapping[P, PhaseTimeout], factor: float) -> dict[P, PhaseTimeout]:
    """Returns a table in which every limit and retransmit interval is multiplied by `factor`."""

    def scale(timeout: PhaseTimeout) -> PhaseTimeout:
        interval = timeout.retransmit_every
        scaled_interval = None if interval is None else interval * factor
        return PhaseTimeout(timeout.limit * factor, scaled_interval, timeout.doubles_until * factor)

    return {phase: scale(timeout) for phase, timeout in timeouts.items()}
