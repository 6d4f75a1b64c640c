"""Where a request may come in, who gives way when pages are short, and who may have more when they are not.

Choices only: nothing is changed here. The scheduler carries them out, each as soon as no plan in flight uses the
request, and asks for none while somebody is still about to give way. `running` is in the order of arrival.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hotset.base.config import TiersMode
from hotset.schedule.request import Phase, Request
from hotset.tiers.ledger import NO_PAGES, Ledger, PageCounts
from hotset.tiers.residence import PageUse, Residence

MOST_PARKS = 3  # of one request, while others could be parked instead


@dataclass(frozen=True, slots=True)
class Preemption:
    """`request` is to change to residence `to`."""

    request: Request
    to: Residence


def admissible_residences(ledger: Ledger, request: Request, mode: TiersMode) -> tuple[Residence, ...]:
    """Where a waiting or parked request may come in, the best first."""
    if not ledger.tiers or request.tiers == "resident" or request.holding.pages[PageUse.ROWS]:
        return (Residence.RESIDENT,)
    below = Residence.TIERED if request.phase is Phase.PARKED and request.prefilled else Residence.STREAMED
    if mode == "always" or request.tiers == "tiered":
        return (below,)
    return (Residence.RESIDENT, below)


def admissible_landings(ledger: Ledger, request: Request, mode: TiersMode) -> list[tuple[bool, Residence]]:
    """Where a prompt that is computed elsewhere may land, the best first: (on the device, residence afterwards)."""
    tiered = ledger.tiers and request.tiers != "resident"
    wished = request.tiers == "resident" or request.landing == "device"  # even where all others are tiered
    resident = wished or not (ledger.tiers and (mode == "always" or request.tiers == "tiered"))
    found = []
    if resident and ledger.landing.on_device and request.landing != "host":
        found.append((True, Residence.RESIDENT))
    if ledger.host is not None and request.landing != "device":
        found += [(False, Residence.RESIDENT)] * resident + [(False, Residence.TIERED)] * tiered
    return found


def pick_victim(ledger: Ledger, needy: Request, running: Sequence[Request], waiting: Iterable[Request]) -> Preemption:
    """Who makes room for the next row of `needy`, which lacks a page; it may be `needy` itself.

    Short of device pages: the request whose demotion frees the most, or else the youngest, which parks. Short of host
    pages, or with none to park in: the youngest that holds any gives up everything and is computed again.
    """
    need = ledger.pages_needed(needy.holding, needy.holding.residence, needy.planned + 1)
    short_of_device = need.device > ledger.device.free
    if short_of_device and (gains := _gains(ledger, running)):
        return Preemption(max(gains, key=gains.__getitem__), Residence.TIERED)
    if short_of_device and ledger.host is not None:
        seldom_parked = [request for request in running if request.parks < MOST_PARKS]
        return Preemption((seldom_parked or running)[-1], Residence.PARKED)
    holders = [*running, *(request for request in waiting if request.phase is Phase.PARKED)]
    return Preemption(max(holders, key=lambda request: request.arrival), Residence.ABSENT)


def demotions_for(ledger: Ledger, need: PageCounts, spare: PageCounts, running: Iterable[Request]) -> list[Request]:
    """Whom to demote, the largest gain first, until `need` fits with `spare` left over; nobody if that would not do."""
    if not ledger.tiers or not ledger.fits(PageCounts(0, need.host), PageCounts(0, spare.host)):
        return []
    demoted, short = [], need.device + spare.device - ledger.device.free
    gains = _gains(ledger, running)
    for request in sorted(gains, key=gains.__getitem__, reverse=True):
        if short <= 0:
            break
        demoted.append(request)
        short -= gains[request]
    return demoted if short <= 0 else []


def promotable(ledger: Ledger, running: Sequence[Request]) -> Request | None:
    """The oldest tiered request for which there is room as a resident one, besides what all will want to grow."""
    tiered = [each for each in running if each.holding.residence is Residence.TIERED and each.tiers != "tiered"]
    spare = headroom(running) if tiered else NO_PAGES
    fitting = (each for each in tiered if ledger.fits(ledger.pages_to_promote(each.planned), spare))
    return next(fitting, None)


def headroom(running: Iterable[Request]) -> PageCounts:
    """A page for every running request that will want more before it ends: left free when others come in."""
    device = host = 0
    for request in running:
        device += request.holding.device_capacity < request.max_length - 1
        host += request.holding.host_capacity < request.max_length - 1
    return PageCounts(device, host)


def _gains(ledger: Ledger, running: Iterable[Request]) -> dict[Request, int]:
    """Pages that demoting would free, of each request where it would free any."""
    return {
        request: gain
        for request in running
        if request.phase is Phase.DECODE
        and request.tiers != "resident"
        and (gain := ledger.pages_freed_by_demotion(request.holding, request.planned)) > 0
    }
