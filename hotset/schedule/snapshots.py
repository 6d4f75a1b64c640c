"""Snapshots of requests for those who watch the engine: where each request is, how large it is, and its story."""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain, islice

from hotset.base.request_options import TiersChoice
from hotset.base.story import StoryEvent
from hotset.schedule.request import FinishReason, Phase, Request
from hotset.tiers.residence import PageUse

MAX_OPEN = 512  # open requests in one report; those that hold pages come first
MAX_ENDED = 256  # requests that ended since the last report


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """One request at the time of a report."""

    request_id: str
    phase: str
    residence: str
    tiers: TiersChoice
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int  # tokens whose rows were in the prefix cache when it was admitted
    rows: int  # tokens that have been computed, or are being computed
    device_pages: int
    host_pages: int
    parks: int
    finish_reason: FinishReason | None
    story: tuple[StoryEvent, ...] | None  # None if it has not changed since the last report


class Snapshots:
    """Takes the snapshots of one scheduler's requests."""

    def __init__(self) -> None:
        self._ended: deque[RequestSnapshot] = deque(maxlen=MAX_ENDED)
        self._reported: dict[str, int] = {}  # number of events of each open request in the last report

    def on_released(self, request: Request) -> None:
        """Keeps the last snapshot of a request until the next report."""
        self._reported.pop(request.request_id, None)
        self._ended.append(_snapshot(request, with_story=True))

    def take(self, requests: Collection[Request]) -> list[RequestSnapshot]:
        """Returns snapshots of the open requests, and of those that have ended since the last call."""
        taken = list(self._ended)
        self._ended.clear()
        for request in islice(_holders_first(requests), MAX_OPEN):
            num_events = request.holding.story.num_events
            changed = self._reported.get(request.request_id) != num_events
            self._reported[request.request_id] = num_events
            taken.append(_snapshot(request, with_story=changed))
        return taken


def _holders_first(requests: Collection[Request]) -> Iterable[Request]:
    if len(requests) <= MAX_OPEN:
        return requests
    waiting = [request for request in requests if request.phase is Phase.WAITING]
    return chain((request for request in requests if request.phase is not Phase.WAITING), waiting)


def _snapshot(request: Request, *, with_story: bool) -> RequestSnapshot:
    holding, prompt_tokens = request.holding, len(request.prompt)
    return RequestSnapshot(
        request_id=request.request_id,
        phase=request.phase.value,
        residence=holding.residence.value,
        tiers=request.options.tiers,
        prompt_tokens=prompt_tokens,
        answer_tokens=len(request.tokens) - prompt_tokens,
        cached_tokens=request.num_cached or 0,
        rows=request.num_scheduled,
        device_pages=holding.device_pages,
        host_pages=len(holding.pages[PageUse.HOST]),
        parks=request.parks,
        finish_reason=request.finish_reason,
        story=tuple(holding.story.events) if with_story else None,
    )
