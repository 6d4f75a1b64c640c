"""Through a real router, sessions stay on the workers that have their prefixes, as long as these workers live."""

import random
from contextlib import closing

import pytest
from cache_model import words
from ports import reserved_port
from running_router import Cluster, Router, Stub
from waiting import wait_until

from hotset.base.address import Address, EventsEndpoint
from hotset.fleet.kv_events.publisher import KvEventPublisher
from hotset.serve.page_marks import PAGE_MARKS_HEADER, page_marks_header
from hotset.tiers.prefix_cache import PageHasher, PagesEvicted, PagesStored

RNG = random.Random(20)
LOOPBACK = Address("127.0.0.1", 0)
HASHER = PageHasher("model", 16)


# A worker is down if its health checks time out, and comes back with an empty cache. This must not happen here, even if
# the machine is busy.
PATIENT = ("--health-timeout-seconds", "60")


@pytest.fixture(scope="module")
def patient_router(shared_cluster: Cluster, workers: list[Stub]) -> Router:
    """A router that several tests share. Each of them sends texts that the router does not know yet."""
    return shared_cluster.router(workers[:2], workers[2:], *PATIENT)


def ask(router: Router, text: str, **fields: object) -> str:
    """Sends a prompt and returns the name of the decode worker that answered."""
    answer = router.post(prompt=text, **fields)
    assert answer.status_code == 200 and PAGE_MARKS_HEADER not in answer.headers, answer.text
    return answer.headers["x-worker"]


def prefills_of(stubs: list[Stub]) -> list[str]:
    requests = [request for stub in stubs for request in stub.seen()["requests"]]
    return [request["headers"]["x-hotset-prefill"] for request in requests]


def choices_and_tokens(router: Router) -> list[float]:
    """Returns how many decode workers were chosen by prefix and by load, and the prompt tokens and cached tokens."""
    choices = [router.metric("hotset_router_choices_total", role="decode", by=by) for by in ("prefix", "load")]
    return choices + [
        router.metric(f"hotset_router_{kind}_tokens_total", role="decode") for kind in ("prompt", "cached")
    ]


def test_every_turn_of_a_session_goes_to_the_same_workers(patient_router: Router, idle_workers: list[Stub]) -> None:
    router, before = patient_router, choices_and_tokens(patient_router)
    sessions = [words(RNG, 3000) for _ in range(6)]
    homes = [ask(router, text) for text in sessions]
    assert {homes.count("d1"), homes.count("d2")} == {3}, "without a known prefix, workers take turns"
    prefills = [set(prefills_of([stub])) for stub in idle_workers[2:]]
    for turn in range(2):
        sessions = [text + words(RNG, 600) for text in sessions]
        assert [ask(router, text, max_tokens=turn + 1) for text in sessions] == homes
    for stub, first in zip(idle_workers[2:], prefills, strict=True):
        assert set(prefills_of([stub])) == first, "prefill workers have caches, too"
    by_prefix, by_load, tokens, cached = (
        now - then for now, then in zip(choices_and_tokens(router), before, strict=True)
    )
    assert (by_prefix, by_load) == (12, 6) and 0.45 < cached / tokens < 0.7
    salted = {ask(router, sessions[0], cache_salt=f"tenant {number}") for number in range(2)}
    assert salted == {"d1", "d2"}, "another tenant's prefix is unknown"
    keyed = [ask(router, words(RNG, 3000), prompt_cache_key="agent") for _ in range(4)]
    assert len(set(keyed)) == 1, "prompts of one cache key go to one worker"


def test_sessions_of_a_killed_worker_continue_elsewhere_and_it_returns_with_an_empty_cache(
    cluster: Cluster, idle_workers: list[Stub]
) -> None:
    with reserved_port() as port:
        doomed = cluster.stub("decode", "doomed", port=port)
        router = cluster.router(idle_workers[:1], [idle_workers[2], doomed], *PATIENT)
        sessions = [words(RNG, 3000) for _ in range(4)]
        homes = [ask(router, text) for text in sessions]
        assert homes.count("doomed") == 2
        doomed.kill()
        assert [ask(router, text) for text in sessions] == ["d1"] * 4
        restarted = cluster.stub("decode", "restarted", port=port)
        assert wait_until(lambda: router.up(idle_workers[0], idle_workers[2], restarted))
    assert [ask(router, text) for text in sessions] == ["d1"] * 4, "the restarted worker has no prefix"


def test_a_worker_that_rejects_a_prompt_or_fails_does_not_have_it(
    patient_router: Router, idle_workers: list[Stub]
) -> None:
    router, (_, _, d1, d2) = patient_router, idle_workers
    *_, cached = choices_and_tokens(router)
    for behaviour in ("busy", "full"):
        text = words(RNG, 3000)
        for stub in (d1, d2):
            stub.behave(behaviour=behaviour)
        assert router.post(prompt=text).status_code == {"busy": 429, "full": 503}[behaviour]
        for stub in (d1, d2):
            stub.behave(behaviour="well")
        assert wait_until(lambda: router.up(*idle_workers))
        assert choices_and_tokens(router)[-1] == cached
        assert ask(router, text) in ("d1", "d2")
        assert choices_and_tokens(router)[-1] == cached, behaviour
    assert ask(router, text) in ("d1", "d2")
    assert choices_and_tokens(router)[-1] > cached


def test_kv_events_tell_the_router_what_the_workers_have(patient_router: Router, idle_workers: list[Stub]) -> None:
    router, (_, _, d1, d2) = patient_router, idle_workers
    text, tokens = words(RNG, 6000), list(range(1500))
    hashes: list[bytes] = []
    HASHER.extend(hashes, tokens, "")

    def cached_share(worker: str) -> float:
        """Sends the prompt, and returns how much of it `worker` was expected to have. Returns 0 if it went to
        another."""
        _, _, tokens_before, cached_before = choices_and_tokens(router)
        if ask(router, text) != worker:
            return 0.0
        _, _, tokens_now, cached_now = choices_and_tokens(router)
        return (cached_now - cached_before) / (tokens_now - tokens_before)

    with closing(new_publisher()) as of_d1, closing(new_publisher()) as of_d2:
        for stub, publisher in ((d1, of_d1), (d2, of_d2)):
            assert publisher.endpoint.replay is not None
            ports = {"live": publisher.endpoint.live.port, "replay": publisher.endpoint.replay.port}
            stub.behave(kv_events=[ports], page_marks=page_marks_header(tokens, "", HASHER))
            assert wait_until(lambda url=stub.url: router.workers()[url]["kv_events_synced"] is True)
        ask(router, text)
        both = ["d1", "d1", "d2", "d2"]  # nobody has published a page of the prompt
        assert wait_until(lambda: sorted(ask(router, text) for _ in range(4)) == both)
        of_d2.on_change(PagesStored(tuple(hashes), None, tuple(tokens), ""))
        of_d2.flush()
        assert wait_until(lambda: cached_share("d2") > 0.9)
        assert wait_until(lambda: [ask(router, text) for _ in range(3)] == ["d2"] * 3)
        of_d1.on_change(PagesStored(tuple(hashes[:40]), None, tuple(tokens[: 40 * 16]), ""))
        of_d1.flush()
        of_d2.on_change(PagesEvicted(tuple(hashes)))
        of_d2.flush()
        assert wait_until(lambda: 0.3 < cached_share("d1") < 0.5), "40 of 93 pages"
        of_d1.close()
        assert wait_until(lambda: router.workers()[d1.url]["kv_events_synced"] is False)
        assert wait_until(lambda: cached_share("d1") > 0.9), "without events, the router knows what it has sent"
    assert "Traceback" not in router.log()


def new_publisher() -> KvEventPublisher:
    return KvEventPublisher(EventsEndpoint(LOOPBACK, LOOPBACK))
