"""The waiting queue, the running batch and its seats, and the state that all parts of a scheduler share."""

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from hotset.base.config import TiersMode
from hotset.schedule.plan import PlanBuilder
from hotset.schedule.request import Phase, Request
from hotset.schedule.statistics import RankStats
from hotset.tiers.ledger import Ledger
from hotset.tiers.residence import Residence


class Queues:
    """Holds the requests that wait for admission, the requests that run, and the free seats."""

    def __init__(self, seats: int) -> None:
        self.waiting: deque[Request] = deque()  # waiting and parked requests, in order of arrival
        self.running: list[Request] = []  # oldest first
        self.pending: dict[Request, Residence] = {}  # residence to change to once no plan in flight uses the request
        self.free_seats = list(range(seats - 1, -1, -1))

    def enqueue(self, request: Request) -> None:
        """Inserts a request in order of arrival. A preempted request is ahead of younger ones that never ran."""
        insort(self.waiting, request, key=lambda waiting: waiting.arrival)

    def start(self, request: Request) -> int:
        """Adds a request to the running batch and returns the seat that it gets. A seat must be free."""
        request.seat = self.free_seats.pop()
        insort(self.running, request, key=lambda running: running.arrival)
        return request.seat

    def stop(self, request: Request, phase: Phase) -> None:
        """Removes a request from the running batch, moves it to `phase` and frees its seat."""
        request.move(phase)
        self.running.remove(request)
        self.release_seat(request)

    def release_seat(self, request: Request) -> None:
        if request.seat is not None:
            self.free_seats.append(request.seat)
            request.seat = None
            request.num_drafted = 0

    def prefilling(self) -> list[Request]:
        """Returns the running requests whose prompts are being computed."""
        return [request for request in self.running if request.phase is Phase.PREFILL]

    @property
    def num_parked(self) -> int:
        return sum(request.phase is Phase.PARKED for request in self.waiting)

    @property
    def tokens_to_prefill(self) -> int:
        """Known tokens, not yet scheduled, of waiting, parked and prefilling requests without a prefill worker."""
        waiting = (request for request in self.waiting if request.prefill_at is None)
        return sum(len(request.tokens) - request.num_scheduled for request in (*waiting, *self.prefilling()))

    def tiered_rows(self) -> dict[int, int]:
        """Returns the number of scheduled rows of every tiered request, by its seat."""
        tiered = (request for request in self.running if request.holding.residence is Residence.TIERED)
        return {request.seat: request.num_scheduled for request in tiered if request.seat is not None}

    def count(self, residence: Residence) -> int:
        """Returns how many running requests are in a residence."""
        return [request.holding.residence for request in self.running].count(residence)

    def audit(self, requests: Iterable[Request]) -> None:
        """Proves that every seat is free or has exactly one owner, that exactly the requests whose residence needs a
        seat have one, and that only running requests have pending changes. Prompts in phase HANDOFF need no seat."""
        assert set(self.pending) <= set(self.running), "a request that does not run has a pending change"
        seats = list(self.free_seats)
        for request in requests:
            residence = request.holding.residence
            seated = residence not in (Residence.ABSENT, Residence.PARKED, Residence.LANDING)
            seated &= request.phase is not Phase.HANDOFF
            assert seated == (request.seat is not None), (
                f"{request.request_id} is {residence.value} on seat {request.seat}"
            )
            if request.seat is not None:
                seats.append(request.seat)
        assert sorted(seats) == list(range(len(seats))), "a seat is lost or shared"


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """What all parts of one scheduler read and change."""

    ledger: Ledger
    queues: Queues
    next_plan: PlanBuilder
    counters: RankStats
    mode: TiersMode

    def stats(self) -> RankStats:
        """Returns what was counted, with the current state of requests and pages."""
        queues, device, host, quarantined = self.queues, self.ledger.device, self.ledger.host, self.ledger.quarantined
        state = RankStats(
            running=len(queues.running),
            waiting=len(queues.waiting) - queues.num_parked,
            tokens_to_prefill=queues.tokens_to_prefill,
            resident=queues.count(Residence.RESIDENT),
            tiered=queues.count(Residence.TIERED),
            parked=queues.num_parked,
            device_pages_held=device.held,
            device_pages_total=device.capacity,
            device_pages_quarantined=quarantined.device,
            host_pages_held=host.held if host else 0,
            host_pages_cached=host.unused if host else 0,
            host_pages_quarantined=quarantined.host,
            host_pages_total=host.capacity if host else 0,
            pages_evicted=host.evictions if host else 0,
        )
        return RankStats.total([self.counters, state])
