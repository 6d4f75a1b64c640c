"""Prompts that prefill workers compute: when reservations are sent, and when pages are quarantined or released."""

import pytest
from schedule.list_runner import ListRunner, answer_alone, execute_next, next_token

from hotset.base.request_options import LandingChoice, RequestOptions
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.memory.geometry import Geometry
from hotset.memory.pages import PageAllocator
from hotset.schedule.handoffs import CancelFetch, HandoffKey, Reservation
from hotset.schedule.request import Phase, Request
from hotset.schedule.scheduler import MAX_ATTEMPTS, Scheduler
from hotset.tiers.commands import Command, Load, MirrorLanded
from hotset.tiers.ledger import LAND_ANYWHERE, NO_PAGES, LandingPolicy, Ledger, PageCounts
from hotset.tiers.prefix_cache import PageHasher, PrefixCache
from hotset.tiers.residence import Residence

GEOMETRY = Geometry(2, 2, 64, keys_per_block=8, slots=4, topk=2)


def make(device: int = 60, host: int = 60) -> tuple[Scheduler, ListRunner, Ledger]:
    ledger = Ledger(GEOMETRY, PageAllocator(device), PrefixCache(host))
    return Scheduler(ledger, 4, 64), ListRunner(GEOMETRY), ledger


def prefilled_by_peer(name: str, length: int, limit: int, prefill_at: str | None = "peer") -> Request:
    """Returns a request whose prompt a prefill worker computes and whose KV lands on the host."""
    prompt = PromptSpec(tuple(range(8, 8 + length)), SamplingParams(seed=0))
    options = RequestOptions(landing="host" if prefill_at else "auto", prefill_at=prefill_at)
    return Request(name, prompt, limit, options)


def next_reservation(scheduler: Scheduler, runner: ListRunner) -> Reservation:
    """Executes and commits the next plan. Returns the one reservation that can then be sent."""
    execute_next(scheduler, runner)
    (outgoing,) = scheduler.take_landing_updates()
    assert isinstance(outgoing, Reservation)
    return outgoing


def test_a_reservation_is_sent_only_after_the_plan_that_granted_its_pages_has_committed() -> None:
    """The peer can write as soon as it has the reservation. This plan may still use the pages for an earlier owner."""
    scheduler, runner, _ = make()
    scheduler.add(prefilled_by_peer("a", 9, 12))
    plan = scheduler.plan()
    assert plan is not None and not plan.seats, "no plan without tokens grants the pages"
    assert scheduler.take_landing_updates() == []
    result = runner.submit(plan)
    assert scheduler.take_landing_updates() == []
    scheduler.commit(result)
    (outgoing,) = scheduler.take_landing_updates()
    assert isinstance(outgoing, Reservation) and outgoing.key.request_id == "a"
    assert scheduler.take_landing_updates() == []


def test_pages_of_a_lost_writer_stay_quarantined_until_it_has_stopped() -> None:
    scheduler, runner, ledger = make()
    scheduler.add(prefilled_by_peer("a", 9, 12))
    first = next_reservation(scheduler, runner)
    scheduler.fail_landing("a", 1, quiesced=False, retry=True)
    reserved_pages = PageCounts(len(first.key_pages), len(first.row_pages))
    assert ledger.quarantined == reserved_pages != NO_PAGES
    second = next_reservation(scheduler, runner)
    assert second.key.attempt == 2
    assert not {*first.row_pages} & {*second.row_pages} and not {*first.key_pages} & {*second.key_pages}
    scheduler.audit()
    scheduler.end_quarantine("a", 1)
    assert ledger.quarantined == NO_PAGES
    runner.land(second)
    scheduler.complete_landing("a", 2, next_token(second.prompt.token_ids), None)
    assert scheduler.take_outputs().token_ids == [next_token(second.prompt.token_ids)]


def test_a_failed_landing_is_retried_until_no_attempt_is_left_and_then_the_request_ends_as_lost() -> None:
    scheduler, runner, ledger = make()
    scheduler.add(prefilled_by_peer("a", 9, 12))
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert next_reservation(scheduler, runner).key.attempt == attempt
        assert scheduler.fail_landing("a", attempt, quiesced=True, retry=True, reason=f"reason {attempt}")
        assert scheduler.counters.retries == min(attempt, MAX_ATTEMPTS - 1)
    outputs = scheduler.take_outputs()
    assert (outputs.finished, outputs.errors) == ({"a": "lost"}, {"a": f"reason {MAX_ATTEMPTS}"})
    assert scheduler.idle and ledger.host is not None and ledger.host.held == 0


def test_requests_that_wait_for_a_lost_prefill_worker_end_and_all_others_continue() -> None:
    scheduler, runner, _ = make()
    scheduler.add(prefilled_by_peer("landing", 9, 12))
    reservation = next_reservation(scheduler, runner)
    scheduler.add(prefilled_by_peer("same peer", 9, 12))
    scheduler.add(prefilled_by_peer("other peer", 9, 12, prefill_at="other peer"))
    scheduler.add(prefilled_by_peer("no peer", 9, 12, prefill_at=None))
    scheduler.fail_waiting(reservation.prefill_at, "it is silent")
    outputs = scheduler.take_outputs()
    assert (outputs.finished, outputs.errors) == ({"same peer": "lost"}, {"same peer": "it is silent"})
    scheduler.audit()


def test_a_parked_request_does_not_need_the_prefill_worker_any_more() -> None:
    scheduler, runner, _ = make()
    request = prefilled_by_peer("a", 9, 12)
    scheduler.add(request)
    reservation = next_reservation(scheduler, runner)
    runner.land(reservation)
    scheduler.complete_landing("a", 1, next_token(reservation.prompt.token_ids), None)
    assert request.phase is Phase.PARKED and request in scheduler.queues.waiting
    scheduler.fail_waiting(reservation.prefill_at, "it is silent")
    assert not scheduler.take_outputs().finished


def test_pages_of_an_aborted_landing_stay_held_until_the_writer_has_stopped() -> None:
    scheduler, runner, ledger = make()
    scheduler.add(prefilled_by_peer("a", 9, 12))
    next_reservation(scheduler, runner)
    scheduler.abort("a")
    assert scheduler.take_landing_updates() == [CancelFetch(HandoffKey("a", 1))]
    assert scheduler.take_outputs().finished == {"a": "abort"}
    assert ledger.host is not None and ledger.host.held > 0
    assert not scheduler.fail_landing("a", 1, quiesced=True, retry=False), "a cancelled landing counts as failed"
    assert scheduler.idle and ledger.host.held == 0
    assert scheduler.counters.lost == 0, "a cancelled landing was counted as lost"


def test_a_request_that_does_not_fit_because_of_quarantined_pages_ends_with_that_reason() -> None:
    """The worker would have computed the prompt of "b" itself, so "lost" would be a misleading reason."""
    scheduler, runner, ledger = make(host=6)
    scheduler.add(prefilled_by_peer("a", 9, 12))
    next_reservation(scheduler, runner)
    scheduler.fail_landing("a", 1, quiesced=False, retry=False)
    scheduler.take_outputs()
    held = ledger.quarantined.device + ledger.quarantined.host
    scheduler.add(Request("b", PromptSpec(tuple(range(8, 14)), SamplingParams(seed=0)), 8))
    assert scheduler.plan() is None
    outputs = scheduler.take_outputs()
    assert outputs.finished == {"b": "no_room"} and outputs.errors["b"].startswith(f"{held} pages are in quarantine")
    assert scheduler.idle


def test_a_long_context_does_not_fit_beside_quarantined_pages_until_their_writer_has_stopped() -> None:
    """Defect 23: such a worker reports that it is degraded."""
    scheduler, runner, ledger = make(host=6)
    assert ledger.fits_beside_quarantine(12) and not ledger.fits_beside_quarantine(13)
    scheduler.add(prefilled_by_peer("a", 9, 12))
    next_reservation(scheduler, runner)
    assert ledger.fits_beside_quarantine(12), "pages that a request holds count as quarantined"
    scheduler.fail_landing("a", 1, quiesced=False, retry=False)
    assert ledger.quarantined.host == 5
    assert ledger.fits_beside_quarantine(2) and not ledger.fits_beside_quarantine(3)
    scheduler.end_quarantine("a", 1)
    assert ledger.fits_beside_quarantine(12)


def make_cached(
    host: int = 60, extend_locally: int = 0, landing: LandingPolicy = LAND_ANYWHERE
) -> tuple[Scheduler, ListRunner, Ledger, PrefixCache]:
    """Returns a scheduler that reuses prefixes. The pages of prompt [8, 17) are in its cache: 4 pages of 2 rows."""
    cache = PrefixCache(host)
    ledger = Ledger(GEOMETRY, PageAllocator(60), cache, landing)
    hasher = PageHasher("model", GEOMETRY.page_rows)
    scheduler, runner = Scheduler(ledger, 4, 64, hasher=hasher, extend_locally=extend_locally), ListRunner(GEOMETRY)
    scheduler.add(prefilled_by_peer("first", 9, 12, prefill_at=None))
    answer_of(scheduler, runner, "first")
    assert cache.cached >= 4 and cache.held == 0
    return scheduler, runner, ledger, cache


def answer_of(scheduler: Scheduler, runner: ListRunner, name: str) -> list[int]:
    """Executes plans until all requests have ended. Returns the answer to one of them."""
    answer = []
    while not scheduler.idle:
        plan = scheduler.plan()
        outputs = scheduler.take_outputs() if plan is None else scheduler.commit(runner.submit(plan))
        found = zip(outputs.request_ids, outputs.token_ids, strict=True)
        answer += [token for request_id, token in found if request_id == name]
        scheduler.audit()
    return answer


def landing_after_prefix(name: str, landing: LandingChoice, length: int = 15, salt: str = "") -> Request:
    """Returns a request for a prefill worker. With no salt, its first 8 rows are in the cache of `make_cached`."""
    prompt = PromptSpec((*range(8, 17), *range(50, 50 + length - 9)), SamplingParams(seed=0), cache_salt=salt)
    return Request(name, prompt, length + 5, RequestOptions(landing=landing, prefill_at="peer"))


@pytest.mark.parametrize("landing", ["host", "device"])
def test_only_rows_that_are_not_in_the_prefix_cache_land(landing: LandingChoice) -> None:
    scheduler, runner, ledger, cache = make_cached()
    request = landing_after_prefix("a", landing)
    scheduler.add(request)
    reservation = next_reservation(scheduler, runner)
    assert (reservation.first, len(reservation.row_pages), request.num_cached) == (8, 4, 8)
    assert [cached.users for cached in request.holding.cached] == [1] * 4
    assert ledger.host is cache and cache.held == 8, "four shared pages and four of its own"
    runner.land(reservation)
    scheduler.complete_landing("a", 1, next_token(reservation.prompt.token_ids), None)
    assert answer_of(scheduler, runner, "a") == answer_alone(reservation.prompt.token_ids, 20)
    assert cache.held == 0 and len(cache.find(request.page_hashes)) >= 7, "its own full pages were not published"


@pytest.mark.parametrize(
    ("landing", "policy", "expected"),
    [
        ("device", LAND_ANYWHERE, [Load(0, 8, Residence.RESIDENT, True), MirrorLanded(0, 15, True, first=8)]),
        (
            "host",
            LAND_ANYWHERE,
            [
                Load(0, 8, Residence.STREAMED, keys=True),
                MirrorLanded(0, 15, rows=False, first=8),
                Load(0, 15, Residence.RESIDENT, keys=False),
            ],
        ),
        ("host", LandingPolicy(on_device=False, keys_on_host=True), [Load(0, 15, Residence.RESIDENT, keys=True)]),
    ],
)
def test_a_cached_prefix_is_loaded_where_the_other_rows_and_keys_landed_and_is_never_mirrored(
    landing: LandingChoice, policy: LandingPolicy, expected: list[Command]
) -> None:
    scheduler, runner, _, _ = make_cached(landing=policy)
    scheduler.add(landing_after_prefix("a", landing))
    reservation = next_reservation(scheduler, runner)
    scheduler.complete_landing("a", 1, next_token(reservation.prompt.token_ids), None)
    plan = scheduler.plan()
    assert plan is not None
    assert [command for command in plan.commands if isinstance(command, Load | MirrorLanded)] == expected


@pytest.mark.parametrize("keys_on_host", [True, False])
def test_keys_that_landed_on_the_host_are_loaded_although_the_policy_has_changed(keys_on_host: bool) -> None:
    """The routes of a peer are measured when it is connected, which may be while its first context lands."""
    scheduler, runner, _, _ = make_cached(landing=LandingPolicy(keys_on_host=keys_on_host))
    scheduler.add(landing_after_prefix("a", "host"))
    reservation = next_reservation(scheduler, runner)
    assert reservation.keys_on_host == keys_on_host
    scheduler.ledger.landing_of_peer["peer"] = LandingPolicy(keys_on_host=not keys_on_host)
    scheduler.complete_landing("a", 1, next_token(reservation.prompt.token_ids), None)
    plan = scheduler.plan()
    assert plan is not None
    assert Load(0, 15, Residence.RESIDENT, keys=keys_on_host) in plan.commands


@pytest.mark.parametrize(
    ("landing", "peer", "on_device"),
    [("auto", "peer", False), ("auto", "other", True), ("device", "peer", True), ("host", "other", False)],
)
def test_rows_avoid_a_device_that_the_peer_reaches_slowly(landing: LandingChoice, peer: str, on_device: bool) -> None:
    scheduler, runner, _, _ = make_cached()
    scheduler.ledger.landing_of_peer["peer"] = LandingPolicy(keys_on_host=True, prefer_host=True)
    prompt = PromptSpec(tuple(range(60, 75)), SamplingParams(seed=0))
    scheduler.add(Request("a", prompt, 20, RequestOptions(landing=landing, prefill_at=peer)))
    reservation = next_reservation(scheduler, runner)
    assert (reservation.on_device, reservation.keys_on_host) == (on_device, peer == "peer" and not on_device)


@pytest.mark.parametrize(("length", "extended"), [(12, True), (13, False)])
def test_a_prompt_is_extended_here_if_its_uncached_part_is_short(length: int, extended: bool) -> None:
    scheduler, runner, _, _ = make_cached(extend_locally=4)
    request = landing_after_prefix("a", "host", length)
    scheduler.add(request)
    plan = scheduler.plan()
    assert plan is not None and scheduler.counters.extended == extended
    assert (request.phase is Phase.LANDING, request.prefill_at is None) == (not extended, extended)
    if extended:
        assert (list(plan.starts), list(plan.counts)) == ([8], [4])
        runner.submit(plan)


def test_a_prompt_without_a_cached_prefix_is_never_extended_here() -> None:
    scheduler, _, _, _ = make_cached(extend_locally=1000)
    request = landing_after_prefix("a", "host", salt="another")
    scheduler.add(request)
    scheduler.plan()
    assert request.phase is Phase.LANDING and scheduler.counters.extended == 0


def test_a_prompt_to_extend_waits_for_a_seat_and_goes_to_the_peer_if_its_prefix_is_evicted() -> None:
    scheduler, runner, _, cache = make_cached(extend_locally=1000)
    for number in range(4):
        prompt = PromptSpec((90 + number,), SamplingParams(seed=0))
        scheduler.add(Request(f"busy {number}", prompt, 20))
    execute_next(scheduler, runner)
    request = landing_after_prefix("a", "host")
    scheduler.add(request)
    plan = scheduler.plan()
    assert plan is not None and request.phase is Phase.WAITING and request.prefill_at == "peer"
    scheduler.commit(runner.submit(plan))
    cache.evict(60)
    plan = scheduler.plan()
    assert plan is not None and request.phase is Phase.LANDING and not request.holding.cached


@pytest.mark.parametrize(
    ("outcome", "salt"), [("lands", ""), ("is aborted", ""), ("is aborted", "no prefix"), ("fails", "no prefix")]
)
def test_a_prompt_that_begins_like_one_that_lands_waits_for_it(outcome: str, salt: str) -> None:
    """As the choices of one prompt do. If the landing ends without its rows, the peer gets the next one."""
    scheduler, runner, _, _ = make_cached(extend_locally=2)
    first, second = (landing_after_prefix(name, "host", salt=salt) for name in ("a", "b"))
    scheduler.add(first)
    scheduler.add(second)
    reservation = next_reservation(scheduler, runner)
    assert (first.phase, second.phase) == (Phase.LANDING, Phase.WAITING)
    assert scheduler.plan() is None and scheduler.counters.recomputes == 0
    if outcome == "lands":
        runner.land(reservation)
        scheduler.complete_landing("a", 1, next_token(reservation.prompt.token_ids), None)
        plan = scheduler.plan()
        assert plan is not None and second.phase is Phase.WAITING, "it started before the pages were in the cache"
        scheduler.commit(runner.submit(plan))
        assert answer_of(scheduler, runner, "b") == answer_alone(reservation.prompt.token_ids, 20)
        assert (scheduler.counters.landed, scheduler.counters.extended, second.num_cached) == (1, 1, 14)
        return
    if outcome == "is aborted":
        scheduler.abort("a")
        assert scheduler.take_landing_updates() == [CancelFetch(HandoffKey("a", 1))]
    scheduler.fail_landing("a", 1, quiesced=True, retry=False)
    scheduler.take_outputs()
    assert next_reservation(scheduler, runner).key.request_id == "b"


def test_a_prompt_does_not_wait_for_a_landing_that_would_save_little() -> None:
    """A landing publishes no page before all have arrived, unlike a prompt that is computed here."""
    scheduler, _, _, _ = make_cached()
    prompts = [(*range(2), *range(100 * number, 100 * number + 20)) for number in range(1, 4)]
    specs = [PromptSpec(prompt, SamplingParams(seed=0)) for prompt in prompts]
    requests = [
        Request(f"{number}", spec, 30, RequestOptions(prefill_at=f"peer {number}")) for number, spec in enumerate(specs)
    ]
    for request in requests:
        scheduler.add(request)
    scheduler.plan()
    assert [request.phase for request in requests] == [Phase.LANDING] * 3


def test_a_prompt_that_can_be_extended_here_outlives_its_prefill_worker() -> None:
    scheduler, runner, _, _ = make_cached(extend_locally=1000)
    for number in range(4):
        scheduler.add(Request(f"busy {number}", PromptSpec((90 + number,), SamplingParams(seed=0)), 20))
    execute_next(scheduler, runner)
    request, other = landing_after_prefix("a", "host"), landing_after_prefix("b", "host", salt="another")
    scheduler.add(request)
    scheduler.add(other)
    scheduler.fail_waiting("peer", "it is lost")
    assert scheduler.take_outputs().finished == {"b": "lost"}
    assert answer_of(scheduler, runner, "a") == answer_alone(request.prompt.token_ids, 20)


def test_no_request_loses_its_pages_for_one_that_waits_for_a_prefix() -> None:
    """`lands` takes most of the device. `waits` begins like it. `parked` has landed on the host and does not fit."""
    cache = PrefixCache(400)
    ledger = Ledger(GEOMETRY, PageAllocator(40), cache)
    scheduler, runner = Scheduler(ledger, 4, 64, hasher=PageHasher("model", 2)), ListRunner(GEOMETRY)

    def add(name: str, prompt: range, landing: LandingChoice) -> Request:
        spec = PromptSpec(tuple(prompt), SamplingParams(seed=0))
        request = Request(name, spec, len(prompt) + 3, RequestOptions(landing=landing, prefill_at="peer"))
        scheduler.add(request)
        return request

    add("lands", range(100, 140), "device")
    next_reservation(scheduler, runner)
    waits = add("waits", range(100, 141), "host")
    parked = add("parked", range(300, 308), "host")
    reservation = next_reservation(scheduler, runner)
    add("lands, too", range(400, 416), "device")
    next_reservation(scheduler, runner)
    runner.land(reservation)
    scheduler.complete_landing("parked", 1, next_token(reservation.prompt.token_ids), None)
    assert scheduler.plan() is None
    assert (waits.phase, parked.phase, scheduler.counters.recomputes) == (Phase.WAITING, Phase.PARKED, 0)


def test_cached_pages_of_a_failed_landing_are_not_quarantined_and_no_late_write_reaches_them() -> None:
    scheduler, runner, ledger, cache = make_cached()
    request = landing_after_prefix("a", "host")
    scheduler.add(request)
    first = next_reservation(scheduler, runner)
    scheduler.fail_landing("a", 1, quiesced=False, retry=True)
    assert ledger.quarantined.host == len(first.row_pages) == 4 and cache.held == 4
    second = next_reservation(scheduler, runner)
    assert second.first == 8 and not {*first.row_pages} & {*second.row_pages}
    runner.land(second)
    runner.write_late(first)
    scheduler.complete_landing("a", 2, next_token(second.prompt.token_ids), None)
    assert answer_of(scheduler, runner, "a") == answer_alone(second.prompt.token_ids, 20)
    scheduler.end_quarantine("a", 1)
    scheduler.audit()
    assert cache.held == 0 and cache.evictions == 0


def test_a_landing_after_a_prefix_evicts_cached_pages_if_the_host_is_full() -> None:
    """Ten pages: four for the prefix, four for the rest of the prompt, two for the answer. Others are evicted."""
    scheduler, runner, _, cache = make_cached(host=10)
    request = landing_after_prefix("a", "host")
    scheduler.add(request)
    reservation = next_reservation(scheduler, runner)
    runner.land(reservation)
    scheduler.complete_landing("a", 1, next_token(reservation.prompt.token_ids), None)
    assert reservation.first == 8 and request.holding.residence is Residence.LANDING
    assert answer_of(scheduler, runner, "a") == answer_alone(reservation.prompt.token_ids, 20)
    assert cache.evictions > 0
