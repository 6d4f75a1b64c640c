"""Steady requests are scheduled and committed together, with the same results as one by one."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lab.simulate.test_requests_in_simulated_time import VOCAB, config_of

from hotset.base.host_memory import host_memory
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.lab.plan.capacity import plan_capacity
from hotset.lab.plan.gpus import Machine
from hotset.lab.plan.model_configs import find_config
from hotset.lab.plan.pipeline import SimulatedClock
from hotset.lab.simulate.prompts import Arrival
from hotset.lab.simulate.step_clock import FixedCosts
from hotset.lab.simulate.traffic import TrafficResult, run_traffic, simulated_engine
from hotset.schedule import steady
from hotset.schedule.request import PlanNumbers, Request

COSTS = FixedCosts(step_s=0.01, prompt_token_s=1e-4, decode_token_s=1e-3, tiered_token_s=1e-3)
# Too few device pages make requests tiered or parked. Too few host pages make them release everything and start again.
MEMORIES: dict[str, dict[str, Any]] = {
    "little device memory": {"device_kv_tokens": 260, "host_kv_tokens": 3000},
    "little host memory": {"device_kv_tokens": 300, "host_kv_tokens": 400},
    "no tiers": {"device_kv_tokens": 400, "tiers": "off", "host_kv_tokens": None},
    "enough memory": {"device_kv_tokens": 2000},
}


def random_traffic(seed: int) -> list[Arrival]:
    generator = random.Random(seed)
    seconds, found = 0.0, []
    for _ in range(16):
        seconds += generator.expovariate(generator.choice((2, 30, 100)))
        prompt = [20] * generator.choice((0, 40)) + generator.choices(range(16, VOCAB), k=generator.randint(1, 90))
        found.append(Arrival(seconds, tuple(prompt), generator.randint(1, 70)))
    return found


def simulate(folder: Path, requests: Sequence[Arrival], settings: dict[str, Any]) -> tuple[TrafficResult, object]:
    """Returns what happened, and the final statistics. Pages and seats are checked after every step."""
    config = config_of(folder, max_model_len=256, max_num_seqs=12, **settings)
    files, clock = find_config(config.model), SimulatedClock()
    capacity = plan_capacity(config, files, Machine(host_memory().free))
    engine = simulated_engine(capacity, files, False, clock, COSTS)
    result = run_traffic(engine, clock, requests, lambda done, total: engine.audit())
    return result, engine.stats()


@pytest.mark.parametrize("plans_in_flight", [1, 2])
@pytest.mark.parametrize("memory", MEMORIES)
def test_steady_requests_decode_as_if_each_was_scheduled_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str, plans_in_flight: int
) -> None:
    seed = random.randrange(1 << 32)
    requests, settings = random_traffic(seed), MEMORIES[memory] | {"plans_in_flight": plans_in_flight}
    together, stats = simulate(tmp_path, requests, settings)
    with monkeypatch.context() as patched:
        patched.setattr(steady, "plans_without_event", lambda request: 0)
        alone, stats_alone = simulate(tmp_path, requests, settings)
    assert together == alone, f"seed {seed}"
    assert stats == stats_alone, f"seed {seed}"


def test_counts_of_a_steady_request_follow_from_plan_numbers() -> None:
    request = Request("a", PromptSpec((1, 2, 3), SamplingParams()), 100)
    request.num_scheduled, request.plan_numbers = 7, PlanNumbers(oldest=4, next=5)
    request.steady_since = 5
    assert (request.num_scheduled, request.num_unsampled, request.in_flight) == (7, 0, 0)
    request.plan_numbers.next = 8
    assert (request.num_scheduled, request.num_unsampled, request.in_flight) == (10, 3, 3)
    request.plan_numbers.oldest = 7
    assert (request.num_scheduled, request.num_unsampled, request.in_flight) == (10, 1, 1)
    request.settle()
    request.plan_numbers.next = 20
    assert (request.num_scheduled, request.num_unsampled, request.in_flight) == (10, 1, 1)
