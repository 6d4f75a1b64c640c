"""Tests the choice of the number of drafts with made-up step costs and acceptance rates, and engines that measure these
costs at their start."""

import random
from itertools import accumulate
from math import inf
from typing import Any

import pytest
from engine.test_mtp_drafts import MODELS, SPECS, record_drafts
from harness import CPU, make_engine, run_all
from hypothesis import given
from hypothesis import strategies as st

from hotset.base.config import EngineConfig
from hotset.base.sampling import SamplingParams
from hotset.engine.drafts.costs import MAX_LOSS, MIN_GAIN, DraftChoice, StepCosts, likely_shares
from hotset.engine.drafts.measuring import measure_draft_costs
from hotset.engine.drafts.speculation import Speculation
from hotset.engine.sizing import kv_budget

# A step reads 1 ms of weights, and computes 0.1 ms per token; each draft costs an iteration of 0.1 ms.
NUMBERS = (1, 4, 16, 64)
MEMORY_BOUND = StepCosts(
    NUMBERS,
    [1 + 0.1 * requests for requests in NUMBERS],
    [[1 + 0.1 * requests * (1 + n) + 0.1 * n for n in range(4)] for requests in NUMBERS],
)


def test_drafts_shrink_to_none_as_batches_grow() -> None:
    shares = likely_shares(3)
    chosen = [MEMORY_BOUND.best_drafts(requests, shares) for requests in (1, 2, 4, 8, 16, 32, 64, 1000)]
    assert chosen == sorted(chosen, reverse=True) and chosen[0] == 3
    compute_bound = StepCosts((1, 8), (1.0, 8.0), ((1.0, 2.0, 3.0, 4.0), (8.0, 16.0, 24.0, 32.0)))
    assert [compute_bound.best_drafts(requests, shares) for requests in (1, 3, 8, 20)] == [0] * 4


def test_times_are_interpolated_between_measured_numbers_of_requests() -> None:
    costs = StepCosts((2, 4), (1.0, 2.0), ((1.0, 3.0, 9.0), (2.0, 5.0)))
    assert [costs.seconds(requests, 0) for requests in (1, 2, 3, 4, 8)] == [1.0, 1.0, 1.5, 2.0, 4.0]
    assert [costs.seconds(requests, 1) for requests in (1, 2, 3, 4, 8)] == [3.0, 3.0, 4.0, 5.0, 10.0]
    assert [costs.seconds(requests, 2) for requests in (1, 2, 3, 4, 8)] == [9.0, 9.0, inf, inf, inf]


def test_drafts_that_are_rejected_are_given_up_and_tried_again() -> None:
    choice = DraftChoice(3)
    assert choice.choose(1) == choice.choose(10_000) == 3, "without costs, all drafts are used"
    choice.costs = MEMORY_BOUND
    assert choice.choose(1) == 3
    for _ in range(400):
        choice.record(3, 0)
    chosen = []
    for _ in range(2048):
        chosen.append(choice.choose(1))
        if chosen[-2:] == [3, 3]:
            choice.record(3, 0)  # the second plan verifies what the first one drafted
    assert sum(map(bool, chosen)) == 8, "two plans in 512 draft nevertheless"
    for _ in range(4000):
        choice.record(3, 3)
    assert choice.choose(1) == 3


times = st.floats(0.1, 10.0)


@st.composite
def step_costs(draw: st.DrawFn) -> StepCosts:
    """Any costs of steps that the choice must cope with: more drafts or requests can even be faster."""
    numbers = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=4)))
    plain = [draw(times) for _ in numbers]
    return StepCosts(numbers, plain, [draw(st.lists(times, min_size=1, max_size=4)) for _ in numbers])


@given(costs=step_costs(), requests=st.integers(1, 80), shares=st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_the_choice_is_never_slower_than_no_drafts(costs: StepCosts, requests: int, shares: list[float]) -> None:
    shares = sorted(shares, reverse=True)
    chosen = costs.best_drafts(requests, shares)
    rates = [tokens / costs.seconds(requests, n) for n, tokens in enumerate(accumulate(shares, initial=1.0))]
    assert rates[chosen] >= rates[0] and (chosen == 0 or rates[chosen] >= MIN_GAIN * rates[0] * (1 - 1e-12))
    assert max(rates) <= max(rates[chosen], MIN_GAIN * rates[0]) * (1 + 1e-12)


@given(costs=step_costs())
def test_drafting_pays_only_if_no_number_of_requests_loses(costs: StepCosts) -> None:
    """If drafting pays, the rate of tokens with the chosen drafts is at least 0.98 of the rate without drafts."""
    shares = likely_shares(3)
    gains = []
    for requests, plain in zip(costs.requests, costs.plain, strict=True):
        chosen = costs.best_drafts(requests, shares)
        gains.append((1 + sum(shares[:chosen])) / costs.seconds(requests, chosen) * plain)
    assert costs.pays(3) == (min(gains) >= MAX_LOSS and max(gains) >= MIN_GAIN)


@pytest.mark.parametrize("right", [0.0, 0.2, 0.4, 0.6, 0.9])
@pytest.mark.parametrize("requests", [1, 16, 64])
def test_a_long_run_is_at_least_as_fast_as_98_percent_of_one_without_drafts(right: float, requests: int) -> None:
    """Each draft is right with the same probability. The time to learn this, and to try again, is included."""
    rng, choice, tokens, seconds = random.Random(7), DraftChoice(3), 0, 0.0
    choice.costs = MEMORY_BOUND
    for _ in range(4000):
        drafts = choice.choose(requests)
        seconds += MEMORY_BOUND.seconds(requests, drafts)
        for _ in range(requests):
            accepted = next((n for n in range(drafts) if rng.random() >= right), drafts)
            if drafts:
                choice.record(drafts, accepted)
            tokens += 1 + accepted
    plain = MEMORY_BOUND.plain[NUMBERS.index(requests)]
    assert tokens / seconds >= 0.98 * requests / plain
    if right == 0.9 and requests == 1:
        assert tokens / seconds > 1.8 * requests / plain


SETTINGS: dict[str, Any] = {
    "device_kv_tokens": 400,
    "max_num_seqs": 3,
    "max_model_len": 56,
    "page_rows": 8,
    "tiers": "off",
    "speculate": 2,
}
PROMPTS = [[1, 2, 3], [4] * 20]
PARAMS = [SamplingParams(temperature=0.9 * n, seed=n, max_tokens=20, ignore_eos=True) for n in range(2)]


def test_steps_are_measured_before_the_first_request() -> None:
    spec, model = SPECS["deepseek"], MODELS["deepseek"]
    engine = make_engine(model, spec, **SETTINGS)
    config = EngineConfig(**SETTINGS)
    budget = kv_budget(config, model.kv_shape, spec.context, CPU)
    counts: list[tuple[int, int]] = []
    costs = measure_draft_costs(engine.executor, config, budget, 1, lambda done, total: counts.append((done, total)))
    assert list(costs.requests) == [1, 2, 3] and counts[-1] == (3, 3)
    assert all(len(times) == 3 and min(times) > 0 for times in costs.drafting) and min(costs.plain) > 0
    expected = run_all(make_engine(model, spec, **SETTINGS), PROMPTS, PARAMS)
    assert run_all(engine, PROMPTS, PARAMS) == expected, "the measurement changed an answer"


def test_drafts_that_do_not_pay_are_left_out_and_plans_overlap() -> None:
    spec, model = SPECS["deepseek"], MODELS["deepseek"]
    expected = run_all(make_engine(model, spec, **SETTINGS), PROMPTS, PARAMS)
    engine = make_engine(model, spec, **SETTINGS, plans_in_flight=2)
    (scheduler,) = engine.schedulers
    speculation = scheduler._speculation
    assert isinstance(speculation, Speculation)
    speculation.choice.costs = StepCosts((1, 2), (1.0, 1.0), ((1.0, 1.2, 1.3), (1.0, 5.0, 9.0)))
    drafter = record_drafts(engine)
    assert run_all(engine, PROMPTS, PARAMS) == expected
    assert not engine.stats().drafts_verified, "two requests decode until the end"
    alone = run_all(make_engine(model, spec, **SETTINGS), PROMPTS[:1], PARAMS[:1])
    assert run_all(engine, PROMPTS[:1], PARAMS[:1]) == alone
    assert any(drafter.recorded.values()), "drafts of one request pay"


def test_drafts_begin_and_end_while_requests_decode() -> None:
    """The choice changes again and again, as if requests came and went. Plans with drafts, and those without, of which
    several are in flight, follow each other in any order."""
    spec, model = SPECS["glm"], MODELS["glm"]
    expected = run_all(make_engine(model, spec, **SETTINGS), PROMPTS, PARAMS)
    verified = 0
    for period in (2, 3, 5, 8, 13):
        engine = make_engine(model, spec, **SETTINGS, plans_in_flight=3)
        (scheduler,) = engine.schedulers
        speculation = scheduler._speculation
        assert speculation is not None
        plans = 0

        def choose(requests: int, period: int = period) -> int:
            nonlocal plans
            plans += 1
            return 2 * (plans // period % 2)

        speculation.choice.choose = choose  # type: ignore[method-assign]
        assert run_all(engine, PROMPTS, PARAMS) == expected, period
        verified += sum(engine.stats().drafts_verified.values())
    assert verified > 12, verified
