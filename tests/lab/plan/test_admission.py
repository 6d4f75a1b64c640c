"""`hotset plan` predicts how many requests an engine runs at the same time. A real engine is the oracle."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import tiny_directory
from matrix import slow_if

from hotset.base.config import EngineConfig
from hotset.base.host_memory import host_memory
from hotset.base.sampling import SamplingParams
from hotset.engine.build import build_engine
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor
from hotset.lab.plan.capacity import plan_capacity
from hotset.lab.plan.gpus import Machine
from hotset.lab.plan.model_configs import find_config
from hotset.schedule.request import Phase, Request

ROOT = Path(__file__).resolve().parents[3]
PAGE_ROWS = 16
CONTEXT = 128  # a multiple of PAGE_ROWS
ANSWER = 12  # tokens of each answer, which are in the last page
SPARSE = json.loads((ROOT / "models" / "demo-dsa" / "config.json").read_text()) | {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "n_routed_experts": 2,
    "index_n_heads": 2,
    "index_topk": 16,
    "max_position_embeddings": 1024,
}
DENSE = {"max_position_embeddings": 1024, "num_hidden_layers": 3, "hidden_size": 32}
MIB = 1 / 1024  # in GiB
CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {  # None is the demo model
    "sparse, resident": (SPARSE, {"device_kv_gib": 6 * MIB, "tiers": "off"}),
    "sparse, tiered": (SPARSE, {"device_kv_gib": 6 * MIB}),
    "sparse, fp8, small hot buffers": (
        SPARSE,
        {"device_kv_gib": 1.2 * MIB, "kv_dtype": "fp8", "index_dtype": "fp8", "hot_slots": 16, "host_kv_gib": 64 * MIB},
    ),
    "sparse, limited by the host": (SPARSE, {"device_kv_gib": 6 * MIB, "host_kv_tokens": 1300}),
    "demo model, fp8 rows": (None, {"device_kv_gib": 6 * MIB, "host_kv_gib": 64 * MIB, "kv_dtype": "fp8"}),
    # If answers were not held, each would end before the next prompt is computed.
    "sparse, tiered, prompts of many chunks": (SPARSE, {"device_kv_gib": 3 * MIB, "max_num_batched_tokens": 8}),
    "dense": (DENSE, {"device_kv_gib": 0.5 * MIB}),
    "dense, limited by seats": (DENSE, {"device_kv_gib": 4 * MIB, "max_num_seqs": 7}),
}


def predicted(config: EngineConfig) -> int:
    capacity = plan_capacity(config, find_config(config.model), Machine(host_memory().free))
    return capacity.requests(CONTEXT) * config.data_parallel_size


def decoding_at_once(engine: Engine, offered: int) -> int:
    """Returns how many of `offered` requests of CONTEXT tokens, which arrive together, decode at once.

    Steps compute prompts in chunks, and meanwhile earlier requests would decode and end. So each answer is held after
    its first token, until every further request waits for memory. Then all held answers are completed together.
    """
    processor = InputProcessor(engine.card, seed=0)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    requests: list[Request] = []
    for number in range(offered):
        prompt = [5 + (number * 7 + position) % 40 for position in range(CONTEXT - ANSWER)]
        requests += [choice.to_request() for choice in processor.accept(str(number), prompt, params)]
    for number, request in enumerate(requests):
        engine.schedulers[number % len(engine.schedulers)].add(request)
    steps = -1
    while steps < engine.steps:  # until a call executes no step
        steps = engine.steps
        engine.step()
        for request in requests:
            if request.phase is Phase.DECODE:
                assert request.in_flight == 0, "an answer can be held only if one plan at a time computes it"
                request.max_length = len(request.prompt) + 1  # it has this many tokens, so no step computes more
    stats = engine.stats()
    for request in requests:
        if request.running:
            request.max_length = CONTEXT
        else:
            engine.abort(request.request_id)
    finished: Counter[str] = Counter()
    while not engine.idle:
        finished.update(engine.step().finished.values())
    assert finished["length"] == stats.running == stats.resident + stats.tiered, "a held answer was not completed"
    return stats.running


def admitted(config: EngineConfig, offered: int) -> int:
    engine = build_engine(config)
    try:
        return decoding_at_once(engine, offered)
    finally:
        engine.close()


def config_of(folder: Path, model: dict[str, Any] | None, settings: dict[str, Any]) -> EngineConfig:
    return EngineConfig(
        model=str(ROOT / "models" / "demo-dsa") if model is None else tiny_directory(folder, **model),
        load_format="dummy",
        device="cpu",
        page_rows=PAGE_ROWS,
        max_model_len=CONTEXT,
        prefix_cache=False,
        **({"max_num_seqs": 96, "max_num_batched_tokens": 8192} | settings),
    )


@pytest.mark.parametrize("case", slow_if(CASES, {"demo model, fp8 rows"}))
def test_an_engine_runs_as_many_requests_as_planned(tmp_path: Path, case: str) -> None:
    config = config_of(tmp_path, *CASES[case])
    expected = predicted(config)
    assert expected >= 5
    assert abs(admitted(config, expected + 3) - expected) <= max(1, 0.03 * expected)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_engines_of_several_workers_run_as_many_requests_as_planned(tmp_path: Path, split: str) -> None:
    config = config_of(tmp_path, SPARSE, {"device_kv_gib": 5 * MIB, split: 2})
    expected = predicted(config)
    assert expected >= 5
    assert abs(admitted(config, expected + 3) - expected) <= max(1, 0.03 * expected)


def test_tiers_raise_the_prediction_and_a_small_host_store_limits_it(tmp_path: Path) -> None:
    off, tiered, limited = (
        predicted(config_of(tmp_path, *CASES[case]))
        for case in ("sparse, resident", "sparse, tiered", "sparse, limited by the host")
    )
    assert off < limited < tiered


def test_no_more_requests_than_necessary_are_tiered(tmp_path: Path) -> None:
    config = config_of(tmp_path, *CASES["sparse, tiered"])
    capacity = plan_capacity(config, find_config(config.model), Machine(host_memory().free))
    geometry, pages = capacity.budget.geometry, capacity.budget.device_pages
    resident, tiered = geometry.resident_pages(CONTEXT), geometry.tiered_pages(CONTEXT)
    for requests in range(capacity.requests(CONTEXT) + 1):
        count = capacity.tiered(requests, CONTEXT)
        assert (requests - count) * resident + count * tiered <= pages
        assert count == 0 or (requests - count + 1) * resident + (count - 1) * tiered > pages
    off = plan_capacity(replace(config, tiers="off"), find_config(config.model), Machine(host_memory().free))
    assert off.tiered(off.requests(CONTEXT), CONTEXT) == 0
