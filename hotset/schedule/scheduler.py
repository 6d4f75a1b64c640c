"""The scheduler: continuous batching with chunked prefill over a fixed number of seats and two pools of pages.

`plan()` decides the next step, the runner carries it out, `commit(result)` takes in what came of it. Several plans may
be in flight; they commit in order. A request's seat, pages and residence change only while no plan in flight uses them.
"""

from collections import deque
from dataclasses import dataclass

from hotset.base.config import TiersMode
from hotset.base.units import ceil_div
from hotset.schedule.counters import Counters
from hotset.schedule.landings import Handovers
from hotset.schedule.occupancy import Occupancy
from hotset.schedule.plan import Alternatives, Committed, Plan, Reservation, StepResult, Withdrawal
from hotset.schedule.request import FinishReason, Phase, Request
from hotset.schedule.room import admissible_residences
from hotset.tiers.commands import Demote, Load, Promote
from hotset.tiers.ledger import NO_PAGES, Ledger
from hotset.tiers.residence import Residence

READS_HOST = (Load, Demote, Promote)
CALM_PLANS = 8  # without pressure before anybody is promoted
MOST_ATTEMPTS = 3  # of having one prompt prefilled elsewhere


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A plan that has not been committed, with the requests of its segments."""

    plan: Plan
    requests: list[Request]


class _Draft:
    """The columns of a plan while they are being filled."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.seats: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.sampled: list[int] = []


class Scheduler:
    """Owns every request, from `add` until it is released. First come, first served."""

    def __init__(
        self,
        ledger: Ledger,
        seats: int,
        step_rows: int,
        tiers: TiersMode = "auto",
        calm_plans: int = CALM_PLANS,
        stages: int = 1,
    ) -> None:
        """At most `seats` requests run at once. A step computes one row of every decoding request, and rows of prompts
        until there are `step_rows` in all, but always at least one, so that prompts get on however many decode.
        Room must have lasted for `calm_plans` before a tiered request is promoted. With several `stages`, whose first
        must know a token before it computes the next, those that decode take turns in as many plans in flight."""
        self.counters = Counters()
        self._ledger = ledger
        self._step_rows = step_rows
        self._mode = tiers
        self._stages = stages
        self._in = Occupancy(ledger, seats, tiers, calm_plans, self.counters)
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._handovers = Handovers(ledger.geometry)
        self._ended: dict[str, FinishReason] = {}
        self._why_lost: dict[str, str] = {}  # of those of them that are, or have no room
        self._early = Committed()  # tokens that came with landings since the last commit
        self._arrivals = 0

    @property
    def waiting(self) -> int:
        return len(self._in.waiting) - self.parked

    @property
    def parked(self) -> int:
        return sum(request.phase is Phase.PARKED for request in self._in.waiting)

    @property
    def running(self) -> int:
        return len(self._in.running)

    @property
    def tokens_to_prefill(self) -> int:
        """Of prompts that wait, or are being computed here."""
        return sum(len(each.tokens) - each.planned for each in self._in.waiting if each.prefill_at is None) + sum(
            len(each.tokens) - each.planned for each in self._in.running if each.phase is Phase.PREFILL
        )

    def in_residence(self, residence: Residence) -> int:
        return self._in.in_residence(residence)

    def tiered_seats(self) -> dict[int, int]:
        """Seats whose workers know them to be tiered, and how many rows each has: for audits."""
        told_later = {command.seat for command in self._in.commands}
        return {
            request.seat: request.planned
            for request in self._in.running
            if request.seat is not None
            and request.holding.residence is Residence.TIERED
            and request.seat not in told_later
        }

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is in flight, and no end is still to be reported."""
        return not (self._requests or self._in_flight or self._ended or self._early)

    def add(self, request: Request) -> None:
        """Queues a request. It must be able to fit empty pools: the front door checks that.

        Prompts computed for peers come alone: they hold all their pages from the start, never grow, and so never give
        way, which what is being sent could not do.
        """
        assert request.request_id not in self._requests, f"request {request.request_id} is known already"
        ledger, rows = self._ledger, request.max_length - 1
        least = min(
            ledger.pages_needed(request.holding, to, rows).device
            for to in admissible_residences(ledger, request, self._mode)
        )
        assert least <= ledger.device.capacity, f"{least} device pages never fit {ledger.device.capacity}"
        if ledger.host is not None:
            on_host = ledger.geometry.row_pages(rows)
            assert on_host <= ledger.host.capacity, f"{on_host} host pages never fit {ledger.host.capacity}"
        request.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        self._requests[request.request_id] = request
        self._in.waiting.append(request)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """Ends a request, whatever it is doing. Unknown or ended already: nothing happens."""
        request = self._requests.get(request_id)
        if request is not None and request.phase is not Phase.ENDING:
            self._end(request, reason)

    def landed(self, request_id: str, attempt: int, token_id: int, alternatives: Alternatives | None) -> None:
        """Every row of a prompt that was computed elsewhere is in its pages. Its first token came along."""
        request = self._landing(request_id, attempt)
        if request is None:
            return
        if request.phase is Phase.ENDING:
            self._release(request)
            return
        self.counters.landed += 1
        self.counters.tokens_generated += 1
        if alternatives is not None:
            self._early.alternatives[len(self._early.token_ids)] = alternatives
        self._early.request_ids.append(request_id)
        self._early.token_ids.append(token_id)
        request.planned = len(request.prompt)
        request.tokens.append(token_id)
        request.move(Phase.PARKED)
        self._in.queue(request)
        self._check_end(request, token_id)

    def lost(self, request_id: str, attempt: int, *, quiesced: bool, retry: bool, reason: str = "") -> bool:
        """A landing ended halfway. Unless `quiesced` something may still be written to its pages. False: nobody wanted
        it any more."""
        request = self._landing(request_id, attempt)
        if request is None:
            return False
        self.counters.lost += 1
        if not quiesced:
            self._ledger.quarantine(request.holding, _landing_name(request_id, attempt))
        self._ledger.release(request.holding)
        if request.phase is Phase.ENDING:
            self._release(request)
            return False
        request.move(Phase.WAITING)
        request.attempt += 1
        self._in.queue(request)
        if not retry or attempt >= MOST_ATTEMPTS:
            self._end(request, "lost", reason)
        else:
            self.counters.asked_again += 1
        return True

    def end_quarantine(self, request_id: str, attempt: int) -> None:
        """Nothing is written any more to the pages of a landing that was lost."""
        self._ledger.end_quarantine(_landing_name(request_id, attempt))

    def drop(self, request_id: str) -> None:
        """A prompt computed for a peer is not wanted, or has arrived: nobody reads its pages. Unknown: nothing."""
        request = self._requests.get(request_id)
        if request is not None and request.phase is not Phase.ENDING:
            self._leave(request)

    def take_outgoing(self) -> list[Reservation | Withdrawal]:
        """What prefill workers are to be told since this was last asked.

        They write when they please, not in the order of plans: so first all plans have drained that could know the
        pages otherwise.
        """
        return self._in.landings.take(self._in_flight[0].plan.number if self._in_flight else self._in.plans)

    def plan(self) -> Plan | None:
        """The next step, or None if there is nothing that could be computed now."""
        draft = _Draft()
        prefills = []
        self._in.settle()
        most = self._turn()
        for request in tuple(self._in.running):
            if request.seat is None or (self._in.yielding and request in self._in.yielding):
                continue  # it gave way to an older one in this very plan, or is about to
            planned = request.planned
            wanted = min(len(request.tokens) + request.promised, request.max_length - 1) - planned
            if wanted > 1:
                prefills.append(request)
            elif self._stages > 1 and (request.promised or len(draft.seats) == most):
                continue
            elif (
                wanted == 1 and (planned < request.holding.capacity or self._in.grow(request)) and self._ready(request)
            ):
                self._put(draft, request, 1)
        room = max(self._step_rows - len(draft.seats), 1)
        for request in prefills:
            if room > 0 and request.running and request not in self._in.yielding:
                room -= self._put(draft, request, min(room, len(request.tokens) - request.planned))
        while room > 0 and self._in.waiting and self._in.admit(self._in.waiting[0]):
            request = self._in.waiting.popleft()
            if request.running:
                room -= self._put(draft, request, min(room, len(request.tokens) - request.planned))
        self._in.promote_one()
        if self._in.waiting and not (draft.seats or self._in.running or self._in_flight):
            self._make_room_for_first()
        needed = draft.seats or self._handovers or self._in.landings.wait_for(self._in.plans)
        return self._seal(draft) if needed else None

    def commit(self, result: StepResult) -> Committed:
        """Takes in the result of the oldest plan in flight. Ends that were decided since the last commit come along."""
        in_flight = self._in_flight.popleft()
        assert result.number == in_flight.plan.number, f"plan {result.number} committed before {in_flight.plan.number}"
        news, requests = self._take_early(), in_flight.requests
        early = len(news.token_ids)
        for request in requests:
            request.in_flight -= 1
        for at, (segment, token) in enumerate(zip(in_flight.plan.sampled, result.token_ids, strict=True)):
            request = requests[segment]
            if request.phase is Phase.ENDING:
                continue  # it ended while this plan was in flight: the token is not wanted
            if request.for_peer:
                self._hand_over(request, token, result.alternatives.get(at))
                continue
            if at in result.alternatives:
                news.alternatives[len(news.token_ids)] = result.alternatives[at]
            news.request_ids.append(request.request_id)
            news.token_ids.append(token)
            self._take_token(request, token)
        for request in requests:
            if request.phase is Phase.ENDING and request.in_flight == 0:
                self._release(request)
        self.counters.steps += 1
        self.counters.tokens_generated += len(news.token_ids) - early
        self._put_ended(news)
        return news

    def take_news(self) -> Committed:
        """What came about since the last commit without a step: tokens that came with landings, and ends."""
        news = self._take_early()
        self._put_ended(news)
        return news

    def _take_early(self) -> Committed:
        early, self._early = self._early, Committed()
        return early

    def _put_ended(self, news: Committed) -> None:
        """Requests whose end was decided since this was last asked, each with its reason."""
        news.finished, self._ended = self._ended, {}
        news.why_lost, self._why_lost = self._why_lost, {}

    def audit(self) -> None:
        """Proves that every page and every seat has exactly one owner or is free."""
        requests = list(self._requests.values())
        self._ledger.audit([request.holding for request in requests])
        seats = [request.seat for request in requests if request.seat is not None]
        assert sorted(seats + self._in.free_seats) == list(range(len(seats) + len(self._in.free_seats))), (
            "a seat is lost or shared"
        )
        assert set(self._in.yielding) <= set(self._in.running), "a request that does not run is asked to give way"
        for request in requests:
            at_rest = request.holding.residence in (Residence.ABSENT, Residence.PARKED, Residence.LANDING)
            assert at_rest == (request.seat is None), f"{request.request_id}: {request.holding.residence} and its seat"
            if not at_rest:
                need = self._ledger.pages_needed(request.holding, request.holding.residence, request.planned)
                assert need == NO_PAGES, f"{request.request_id} has rows without a page"

    def _take_token(self, request: Request, token: int) -> None:
        request.promised -= 1
        request.tokens.append(token)
        if request.phase is Phase.PREFILL:
            self._in.on_kv_ready(request)
        self._check_end(request, token)

    def _check_end(self, request: Request, token: int) -> None:
        """`token` was its newest."""
        if token in request.prompt.stop_ids:
            self._end(request, "stop")
        elif len(request.tokens) >= request.max_length:
            self._end(request, "length")

    def _turn(self) -> int:
        """The most that may decode in the next plan, so that every stage has some."""
        return ceil_div(len(self._in.running), self._stages)

    @property
    def load(self) -> int:
        """Tokens of all its requests: by this the least busy replica is chosen."""
        return sum(len(request.tokens) for request in self._requests.values())

    def _ready(self, request: Request) -> bool:
        """False: its prompt has been streamed, and it becomes tiered when that is committed."""
        if request.phase is Phase.DECODE:
            return True
        return request.holding.residence is not Residence.STREAMED or request.planned < len(request.tokens)

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
        if request.for_peer:
            self._handovers.rows(request)
        if request.planned == len(request.tokens) + request.promised:
            draft.sampled.append(len(draft.requests))
            request.promised += 1
        draft.requests.append(request)
        request.in_flight += 1
        return count

    def _hand_over(self, request: Request, token: int, alternatives: Alternatives | None) -> None:
        """A prompt computed for a peer is whole. Its rows wait on the host until they have been sent."""
        self._in.commands += self._ledger.park(request.holding, request.planned)
        request.move(Phase.HANDOVER)
        self._in.running.remove(request)
        self._in.leave_seat(request)
        self._handovers.rows(request, whole=True)
        self._handovers.first_token(request, token, alternatives)
        self.counters.handed_over += 1

    def _make_room_for_first(self) -> None:
        """Nobody runs, and yet the first in the queue does not fit. Of those who hold pages the youngest gives them up
        and will be computed here. If nobody does, quarantine has taken too many for it ever to come in."""
        holders = [each for each in self._in.waiting if each.phase is Phase.PARKED and each is not self._in.waiting[0]]
        if holders:
            self._in.recompute(holders[-1])
        elif self._ledger.quarantined != NO_PAGES and len(self._requests) == len(self._in.waiting):
            pages = self._ledger.quarantined.device + self._ledger.quarantined.host
            why = f"{pages} pages are in quarantine, since lost prefill workers might still write to them, and too few"
            self._end(self._in.waiting[0], "no_room", f"{why} are left; restart this worker")

    def _landing(self, request_id: str, attempt: int) -> Request | None:
        """The request whose landing this is; None where it is not awaited any more."""
        request = self._requests.get(request_id)
        awaited = request is not None and request.holding.residence is Residence.LANDING and request.attempt == attempt
        return request if awaited and request is not None and request.phase is not Phase.PARKED else None

    def _seal(self, draft: _Draft) -> Plan:
        sent = self._handovers.take()
        commands = self._in.take_commands()
        reads_host = any(isinstance(command, READS_HOST) for command in commands) or any(
            request.holding.residence is Residence.STREAMED for request in draft.requests
        )
        columns = (draft.seats, draft.starts, draft.counts, draft.sampled)
        plan = Plan(self._in.plans, commands, *columns, sent, reads_host)
        self._in.plans += 1
        self._in_flight.append(_InFlight(plan, draft.requests))
        return plan

    def _end(self, request: Request, reason: FinishReason, why_lost: str | None = None) -> None:
        self.counters.finished[reason] += 1
        self._ended[request.request_id] = reason
        if why_lost is not None:
            self._why_lost[request.request_id] = why_lost
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """Out of whatever it is part of; it is released as soon as nothing uses what it holds."""
        if request.phase in (Phase.WAITING, Phase.PARKED):
            self._in.waiting.remove(request)
            self._release(request)
        elif request.phase is Phase.HANDOVER:
            self._handovers.forget(request)
            self._release(request)
        elif request.phase is Phase.LANDING:
            request.move(Phase.ENDING)
            if self._in.landings.withdraw(request):
                self._release(request)
        else:
            request.move(Phase.ENDING)
            self._in.running.remove(request)
            self._in.yielding.pop(request, None)
            if request.in_flight == 0:
                self._release(request)

    def _release(self, request: Request) -> None:
        """The one door out: seat and pages go back, the request is forgotten. No plan in flight uses them any more."""
        if request.phase is Phase.FINISHED:
            return
        assert request.in_flight == 0, f"{request.request_id} is part of a plan in flight"
        request.move(Phase.FINISHED)
        self._in.leave_seat(request)
        self._ledger.release(request.holding)
        del self._requests[request.request_id]


def _landing_name(request_id: str, attempt: int) -> str:
    return f"{request_id} {attempt}"
