"""Times of steps that follow each other through pipeline stages: by hand, by brute force, and in the real scheduler."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from random import Random

import pytest
from harness import tiny_directory
from lab.plan.test_admission import DENSE

from hotset.base.config import EngineConfig
from hotset.base.host_memory import host_memory
from hotset.base.units import GIB
from hotset.lab.plan.capacity import Capacity, plan_capacity, with_host_store
from hotset.lab.plan.gpus import H200, Machine
from hotset.lab.plan.model_configs import find_config
from hotset.lab.plan.pipeline import SimulatedClock, pipeline_seconds, seconds_between_tokens
from hotset.lab.plan.planner import predict, rank_costs
from hotset.lab.simulate.prompts import Arrival
from hotset.lab.simulate.step_clock import GpuCosts, StepCost
from hotset.lab.simulate.traffic import TrafficResult, run_traffic, simulated_engine
from hotset.models.checkpoint.files import ModelFiles


def longest_path(steps: Sequence[Sequence[float]]) -> float:
    """Returns the largest sum over all ways from the first stage of the first step to the last stage of the last step,
    each of which goes on to the next stage or to the next step. A way is the stages at which it changes steps."""
    stages = len(steps[0])
    turns = combinations(range(stages + len(steps) - 1), len(steps) - 1)
    ways = [[turn - index for index, turn in enumerate(way)] for way in turns]
    return max(
        sum(sum(steps[step][first : last + 1]) for step, (first, last) in enumerate(pairwise([0, *way, stages - 1])))
        for way in ways
    )


def test_chunks_follow_each_other_through_the_stages() -> None:
    """Chunks of 1, 2 and 4 s on the first stage, and of 3, 1 and 2 s on the second.

    The first stage computes them until 1, 3 and 7 s. The second computes the first from 1 to 4, the second from 4 to 5,
    and the third from 7 to 9.
    """
    steps = [(1.0, 3.0), (2.0, 1.0), (4.0, 2.0)]
    assert pipeline_seconds(steps, 3) == 9.0
    # With two plans in flight, the third chunk begins when the first has passed both stages, at 4 s.
    assert pipeline_seconds(steps, 2) == 4 + 4 + 2
    # With one plan in flight, they take turns.
    assert pipeline_seconds(steps, 1) == 13.0
    # Eight equal chunks over four equal stages: the last begins after seven others.
    assert pipeline_seconds([(1.0,) * 4] * 8, 4) == 7 + 4
    # Only two may be in flight: two begin every 4 s.
    assert pipeline_seconds([(1.0,) * 4] * 8, 2) == 3 * 4 + 1 + 4


def test_the_last_chunk_ends_when_the_longest_way_through_chunks_and_stages_does() -> None:
    random = Random(0)
    for _ in range(200):
        chunks, stages = random.randint(1, 5), random.randint(1, 5)
        steps = [[random.randint(0, 9) * 1.0 for _ in range(stages)] for _ in range(chunks)]
        assert pipeline_seconds(steps, chunks) == longest_path(steps), steps


def test_batches_wait_for_the_slowest_stage_or_for_all_stages() -> None:
    assert seconds_between_tokens([1.0, 3.0, 2.0], 3) == 9.0
    assert seconds_between_tokens([1.0, 3.0, 2.0], 2) == seconds_between_tokens([1.0, 3.0, 2.0], 1) == 6.0
    assert seconds_between_tokens([5.0], 1) == 5.0


def simulate(
    capacity: Capacity, files: ModelFiles, cost: StepCost, requests: Sequence[Arrival], *, on_gpu: bool = False
) -> TrafficResult:
    """Runs requests through the scheduler of the engine, in simulated time."""
    clock = SimulatedClock()
    return run_traffic(simulated_engine(capacity, files, on_gpu, clock, cost), clock, requests)


@pytest.mark.parametrize("requests", [1, 2, 3, 4, 7])
def test_the_scheduler_of_a_pipeline_takes_the_time_between_tokens_that_is_predicted(
    tmp_path: Path, requests: int
) -> None:
    stages, tokens = (1.0, 3.0, 2.0), 40
    config = EngineConfig(
        model=tiny_directory(tmp_path, **DENSE),
        load_format="dummy",
        device="cpu",
        device_kv_tokens=4096,
        max_num_seqs=8,
        max_model_len=256,
        pipeline_parallel_size=3,
    )
    files = find_config(config.model)
    capacity = plan_capacity(config, files, Machine(host_memory().free))
    arrivals = [Arrival(0.0, (20 + number,) * 4, tokens) for number in range(requests)]
    result = simulate(capacity, files, lambda _work: stages, arrivals)
    batch = -(-requests // 3)
    predicted = seconds_between_tokens(stages, -(-requests // batch))
    # Requests are regrouped after their prompts, which delays them by less than one round.
    assert result.token_s[0] == pytest.approx(predicted, rel=2 / tokens)


@pytest.mark.parametrize("split", ["pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size"])
def test_the_scheduler_computes_a_prompt_in_the_predicted_time(split: str) -> None:
    """Chunks of a prompt are in flight on several stages at once, in the engine's own scheduler."""
    files, machine, context = find_config("deepseek-v3.2"), Machine(2048 * GIB, H200, 8), 16500
    config = EngineConfig(max_model_len=context + 1, kv_dtype="fp8", index_dtype="fp8", **{split: 8})
    capacity = plan_capacity(with_host_store(config, files, machine), files, machine)
    costs = rank_costs(capacity, files, machine)
    result = simulate(capacity, files, GpuCosts(costs), [Arrival(0.0, (20,) * context, 1)], on_gpu=True)
    planned = predict(capacity, files, machine, context)
    assert result.first_token_s == [pytest.approx(planned.prompt_s)]
    assert result.steps == 17
