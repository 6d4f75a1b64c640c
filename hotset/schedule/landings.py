"""Prompts that cross between workers: reservations of a decode worker, and announcements of a prefill worker.

The scheduler decides. The classes here keep what peers must be sent, and the moment from which it may be sent.
"""

from dataclasses import dataclass

from hotset.memory.geometry import Geometry
from hotset.schedule.plan import Alternatives, Announcement, PromptComputed, Reservation, RowsWritten, Withdrawal
from hotset.schedule.request import Phase, Request
from hotset.tiers.residence import PageUse


@dataclass(frozen=True, slots=True)
class _Unsent:
    """A reservation whose pages plans up to number `last_plan` may still use for their last owner."""

    reservation: Reservation
    last_plan: int


class Landings:
    """Reservations and withdrawals that a decode worker has not yet sent to prefill workers."""

    def __init__(self) -> None:
        self._unsent: dict[Request, _Unsent] = {}
        self._withdrawn: list[Withdrawal] = []

    def reserve(self, request: Request, on_device: bool, plan: int) -> None:
        """Adds the reservation of a waiting request that got pages while plan number `plan` was made."""
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
        self._unsent[request] = _Unsent(reservation, last_plan=plan)

    def withdraw(self, request: Request) -> bool:
        """Cancels a landing. Returns True if its reservation was never sent; then its pages are free at once."""
        if self._unsent.pop(request, None) is not None:
            return True
        self._withdrawn.append(Withdrawal(request.request_id, request.attempt))
        return False

    def reserved_in(self, plan: int) -> bool:
        """Whether a reservation was made in this plan. Then the plan must be executed even if it computes nothing."""
        return any(unsent.last_plan == plan for unsent in self._unsent.values())

    def take(self, first_in_flight: int) -> list[Reservation | Withdrawal]:
        """Returns, once, what may be sent now. All plans before number `first_in_flight` have been committed."""
        ready = [request for request, unsent in self._unsent.items() if unsent.last_plan < first_in_flight]
        reservations = [self._unsent.pop(request).reservation for request in ready]
        withdrawn, self._withdrawn = self._withdrawn, []
        return [*withdrawn, *reservations]


class Announcements:
    """Announcements of prompts computed for decode workers, which the next plan will carry."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._pending: list[Announcement] = []

    def __bool__(self) -> bool:
        return bool(self._pending)

    def announce_rows(self, request: Request, *, whole: bool = False) -> None:
        """Announces the full pages that the next plan puts on the host or, if `whole`, all scheduled rows."""
        page_rows = self._geometry.page_rows
        last = request.num_scheduled if whole else request.num_scheduled - request.num_scheduled % page_rows
        if last > request.num_announced:
            pages = request.holding.pages[PageUse.HOST][: self._geometry.row_pages(last)]
            self._pending.append(RowsWritten(request.request_id, request.num_announced, last, tuple(pages)))
            request.num_announced = last

    def announce_first_token(self, request: Request, token: int, alternatives: Alternatives | None) -> None:
        self._pending.append(PromptComputed(request.request_id, token, alternatives))

    def discard(self, request: Request) -> None:
        """Removes the announcements of a request that is not needed any more."""
        self._pending = [kept for kept in self._pending if kept.request_id != request.request_id]

    def take(self) -> list[Announcement]:
        announcements, self._pending = self._pending, []
        return announcements
