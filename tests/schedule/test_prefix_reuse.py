"""Prefix reuse in the scheduler: who waits for whom, what is computed, published and reported.

`ListRunner` checks every row that attention could read, so a wrong page fails each of these tests.
"""

from collections.abc import Callable

import pytest
from schedule.list_runner import answer_alone
from schedule.prefix_loop import NO_STOP, ROWS, Loop, seed_tokens, tokens  # noqa: F401

from hotset.base.config import TiersMode
from hotset.schedule import prefixes
from hotset.schedule.prefixes import HASHED_TOKENS
from hotset.schedule.request import Request
from hotset.tiers.prefix_cache import CachedPage, PrefixCache
from hotset.tiers.residence import Residence

MODES = pytest.mark.parametrize("mode", ["auto", "always"])
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


@MODES
@DEPTHS
def test_a_request_waits_for_a_prefix_in_progress_and_computes_only_the_rest(depth: int, mode: TiersMode) -> None:
    loop, shared = Loop(depth, mode), tokens(22)
    loop.add("first", shared + tokens(9))
    loop.add("second", shared + tokens(13))
    loop.add("other", tokens(12))
    plan = loop.submit()
    assert plan is not None and plan.counts == [31, 12], "a request behind the one that waits is delayed"
    loop.run()
    assert loop.order == ["first", "other", "second"]
    assert loop.start("second") == 20, "not exactly the shared pages were reused"
    assert set(loop.computed("second").values()) == {1}
    assert loop.cached_tokens == [("second", 20)]


@DEPTHS
def test_a_request_waits_for_its_whole_prefix_but_not_for_the_rest_of_the_other_prompt(depth: int) -> None:
    loop, shared = Loop(depth, step_tokens=8), tokens(20)
    loop.add("first", shared + tokens(40))
    for _ in range(2):
        loop.step()
    loop.add("second", shared + tokens(10))
    loop.run()
    assert loop.start("second") == 20
    assert loop.segments["first"][-1][0] > 60 > loop.segments["second"][0][0]


@pytest.mark.parametrize("seats", [1, 2, 8])
@pytest.mark.parametrize(("length", "shared"), [(41, 40), (40, 36), (4, 0), (5, 4)])
@MODES
def test_requests_with_the_same_prompt_compute_it_once(mode: TiersMode, length: int, shared: int, seats: int) -> None:
    loop, prompt = Loop(depth=2, mode=mode, seats=seats), tokens(length)
    for number in range(4):
        loop.add(f"answer {number}", prompt)
    loop.run()
    assert [loop.start(f"answer {number}") for number in range(4)] == [0] + [shared] * 3
    assert loop.scheduler.counters.tokens_prefilled == length + 3 * (length - shared)
    assert loop.scheduler.counters.tokens_queried == 4 * length
    assert loop.scheduler.counters.tokens_reused == 3 * shared


def test_a_request_with_one_token_left_to_compute_is_tiered_without_being_streamed() -> None:
    loop, prompt = Loop(mode="always"), tokens(41)
    loop.add("first", prompt)
    loop.run()
    second = loop.add("second", prompt)
    loop.submit()
    assert second.holding.residence is Residence.TIERED
    loop.run()
    third = loop.add("third", prompt + tokens(1))
    loop.submit()
    assert third.holding.residence is Residence.STREAMED, "two tokens are left to compute"
    loop.run()


def park(loop: Loop, request: Request) -> None:
    loop.scheduler._preemptor.change_residence(request, Residence.PARKED)


def recompute(loop: Loop, request: Request) -> None:
    loop.scheduler._preemptor.change_residence(request, Residence.ABSENT)


def abort(loop: Loop, request: Request) -> None:
    loop.scheduler.abort(request.request_id)


def fail(loop: Loop, request: Request) -> None:
    loop.scheduler._end(request, "no_room", "a failure")


@pytest.mark.parametrize("stop", [park, abort, fail])
@DEPTHS
def test_a_request_continues_if_its_prefix_is_abandoned(depth: int, stop: Callable[[Loop, Request], None]) -> None:
    loop, shared = Loop(depth, step_tokens=16), tokens(40)
    first = loop.add("first", shared + tokens(3))
    while len(first.holding.cached) < 4:
        loop.step()
    second = loop.add("second", shared + tokens(5))
    assert loop.scheduler._prefixes.must_wait(second)
    stop(loop, first)
    assert not loop.scheduler._prefixes.must_wait(second)
    loop.submit()
    # With one plan in flight, the parked request is resumed at once and is ahead of the second one.
    assert "second" in loop.segments or (stop is park and depth == 1), "it still waits for the abandoned prefix"
    loop.run()
    assert loop.start("second") >= 4 * ROWS, "published pages were computed again"
    assert set(loop.computed("second").values()) == {1}


@DEPTHS
def test_a_recomputed_request_finds_its_own_pages_and_is_reported_only_once(depth: int) -> None:
    loop, prompt = Loop(depth, step_tokens=16), tokens(50)
    loop.add("earlier", prompt[:9])
    loop.run()
    first = loop.add("first", prompt)
    while len(first.holding.cached) < 8:
        loop.step()
    recompute(loop, first)
    loop.add("second", prompt)
    loop.run()
    assert loop.scheduler.counters.recomputes == 1
    again = [token for token, times in loop.computed("first").items() if times > 1]
    assert not again or min(again) >= 32, "pages that were in the cache were computed again"
    assert loop.start("second") >= 32
    assert loop.cached_tokens == [("first", 8), ("second", loop.start("second"))]
    assert first.num_cached == 8


def test_a_request_recomputed_while_it_decodes_starts_from_the_pages_of_its_answer() -> None:
    loop = Loop()
    request = loop.add("r", tokens(7), answer=20)
    while len(loop.answers["r"]) < 12:
        loop.step()
    recompute(loop, request)
    loop.run()
    assert loop.scheduler.counters.recomputes == 1
    assert loop.computed("r")[15] == 1 and loop.computed("r")[16] == 2, "four full pages were in the cache"
    assert loop.cached_tokens == []


@pytest.mark.parametrize("length", [10, 11, 12, 13])
@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
@DEPTHS
def test_the_next_turn_reuses_the_answer_but_no_row_after_its_end(depth: int, reason: str, length: int) -> None:
    prompt = tokens(length)
    stop = answer_alone(prompt, length + 20)[-1] if reason == "stop" else NO_STOP
    loop = Loop(depth)
    loop.add("turn", prompt, answer=21, stop=stop)
    if reason == "abort":
        while len(loop.answers["turn"]) < 11:
            loop.step()
        loop.scheduler.abort("turn")
    loop.run()
    assert loop.finished["turn"] == reason
    known, hashes = prompt + loop.answers["turn"], list[bytes]()
    loop.hasher.extend(hashes, known, "")
    assert set(loop.host._cached) <= set(hashes), "a page with rows after the end was published"
    loop.add("next", known + tokens(9))
    loop.run()
    # The row of the last token is computed if a plan was in flight when the request ended.
    rows = len(known) - 1 if depth == 1 or reason == "length" else len(known)
    assert loop.start("next") == rows // ROWS * ROWS


def test_requests_that_ask_for_log_probabilities_of_the_prompt_compute_it_and_publish_it() -> None:
    loop, prompt = Loop(depth=2), tokens(30)
    loop.add("first", prompt)
    loop.add("scored", prompt, prompt_logprobs=1)
    plan = loop.submit()
    assert plan is not None and plan.counts == [30, 30], "a request that computes its whole prompt waits for a prefix"
    loop.run()
    loop.host.evict(200)
    loop.add("scored again", prompt, prompt_logprobs=1)
    loop.run()
    assert loop.start("scored again") == 0
    loop.add("second", prompt)
    loop.run()
    assert loop.start("second") == 28
    assert loop.cached_tokens == [("second", 28)]


@pytest.mark.parametrize(("depth", "mode"), [(1, "auto"), (2, "always"), (3, "auto")])
def test_a_host_full_of_cached_pages_evicts_them_and_then_requests_wait(depth: int, mode: TiersMode) -> None:
    loop = Loop(depth, mode, host=30, seats=3)
    for number in range(8):
        loop.add(f"r{number}", tokens(40 + number), answer=16 + number)
    loop.run()
    assert set(loop.finished.values()) == {"length"}
    assert loop.host.evictions > 0
    assert loop.host.cached > 20, "pages were evicted although nobody needed their memory"
    assert loop.ledger.fits_beside_quarantine(119), "cached pages without users do not count as free"
    loop.add("large", tokens(100), answer=20)
    assert loop.submit() is not None, "a request that fits without the cached pages was not admitted"
    loop.run()
    assert loop.finished["large"] == "length"


def test_the_prefix_that_was_used_last_is_evicted_last() -> None:
    loop, old, new = Loop(host=30), tokens(41), tokens(41)
    for name, prompt in (("old", old), ("new", new), ("old again", old)):
        loop.add(name, prompt, answer=1)
        loop.run()
    loop.add("large", tokens(70), answer=1)
    loop.run()
    loop.add("old, used lately", old, answer=1)
    loop.run()
    assert loop.start("old, used lately") == 40
    loop.add("new, not used since", new, answer=1)
    loop.run()
    assert loop.start("new, not used since") < 40


def test_the_choices_of_one_prompt_share_its_hashes() -> None:
    loop, prompt = Loop(seats=4, device=1000, host=1000, step_tokens=1000), tokens(20 * ROWS)
    for name in ("a", "b", "c"):
        loop.add(name, prompt, answer=1)
    loop.add("salted", prompt, answer=1, salt="other")
    loop.scheduler.plan()
    assert loop.hasher.hashed == 2 * 20


def test_hashing_is_done_once_per_request_and_is_bounded_per_plan() -> None:
    loop, shared = Loop(seats=64, device=10**5, host=10**5, step_tokens=1 << 20), tokens(HASHED_TOKENS // 2)
    names = [f"r{number}" for number in range(6)]
    for name in names:
        loop.add(name, [*shared, int(name[1:])], answer=1)
    pages, hashed = len(shared) // ROWS, []
    plans = []
    for _ in range(4):
        before = loop.hasher.hashed
        plans.append(loop.scheduler.plan())
        hashed.append(loop.hasher.hashed - before)
    assert plans[0] is not None and plans[1:] == [None] * 3, "the others do not wait for the first"
    assert hashed == [2 * pages, 2 * pages, 2 * pages, 0]


def test_a_long_prompt_is_hashed_in_several_plans_only_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "HASHED_TOKENS", 16 * ROWS)
    loop, hashed = Loop(step_tokens=500, device=500, host=500), []
    loop.add("alone", tokens(40 * ROWS))
    loop.submit()
    assert loop.hasher.hashed == 40 and loop.order == ["alone"]
    loop.add("long", tokens(40 * ROWS))
    loop.add("short", tokens(ROWS + 1))
    for _ in range(3):
        before = loop.hasher.hashed
        loop.submit()
        hashed.append(loop.hasher.hashed - before)
    assert hashed == [16, 16, 8 + 1]
    assert loop.order == ["alone", "long", "short"], "the plan that hashed the last page did not admit both"
    loop.run()


def blocked_request(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Adds a request that does not fit, although the beginning of its prompt is cached. Returns a list to which the
    number of pages is added whenever its cached pages are looked up."""
    found: list[int] = []
    prompt, find = tokens(10 * ROWS + 1), PrefixCache.find

    def counting_find(cache: PrefixCache, hashes: list[bytes]) -> list[CachedPage]:
        pages = find(cache, hashes)
        found.append(len(pages))
        return pages

    loop.add("earlier", prompt, answer=1)
    loop.run()
    loop.add("large", tokens(18 * ROWS), answer=8)
    loop.submit()
    monkeypatch.setattr(PrefixCache, "find", counting_find)
    loop.add("blocked", prompt + tokens(8 * ROWS))
    return found


def test_the_prefix_of_a_request_that_does_not_fit_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(depth=4, host=30)
    found = blocked_request(loop, monkeypatch)
    for _ in range(3):
        assert loop.submit() is not None
    assert found == [10] and "blocked" not in loop.segments
    loop.run()
    assert loop.start("blocked") == 10 * ROWS


def test_a_prefix_that_was_evicted_after_its_lookup_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(depth=4, host=30)
    found = blocked_request(loop, monkeypatch)
    loop.submit()
    loop.host.evict(7)
    loop.submit()
    assert found == [10, 3]
    loop.run()
    assert loop.start("blocked") == 3 * ROWS
