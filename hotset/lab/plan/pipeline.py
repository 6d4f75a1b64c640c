"""How steps follow each other through the stages of a pipeline. With one stage, they follow each other on it."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class SimulatedClock:
    """The time at which an engine makes its plans, and until which each pipeline stage is busy."""

    now: float = 0.0
    busy_until: list[float] = field(default_factory=list)

    def run(self, seconds: Sequence[float]) -> float:
        """Returns when a step ends that is submitted now and takes `seconds` on each stage, one after another."""
        self.busy_until = self.busy_until or [0.0] * len(seconds)
        ends = self.now
        for stage, duration in enumerate(seconds):
            ends = max(ends, self.busy_until[stage]) + duration
            self.busy_until[stage] = ends
        return ends


def pipeline_seconds(steps: Iterable[Sequence[float]], plans_in_flight: int) -> float:
    """Returns when the last of `steps` ends, each of which takes some seconds on every stage.

    No step needs a token that another samples: they are chunks of a prompt. A step is submitted when fewer than
    `plans_in_flight` are left.
    """
    clock, in_flight = SimulatedClock(), deque[float]()
    for seconds in steps:
        if len(in_flight) == plans_in_flight:
            clock.now = in_flight.popleft()
        in_flight.append(clock.run(seconds))
    return max(clock.busy_until, default=0.0)


def seconds_between_tokens(stages: Sequence[float], batches: int) -> float:
    """Returns the time between two tokens of a request if `batches` batches take turns, at most one for each stage.

    A batch takes `stages` seconds. Its next token is computed when it has passed all stages, and when the slowest stage
    has computed the other batches.
    """
    return max(sum(stages), batches * max(stages))
