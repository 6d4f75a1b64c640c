"""Quiet plans, which a simulation skips: nothing differs from a simulation that makes every plan."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from harness import tiny_directory
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from lab.plan.test_admission import SPARSE
from lab.simulate.test_requests_in_simulated_time import VOCAB

from hotset.base.config import EngineConfig
from hotset.engine.outputs import EngineStats
from hotset.lab.bench.workload import TraceEntry
from hotset.lab.plan.capacity import Capacity, plan_capacity
from hotset.lab.plan.costs import RankCosts
from hotset.lab.plan.gpus import H200, Machine
from hotset.lab.plan.model_configs import find_config
from hotset.lab.simulate.prompts import Arrival, arrivals, page_hashes
from hotset.lab.simulate.step_clock import FixedCosts, SimulatedClock
from hotset.lab.simulate.traffic import TrafficResult, run_traffic, simulated_engine
from hotset.models.decoder import worker_kv_shape
from hotset.models.spec import KvStorage
from hotset.models.split import Split
from hotset.schedule.plan import Plan
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.prefix_cache import PageHasher

COSTS = FixedCosts(step_s=0.01, prompt_token_s=1e-4, decode_token_s=1e-3, tiered_token_s=1e-3, position_s=1e-4)
PAGE_ROWS, BLOCK_TOKENS = 16, 32
MEMORIES: tuple[dict[str, Any], ...] = (
    {"device_kv_tokens": 260, "host_kv_tokens": 3000},
    {"device_kv_tokens": 300, "host_kv_tokens": 400},
    {"device_kv_tokens": 300, "host_kv_tokens": 600, "tiers": "always"},
    {"device_kv_tokens": 400, "tiers": "off", "host_kv_tokens": None},
    {"device_kv_tokens": 2000, "host_kv_tokens": 2100},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("fast_scheduler")
    return tiny_directory(folder, **SPARSE | {"max_position_embeddings": 4096})


@cache
def planned(config: EngineConfig) -> Capacity:
    return plan_capacity(config, find_config(config.model), Machine(8 << 30))


def simulate(
    config: EngineConfig, requests: list[Arrival], *, every_plan: bool, audits: bool = False
) -> tuple[TrafficResult, EngineStats]:
    clock = SimulatedClock()
    engine = simulated_engine(planned(config), find_config(config.model), False, clock, COSTS, every_plan=every_plan)
    result = run_traffic(engine, clock, requests, lambda done, total: engine.audit() if audits else None)
    engine.audit()
    return result, engine.stats()


def traffic(seed: int) -> list[Arrival]:
    """Returns requests of which some share blocks, arrive together, or have prompts of many chunks."""
    generator, entries, seconds = random.Random(seed), [], 0.0
    for _ in range(generator.randint(2, 14)):
        seconds += generator.choice((0.0, 0.02, 0.1, 0.3, 1.0))
        blocks = tuple(generator.choices(range(3), k=generator.randint(1, 5)))
        tokens = BLOCK_TOKENS * len(blocks) - generator.randrange(BLOCK_TOKENS)
        blocks = generator.choice((blocks, ()))  # without blocks, the prompt is random
        entries.append(TraceEntry(seconds, tokens, generator.randint(1, 90), blocks))
    return arrivals(entries, BLOCK_TOKENS / 512, VOCAB)


@given(
    seed=st.integers(0, 1 << 32),
    memory=st.sampled_from(MEMORIES),
    plans_in_flight=st.integers(1, 3),
    replicas=st.integers(1, 2),
    chunk=st.sampled_from((8, 24, 256)),
    seats=st.sampled_from((2, 12)),
    audits=st.booleans(),
)
@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_traffic_is_the_same_as_with_every_plan(
    model: str,
    seed: int,
    memory: dict[str, Any],
    plans_in_flight: int,
    replicas: int,
    chunk: int,
    seats: int,
    audits: bool,
) -> None:
    config = EngineConfig(
        model=model,
        load_format="dummy",
        device="cpu",
        max_num_batched_tokens=chunk,
        max_num_seqs=seats,
        max_model_len=256,
        page_rows=PAGE_ROWS,
        plans_in_flight=plans_in_flight,
        data_parallel_size=replicas,
        **memory,
    )
    requests = traffic(seed)
    expected = simulate(config, requests, every_plan=True)
    assert simulate(config, requests, every_plan=False, audits=audits) == expected


def test_most_plans_of_long_answers_are_skipped(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=model, load_format="dummy", device="cpu", max_num_batched_tokens=16, max_model_len=1024)
    requests = [Arrival(0.0, (20,) * 400, 300), Arrival(0.5, (30,) * 400, 300)]
    made, make_plan = [], Scheduler.plan

    def counted(scheduler: Scheduler) -> Plan | None:
        made.append(make_plan(scheduler))
        return made[-1]

    monkeypatch.setattr(Scheduler, "plan", counted)
    _result, stats = simulate(config, requests, every_plan=False)
    assert stats.steps > 300
    assert len(made) < 0.1 * stats.steps


def test_pages_of_blocks_have_equal_hashes_if_all_tokens_before_their_end_are_equal() -> None:
    blocks = [(1, 2, 3), (1, 2, 4), (1, 2, 3), (2, 2, 3), (1,)]
    entries = [TraceEntry(0.0, 512 * len(ids) - 100 * (len(ids) > 1), 1, ids) for ids in blocks]
    hasher, ours, theirs = PageHasher("model", 64), [], []
    for request in arrivals(entries, 1.0, 1000):
        expected: list[bytes] = []
        hasher.extend(expected, request.prompt, "")
        ours += page_hashes(request, 64)
        theirs += expected
    assert len(ours) == len(theirs)
    assert [ours.index(one) for one in ours] == [theirs.index(one) for one in theirs]
    assert page_hashes(replace(request, block_tokens=96), 64) == []


@pytest.mark.parametrize("name", ["glm-5.2", "qwen3-8b"])
def test_rates_of_decode_steps_give_the_times_of_decode_steps(name: str) -> None:
    spec, split = find_config(name).spec, Split()
    shape = worker_kv_shape(spec, torch.bfloat16, KvStorage(), split)
    costs = RankCosts(spec, split, shape, H200, 4096 if name == "glm-5.2" else 0, 2)
    for requests, context, tiered in ((1, 100.0, 0), (7, 5000.5, 3), (64, 2048.0, 64)):
        tiered = tiered if name == "glm-5.2" else 0
        rates = costs.decode_rates(requests)
        seconds = rates.whole_s + rates.seconds(context, tiered)
        assert seconds == pytest.approx(costs.decode(requests, context, tiered).seconds, rel=1e-9)
