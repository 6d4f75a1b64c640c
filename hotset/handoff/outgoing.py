"""One handoff on the prefill side: its phases, and what it holds."""

from dataclasses import dataclass
from enum import Enum

from hotset.handoff.course import Course, Wait
from hotset.handoff.messages import Ask, Done, Failed, Hello, Sampled, Written
from hotset.handoff.tombs import Name


class Phase(Enum):
    OFFERED = "offered"  # Accepted is said again; the engine may compute, and what it tells waits
    WRITING = "writing"  # Go came: rows are written as the engine tells them, a few lists at a time
    ENDING = "ending"  # its end is decided; writes under way are waited for
    STUCK = "stuck"  # a write would not end: the receiver knows that nobody knows
    TELLING = "telling"  # Done or Failed is said again; nothing is under way, the engine has its pages back
    CLOSED = "closed"  # only its tomb is left


NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.OFFERED: frozenset({Phase.WRITING, Phase.TELLING, Phase.CLOSED}),
    Phase.WRITING: frozenset({Phase.ENDING, Phase.TELLING, Phase.CLOSED}),
    Phase.ENDING: frozenset({Phase.STUCK, Phase.TELLING, Phase.CLOSED}),
    Phase.STUCK: frozenset({Phase.TELLING, Phase.CLOSED}),
    Phase.TELLING: frozenset({Phase.CLOSED}),
    Phase.CLOSED: frozenset(),
}

# WRITING counts from the engine's last word; a request may stand in its queue for long.
WAITS: dict[Phase, Wait] = {
    Phase.OFFERED: Wait(10.0, again=0.5),
    Phase.WRITING: Wait(600.0, again=1.0),
    Phase.ENDING: Wait(10.0, again=1.0),
    Phase.STUCK: Wait(600.0, again=1.0),
    Phase.TELLING: Wait(60.0, again=0.5),
}


class Ending(Enum):
    FAILED = "failed"  # the receiver is told, until it has heard
    CANCELLED = "cancelled"  # the receiver wished it: it is answered
    LOST = "lost"  # there is no receiver any more


@dataclass(slots=True)
class Chunk:
    """Rows [first, last), being written."""

    first: int
    last: int
    due: float
    ticket: int | None = None  # None: not submitted yet


class Outgoing:
    """One handoff. Only the sender changes it."""

    __slots__ = (
        *("ask", "course", "dropped", "ending", "hello", "landed", "open", "peer"),
        *("reason", "retry", "sampled", "tainted", "verdict", "waiting", "written"),
    )

    def __init__(self, peer: str, ask: Ask, hello: Hello, course: Course[Phase]) -> None:
        self.peer, self.ask, self.hello, self.course = peer, ask, hello, course
        self.waiting: Written | None = None  # all that was told and is not being written yet
        self.open: list[Chunk] = []  # that have not ended
        self.landed = 0  # rows [0, landed) are in place
        self.written = 0  # rows [0, written) were told by the engine
        self.sampled: Sampled | None = None
        self.tainted = False  # a write ended, and nobody knows whether it still writes
        self.dropped = False
        self.ending: Ending | None = None
        self.retry, self.reason = False, ""  # of the ending
        self.verdict: Done | Failed | None = None  # what the receiver has yet to acknowledge

    @property
    def phase(self) -> Phase:
        return self.course.phase

    @property
    def name(self) -> Name:
        return self.peer, self.ask.key

    @property
    def begun(self) -> int:
        """Rows [0, begun) are written, or being written."""
        return self.written if self.waiting is None else self.waiting.first

    @property
    def quiesced(self) -> bool:
        return not self.open and not self.tainted

    @property
    def deadline(self) -> float:
        if self.phase is Phase.WRITING:
            return min([self.course.deadline, *(chunk.due for chunk in self.open)])
        return self.course.deadline
