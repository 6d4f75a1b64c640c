"""Messages about prompts that a prefill worker computes for a decode worker, kept until they can be sent.

A decode worker sends reservations and cancellations; a prefill worker sends announcements. The scheduler creates them.
`Landings` keeps a reservation until no plan in flight can use its pages for their previous owner. `Announcements` keeps
an announcement until the next plan carries it.
"""

from dataclasses import dataclass

from hotset.base.sampling import Alternatives
from hotset.memory.geometry import Geometry
from hotset.schedule.handoffs import (
    Announcement,
    CancelFetch,
    ContextPages,
    FirstTokenSampled,
    HandoffId,
    HandoffKey,
    PrefillFailed,
    Reservation,
    RowsComputed,
)
from hotset.schedule.request import Phase, Request
from hotset.tiers.residence import PageUse, Residence


@dataclass(frozen=True, slots=True)
class _Unsent:
    """An unsent reservation. Plans up to number `last_plan` may still use its pages for their previous owner."""

    reservation: Reservation
    last_plan: int


class Landings:
    """Reservations and cancellations that a decode worker has not yet sent to prefill workers."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._unsent: dict[Request, _Unsent] = {}
        self._cancellations: list[CancelFetch] = []

    def __bool__(self) -> bool:
        return bool(self._unsent) or bool(self._cancellations)

    def reserve(self, request: Request, on_device: bool, plan: int) -> None:
        """Moves a waiting request to phase LANDING and adds its reservation.

        The request got its pages while plan number `plan` was made.
        """
        request.move(Phase.LANDING)
        assert request.prefill_at is not None
        pages, num_cached = request.holding.pages, len(request.holding.cached)
        first = num_cached * self._geometry.page_rows
        rows = pages[PageUse.ROWS if on_device else PageUse.HOST]
        reservation = Reservation(
            key=HandoffKey(request.request_id, request.attempt),
            prefill_at=request.prefill_at,
            prompt=request.prompt,
            on_device=on_device,
            row_pages=tuple(rows[num_cached:]),
            # Index keys that land on the host lie in the pages of their rows.
            key_pages=tuple(
                pages[PageUse.KEYS][self._geometry.key_pages_before(first) :] or pages[PageUse.HOST][num_cached:]
            ),
            first=first,
            keys_on_host=request.holding.keys_land_on_host,
        )
        self._unsent[request] = _Unsent(reservation, last_plan=plan)

    def cancel(self, request: Request) -> bool:
        """Cancels a landing.

        Returns True if its reservation was never sent. In this case no peer can write, and the caller can release the
        pages at once. Otherwise a cancellation will be sent.
        """
        if self._unsent.pop(request, None) is not None:
            return True
        self._cancellations.append(CancelFetch(HandoffKey(request.request_id, request.attempt)))
        return False

    def reserved_in(self, plan: int) -> bool:
        """Returns True if a reservation was made for this plan. The plan is then needed even if it computes nothing."""
        return any(unsent.last_plan == plan for unsent in self._unsent.values())

    def take(self, first_in_flight: int) -> list[Reservation | CancelFetch]:
        """Returns the messages that can be sent now, each of them once.

        All plans before number `first_in_flight` have been committed.
        """
        ready = [request for request, unsent in self._unsent.items() if unsent.last_plan < first_in_flight]
        reservations = [self._unsent.pop(request).reservation for request in ready]
        cancellations, self._cancellations = self._cancellations, []
        return [*cancellations, *reservations]


class Announcements:
    """Announcements about prompts computed for decode workers. The next plan will carry them."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._pending: list[Announcement] = []

    def __bool__(self) -> bool:
        return bool(self._pending)

    def announce_rows(self, request: Request, *, whole: bool = False) -> None:
        """Announces rows that will be on the host once the next plan has been executed.

        These are the scheduled rows of full pages or, if `whole`, all scheduled rows. The last row of a prompt with a
        structure may be computed again if the mask of the first token is late, so it is announced only with `whole`.
        """
        page_rows, rows = self._geometry.page_rows, request.num_scheduled
        if request.prompt.params.structure is not None:
            rows = min(rows, len(request.prompt) - 1)
        last = request.num_scheduled if whole else rows - rows % page_rows
        if last > request.num_announced:
            holding, num_pages = request.holding, self._geometry.row_pages(last)
            on_device = None
            if request.stays_on_device and holding.residence is Residence.RESIDENT:
                rows_there, keys_there = holding.pages[PageUse.ROWS][:num_pages], holding.pages[PageUse.KEYS]
                on_device = ContextPages(tuple(rows_there), tuple(keys_there))
            pages = tuple(holding.pages[PageUse.HOST][:num_pages])
            peer, key = _handoff(request)
            announcement = RowsComputed(peer, key, request.num_announced, last, pages, device_pages=on_device)
            self._pending.append(announcement)
            request.num_announced = last

    def announce_first_token(self, request: Request, token: int, alternatives: Alternatives | None) -> None:
        self._pending.append(FirstTokenSampled(*_handoff(request), token, alternatives))

    def announce_failure(self, request: Request, reason: str) -> None:
        self._pending.append(PrefillFailed(*_handoff(request), retry=False, reason=reason))

    def discard(self, request: Request) -> None:
        """Removes the announcements of a request that was dropped."""
        self._pending = [kept for kept in self._pending if (kept.peer, kept.key) != request.for_peer]

    def take(self) -> list[Announcement]:
        announcements, self._pending = self._pending, []
        return announcements


def _handoff(request: Request) -> HandoffId:
    assert request.for_peer is not None, "only prompts that are computed for a peer are announced"
    return request.for_peer
