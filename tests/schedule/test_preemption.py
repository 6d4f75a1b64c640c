"""Unit tests of the functions that choose victims; tests/schedule/test_scheduler.py tests the whole scheduler."""

import pytest

from hotset.base.request_options import RequestOptions, TiersChoice
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.memory.geometry import Geometry
from hotset.memory.pages import PageAllocator
from hotset.schedule.preemption import MAX_PARKS, Victim, demotions_for, pick_victim, promotable
from hotset.schedule.request import Phase, Request
from hotset.tiers.ledger import NO_PAGES, Ledger, PageCounts
from hotset.tiers.prefix_cache import PrefixCache
from hotset.tiers.residence import Residence

GEOMETRY = Geometry(page_rows=2, layers=2, layer_page_bytes=64, keys_per_block=8, slots=4, topk=2)


class Running:
    """Resident, decoding requests of the given lengths, oldest first, and pools with `device` and `host` free pages.

    If `host` is None, there is no host store.
    """

    def __init__(self, lengths: list[int], device: int = 0, host: int | None = 20, tiers: TiersChoice = "auto") -> None:
        held, on_host = sum(map(GEOMETRY.resident_pages, lengths)), sum(map(GEOMETRY.row_pages, lengths))
        allocator = None if host is None else PrefixCache(on_host + host)
        self.ledger = Ledger(GEOMETRY, PageAllocator(held + device), allocator)
        self.requests = [self._decoding(seat, length, tiers) for seat, length in enumerate(lengths)]

    def _decoding(self, seat: int, length: int, tiers: TiersChoice) -> Request:
        request = Request(
            f"r{seat}", PromptSpec((1,) * length, SamplingParams(seed=0)), length + 40, RequestOptions(tiers)
        )
        assert self.ledger.admit(request.holding, seat, Residence.RESIDENT, length) is not None
        request.arrival = request.seat = seat
        request.num_scheduled = length
        request.move(Phase.PREFILL)
        request.move(Phase.DECODE)
        return request

    def victim(self, needy: int = 0, waiting: tuple[Request, ...] = ()) -> Victim:
        return pick_victim(self.ledger, self.requests[needy], self.requests, waiting)


def test_the_request_that_frees_the_most_pages_is_demoted_and_the_older_one_in_a_tie() -> None:
    running = Running([40, 64, 64, 40])
    assert running.victim() == Victim(running.requests[1], Residence.TIERED)


def test_if_no_demotion_frees_pages_the_youngest_request_is_parked() -> None:
    running = Running([8, 8, 8])
    assert running.victim() == Victim(running.requests[2], Residence.PARKED)


def test_a_request_that_must_stay_resident_is_not_demoted() -> None:
    running = Running([64, 64], tiers="resident")
    assert running.victim() == Victim(running.requests[1], Residence.PARKED)


def test_a_request_that_was_parked_often_is_not_parked_again_until_all_others_were() -> None:
    running = Running([8, 8, 8])
    running.requests[2].parks = MAX_PARKS
    assert running.victim() == Victim(running.requests[1], Residence.PARKED)
    for request in running.requests:
        request.parks = MAX_PARKS
    assert running.victim() == Victim(running.requests[2], Residence.PARKED)


@pytest.mark.parametrize("host", [None, 0])
def test_if_host_pages_are_short_the_youngest_request_is_recomputed(host: int | None) -> None:
    running = Running([8, 8], device=0 if host is None else 10, host=host)
    assert running.victim() == Victim(running.requests[1], Residence.ABSENT)


def test_if_host_pages_are_short_a_younger_parked_request_is_recomputed_first() -> None:
    running = Running([8, 8, 8], device=10, host=0)
    parked = running.requests.pop()
    running.ledger.park(parked.holding, parked.num_scheduled)
    parked.move(Phase.PARKED)
    assert running.victim(waiting=(parked,)) == Victim(parked, Residence.ABSENT)


def test_only_as_many_requests_are_demoted_as_necessary_and_none_if_all_would_not_suffice() -> None:
    running = Running([40, 64, 40])
    ledger, (old, large, young) = running.ledger, running.requests
    few, many = (ledger.pages_freed_by_demotion(request.holding, request.num_scheduled) for request in (old, large))
    assert demotions_for(ledger, PageCounts(many, 0), NO_PAGES, running.requests) == [large]
    assert demotions_for(ledger, PageCounts(many, 0), PageCounts(1, 0), running.requests) == [large, old]
    assert demotions_for(ledger, PageCounts(many + 2 * few, 0), NO_PAGES, running.requests) == [large, old, young]
    assert demotions_for(ledger, PageCounts(many + 2 * few + 1, 0), NO_PAGES, running.requests) == []
    assert demotions_for(ledger, PageCounts(1, 21), NO_PAGES, running.requests) == [], "demoted to free host pages"


@pytest.mark.parametrize("missing", [0, 1])
def test_a_promotion_leaves_one_free_page_for_every_running_request(missing: int) -> None:
    running = Running([40, 40], device=20)
    ledger, young = running.ledger, running.requests[1]
    ledger.demote(young.holding, young.num_scheduled)
    sufficient = ledger.pages_to_promote(young.num_scheduled).device + len(running.requests)
    ledger.device.allocate(ledger.device.free - sufficient + missing)
    assert promotable(ledger, running.requests) is (None if missing else young)
