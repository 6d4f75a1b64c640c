"""The story of a request: when its phase and its residence changed."""

import time
from typing import Literal, NamedTuple

MAX_EVENTS = 64  # of one story; in a longer one, the middle is missing

Lane = Literal["phase", "residence"]


class StoryEvent(NamedTuple):
    """A change of one request."""

    seconds: float  # by time.time
    lane: Lane
    state: str  # the phase or the residence from then on


class Story:
    """The changes of one request, oldest first. At most MAX_EVENTS are kept: the first half, and the newest ones."""

    __slots__ = ("events", "num_events")

    def __init__(self) -> None:
        self.events: list[StoryEvent] = []
        self.num_events = 0  # including the missing ones

    def record(self, lane: Lane, state: str) -> None:
        if len(self.events) == MAX_EVENTS:
            del self.events[MAX_EVENTS // 2]
        self.events.append(StoryEvent(time.time(), lane, state))
        self.num_events += 1
