"""Scaling of the timeouts of the state machines, to shorten tests."""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from hotset.handoff.timers import PhaseTimeout

P = TypeVar("P", bound=Enum)


def scaled(timeouts: Mapping[P, PhaseTimeout], factor: float) -> dict[P, PhaseTimeout]:
    """Returns a table in which every limit and retransmit interval is multiplied by `factor`."""

    def scale(timeout: PhaseTimeout) -> PhaseTimeout:
        every = timeout.retransmit_every
        return PhaseTimeout(timeout.limit * factor, None if every is None else every * factor)

    return {phase: scale(timeout) for phase, timeout in timeouts.items()}
