"""Log-probabilities of prompts do not depend on chunks, tiers, preemption, plans in flight or workers. Each is reported
exactly once. tests/models/test_parity.py compares them with those of transformers."""

import random
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from engine.test_invariance import MODELS
from engine.threaded import split_engine
from harness import Answer, make_engine, run_all
from models.split_workers import SPECS

from hotset.base.request_options import RequestOptions
from hotset.base.sampling import SamplingParams
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor, ModelCard
from hotset.engine.outputs import PromptLogprobs
from hotset.models import logprobs as logprobs_module
from hotset.models.decoder import Decoder

TOP = 3
TOLERANCE = 1e-4
VOCAB = 151


def params(max_tokens: int, alternatives: int = TOP) -> SamplingParams:
    return SamplingParams(
        temperature=0.7,
        seed=1,
        max_tokens=max_tokens,
        ignore_eos=True,
        prompt_logprobs=alternatives,
        logit_bias={1: 50},
    )


def prompt_logprobs(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int = 0) -> list[PromptLogprobs]:
    """Returns the log-probabilities of the prompts, which run together."""
    answers = run_all(engine, prompts, [params(max_tokens)] * len(prompts), [2 * n for n in range(len(prompts))])
    return [PromptLogprobs(prompt, answer.prompt_logprobs) for prompt, answer in zip(prompts, answers, strict=True)]


def random_prompts(vocab: int, lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def assert_equal(ours: Sequence[Any], expected: Sequence[Any], tolerance: float) -> None:
    """Compares the entries of one prompt: the same tokens, order and ranks, close log-probabilities."""
    assert len(ours) == len(expected) and ours[0] is expected[0] is None
    for mine, other in zip(ours[1:], expected[1:], strict=True):
        assert list(mine) == list(other)
        assert [entry.rank for entry in mine.values()] == [entry.rank for entry in other.values()]
        for token in mine:
            assert mine[token].logprob == pytest.approx(other[token].logprob, abs=tolerance)


@cache
def computed_alone(name: str) -> tuple[list[list[int]], list[PromptLogprobs]]:
    """Returns prompts and their log-probabilities, each computed in one step on an engine with room for all."""
    spec, model = MODELS[name]
    prompts = random_prompts(spec.vocab, [1, 2, 30, 29, 30, 17, 30])
    engine = make_engine(model, spec, device_kv_tokens=400, max_num_batched_tokens=400, max_num_seqs=1, tiers="off")
    return prompts, prompt_logprobs(engine, prompts)


@pytest.mark.parametrize(
    ("name", "tiers", "counter", "plans_in_flight"), [("gqa", "off", "recomputes", 3), ("shared", "auto", "parks", 2)]
)
def test_preempted_requests_report_logprobs_once(name: str, tiers: str, counter: str, plans_in_flight: int) -> None:
    spec, model = MODELS[name]
    prompts, expected = computed_alone(name)
    settings: dict[str, Any] = {"plans_in_flight": plans_in_flight, "max_num_batched_tokens": 5, "page_rows": 2}
    settings |= {"tiers": tiers} if tiers == "off" else {"tiers": tiers, "host_kv_tokens": 400}
    engine = make_engine(model, spec, device_kv_tokens=58, max_num_seqs=5, max_model_len=56, **settings)
    ours = prompt_logprobs(engine, prompts, max_tokens=20)
    assert getattr(engine.stats(), counter) > 0, "the pool was large enough, so this test checks nothing"
    for got, alone in zip(ours, expected, strict=True):
        assert_equal(got, alone, 1e-9)


@pytest.mark.parametrize(
    "split", [{"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {"data_parallel_size": 2}], ids=str
)
def test_several_workers_report_the_log_probabilities_of_one_process(split: dict[str, int]) -> None:
    small = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "page_rows": 4, "max_model_len": 64, "tiers": "always"}
    prompts = random_prompts(SPECS["deepseek_v32"].vocab, [30, 1, 25, 16])
    found = []
    for workers in ({}, split):
        with closing(
            split_engine(SPECS["deepseek_v32"], 5, **small, **workers, device_kv_tokens=200, host_kv_tokens=600)
        ) as engine:
            found.append(prompt_logprobs(engine, prompts, max_tokens=2))
    for one, several in zip(*found, strict=True):
        assert_equal(several, one, 1e-9)


def test_logits_of_a_prompt_are_computed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, model = MODELS["dsa"]
    prompts, expected = computed_alone("dsa")
    rows: list[int] = []
    compute = Decoder.logits

    def logits(decoder: Decoder, hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        computed = compute(decoder, hidden, indices)
        rows.append(len(computed))
        return computed

    monkeypatch.setattr(Decoder, "logits", logits)
    monkeypatch.setattr(logprobs_module, "SLICE_BYTES", 4 * 4 * spec.vocab)
    engine = make_engine(model, spec, device_kv_tokens=400, max_num_batched_tokens=400)
    for got, alone in zip(prompt_logprobs(engine, prompts), expected, strict=True):
        assert_equal(got, alone, 1e-9)
    assert max(rows) == 4 and sum(rows) == sum(map(len, prompts))


def test_requests_of_one_step_have_their_own_numbers_of_alternatives_and_others_have_none() -> None:
    spec, model = MODELS["gqa"]
    prompts = random_prompts(spec.vocab, [6, 6, 6])
    engine = make_engine(model, spec, device_kv_tokens=400)
    plain = SamplingParams(seed=1, max_tokens=1)
    none, few, many = run_all(engine, prompts, [plain, params(1, alternatives=0), params(1, alternatives=20)])
    assert not none.prompt_logprobs
    assert [len(entry or {}) for entry in PromptLogprobs(prompts[1], few.prompt_logprobs)] == [0, 1, 1, 1, 1, 1]
    for entry in PromptLogprobs(prompts[2], many.prompt_logprobs)[1:]:
        assert entry is not None and {value.rank for value in entry.values()} >= set(range(1, 21))


def test_with_max_tokens_0_nothing_is_generated_and_all_pages_are_freed() -> None:
    spec, model = MODELS["dsa"]
    engine = make_engine(model, spec, device_kv_tokens=96, plans_in_flight=3, max_num_batched_tokens=4)
    prompts = random_prompts(spec.vocab, [1, 4, 9])
    answers = run_all(engine, prompts, [SamplingParams(seed=1, max_tokens=0), params(0), params(0)])
    assert [(answer.token_ids, answer.finish_reason) for answer in answers] == [([], "length")] * 3
    assert list(map(_reported, answers)) == [0, 3, 8]
    stats = engine.stats()
    assert (stats.tokens_generated, stats.device_pages_held, stats.requests_finished) == (0, 0, {"length": 3})


@pytest.mark.parametrize(
    ("changes", "computed_here"),
    [({}, False), ({"logprobs": 1}, False), ({"prompt_logprobs": 0}, True), ({"max_tokens": 0}, True)],
)
def test_a_decode_worker_computes_prompts_whose_logits_are_needed(changes: dict[str, int], computed_here: bool) -> None:
    """A handoff brings the KV and the first token, but no logits of the prompt."""
    card = ModelCard("tiny", "llama", 64, VOCAB, (), False, 64, "cpu", "float32", role="decode")
    options = RequestOptions(prefill_at="127.0.0.1:7001")
    (choice,) = InputProcessor(card, 0).accept("r", [1, 2], SamplingParams(**changes), options)  # type: ignore[arg-type]
    assert choice.options.prefill_at == (None if computed_here else "127.0.0.1:7001")


def _reported(answer: Answer) -> int:
    return len(list(chain.from_iterable(columns.logprobs for columns in answer.prompt_logprobs)))
