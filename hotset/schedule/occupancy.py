"""Who is in, on which seat, and where its rows are.

Requests come in, grow, give way and leave here, each with the commands that carry it out; which of them computes what
is the scheduler's to say. Who makes room for whom is chosen in `room.py`; what that frees is offered to whoever waits,
in the same plan.
"""

from bisect import insort
from collections import deque

from hotset.base.config import TiersMode
from hotset.schedule.counters import Counters
from hotset.schedule.landings import Landings
from hotset.schedule.plan import Admission
from hotset.schedule.request import Phase, Request
from hotset.schedule.room import (
    admissible_landings,
    admissible_residences,
    demotions_for,
    headroom,
    pick_victim,
    promotable,
)
from hotset.tiers.commands import Command
from hotset.tiers.ledger import Ledger, PageCounts
from hotset.tiers.residence import Residence


class Occupancy:
    """The queue, the running, their seats and, through the ledger, their pages. Only the scheduler changes it."""

    def __init__(self, ledger: Ledger, seats: int, tiers: TiersMode, calm_plans: int, counters: Counters) -> None:
        """Room must have lasted for `calm_plans` before a tiered request is promoted."""
        self.waiting: deque[Request] = deque()  # waiting and parked, in the order in which they may come in
        self.running: list[Request] = []  # oldest first
        self.yielding: dict[Request, Residence] = {}  # not planned until drained; then it changes to that residence
        self.free_seats = list(range(seats - 1, -1, -1))
        self.commands: list[Admission | Command] = []  # for the next plan
        self.landings = Landings()
        self.plans = 0  # made; the number of the one that is in the making
        self._ledger, self._mode, self._calm_plans, self._counters = ledger, tiers, calm_plans, counters
        self._last_pressure = 0  # number of the plan in which room was last short

    def in_residence(self, residence: Residence) -> int:
        return sum(request.holding.residence is residence for request in self.running)

    def take_commands(self) -> list[Admission | Command]:
        commands, self.commands = self.commands, []
        return commands

    def admit(self, request: Request) -> bool:
        """A waiting or parked request comes in, with pages for all its tokens; False if there is no room for it yet.

        One whose prompt is computed elsewhere gets pages for that to land in."""
        if request.phase is Phase.WAITING and request.prefill_at is not None:
            return self._reserve(request)
        if not self.free_seats:
            return False
        spare = headroom(self.running)
        for place in admissible_residences(self._ledger, request, self._mode):
            if place is Residence.STREAMED and self.in_residence(Residence.STREAMED):
                continue  # one workspace at a time
            need = self._ledger.pages_needed(request.holding, place, len(request.tokens))
            if self._ledger.fits(need, spare) or self._demote_for(need, spare):
                self._seat_request(request, place)
                return True
        self._last_pressure = self.plans
        return False

    def on_kv_ready(self, request: Request) -> None:
        """The one door into decoding: every row of the request's known tokens but the newest is in memory."""
        request.move(Phase.DECODE)
        if request.holding.residence is Residence.STREAMED:
            self.commands += self._ledger.end_streaming(request.holding, request.planned)

    def grow(self, request: Request) -> bool:
        """Pages for one more row, for which others give way if they must.

        False: the request cannot go on in this plan; it may itself have given way.
        """
        while (commands := self._ledger.grow(request.holding, request.planned + 1)) is None:
            self._last_pressure = self.plans
            if self.yielding:
                return False  # room is on its way
            chosen = pick_victim(self._ledger, request, self.running, self.waiting)
            if not self.preempt(chosen.request, chosen.to) or not request.running:
                return False
        self.commands += commands
        return True

    def preempt(self, request: Request, to: Residence) -> bool:
        """Changes a request's residence at once, if no plan in flight uses it, or else as soon as they have drained."""
        if request.in_flight > 0:
            self.yielding[request] = to
            return False
        self._change(request, to)
        return True

    def settle(self) -> None:
        """Those who were asked to give way, and whose plans have drained, do so."""
        for request, to in tuple(self.yielding.items()):
            if request.in_flight == 0:
                del self.yielding[request]
                self._change(request, to)

    def promote_one(self) -> None:
        """When room has lasted and nobody waits, the oldest tiered request that fits becomes resident again."""
        if self._mode == "always" or self.waiting or self.yielding or not self._ledger.tiers:
            return
        if self.plans - self._last_pressure < self._calm_plans:
            return
        if (request := promotable(self._ledger, self.running)) is not None:
            self.preempt(request, Residence.RESIDENT)

    def recompute(self, request: Request) -> None:
        """Gives up everything: the one way of making room that costs computing again."""
        self._ledger.release(request.holding)
        request.planned = 0
        request.prefill_at = None  # what it has answered so far belongs to what must be computed: that is done here
        self._counters.recomputes += 1
        if request.phase is Phase.PARKED:
            request.move(Phase.WAITING)
        else:
            self._step_back(request, Phase.WAITING)

    def queue(self, request: Request) -> None:
        at = sum(other.arrival < request.arrival for other in self.waiting)
        self.waiting.insert(at, request)

    def leave_seat(self, request: Request) -> None:
        if request.seat is not None:
            self.free_seats.append(request.seat)
            request.seat = None

    def _reserve(self, request: Request) -> bool:
        """Pages for a prompt to land in, if it could come in as well when it has; False if there is no room yet."""
        ledger, spare, rows = self._ledger, headroom(self.running), len(request.tokens)
        for on_device, residence in admissible_landings(ledger, request, self._mode):
            need = ledger.pages_needed(request.holding, residence, min(rows + 1, request.max_length - 1))
            if not (ledger.fits(need, spare) or self._demote_for(need, spare)):
                continue
            reserved = ledger.reserve(request.holding, on_device, rows)
            assert reserved, "there was room"
            self.landings.reserve(request, on_device, self.plans)
            return True
        self._last_pressure = self.plans
        return False

    def _seat_request(self, request: Request, place: Residence) -> None:
        ledger, seat = self._ledger, self.free_seats.pop()
        parked = request.holding.residence is Residence.PARKED
        rows = len(request.tokens)
        if parked:
            commands = ledger.resume(request.holding, seat, place, request.planned, rows)
        elif request.holding.residence is Residence.LANDING:
            commands = ledger.land(request.holding, seat, place, request.planned, rows)
        else:
            commands = ledger.admit(request.holding, seat, place, rows)
        assert commands is not None, "there was room"
        request.seat = seat
        self.commands.append(Admission(seat, request.prompt, answer=tuple(request.tokens[len(request.prompt) :])))
        self.commands += commands
        insort(self.running, request, key=lambda other: other.arrival)
        self._counters.resumes += parked
        if request.prefilled and request.planned:
            self.on_kv_ready(request)
        else:
            request.move(Phase.PREFILL)

    def _demote_for(self, need: PageCounts, spare: PageCounts) -> bool:
        """Demotes as many as it takes for `need` to fit; nobody if that would not do. False: not yet, or never."""
        if self.yielding or not (demoted := demotions_for(self._ledger, need, spare, self.running)):
            return False
        self._last_pressure = self.plans
        for request in demoted:
            self.preempt(request, Residence.TIERED)
        return self._ledger.fits(need, spare)

    def _change(self, request: Request, to: Residence) -> None:
        ledger, holding = self._ledger, request.holding
        if to is Residence.TIERED:
            if ledger.pages_freed_by_demotion(holding, request.planned) > 0:
                self.commands += ledger.demote(holding, request.planned)
                self._counters.demotions += 1
        elif to is Residence.RESIDENT:
            commands = ledger.promote(holding, request.planned)
            if commands is not None:
                self.commands += commands
                self._counters.promotions += 1
        elif to is Residence.PARKED:
            self.commands += ledger.park(holding, request.planned)
            self._counters.parks += 1
            request.parks += 1
            self._step_back(request, Phase.PARKED)
        else:
            self.recompute(request)

    def _step_back(self, request: Request, phase: Phase) -> None:
        """Out of the running, into the queue by the order of arrival: in front of all that never ran."""
        request.move(phase)
        self.running.remove(request)
        self.leave_seat(request)
        self.queue(request)
