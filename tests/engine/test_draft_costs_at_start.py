"""Engines measure steps with drafts, and draft only what pays."""

from typing import Any

import torch
from engine.test_mtp_drafts import MODELS, SPECS, record_drafts
from harness import make_engine, run_all

from hotset.base.config import EngineConfig
from hotset.base.sampling import SamplingParams
from hotset.engine.drafts.costs import StepCosts
from hotset.engine.drafts.measuring import measure_draft_costs
from hotset.engine.drafts.speculation import Speculation
from hotset.engine.sizing import kv_budget

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
CPU = torch.device("cpu")


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
