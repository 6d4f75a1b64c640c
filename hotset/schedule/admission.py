"""Decides whether a waiting request is admitted and in which residence, and where prompts from prefill workers land."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hotset.base.config import TiersMode
from hotset.base.errors import InternalError
from hotset.schedule.landings import Landings
from hotset.schedule.plan import AssignSeat
from hotset.schedule.preemption import Preemptor, headroom
from hotset.schedule.prefixes import Prefixes
from hotset.schedule.queues import SchedulerState
from hotset.schedule.request import Phase, Request
from hotset.tiers.ledger import Ledger, PageCounts
from hotset.tiers.prefix_cache import CachedPage
from hotset.tiers.residence import PageUse, Residence


def admissible_residences(ledger: Ledger, request: Request, mode: TiersMode, rows: int = 0) -> tuple[Residence, ...]:
    """Returns the residences in which a waiting or parked request may be admitted, the best first.

    Its first `rows` rows are on the host. If at most one row is left to compute, the request need not be streamed.
    """
    if not ledger.tiers or request.options.tiers == "resident" or request.holding.pages[PageUse.ROWS]:
        return (Residence.RESIDENT,)
    on_host = Residence.TIERED if rows and rows >= len(request.tokens) - 1 else Residence.STREAMED
    if mode == "always" or request.options.tiers == "tiered":
        return (on_host,)
    return (Residence.RESIDENT, on_host)


def admissible_landings(ledger: Ledger, request: Request, mode: TiersMode) -> list[tuple[bool, Residence]]:
    """Returns where a prompt that a prefill worker computes may land, the best place first.

    Each entry is (whether the prompt lands in device pages, residence of the request afterwards).
    """
    tiers, landing = request.options.tiers, request.options.landing
    may_be_tiered = ledger.tiers and tiers != "resident"
    must_be_resident = tiers == "resident" or landing == "device"  # even if `mode` is "always"
    may_be_resident = must_be_resident or not (ledger.tiers and (mode == "always" or tiers == "tiered"))
    landings = []
    policy = ledger.landing_policy(request.prefill_at)
    avoids_device = policy.prefer_host and ledger.host is not None and landing != "device"
    if may_be_resident and policy.on_device and landing != "host" and not avoids_device:
        landings.append((True, Residence.RESIDENT))
    if ledger.host is not None and landing != "device":
        landings += [(False, Residence.RESIDENT)] * may_be_resident + [(False, Residence.TIERED)] * may_be_tiered
    return landings


@dataclass(frozen=True, slots=True)
class _Lookup:
    """The cached prefix and the page counts found for a request in the queue. They are valid until the ledger's version
    changes or the request leaves the queue."""

    request: Request
    version: int
    prefix: list[CachedPage]  # the cached pages from which the request can start
    needs: dict[tuple[Residence, int], PageCounts] = field(default_factory=dict)  # by residence and number of rows


class Admission:
    """Admits waiting and parked requests. Each gets a seat and pages.

    A request whose prompt a prefill worker computes first gets only the pages in which the prompt will land.
    """

    def __init__(
        self,
        state: SchedulerState,
        preemptor: Preemptor,
        landings: Landings,
        prefixes: Prefixes,
        extend_locally: int,
    ) -> None:
        """A prompt for a prefill worker is computed here instead if all but `extend_locally` of its tokens are in the
        prefix cache."""
        self._ledger, self._queues, self._mode = state.ledger, state.queues, state.mode
        self._next_plan, self._counters = state.next_plan, state.counters
        self._preemptor, self._landings, self._prefixes = preemptor, landings, prefixes
        self._extend_locally = extend_locally
        self._last_lookup: _Lookup | None = None

    def check_possible(self, request: Request) -> None:
        """Raises InternalError if the request does not fit empty pools. The front end has refused such requests."""
        ledger, rows = self._ledger, request.max_length - 1
        residences = admissible_residences(ledger, request, self._mode)
        least = min(ledger.pages_needed(request.holding, to, rows).device for to in residences)
        if least > ledger.device.capacity:
            raise InternalError(f"a request needs {least} device pages, but there are {ledger.device.capacity}")
        if ledger.host is not None:
            on_host = ledger.geometry.row_pages(rows)
            if on_host > ledger.host.capacity:
                raise InternalError(f"a request needs {on_host} host pages, but there are {ledger.host.capacity}")

    def admit_waiting(self) -> Iterator[Request]:
        """Admits requests in order of arrival until one does not fit, and yields each. A request whose prefix is being
        computed waits without delaying others."""
        waiting, free_seats, skipped = self._queues.waiting, self._queues.free_seats, 0
        self._prefixes.begin_plan()
        while skipped < len(waiting):
            request = waiting[skipped]
            if not free_seats and self._needs_seat(request):
                break
            if self._prefixes.must_wait(request):
                skipped += 1
            elif self._admit(request):
                del waiting[skipped]
                self._last_lookup = None
                yield request
            else:
                break

    def _admit(self, request: Request) -> bool:
        """Admits a waiting or parked request with pages for all its tokens. Returns False if it must wait.

        A request whose prompt a prefill worker computes gets the pages in which the prompt will land, but no seat yet.
        """
        spare, lookup = headroom(self._queues.running), self._look_up(request)
        if self._needs_peer(request, lookup.prefix):
            return self._reserve_landing(request, lookup)
        if not self._queues.free_seats:
            return False
        length = request.num_scheduled or len(lookup.prefix) * self._ledger.geometry.page_rows
        for residence in admissible_residences(self._ledger, request, self._mode, length):
            need = self._pages_needed(lookup, residence, len(request.tokens))
            if self._preemptor.make_room(need, spare):
                self._start(request, residence, lookup.prefix)
                return True
        self._preemptor.note_pressure()
        return False

    def _look_up(self, request: Request) -> _Lookup:
        """Finds the cached pages from which a request in the queue can start. Every plan looks up the first request
        that does not fit. The result is kept, because finding a long prefix takes up to a millisecond."""
        last, version = self._last_lookup, self._ledger.version
        if last is None or last.request is not request or last.version != version:
            self._last_lookup = last = _Lookup(request, version, self._prefixes.find(request))
        return last

    def _pages_needed(self, lookup: _Lookup, residence: Residence, rows: int) -> PageCounts:
        need = lookup.needs.get((residence, rows))
        if need is None:
            need = self._ledger.pages_needed(lookup.request.holding, residence, rows, lookup.prefix)
            lookup.needs[residence, rows] = need
        return need

    @staticmethod
    def _needs_seat(request: Request) -> bool:
        """Returns False if a prefill worker may compute the prompt: a landing needs no seat."""
        return request.phase is Phase.PARKED or request.prefill_at is None

    def needs_peer(self, request: Request) -> bool:
        """Returns True if a prefill worker must compute the prompt of a waiting request, given what is cached now."""
        return self._needs_peer(request, self._prefixes.find(request))

    def _needs_peer(self, request: Request, prefix: Sequence[CachedPage]) -> bool:
        """Returns True if a prefill worker must compute the prompt, because `prefix` lacks more than a few tokens."""
        if self._needs_seat(request):
            return False
        unknown = len(request.tokens) - len(prefix) * self._ledger.geometry.page_rows
        return not prefix or unknown > self._extend_locally

    def audit(self) -> None:
        """Proves that the last lookup, if it is still valid, finds the same pages as a new lookup."""
        last = self._last_lookup
        if last is None or last.version != self._ledger.version or last.request not in self._queues.waiting:
            return
        name = last.request.request_id
        assert last.prefix == self._prefixes.find(last.request), f"the cached prefix of {name} has changed"
        for (residence, rows), need in last.needs.items():
            now = self._ledger.pages_needed(last.request.holding, residence, rows, last.prefix)
            assert need == now, f"the pages that {name} needs have changed from {need} to {now}"

    def on_kv_ready(self, request: Request) -> None:
        """Moves a request to phase DECODE; no other method does. All its tokens except the newest have rows."""
        request.move(Phase.DECODE)
        if request.holding.residence is Residence.STREAMED:
            self._next_plan.commands += self._ledger.end_streaming(request.holding, request.num_scheduled)

    def _reserve_landing(self, request: Request, lookup: _Lookup) -> bool:
        """Reserves the pages in which a prompt will land, except those of its cached prefix.

        Returns False if too few pages are free to hold the prompt and to admit the request after the landing.
        """
        ledger, spare, rows = self._ledger, headroom(self._queues.running), len(request.tokens)
        for on_device, residence in admissible_landings(ledger, request, self._mode):
            need = self._pages_needed(lookup, residence, min(rows + 1, request.max_length - 1))
            if not self._preemptor.make_room(need, spare):
                continue
            self._prefixes.on_admitted(request, lookup.prefix)
            policy = ledger.landing_policy(request.prefill_at)
            reserved = ledger.reserve(request.holding, on_device, rows, lookup.prefix, policy)
            if not reserved:
                raise InternalError("pages were free a moment ago")
            self._landings.reserve(request, on_device, self._next_plan.number)
            self._prefixes.add_landing(request)
            return True
        self._preemptor.note_pressure()
        return False

    def _start(self, request: Request, residence: Residence, prefix: Sequence[CachedPage]) -> None:
        """Gives a request a seat and its pages. The caller has checked that both are free."""
        ledger, holding, length, rows = self._ledger, request.holding, request.num_scheduled, len(request.tokens)
        seat = self._queues.start(request)
        self._prefixes.on_admitted(request, prefix)
        if request.phase is Phase.WAITING:
            self._counters.extended += request.prefill_at is not None
            request.prefill_at = None
        if holding.residence is Residence.PARKED:
            commands = ledger.resume(holding, seat, residence, length, rows)
            self._counters.resumes += 1
        elif holding.residence is Residence.LANDING:
            commands = ledger.land(holding, seat, residence, length, rows)
        else:
            request.num_scheduled = length = len(prefix) * ledger.geometry.page_rows
            commands = ledger.admit(holding, seat, residence, rows, prefix)
        if commands is None:
            raise InternalError("pages were free a moment ago")
        answer = tuple(request.tokens[len(request.prompt) :])
        self._next_plan.commands += [AssignSeat(seat, request.prompt, answer, request.request_id), *commands]
        if request.prefilled and length:
            self.on_kv_ready(request)
        else:
            request.move(Phase.PREFILL)
