"""Decode steps as graphs, emulated on a CPU, give the tokens of steps without graphs."""

import random
from typing import Any

import pytest
from engine.emulated_graphs import emulate_graphs, make_engine_with_graphs
from engine.test_mtp_drafts import MODELS, SPECS
from harness import make_engine, run_all

from hotset.base.sampling import SamplingParams

REQUESTS = 3


@pytest.mark.parametrize(
    ("name", "tiers", "slots"),
    [("deepseek", "off", None), ("glm", "auto", 6), ("deepseek", "always", 6)],
)
def test_graphs_sample_what_steps_without_graphs_sample(
    name: str, tiers: str, slots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(1 << 32)
    spec, model, rng = SPECS[name], MODELS[name], random.Random(seed)
    prompts = [[rng.randrange(spec.vocab) for _ in range(length)] for length in (26, 1, 17)]
    params = [SamplingParams(temperature=0.9 * (n % 2), seed=n, max_tokens=26, ignore_eos=True) for n in range(3)]
    settings: dict[str, Any] = {"max_model_len": 56, "page_rows": 3, "max_num_batched_tokens": 64, "tiers": tiers}
    settings |= {"device_kv_tokens": 120} | ({} if tiers == "off" else {"host_kv_tokens": 600, "hot_slots": slots})
    expected = run_all(make_engine(model, spec, **settings, max_num_seqs=REQUESTS), prompts, params)
    graphs = emulate_graphs(monkeypatch)
    captured = make_engine_with_graphs(model, spec, requests=REQUESTS, **settings)
    assert run_all(captured, prompts, params) == expected, f"seed {seed}"
    used = [graph for graph in graphs if graph is not None]
    assert len(used) > len(graphs) / 2
    assert any(graph.has_tiered for graph in used) == (tiers == "always") or tiers == "auto"
