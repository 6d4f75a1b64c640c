"""Waits of the machines, at another pace."""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from hotset.handoff.timers import PhaseTimeout

P = TypeVar("P", bound=Enum)


def scaled(waits: Mapping[P, PhaseTimeout], factor: float) -> dict[P, PhaseTimeout]:
    """The same, slower or quicker."""
    return {
        phase: PhaseTimeout(wait.limit * factor, None if wait.again is None else wait.again * factor)
        for phase, wait in waits.items()
    }
