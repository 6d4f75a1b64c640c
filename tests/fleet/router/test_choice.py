"""The choice of a worker weighs the known prefix of a prompt against the worker's load."""

import random
from contextlib import ExitStack
from functools import cache

import pytest
from cache_model import NORMAL, ModelledWorker, Sizes, add_worker, in_loop, serve_sessions, state_of, words
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.base.errors import NoWorkers
from hotset.fleet.router.fleet import (
    BALANCED_TOKENS,
    CACHED_WEIGHT,
    FAILURES_UNTIL_DOWN,
    FULL_CHARGE,
    REQUEST_TOKENS,
    Fleet,
    RoutedWorker,
)
from hotset.fleet.router.prefixes import PromptPrefixes

PROMPT = PromptPrefixes.of("/v1/completions", b'{"prompt": "' + words(random.Random(3), 30_000).encode())
WORKERS = st.fixed_dictionaries(
    {
        "failures": st.sampled_from((0, 0, 0, FAILURES_UNTIL_DOWN)),
        "degraded": st.sampled_from((None, None, None, "too few pages")),
        "avoided": st.sampled_from((False, False, False, True)),
        "prefixes": st.integers(0, len(PROMPT.hashes)),
        "requests": st.integers(0, 40),
        "uncached_tokens": st.integers(0, 20_000),
        "external_tokens": st.integers(0, 5_000),
        "stored_tokens": st.integers(0, 200_000),
        "host_tokens": st.sampled_from((0, 200_000, 200_000, 1_000_000)),
    }
)


def stranger() -> RoutedWorker:
    """Returns a worker that is not in the fleet."""
    return RoutedWorker("http://stranger", "decode")


@examples(60)
@given(st.lists(WORKERS, max_size=5), st.booleans())
def test_the_choice_is_the_live_worker_with_the_lowest_cost(described: list[dict], shared: bool) -> None:
    def test(fleet: Fleet) -> None:
        costs = {}
        avoid = {f"http://{number}" for number, worker in enumerate(described) if worker["avoided"]}
        for number, given_worker in enumerate(described):
            worker = add_worker(fleet, f"http://{number}")
            worker.failures = given_worker["failures"]
            assert worker.state is not None
            for name in ("degraded", "stored_tokens", "host_tokens"):
                setattr(worker.state, name, given_worker[name])
            for name in ("requests", "uncached_tokens", "external_tokens"):
                setattr(worker, name, given_worker[name])
            fleet.prefixes.record_sent(PromptPrefixes(PROMPT.hashes[: given_worker["prefixes"]]), worker)
        alive = [worker for worker in fleet.workers if worker.failures == 0]
        if not alive:
            with pytest.raises(NoWorkers):
                fleet.choose("decode", avoid, PROMPT)
            return
        longest = max(worker["prefixes"] for worker in described)
        for other in (b"one", b"another") if shared else ():  # prompts that go on otherwise
            fleet.prefixes.record_sent(PromptPrefixes((*PROMPT.hashes[:longest], other)), stranger())
        goes_on = longest > 0 and not shared
        cached = {worker.url: fleet.prefixes.cached_tokens(PROMPT, [worker])[0] for worker in alive}
        most_uncached = PROMPT.tokens - min(cached.values())
        shares = [
            worker.state.stored_tokens / worker.state.host_tokens
            for worker in alive
            if worker.state is not None and worker.state.host_tokens
        ]
        least_load = min(worker.load for worker in alive)
        for number, worker in enumerate(alive):
            load = worker.uncached_tokens + worker.external_tokens + REQUEST_TOKENS * worker.requests
            uncached = PROMPT.tokens - cached[worker.url]
            cost: float = load + uncached
            if goes_on:
                cost = max(0, load - least_load - BALANCED_TOKENS) + CACHED_WEIGHT * uncached
            elif len(shares) == len(alive):
                cost += most_uncached * min(1, (shares[number] - min(shares)) / FULL_CHARGE)
            costs[worker.url] = worker.url in avoid, worker.degraded is not None, cost, load
        chosen = fleet.choose("decode", avoid, PROMPT)
        assert costs[chosen.worker.url] == min(costs.values())
        assert [chosen.cached_tokens] == fleet.prefixes.cached_tokens(PROMPT, [chosen.worker])

    in_loop(test)


def test_a_session_stays_on_its_worker_until_the_load_outweighs_its_prefix() -> None:
    def test(fleet: Fleet) -> None:
        home, other = add_worker(fleet, "http://home"), add_worker(fleet, "http://other")
        fleet.prefixes.record_sent(PROMPT, home)
        cached = fleet.choose("decode", (), PROMPT).cached_tokens
        assert cached > 6000
        home.state, other.state = state_of(stored_tokens=100_000, host_tokens=100_000), state_of(host_tokens=100_000)
        with home.in_flight(BALANCED_TOKENS + CACHED_WEIGHT * cached - REQUEST_TOKENS - 1, 0):
            assert fleet.choose("decode", (), PROMPT).worker is home
            assert fleet.choose("decode", {home.url}, PROMPT).worker is other, "a worker that failed is avoided"
            with home.in_flight(1000, cached_tokens=999):
                assert fleet.choose("decode", (), PROMPT).worker is other
        assert fleet.choose("decode", (), PROMPT).worker is home
        home.state = state_of(degraded="too few pages")
        assert fleet.choose("decode", (), PROMPT).worker is other
        home.state = state_of()
        home.failures = FAILURES_UNTIL_DOWN
        assert fleet.choose("decode", (), PROMPT).worker is other
        assert (home.requests, home.tokens, home.uncached_tokens, other.load) == (0, 0, 0, 0)

    in_loop(test)


def test_stored_tokens_spread_new_sessions_and_leave_others_where_they_are() -> None:
    def test(fleet: Fleet) -> None:
        full, empty = add_worker(fleet, "http://full"), add_worker(fleet, "http://empty")
        fleet.prefixes.record_sent(PROMPT, full)
        for number in range(2):
            fleet.prefixes.record_sent(PromptPrefixes((*PROMPT.hashes[:4], b"%d" % number)), full)
        session = PromptPrefixes((*PROMPT.hashes[:4], b"new"), prompt_bytes=10_000)
        assert fleet.choose("decode", (), session).worker is full, "the sizes of the stores are unknown"
        full.state, empty.state = state_of(stored_tokens=50_000, host_tokens=100_000), state_of(host_tokens=100_000)
        assert fleet.choose("decode", (), session).worker is empty, "a session that shares only the system prompt"
        assert fleet.choose("decode", (), PROMPT).worker is full, "a session that goes on"

    in_loop(test)


def test_a_larger_store_with_more_tokens_is_not_fuller() -> None:
    def test(fleet: Fleet) -> None:
        large, small = add_worker(fleet, "http://large"), add_worker(fleet, "http://small")
        large.state = state_of(stored_tokens=500_000, host_tokens=1_000_000)
        small.state = state_of(stored_tokens=90_000, host_tokens=100_000)
        assert [fleet.choose("decode", (), PROMPT).worker for _ in range(3)] == [large] * 3
        small.state = state_of(stored_tokens=50_000, host_tokens=100_000)
        assert [fleet.choose("decode", (), PROMPT).worker for _ in range(3)] == [small, large, small]

    in_loop(test)


def test_a_worker_that_has_just_restarted_does_not_get_all_new_sessions() -> None:
    """Requests of 500 tokens arrive, and none ends. Neither worker ever has two more of them than the other."""

    def test(fleet: Fleet) -> None:
        full, empty = add_worker(fleet, "http://full"), add_worker(fleet, "http://empty")
        full.state = state_of(stored_tokens=1 << 20, host_tokens=1 << 20)
        empty.state = state_of(host_tokens=1 << 20)
        with ExitStack() as requests:
            for number in range(40):
                prompt = PromptPrefixes((b"%d" % number,), prompt_bytes=2000)
                choice = fleet.choose("decode", (), prompt)
                assert number or choice.worker is empty
                requests.enter_context(choice.worker.in_flight(500, choice.cached_tokens))
                assert 0 <= empty.requests - full.requests <= 1

    in_loop(test)


def test_prefill_workers_are_chosen_by_their_own_caches() -> None:
    def test(fleet: Fleet) -> None:
        workers = [add_worker(fleet, f"http://{number}", "prefill") for number in range(3)]
        decode = add_worker(fleet, "http://decode")
        fleet.prefixes.record_sent(PROMPT, workers[1])
        fleet.prefixes.record_sent(PROMPT, decode)
        assert [fleet.choose("prefill", (), PROMPT).worker for _ in range(4)] == [workers[1]] * 4

    in_loop(test)


SHORT_TURNS = Sizes(system=1024, question=(512, 512), answer=(32, 32))
# Pages of all stores that hold about two thirds of 32 sessions of 6 turns.
PAGES = {NORMAL: 1000, SHORT_TURNS: 300}


@cache
def hit_rate(
    workers: int, *, events: bool, sizes: Sizes = NORMAL, at_once: int = 8, killed_at: int | None = None
) -> tuple[float, int]:
    """Serves 32 sessions. Returns the share of prompt tokens that were cached, and how many turns went to another
    worker than the turn before."""

    def test(fleet: Fleet) -> tuple[float, int]:
        modelled = {}
        for number in range(workers):
            routed = add_worker(fleet, f"http://{number}")
            modelled[routed.url] = ModelledWorker(routed, PAGES[sizes] // workers)
            if events:
                modelled[routed.url].publish_events()

        def on_request(number: int) -> None:
            if number == killed_at:
                modelled["http://0"].routed.failures = FAILURES_UNTIL_DOWN

        rate = serve_sessions(
            fleet, modelled, random.Random(1), turns=6, at_once=at_once, sizes=sizes, on_request=on_request
        )
        for worker in modelled.values():
            worker.cache.audit()
            assert worker.routed.requests == 0
        return rate.share, rate.moves

    return in_loop(test)


@pytest.mark.parametrize("events", [True, False], ids=["with KV events", "without KV events"])
@pytest.mark.parametrize("sizes", [NORMAL, SHORT_TURNS], ids=["normal turns", "short turns"])
def test_32_sessions_on_two_workers_hit_as_much_as_on_one_with_all_the_memory(sizes: Sizes, events: bool) -> None:
    """The caches hold about two thirds of all sessions, so that sessions in the wrong place would evict others."""
    one, _ = hit_rate(1, events=False, sizes=sizes)
    two, moves = hit_rate(2, events=events, sizes=sizes)
    assert two > 0.95 * one, f"hit rates: one worker {one:.3f}, two workers {two:.3f}; {moves} moves"


@pytest.mark.parametrize("events", [True, False], ids=["with KV events", "without KV events"])
def test_sessions_one_after_the_other_use_the_memory_of_both_workers(events: bool) -> None:
    """Without overlapping requests there is no load, so the charge for stored tokens must spread the sessions."""
    one, _ = hit_rate(1, events=False, at_once=1)
    two, moves = hit_rate(2, events=events, at_once=1)
    assert two > 0.95 * one, f"hit rates: one worker {one:.3f}, two workers {two:.3f}; {moves} moves"


def test_the_sessions_of_a_killed_worker_continue_at_the_other() -> None:
    killed, moves = hit_rate(2, events=True, killed_at=96)
    alive, _ = hit_rate(2, events=True)
    assert moves >= 8 and 0.7 * alive < killed < alive, f"hit rates: {killed:.3f} and {alive:.3f}; {moves} moves"
