"""Drafts change no token and no byte: a whole engine that verifies drafts, compared with a plain decoder.

`Bench` compares the host store with the plain contexts after each step that leaves no command pending, and the answers
at the end. Its drafts are wrong at random places, so that rows of rejected drafts are computed again everywhere.
"""

from typing import Any

import pytest
from tiers.whole_numbers import Bench

from hotset.schedule.request import Phase
from hotset.tiers.residence import Residence

# Pools in which requests stay resident, become tiered, or are parked and resumed.
POOLS: dict[str, dict[str, Any]] = {
    "roomy": {"device_pages": 160, "host_pages": 160},
    "crowded": {"device_pages": 44, "host_pages": 120},
    "always": {"device_pages": 60, "host_pages": 120, "tiers": "always"},
    "host full": {"device_pages": 44, "host_pages": 46},
}


def make_bench(pool: str, max_drafts: int, **settings: Any) -> Bench:
    return Bench(**POOLS[pool], max_drafts=max_drafts, slots=4 * (1 + max_drafts) + 2, **settings)


@pytest.mark.parametrize(
    ("pool", "max_drafts", "depth", "mtp"),
    [
        ("host full", 2, 1, True),
        ("always", 3, 3, True),
        ("crowded", 3, 2, True),
        ("roomy", 5, 2, False),
        ("always", 1, 3, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("roomy", 3, 3, True), ("crowded", 5, 3, True), ("host full", 1, 2, False))
        ),
    ],
)
def test_answers_and_rows_are_those_without_drafts(pool: str, max_drafts: int, depth: int, mtp: bool) -> None:
    """Every plan in flight can verify drafts of the MTP layer. Other drafts wait until the plan before is committed."""
    bench = make_bench(pool, max_drafts, depth=depth, mtp=mtp)
    requests = [bench.add(f"r{number}", 20 + number, 44 - 4 * number) for number in range(4)]
    aborted = bench.add("aborted", 9, 50)
    bench.run(until=lambda: len(aborted.tokens) > 25 and requests[0].in_flight > 0)
    bench.scheduler.abort("aborted")
    bench.finish()
    counters = bench.scheduler.counters
    assert sorted(counters.drafts_verified) == [*range(1, max_drafts + 1)], "drafts of some place were not verified"
    for place in range(1, max_drafts + 1):
        assert 0 < counters.drafts_accepted[place] < counters.drafts_verified[place], (
            f"no draft was accepted, or none rejected, at place {place}"
        )
    assert counters.tokens_generated == sum(len(answer) for answer in bench.answers.values())
    assert not bench.drafter.open, "the drafter still keeps requests that have ended"
    events = {
        "roomy": counters.demotions == counters.parks == 0,
        "crowded": counters.demotions or counters.parks,  # a hot buffer for five drafts is too large for a demotion
        "always": bench.compared[Residence.TIERED],
        "host full": counters.recomputes,
    }
    assert events[pool], f"the pool is not {pool}"


def test_correct_drafts_save_steps_and_wrong_drafts_cost_none() -> None:
    steps = {}
    for share in (0.0, 1.0):
        bench = make_bench("roomy", 3, right_drafts=share)
        bench.add("request", 10, 31)
        bench.finish()
        steps[share] = bench.scheduler.counters.steps
    assert 8 <= steps[1.0] < 13, "steps with correct drafts do not add about four tokens each"
    assert 25 < steps[0.0] <= 31, "steps with wrong drafts do not add about one token each"


@pytest.mark.parametrize("park", [False, True])
def test_drafts_that_need_a_page_are_left_out_if_none_is_free(park: bool) -> None:
    """Drafts never preempt a request. With pages for the final tokens only, tokens are decoded one by one."""
    bench = Bench(13, 60, max_drafts=3, slots=18, page_rows=8, tiers="auto")
    request = bench.add("request", 30, 40)
    bench.run(until=lambda: request.phase is Phase.DECODE)
    if park:
        bench.scheduler._preemptor.change_residence(request, Residence.PARKED)
    bench.finish()
    assert bench.scheduler.counters.parks == park


def test_with_more_requests_fewer_tokens_are_drafted() -> None:
    bench = make_bench("roomy", 5, step_tokens=7, right_drafts=0.0)
    for number in range(4):
        bench.add(f"r{number}", 3, 30)
    bench.run(until=lambda: all(request.phase is Phase.DECODE for request in bench.requests.values()))
    before = bench.scheduler.counters.drafts_verified.total()
    steps = bench.scheduler.counters.steps
    for _ in range(10):
        bench.step()
    drafted = bench.scheduler.counters.drafts_verified.total() - before
    assert 0 < drafted <= 3 * (bench.scheduler.counters.steps - steps), "more than 3 were drafted beside 4 requests"
    bench.finish()
