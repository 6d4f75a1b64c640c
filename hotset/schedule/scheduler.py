"""The scheduler: continuous batching with chunked prefill over a fixed number of seats and pages.

`plan()` decides the next step, the runner carries it out, `commit(result)` takes in what came of it. Several plans may
be in flight; they commit in order. A request's seat and pages change hands only when no plan in flight uses them.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from hotset.base.units import ceil_div
from hotset.memory.pages import PageAllocator
from hotset.schedule.plan import Admission, Committed, Growth, Plan, StepResult
from hotset.schedule.request import FinishReason, Phase, Request


@dataclass(slots=True)
class Counters:
    """Totals since start; each is counted where the thing happens and nowhere else."""

    steps: int = 0
    tokens_prefilled: int = 0
    tokens_generated: int = 0
    preemptions: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A plan that has not been committed, with the requests of its segments."""

    plan: Plan
    requests: list[Request]


class _Draft:
    """The columns of a plan while they are being filled."""

    def __init__(self) -> None:
        self.admissions: list[Admission] = []
        self.growth: list[Growth] = []
        self.requests: list[Request] = []
        self.seats: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.sampled: list[int] = []


class Scheduler:
    """Owns every request's phase, seat and pages. First come, first served; the youngest gives way."""

    def __init__(self, pages: PageAllocator, page_rows: int, seats: int, step_rows: int) -> None:
        """At most `seats` requests run at once. A step computes one row of every decoding request, and rows of prompts
        until there are `step_rows` in all, but always at least one, so that prompts get on however many decode."""
        self.counters = Counters()
        self._pages = pages
        self._page_rows = page_rows
        self._step_rows = step_rows
        self._free_seats = list(range(seats - 1, -1, -1))
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # oldest first
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._ended: dict[str, FinishReason] = {}
        self._yielding: Request | None = None  # not planned any more: its pages are wanted once its plans have drained
        self._plans = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is in flight, and no end is still to be reported."""
        return not (self._requests or self._in_flight or self._ended)

    def add(self, request: Request) -> None:
        """Queues a request. It must be able to fit an empty pool: the front door checks that."""
        assert request.request_id not in self._requests, f"request {request.request_id} is known already"
        most = ceil_div(request.max_length - 1, self._page_rows)
        assert most <= self._pages.capacity, f"{most} pages never fit {self._pages.capacity}"
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """Ends a request, whatever it is doing. Unknown or ended already: nothing happens."""
        request = self._requests.get(request_id)
        if request is not None and request.phase is not Phase.ENDING:
            self._end(request, reason)

    def plan(self) -> Plan | None:
        """The next step, or None if there is nothing that could be computed now."""
        draft = _Draft()
        prefills = []
        if self._yielding is not None and self._yielding.in_flight == 0:
            self._yielding = None
        for request in tuple(self._running):
            if request is self._yielding:
                continue
            wanted = min(len(request.tokens) + request.promised, request.max_length - 1) - request.planned
            if wanted > 1:
                prefills.append(request)
            elif wanted == 1 and request.seat is not None and self._has_room(request, 1, draft):
                self._put(draft, request, 1)
        room = max(self._step_rows - len(draft.seats), 1)
        for request in prefills:
            if room > 0 and request.running:
                room -= self._put(draft, request, min(room, len(request.tokens) - request.planned))
        while room > 0 and self._waiting and self._admit(self._waiting[0], draft):
            request = self._waiting.popleft()
            room -= self._put(draft, request, min(room, len(request.tokens)))
        return self._seal(draft) if draft.seats else None

    def commit(self, result: StepResult) -> Committed:
        """Takes in the result of the oldest plan in flight. Ends that were decided since the last commit come along."""
        in_flight = self._in_flight.popleft()
        assert result.number == in_flight.plan.number, f"plan {result.number} committed before {in_flight.plan.number}"
        news = Committed()
        requests = in_flight.requests
        for request in requests:
            request.in_flight -= 1
        for at, (segment, token) in enumerate(zip(in_flight.plan.sampled, result.token_ids, strict=True)):
            request = requests[segment]
            if request.phase is Phase.ENDING:
                continue  # it ended while this plan was in flight: the token is not wanted
            if at in result.alternatives:
                news.alternatives[len(news.token_ids)] = result.alternatives[at]
            news.request_ids.append(request.request_id)
            news.token_ids.append(token)
            self._take_token(request, token)
        for request in requests:
            if request.phase is Phase.ENDING and request.in_flight == 0:
                self._release(request)
        self.counters.steps += 1
        self.counters.tokens_generated += len(news.token_ids)
        news.finished = self.take_ended()
        return news

    def take_ended(self) -> dict[str, FinishReason]:
        """Requests whose end was decided since this was last asked, each with its reason."""
        ended, self._ended = self._ended, {}
        return ended

    def audit(self) -> None:
        """Proves that every page and every seat has exactly one owner or is free."""
        self._pages.audit()
        held = [page for request in self._requests.values() for page in request.pages]
        assert len(held) == len(set(held)), "a page has two owners"
        assert len(held) == self._pages.held, f"{len(held)} pages are owned, {self._pages.held} are held"
        seats = [request.seat for request in self._requests.values() if request.seat is not None]
        assert sorted(seats + self._free_seats) == list(range(len(seats) + len(self._free_seats))), (
            "a seat is lost or shared"
        )
        for request in self._requests.values():
            assert request.planned <= len(request.pages) * self._page_rows, (
                f"{request.request_id} has rows without a page"
            )

    def _take_token(self, request: Request, token: int) -> None:
        request.promised -= 1
        request.tokens.append(token)
        if request.phase is Phase.PREFILL:
            self._on_kv_ready(request)
        if token in request.stop_ids:
            self._end(request, "stop")
        elif len(request.tokens) >= request.max_length:
            self._end(request, "length")

    def _on_kv_ready(self, request: Request) -> None:
        """The one door into decoding: every row of the request's known tokens is in memory."""
        request.move(Phase.DECODE)

    def _put(self, draft: _Draft, request: Request, count: int) -> int:
        """Adds rows [planned, planned + count) of a request, which has pages for them, to the plan."""
        seat = request.seat
        assert seat is not None
        draft.seats.append(seat)
        draft.starts.append(request.planned)
        draft.counts.append(count)
        if request.phase is Phase.PREFILL and request.promised == 0:
            self.counters.tokens_prefilled += count
        request.planned += count
        if request.planned == len(request.tokens) + request.promised:
            draft.sampled.append(len(draft.requests))
            request.promised += 1
        draft.requests.append(request)
        request.in_flight += 1
        return count

    def _has_room(self, request: Request, count: int, draft: _Draft) -> bool:
        """Grows the request's pages to hold `count` more rows, preempting younger requests if it must.

        False: the request cannot go on in this plan; it may itself have been preempted.
        """
        missing = ceil_div(request.planned + count, self._page_rows) - len(request.pages)
        if missing <= 0:
            return True
        while (pages := self._pages.allocate(missing, after=request.pages[-1])) is None:
            if not self._preempt_youngest(request):
                return False
        draft.growth.append(Growth(request.seat or 0, len(request.pages), tuple(pages)))
        request.pages += pages
        return True

    def _preempt_youngest(self, needy: Request) -> bool:
        """Takes seat and pages from the youngest running request and puts it back in front of the queue.

        False: nothing more can be had now. That request is `needy` itself, or plans in flight still use its pages; then
        it is not planned again until they have drained, so that its turn to give way comes.
        """
        victim = self._running[-1]
        if victim.in_flight > 0:
            self._yielding = victim
            return False
        self._running.pop()
        self._give_back(victim)
        victim.move(Phase.WAITING)
        victim.planned = 0
        self.counters.preemptions += 1
        self._waiting.appendleft(victim)
        return victim is not needy

    def _admit(self, request: Request, draft: _Draft) -> bool:
        """Gives the request a seat and pages for all its tokens, in one run where possible; False if there is no room.

        A page per running request is left free, so that those who run can grow before somebody is preempted.
        """
        wanted = ceil_div(len(request.tokens), self._page_rows)
        if not self._free_seats or (wanted + len(self._running) > self._pages.free and self._running):
            return False
        pages = self._pages.allocate(wanted)
        if pages is None:
            return False
        request.seat = self._free_seats.pop()
        request.pages = pages
        request.move(Phase.PREFILL)
        self._running.append(request)
        draft.admissions.append(
            Admission(request.seat, tuple(request.tokens), request.prompt_length, request.params, request.stop_ids)
        )
        draft.growth.append(Growth(request.seat, 0, tuple(pages)))
        return True

    def _seal(self, draft: _Draft) -> Plan:
        plan = Plan(self._plans, draft.admissions, draft.growth, draft.seats, draft.starts, draft.counts, draft.sampled)
        self._plans += 1
        self._in_flight.append(_InFlight(plan, draft.requests))
        return plan

    def _end(self, request: Request, reason: FinishReason) -> None:
        self.counters.finished[reason] += 1
        self._ended[request.request_id] = reason
        if request.phase is Phase.WAITING:
            self._waiting.remove(request)
            self._release(request)
            return
        request.move(Phase.ENDING)
        self._running.remove(request)
        if request.in_flight == 0:
            self._release(request)

    def _release(self, request: Request) -> None:
        """The one door out: seat and pages go back, the request is forgotten. No plan in flight uses them any more."""
        if request.phase is Phase.FINISHED:
            return
        request.move(Phase.FINISHED)
        self._give_back(request)
        del self._requests[request.request_id]

    def _give_back(self, request: Request) -> None:
        assert request.in_flight == 0, f"{request.request_id} is part of a plan in flight"
        if request.seat is not None:
            self._free_seats.append(request.seat)
            self._pages.release(request.pages)
            request.seat, request.pages = None, []
