"""The tokens of a request do not depend on other requests, chunks, pages, tiers, preemption or plans in flight."""

import random
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from harness import Answer, RandomWeights, make_engine, run_all

from hotset.base.config import TiersMode
from hotset.base.errors import EngineStopped
from hotset.base.sampling import SamplingParams
from hotset.engine.input_processor import InputProcessor
from hotset.memory.view import View
from hotset.models.attention.dsa_spec import IndexSpec, MlaSpec
from hotset.models.attention.gqa_spec import GqaSpec
from hotset.models.decoder import Decoder
from hotset.models.feed_forward import MoeSpec
from hotset.models.spec import ModelSpec, RopeSpec

VOCAB = 61
COUNTERS = ("recomputes", "parks", "resumes", "demotions")


def gqa_spec() -> ModelSpec:
    attention = GqaSpec(heads=4, kv_heads=2, head_dim=8, qk_norm=True)
    return ModelSpec("qwen3", VOCAB, 24, 2, 32, False, 1e-6, True, 96, RopeSpec(8), attention, None, "float64", (3,))


def dsa_spec(layers: int, full_layers: tuple[int, ...]) -> ModelSpec:
    index = IndexSpec(heads=2, head_dim=8, topk=6, interleaved_rope=False, full_layers=full_layers)
    attention = MlaSpec(2, 12, 16, 8, 4, 8, False, index)
    moe = MoeSpec(6, 2, 8, shared=1, groups=2, topk_group=1, scale=1.5, normalise=True, layers=tuple(range(1, layers)))
    return ModelSpec(
        "deepseek_v32", VOCAB, 24, layers, 32, False, 1e-6, False, 96, RopeSpec(4), attention, moe, "float64", (3,)
    )


MODELS = {
    name: (spec, Decoder(spec, RandomWeights(torch.float64, seed=5)))
    for name, spec in {"gqa": gqa_spec(), "dsa": dsa_spec(2, (0, 1)), "shared": dsa_spec(3, (0, 2))}.items()
}


def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(7)
    pairs = []
    for number in range(20):
        prompt = [rng.randrange(VOCAB) for _ in range((1, 7, 16, 25, 30)[number % 5])]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            seed=rng.randrange(100),
            max_tokens=(1, 9, 20, 26)[number % 4],
            min_tokens=rng.choice([0, 1]),
            ignore_eos=rng.random() < 0.5,
        )
        pairs.append((prompt, params))
    return pairs


REQUESTS = requests()  # every prompt length is combined with every value of max_tokens


@cache
def expected_answers(name: str) -> list[Answer]:
    """Returns the answers of an engine that has room for all REQUESTS, and computes every prompt in one step."""
    spec, model = MODELS[name]
    sizes = {"device_kv_tokens": 2000, "page_rows": 96, "max_num_seqs": len(REQUESTS), "max_num_batched_tokens": 400}
    return run_all(make_engine(model, spec, **sizes, max_model_len=56, tiers="off"), *zip(*REQUESTS, strict=True))


class Workload(NamedTuple):
    """Requests that run together, and the settings of an engine that is usually too small to hold them all."""

    batch: list[int]  # indices into REQUESTS
    arrive_at: list[int]  # the step before which each request is added, counted from 0
    settings: dict[str, Any]


def workload(rng: random.Random, tiers: TiersMode, sparse: bool) -> Workload:
    count, kv_tokens = rng.randint(4, 6), rng.randint(58, 62)
    settings: dict[str, Any] = {
        "max_num_seqs": rng.randint(3, 5),
        "max_num_batched_tokens": rng.choice([4, 11, 64]),
        "page_rows": rng.choice([1, 3, 8]),
        "plans_in_flight": rng.randint(1, 3),
        "device_kv_tokens": kv_tokens,
        "tiers": tiers,
    }
    if tiers != "off":
        settings["host_kv_tokens"] = kv_tokens + rng.choice([20, 200])
        settings["hot_slots"] = rng.choice([6, 9, 12]) if sparse else None
    batch = [rng.randrange(len(REQUESTS)) for _ in range(count)]
    return Workload(batch, [rng.randint(0, 9) for _ in range(count)], settings)


def with_room_for_drafts(settings: dict[str, Any], max_drafts: int) -> dict[str, Any]:
    """Returns settings of a workload whose pools and hot buffers also hold drafts."""
    room = {"hot_slots": 6 * max_drafts, "host_kv_tokens": 16 * max_drafts, "device_kv_tokens": 16 * max_drafts}
    return settings | {name: settings[name] + more for name, more in room.items() if settings.get(name)}


@pytest.mark.parametrize(
    ("name", "workloads"),
    [("gqa", 6), ("shared", 4), *(pytest.param(name, 90, marks=pytest.mark.slow) for name in MODELS)],
)
def test_tokens_do_not_depend_on_other_requests(name: str, workloads: int) -> None:
    spec, model = MODELS[name]
    modes: list[TiersMode] = ["auto", "off"] if name == "gqa" else ["auto", "off", "always"]
    totals = dict.fromkeys(COUNTERS[:3] if name == "gqa" else COUNTERS, 0)
    rng = random.Random(12)
    for number in range(workloads):
        load = workload(rng, modes[number % len(modes)], sparse=name != "gqa")
        engine = make_engine(model, spec, max_model_len=56, **load.settings)
        prompts, params = zip(*(REQUESTS[request] for request in load.batch), strict=True)
        together = run_all(engine, prompts, params, load.arrive_at)
        assert together == [expected_answers(name)[request] for request in load.batch], load
        stats = engine.stats()
        assert stats.device_pages_held == 0, load
        for counter in totals:
            totals[counter] += getattr(stats, counter)
    print(name, totals)
    assert all(totals.values()), f"one of these counters is 0, so this test checks less than it should: {totals}"


def test_an_abort_at_any_step_frees_all_pages_and_does_not_change_other_answers() -> None:
    spec, model = MODELS["dsa"]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
    expected = run_all(make_engine(model, spec, device_kv_tokens=96, page_rows=4), [prompts[0]], [params])[0]
    for abort_at in range(14):
        engine = make_engine(
            model, spec, device_kv_tokens=96, page_rows=4, max_num_seqs=2, max_num_batched_tokens=4, plans_in_flight=2
        )
        processor = InputProcessor(engine.card, seed=0)
        for name, prompt in zip("ab", prompts, strict=True):
            for choice in processor.accept(name, prompt, params):
                engine.add(choice)
        tokens, step = [], 0
        while not engine.idle:
            if step == abort_at:
                engine.abort("b/0")
                engine.abort("b/0")
            outputs = engine.step()
            engine.audit()
            answered = zip(outputs.request_ids, outputs.token_ids, strict=True)
            tokens += [token for name, token in answered if name == "a/0"]
            step += 1
        assert tokens == expected.token_ids
        assert engine.stats().device_pages_held == 0


class FailingModel:
    """Computes `steps` steps, then raises like a failing device."""

    def __init__(self, steps: int) -> None:
        self._inner = MODELS["gqa"][1]
        self._steps_left = steps
        self.device = self._inner.device
        self.kv_shape = self._inner.kv_shape

    def forward(self, token_ids: torch.Tensor, view: View) -> torch.Tensor:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise RuntimeError("the device is gone")
        return self._inner.forward(token_ids, view)

    def logits(self, hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        return self._inner.logits(hidden, indices)


def test_a_failed_step_raises_and_ends_the_engine_instead_of_hanging() -> None:
    engine = make_engine(FailingModel(3), MODELS["gqa"][0], device_kv_tokens=96, plans_in_flight=2)
    with pytest.raises(RuntimeError, match="device is gone"):
        run_all(engine, [[1, 2]], [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)])
    assert engine.idle, "a failed engine does not count as idle, so draining it would never end"
    with pytest.raises(EngineStopped):
        engine.step()
