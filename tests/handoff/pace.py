"""Scales the timeouts of the state machines, so that tests take less time."""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from hotset.handoff.timers import PhaseTimeout

P = TypeVar("P", bound=Enum)


def scaled(timeouts: Mapping[P, PhaseTimeout], factor: float) -> dict[P, PhaseTimeout]:
    def scale(timeout: PhaseTimeout) -> PhaseTimeout:
        every = timeout.retransmit_every
        return PhaseTimeout(timeout.limit * factor, None if every is None else every * factor)

    return {phase: scale(timeout) for phase, timeout in timeouts.items()}
