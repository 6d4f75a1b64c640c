"""The scheduler: continuous batching with chunked prefill over a fixed number of seats and two pools of pages.

`plan()` decides the next step, the runner carries it out, `commit(result)` takes in what came of it. Several plans may
be in flight; they commit in order. A request's seat, pages and residence change only while no plan in flight uses them.
"""

from bisect import insort
from collections import Counter, deque
from dataclasses import dataclass, field

from hotset.base.config import TiersMode
from hotset.schedule.plan import Admission, Committed, Plan, StepResult
from hotset.schedule.request import FinishReason, Phase, Request
from hotset.schedule.room import demotions_for, places, promotable, room_to_grow, who_gives_way
from hotset.tiers.commands import Command
from hotset.tiers.ledger import NOTHING, Ledger, Need
from hotset.tiers.residence import Residence

CALM_PLANS = 8  # without pressure before anybody is promoted


@dataclass(slots=True)
class Counters:
    """Totals since start; each is counted where the thing happens and nowhere else."""

    steps: int = 0
    tokens_prefilled: int = 0
    tokens_generated: int = 0
    demotions: int = 0
    promotions: int = 0
    parks: int = 0
    resumes: int = 0
    recomputes: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)


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
    """Owns every request's phase and seat, and through the ledger its pages. First come, first served.

    Who makes room for whom is chosen in `room.py`; what that frees is offered to whoever waits, in the same plan.
    """

    def __init__(
        self,
        ledger: Ledger,
        seats: int,
        step_rows: int,
        tiers: TiersMode = "auto",
        calm_plans: int = CALM_PLANS,
    ) -> None:
        """At most `seats` requests run at once. A step computes one row of every decoding request, and rows of prompts
        until there are `step_rows` in all, but always at least one, so that prompts get on however many decode.
        Room must have lasted for `calm_plans` before a tiered request is promoted."""
        self.counters = Counters()
        self._ledger = ledger
        self._step_rows = step_rows
        self._mode = tiers
        self._calm_plans = calm_plans
        self._free_seats = list(range(seats - 1, -1, -1))
        self._waiting: deque[Request] = deque()  # waiting and parked, in the order in which they may come in
        self._running: list[Request] = []  # oldest first
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._ended: dict[str, FinishReason] = {}
        self._yielding: dict[Request, Residence] = {}  # not planned until drained; then it changes to that residence
        self._commands: list[Admission | Command] = []  # for the next plan
        self._plans = 0
        self._arrivals = 0
        self._last_pressure = 0  # number of the plan in which room was last short

    @property
    def waiting(self) -> int:
        return len(self._waiting) - self.parked

    @property
    def parked(self) -> int:
        return sum(request.phase is Phase.PARKED for request in self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def in_residence(self, residence: Residence) -> int:
        return sum(request.holding.residence is residence for request in self._running)

    def tiered_seats(self) -> dict[int, int]:
        """Seats whose workers know them to be tiered, and how many rows each has: for audits."""
        told_later = {command.seat for command in self._commands}
        return {
            request.seat: request.planned
            for request in self._running
            if request.seat is not None
            and request.holding.residence is Residence.TIERED
            and request.seat not in told_later
        }

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is in flight, and no end is still to be reported."""
        return not (self._requests or self._in_flight or self._ended)

    def add(self, request: Request) -> None:
        """Queues a request. It must be able to fit empty pools: the front door checks that."""
        assert request.request_id not in self._requests, f"request {request.request_id} is known already"
        ledger, rows = self._ledger, request.max_length - 1
        least = min(ledger.need(request.holding, to, rows).device for to in places(ledger, request, self._mode))
        assert least <= ledger.device.capacity, f"{least} device pages never fit {ledger.device.capacity}"
        if ledger.host is not None:
            on_host = ledger.geometry.row_pages(rows)
            assert on_host <= ledger.host.capacity, f"{on_host} host pages never fit {ledger.host.capacity}"
        request.arrival, self._arrivals = self._arrivals, self._arrivals + 1
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
        self._settle()
        for request in tuple(self._running):
            if request.seat is None or (self._yielding and request in self._yielding):
                continue  # it gave way to an older one in this very plan, or is about to
            planned = request.planned
            wanted = min(len(request.tokens) + request.promised, request.max_length - 1) - planned
            if wanted > 1:
                prefills.append(request)
            elif wanted == 1 and (planned < request.holding.room or self._grow(request)) and self._ready(request):
                self._put(draft, request, 1)
        room = max(self._step_rows - len(draft.seats), 1)
        for request in prefills:
            if room > 0 and request.running and request not in self._yielding:
                room -= self._put(draft, request, min(room, len(request.tokens) - request.planned))
        while room > 0 and self._waiting and self._admit(self._waiting[0]):
            request = self._waiting.popleft()
            room -= self._put(draft, request, min(room, len(request.tokens) - request.planned))
        self._promote_one()
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
        requests = list(self._requests.values())
        self._ledger.audit([request.holding for request in requests])
        seats = [request.seat for request in requests if request.seat is not None]
        assert sorted(seats + self._free_seats) == list(range(len(seats) + len(self._free_seats))), (
            "a seat is lost or shared"
        )
        assert set(self._yielding) <= set(self._running), "a request that does not run is asked to give way"
        for request in requests:
            at_rest = request.holding.residence in (Residence.ABSENT, Residence.PARKED)
            assert at_rest == (request.seat is None), f"{request.request_id}: {request.holding.residence} and its seat"
            if not at_rest:
                need = self._ledger.need(request.holding, request.holding.residence, request.planned)
                assert need == NOTHING, f"{request.request_id} has rows without a page"

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
        """The one door into decoding: every row of the request's known tokens but the newest is in memory."""
        request.move(Phase.DECODE)
        if request.holding.residence is Residence.STREAMED:
            self._commands += self._ledger.ready(request.holding, request.planned)

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
        if request.planned == len(request.tokens) + request.promised:
            draft.sampled.append(len(draft.requests))
            request.promised += 1
        draft.requests.append(request)
        request.in_flight += 1
        return count

    def _grow(self, request: Request) -> bool:
        """Pages for one more row, for which others give way if they must.

        False: the request cannot go on in this plan; it may itself have given way.
        """
        while (commands := self._ledger.grow(request.holding, request.planned + 1)) is None:
            self._last_pressure = self._plans
            if self._yielding:
                return False  # room is on its way
            chosen = who_gives_way(self._ledger, request, self._running, self._waiting)
            if not self._give_way(chosen.request, chosen.to) or not request.running:
                return False
        self._commands += commands
        return True

    def _give_way(self, request: Request, to: Residence) -> bool:
        """Changes a request's residence at once, if no plan in flight uses it, or else as soon as they have drained."""
        if request.in_flight > 0:
            self._yielding[request] = to
            return False
        self._change(request, to)
        return True

    def _settle(self) -> None:
        """Those who were asked to give way, and whose plans have drained, do so."""
        for request, to in tuple(self._yielding.items()):
            if request.in_flight == 0:
                del self._yielding[request]
                self._change(request, to)

    def _change(self, request: Request, to: Residence) -> None:
        ledger, holding = self._ledger, request.holding
        if to is Residence.TIERED:
            if ledger.gain(holding, request.planned) > 0:
                self._commands += ledger.demote(holding, request.planned)
                self.counters.demotions += 1
        elif to is Residence.RESIDENT:
            commands = ledger.promote(holding, request.planned)
            if commands is not None:
                self._commands += commands
                self.counters.promotions += 1
        elif to is Residence.PARKED:
            self._commands += ledger.park(holding, request.planned)
            self.counters.parks += 1
            request.parks += 1
            self._step_back(request, Phase.PARKED)
        else:
            self._recompute(request)

    def _recompute(self, request: Request) -> None:
        """Gives up everything: the one way of making room that costs computing again."""
        self._ledger.release(request.holding)
        request.planned = 0
        self.counters.recomputes += 1
        if request.phase is Phase.PARKED:
            request.move(Phase.WAITING)
        else:
            self._step_back(request, Phase.WAITING)

    def _step_back(self, request: Request, phase: Phase) -> None:
        """Out of the running, into the queue by the order of arrival: in front of all that never ran."""
        request.move(phase)
        self._running.remove(request)
        self._leave_seat(request)
        at = sum(other.arrival < request.arrival for other in self._waiting)
        self._waiting.insert(at, request)

    def _admit(self, request: Request) -> bool:
        """A waiting or parked request comes in, with pages for all its tokens; False if there is no room for it yet."""
        if not self._free_seats:
            return False
        spare = room_to_grow(self._running)
        for place in places(self._ledger, request, self._mode):
            if place is Residence.STREAMED and self.in_residence(Residence.STREAMED):
                continue  # one workspace at a time
            need = self._ledger.need(request.holding, place, len(request.tokens))
            if self._ledger.fits(need, spare) or self._demote_for(need, spare):
                self._come_in(request, place)
                return True
        self._last_pressure = self._plans
        return False

    def _demote_for(self, need: Need, spare: Need) -> bool:
        """Demotes as many as it takes for `need` to fit; nobody if that would not do. False: not yet, or never."""
        if self._yielding or not (demoted := demotions_for(self._ledger, need, spare, self._running)):
            return False
        self._last_pressure = self._plans
        for request in demoted:
            self._give_way(request, Residence.TIERED)
        return self._ledger.fits(need, spare)

    def _come_in(self, request: Request, place: Residence) -> None:
        ledger, seat = self._ledger, self._free_seats.pop()
        parked = request.phase is Phase.PARKED
        rows = len(request.tokens)
        commands = (
            ledger.resume(request.holding, seat, place, request.planned, rows)
            if parked
            else ledger.admit(request.holding, seat, place, rows)
        )
        assert commands is not None, "there was room"
        request.seat = seat
        self._commands.append(
            Admission(seat, tuple(request.tokens), request.prompt_length, request.params, request.stop_ids)
        )
        self._commands += commands
        insort(self._running, request, key=lambda other: other.arrival)
        self.counters.resumes += parked
        if parked and request.prefilled:
            self._on_kv_ready(request)
        else:
            request.move(Phase.PREFILL)

    def _promote_one(self) -> None:
        """When room has lasted and nobody waits, the oldest tiered request that fits becomes resident again."""
        if self._mode == "always" or self._waiting or self._yielding or not self._ledger.tiers:
            return
        if self._plans - self._last_pressure < self._calm_plans:
            return
        if (request := promotable(self._ledger, self._running)) is not None:
            self._give_way(request, Residence.RESIDENT)

    def _seal(self, draft: _Draft) -> Plan:
        plan = Plan(self._plans, self._commands, draft.seats, draft.starts, draft.counts, draft.sampled)
        self._commands = []
        self._plans += 1
        self._in_flight.append(_InFlight(plan, draft.requests))
        return plan

    def _end(self, request: Request, reason: FinishReason) -> None:
        self.counters.finished[reason] += 1
        self._ended[request.request_id] = reason
        if request.phase in (Phase.WAITING, Phase.PARKED):
            self._waiting.remove(request)
            self._release(request)
            return
        request.move(Phase.ENDING)
        self._running.remove(request)
        self._yielding.pop(request, None)
        if request.in_flight == 0:
            self._release(request)

    def _release(self, request: Request) -> None:
        """The one door out: seat and pages go back, the request is forgotten. No plan in flight uses them any more."""
        if request.phase is Phase.FINISHED:
            return
        assert request.in_flight == 0, f"{request.request_id} is part of a plan in flight"
        request.move(Phase.FINISHED)
        self._leave_seat(request)
        self._ledger.release(request.holding)
        del self._requests[request.request_id]

    def _leave_seat(self, request: Request) -> None:
        if request.seat is not None:
            self._free_seats.append(request.seat)
            request.seat = None
