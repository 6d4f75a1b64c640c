"""Decides which requests are demoted, parked or recomputed when pages are short, and promoted when pages are free.

The functions only decide; `Preemptor` carries their decisions out. A request's residence changes only while no plan in
flight uses the request. Until then the change is pending, and no other victim is chosen. Pages that a change frees can
be granted in the same plan. `running` is always in order of arrival.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hotset.schedule.prefixes import Prefixes
from hotset.schedule.queues import SchedulerState
from hotset.schedule.request import Phase, Request
from hotset.tiers.ledger import NO_PAGES, Ledger, PageCounts
from hotset.tiers.residence import Residence

MAX_PARKS = 3  # after this many parks, a request is parked again only if every running request was parked as often


@dataclass(frozen=True, slots=True)
class Victim:
    """The decision that the residence of `request` must become `to`."""

    request: Request
    to: Residence


def pick_victim(ledger: Ledger, needy: Request, running: Sequence[Request], waiting: Iterable[Request]) -> Victim:
    """Chooses the request that frees a page for the next token of `needy`. The victim can be `needy` itself.

    If device pages are short, the request whose demotion frees the most pages is demoted. If no demotion frees any, the
    youngest running request that was parked fewer than MAX_PARKS times is parked. If all were parked that often, the
    youngest of them is. If host pages are short, or there is no host store, the youngest running or parked request
    releases all its pages and is recomputed.
    """
    need = ledger.pages_needed(needy.holding, needy.holding.residence, needy.num_scheduled + 1)
    short_of_device = need.device > ledger.device.free
    if short_of_device and (freed := _pages_freed(ledger, running)):
        return Victim(max(freed, key=freed.__getitem__), Residence.TIERED)
    if short_of_device and ledger.host is not None:
        parkable = [request for request in running if request.parks < MAX_PARKS]
        return Victim((parkable or running)[-1], Residence.PARKED)
    holders = [*running, *(request for request in waiting if request.phase is Phase.PARKED)]
    return Victim(max(holders, key=lambda request: request.arrival), Residence.ABSENT)


def demotions_for(ledger: Ledger, need: PageCounts, spare: PageCounts, running: Iterable[Request]) -> list[Request]:
    """Chooses requests to demote, those that free the most first, until `need` fits with `spare` pages left.

    Returns an empty list if all demotions together would not suffice. Demotions free no host pages.
    """
    if not ledger.tiers or not ledger.fits(PageCounts(0, need.host), PageCounts(0, spare.host)):
        return []
    demoted, short = [], need.device + spare.device - ledger.device.free
    freed = _pages_freed(ledger, running)
    for request in sorted(freed, key=freed.__getitem__, reverse=True):
        if short <= 0:
            break
        demoted.append(request)
        short -= freed[request]
    return demoted if short <= 0 else []


def promotable(ledger: Ledger, running: Sequence[Request]) -> Request | None:
    """Returns the oldest tiered request that can become resident, with headroom left for all running requests.

    Requests that asked for tiers stay tiered.
    """
    tiered = [
        request
        for request in running
        if request.holding.residence is Residence.TIERED and request.options.tiers != "tiered"
    ]
    spare = headroom(running) if tiered else NO_PAGES
    return next((r for r in tiered if ledger.fits(ledger.pages_to_promote(r.num_scheduled), spare)), None)


def headroom(running: Iterable[Request]) -> PageCounts:
    """Returns how many pages admission leaves free: in each pool, one for every request that can still grow there."""
    device = host = 0
    for request in running:
        device += request.holding.device_capacity < request.max_length - 1
        host += request.holding.host_capacity < request.max_length - 1
    return PageCounts(device, host)


def _pages_freed(ledger: Ledger, running: Iterable[Request]) -> dict[Request, int]:
    """Returns how many pages a demotion would free, for every request whose demotion would free at least one."""
    return {
        request: freed
        for request in running
        if request.phase is Phase.DECODE
        and request.options.tiers != "resident"
        and (freed := ledger.pages_freed_by_demotion(request.holding, request.num_scheduled)) > 0
    }


class Preemptor:
    """Makes room for requests that grow or are admitted, and promotes requests when room has remained for a while."""

    def __init__(self, state: SchedulerState, prefixes: Prefixes, promote_after_plans: int) -> None:
        """A tiered request is promoted only after `promote_after_plans` plans without memory pressure."""
        self.pending = state.queues.pending
        self._ledger, self._queues, self._mode = state.ledger, state.queues, state.mode
        self._next_plan, self._counters = state.next_plan, state.counters
        self._prefixes, self._promote_after_plans = prefixes, promote_after_plans
        self._last_pressure = 0  # number of the last plan for which pages were short

    def grow(self, request: Request) -> bool:
        """Grants pages for one more token, and preempts requests for them if necessary.

        Returns False if the request cannot be scheduled in this plan. In this case it may have been preempted itself.
        """
        ledger, queues = self._ledger, self._queues
        while (commands := ledger.grow(request.holding, request.num_scheduled + 1)) is None:
            self.note_pressure()
            if self.pending:
                return False  # wait for the pending change, which may free pages
            victim = pick_victim(ledger, request, queues.running, queues.waiting)
            if not self.change_residence(victim.request, victim.to) or not request.running:
                return False
        self._next_plan.commands += commands
        return True

    def make_room(self, need: PageCounts, spare: PageCounts) -> bool:
        """Demotes requests, if necessary, until `need` fits with `spare` pages left. Returns whether it fits now.

        No request is demoted if that would not suffice, or while a change is pending. If plans in flight delay
        a demotion, it becomes pending, and `need` may fit in a later plan.
        """
        if self._ledger.fits(need, spare):
            return True
        if self.pending or not (demoted := demotions_for(self._ledger, need, spare, self._queues.running)):
            return False
        self.note_pressure()
        for request in demoted:
            self.change_residence(request, Residence.TIERED)
        return self._ledger.fits(need, spare)

    def note_pressure(self) -> None:
        """Records that pages are short for the plan that is being built."""
        self._last_pressure = self._next_plan.number

    def change_residence(self, request: Request, to: Residence) -> bool:
        """Changes a request's residence. Returns False if that must wait because plans in flight use the request."""
        request.settle()
        if request.in_flight > 0:
            self.pending[request] = to
            return False
        self._change(request, to)
        return True

    def apply_pending(self) -> None:
        """Carries out the pending changes of requests that no plan in flight uses any more."""
        for request, to in tuple(self.pending.items()):
            if request.in_flight == 0:
                del self.pending[request]
                self._change(request, to)

    def promote_one(self) -> None:
        """Promotes the oldest request that `promotable` finds, if no request waits and pages were not short lately."""
        if self._mode == "always" or not self._ledger.tiers or self._queues.waiting or self.pending:
            return
        if self._next_plan.number - self._last_pressure < self._promote_after_plans:
            return
        if (request := promotable(self._ledger, self._queues.running)) is not None:
            self.change_residence(request, Residence.RESIDENT)

    def recompute(self, request: Request) -> None:
        """Releases all pages of a running or parked request. Tokens whose pages are evicted from the prefix cache
        meanwhile will be computed again."""
        self._prefixes.publish_rest(request)
        self._ledger.release(request.holding)
        request.num_scheduled = 0
        request.prefill_at = None  # prefill workers compute only prompts, not the answer that this request has
        self._counters.recomputes += 1
        if request.phase is Phase.PARKED:
            request.move(Phase.WAITING)
        else:
            self._return_to_queue(request, Phase.WAITING)

    def _change(self, request: Request, to: Residence) -> None:
        ledger, holding, length = self._ledger, request.holding, request.num_scheduled
        if to is Residence.TIERED:
            if ledger.pages_freed_by_demotion(holding, length) > 0:
                self._next_plan.commands += ledger.demote(holding, length)
                self._counters.demotions += 1
        elif to is Residence.RESIDENT:
            commands = ledger.promote(holding, length)
            if commands is not None:
                self._next_plan.commands += commands
                self._counters.promotions += 1
        elif to is Residence.PARKED:
            self._next_plan.commands += ledger.park(holding, length)
            self._counters.parks += 1
            request.parks += 1
            self._return_to_queue(request, Phase.PARKED)
        else:
            self.recompute(request)

    def _return_to_queue(self, request: Request, phase: Phase) -> None:
        self._queues.stop(request, phase)
        self._queues.enqueue(request)
