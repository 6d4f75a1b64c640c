"""Prompts that cross between workers: what a decode worker has others compute, and what a prefill worker computes for
others. The scheduler decides; here is kept what peers must be told of it, and when they may be."""

from dataclasses import dataclass

from hotset.memory.geometry import Geometry
from hotset.schedule.plan import Alternatives, FirstToken, Reservation, Rows, Withdrawal
from hotset.schedule.request import Phase, Request
from hotset.tiers.residence import PageUse


@dataclass(frozen=True, slots=True)
class _Reserved:
    """Plans up to number `until` may still use these pages for whoever had them before."""

    reservation: Reservation
    until: int


class Landings:
    """Reservations that prefill workers were not told of yet, and withdrawals of others."""

    def __init__(self) -> None:
        self._reserved: dict[Request, _Reserved] = {}
        self._withdrawn: list[Withdrawal] = []

    def reserve(self, request: Request, on_device: bool, plan: int) -> None:
        """A waiting request has got pages to land in, in the making of plan number `plan`."""
        request.move(Phase.LANDING)
        assert request.prefill_at is not None
        pages = request.holding.pages
        reservation = Reservation(
            request_id=request.request_id,
            attempt=request.attempt,
            prefill_at=request.prefill_at,
            prompt=request.prompt,
            on_device=on_device,
            row_pages=tuple(pages[PageUse.ROWS if on_device else PageUse.HOST]),
            # Index keys that land on the host lie in the pages of their rows.
            key_pages=tuple(pages[PageUse.KEYS] or pages[PageUse.HOST]),
        )
        self._reserved[request] = _Reserved(reservation, until=plan)

    def withdraw(self, request: Request) -> bool:
        """A landing is not wanted any more. True: nobody was told of it, so its pages are free at once."""
        if self._reserved.pop(request, None) is not None:
            return True
        self._withdrawn.append(Withdrawal(request.request_id, request.attempt))
        return False

    def wait_for(self, plan: int) -> bool:
        """Something was reserved in the making of this plan, which must so be carried out, if only for its commands."""
        return any(each.until == plan for each in self._reserved.values())

    def take(self, drained: int) -> list[Reservation | Withdrawal]:
        """What peers may be told, now that all plans before number `drained` are done with."""
        ready = [(request, each.reservation) for request, each in self._reserved.items() if each.until < drained]
        for request, _reservation in ready:
            del self._reserved[request]
        withdrawn, self._withdrawn = self._withdrawn, []
        return [*withdrawn, *(reservation for _request, reservation in ready)]


class Handovers:
    """What the next plan will announce of prompts computed for decode workers."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._sent: list[Rows | FirstToken] = []

    def __bool__(self) -> bool:
        return bool(self._sent)

    def rows(self, request: Request, whole: bool = False) -> None:
        """The next plan puts its full pages on the host, or all of its rows, if `whole`."""
        page_rows = self._geometry.page_rows
        last = request.planned if whole else request.planned - request.planned % page_rows
        if last > request.told:
            pages = request.holding.pages[PageUse.HOST][: self._geometry.row_pages(last)]
            self._sent.append(Rows(request.request_id, request.told, last, tuple(pages)))
            request.told = last

    def first_token(self, request: Request, token: int, alternatives: Alternatives | None) -> None:
        self._sent.append(FirstToken(request.request_id, token, alternatives))

    def forget(self, request: Request) -> None:
        self._sent = [sent for sent in self._sent if sent.request_id != request.request_id]

    def take(self) -> list[Rows | FirstToken]:
        sent, self._sent = self._sent, []
        return sent
