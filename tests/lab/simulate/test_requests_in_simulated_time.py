"""Simulated traffic agrees with a real engine that computes the same requests on a CPU, and follows its own rules."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import tiny_directory
from lab.plan.test_admission import SPARSE

from hotset.base.config import EngineConfig
from hotset.base.host_memory import host_memory
from hotset.engine.build import build_engine
from hotset.engine.core import Engine
from hotset.engine.outputs import EngineStats
from hotset.engine.workers.executor import Step, StepFuture
from hotset.lab.bench.workload import TraceEntry, read_trace
from hotset.lab.plan.capacity import plan_capacity
from hotset.lab.plan.costs import RankCosts
from hotset.lab.plan.gpus import H200, Machine
from hotset.lab.plan.model_configs import find_config
from hotset.lab.plan.pipeline import SimulatedClock
from hotset.lab.plan.products import product_rates, prompt_work
from hotset.lab.simulate.prompts import Arrival, arrivals, page_hashes
from hotset.lab.simulate.step_clock import FixedCosts, GpuCosts, StepCost, StepWork, work_of
from hotset.lab.simulate.traffic import TrafficResult, run_traffic, simulated_engine
from hotset.models.decoder import worker_kv_shape
from hotset.models.feed_forward import ROUTED
from hotset.models.spec import KvStorage
from hotset.models.split import Split
from hotset.schedule.plan import StepResult
from hotset.tiers.prefix_cache import PageHasher
from hotset.tiers.residence import Residence

VOCAB = 64
COSTS = FixedCosts(step_s=0.01, prompt_token_s=1e-4, decode_token_s=1e-3, tiered_token_s=1e-3, position_s=1e-4)


class TimedExecutor:
    """Executes each step with a model, and moves the clock by its cost."""

    def __init__(self, engine: Engine, clock: SimulatedClock) -> None:
        self._inner, self._engine, self._clock = engine.executor, engine, clock

    def submit(self, step: Step) -> StepFuture:
        (plan,) = step
        assert plan is not None
        work = work_of(plan, self._engine.schedulers[0].queues.count(Residence.TIERED))
        results = self._inner.submit(step).results()
        self._clock.now += sum(COSTS(work))
        return Finished(results)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Finished:
    def __init__(self, results: Sequence[StepResult | None]) -> None:
        self._results = results

    def results(self) -> Sequence[StepResult | None]:
        return self._results


def run_real(config: EngineConfig, requests: Sequence[Arrival]) -> TrafficResult:
    engine, clock = build_engine(config), SimulatedClock()
    try:
        executor: Any = TimedExecutor(engine, clock)
        engine.executor = executor
        return run_traffic(engine, clock, requests)
    finally:
        engine.close()


def simulate(config: EngineConfig, requests: Sequence[Arrival], cost: StepCost) -> TrafficResult:
    files, clock = find_config(config.model), SimulatedClock()
    capacity = plan_capacity(config, files, Machine(host_memory().free))
    engine = simulated_engine(capacity, files, False, clock, cost)
    result = run_traffic(engine, clock, requests)
    engine.audit()
    return result


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "device_kv_tokens": 4000,
        "host_kv_tokens": 20000,
        "max_num_seqs": 24,
        "max_model_len": 2048,
        "page_rows": 16,
    }
    return EngineConfig(
        model=tiny_directory(folder, **SPARSE | {"max_position_embeddings": 4096}),
        load_format="dummy",
        device="cpu",
        max_num_batched_tokens=256,
        **(defaults | settings),
    )


def random_arrivals(count: int, rate: float, prompt: float = 200, answer: float = 12) -> list[Arrival]:
    """Returns requests like those of a trace: a few of them long, some with a common prefix. `prompt` and `answer` are
    mean lengths."""
    generator, seconds, found = random.Random(0), 0.0, []
    for _ in range(count):
        seconds += generator.expovariate(rate)
        length = int(min(7.5 * prompt, prompt / 10 + generator.expovariate(1 / (0.9 * prompt))))
        prefix = [20] * generator.choice((0, 0, 32))
        tokens = (prefix + generator.choices(range(16, VOCAB), k=length))[:length]
        found.append(Arrival(seconds, tuple(tokens), 1 + int(generator.expovariate(1 / answer))))
    return found


def test_requests_wait_for_seats_and_all_of_them_end(tmp_path: Path) -> None:
    """With one seat and a constant time per step, requests are served one after another."""
    config = config_of(tmp_path, max_num_seqs=1, tiers="off", host_kv_tokens=None)
    requests = [Arrival(0.0, (20,) * 10, 5), Arrival(0.1, (30,) * 10, 5), Arrival(20.0, (40,) * 300, 2)]
    result = simulate(config, requests, FixedCosts(step_s=1.0))
    firsts = [times.first_token for times in result.times]
    ends = [times.ended for times in result.times]
    assert firsts == [1.0, 6.0, 22.0]  # the last prompt takes two steps of 256 tokens
    assert ends == [5.0, 10.0, 23.0]
    assert (result.steps, result.max_running, result.seconds) == (13, 1, 23.0)
    assert result.mean_running == pytest.approx(13 / 23)


def test_a_step_takes_the_time_of_its_work(tmp_path: Path) -> None:
    seen: list[StepWork] = []

    def cost(work: StepWork) -> Sequence[float]:
        seen.append(work)
        return (1.0,)

    config = config_of(tmp_path, prefix_cache=False)
    simulate(config, [Arrival(0.0, tuple(range(16, 46)) * 10, 3), Arrival(0.0, (17,) * 20, 2)], cost)
    assert sum(work.prompt_tokens for work in seen) == 320
    assert next(work.chunks for work in seen if work.chunks) == [(0, 256)]
    assert sum(work.decodes for work in seen) == 2 + 1  # first tokens are sampled by the prompts' steps
    assert max(work.context for work in seen) >= 300


def test_pipeline_stages_compute_different_steps_at_the_same_time() -> None:
    clock = SimulatedClock()
    assert clock.run((1.0, 2.0)) == 3.0
    assert clock.run((1.0, 2.0)) == 5.0  # its first stage ran from 1 to 2, and its second after the step before
    clock.now = 10.0
    assert clock.run((1.0, 2.0)) == 13.0


def test_experts_compute_the_prompts_of_all_replicas() -> None:
    """If only one of eight replicas has prompts, each computes an eighth of the experts' work of a full load."""
    spec, split = find_config("glm-5.2").spec, Split(dp_size=8)
    shape = worker_kv_shape(spec, torch.bfloat16, KvStorage(fp8_rows=True, fp8_keys=True), split)
    costs = GpuCosts([RankCosts(spec, split, shape, H200, 4096, 2)])
    alone, together = (costs(StepWork(chunks=[(0, 8192)], expert_share=share))[0] for share in (1 / 8, 1.0))
    (routed,) = (rate for rate in product_rates(spec, split) if rate.name == ROUTED)
    assert together - alone == pytest.approx(7 / 8 * 2.0 * routed.flops(prompt_work(spec, 0, 8192)) / (1979e12 * 0.6))


def test_memory_pressure_makes_requests_tiered_and_parked_as_in_a_real_engine(tmp_path: Path) -> None:
    """If the time of a step depends on its work alone, a simulation equals the real engine exactly."""
    config = config_of(tmp_path, device_kv_tokens=250, host_kv_tokens=3000, max_model_len=256)
    requests = [replace(request, prompt=request.prompt[:60], answer_tokens=60) for request in random_arrivals(5, 50.0)]
    real, simulated = run_real(config, requests), simulate(config, requests, COSTS)
    assert real.max_tiered > 0 and real.parks > 0
    for field in ("requests", "steps", "max_running", "max_tiered", "parks", "demotions", "reused"):
        assert getattr(simulated, field) == getattr(real, field), field
    assert simulated.first_token_s == pytest.approx(real.first_token_s)
    assert simulated.token_s == pytest.approx(real.token_s)


def test_the_ranks_of_a_data_parallel_engine_have_the_requests_and_pages_of_the_whole(tmp_path: Path) -> None:
    config = config_of(tmp_path, data_parallel_size=2, device_kv_tokens=500, max_model_len=768)
    files, clock = find_config(config.model), SimulatedClock()
    capacity = plan_capacity(config, files, Machine(host_memory().free))
    engine = simulated_engine(capacity, files, False, clock, FixedCosts(step_s=0.01))
    seen: list[EngineStats] = []
    run_traffic(engine, clock, random_arrivals(12, 50.0, prompt=100), lambda done, total: seen.append(engine.stats()))
    for stats in seen:
        assert len(stats.ranks) == 2
        for name in stats.ranks[0].of_rank:
            assert sum(getattr(rank, name) for rank in stats.ranks) == getattr(stats, name), name
    assert any(all(rank.running for rank in stats.ranks) for stats in seen)


def test_blocks_of_a_trace_become_equal_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 500, "input_length": 1100, "output_length": 80, "hash_ids": [1, 2, 3]},
        {"timestamp": 1500, "input_length": 1030, "output_length": 8, "hash_ids": [1, 2, 9]},
        {"timestamp": 2500, "input_length": 100, "output_length": 1, "hash_ids": []},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second, third = arrivals(read_trace(path, 2.0, 0.125), 0.125, VOCAB)
    assert [len(request.prompt) for request in (first, second, third)] == [138, 129, 12]
    assert [request.seconds for request in (first, second, third)] == [0.0, 0.5, 1.0]
    assert [request.answer_tokens for request in (first, second, third)] == [10, 1, 1]
    assert first.prompt[:128] == second.prompt[:128] and first.prompt[:64] != first.prompt[64:128]
    assert all(16 <= token < VOCAB for request in (first, second, third) for token in request.prompt)


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
