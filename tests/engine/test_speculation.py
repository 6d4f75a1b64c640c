"""Tokens with drafts are those without: sampled, with penalties, structures and logprobs, in every split.

`ImposedDrafter` knows the right answers and drafts some wrong tokens, so that drafts are accepted and rejected at all
places. test_lookup_drafts.py tests the drafts of `lookup`.
"""

import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engine.handoff_pair import Prompts, decoder_of, pair
from engine.test_invariance import MODELS, REQUESTS, expected_answers, with_room_for_drafts, workload
from engine.threaded import split_engine
from harness import Answer, make_engine, run_all, whole_engine
from imposed_drafts import ImposedDrafter
from models.split_workers import SPECS
from scripted_model import write_scripted_model

from hotset import LLM
from hotset.base.config import TiersMode
from hotset.base.sampling import SamplingParams
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor

LOOKUP: dict[str, Any] = {"speculate_by": "lookup"}


def impose_drafts(engine: Engine, prompts: Sequence[Sequence[int]], answers: Sequence[Answer], vocab: int) -> None:
    """Replaces the drafter of every replica by one that knows these answers."""
    contexts = [[*prompt, *answer.token_ids, 0] for prompt, answer in zip(prompts, answers, strict=True)]

    def following(request_id: str, tokens: Sequence[int]) -> int:
        context = contexts[int(request_id.partition("/")[0])]
        return context[min(len(tokens), len(context) - 1)]

    for number, scheduler in enumerate(engine.schedulers):
        assert scheduler._speculation is not None
        scheduler._speculation._drafter = ImposedDrafter(following, vocab, random.Random(number))


@pytest.mark.parametrize(
    ("name", "workloads"),
    [("dsa", 4), ("gqa", 4), *(pytest.param(name, 60, marks=pytest.mark.slow) for name in MODELS)],
)
def test_tokens_are_those_without_drafts(name: str, workloads: int) -> None:
    spec, model = MODELS[name]
    modes: list[TiersMode] = ["auto", "off"] if name == "gqa" else ["auto", "off", "always"]
    rng = random.Random(21)
    accepted = rejected = 0
    for number in range(workloads):
        load = workload(rng, modes[number % len(modes)], sparse=name != "gqa")
        max_drafts = (1, 2, 3, 5)[number % 4]
        settings = with_room_for_drafts(load.settings, max_drafts) | LOOKUP
        settings |= {"speculate": max_drafts, "max_num_batched_tokens": rng.choice([11, 64])}
        engine = make_engine(model, spec, max_model_len=56, **settings)
        prompts, params = zip(*(REQUESTS[request] for request in load.batch), strict=True)
        expected = [expected_answers(name)[request] for request in load.batch]
        impose_drafts(engine, prompts, expected, spec.vocab)
        assert run_all(engine, prompts, params, load.arrive_at) == expected, load
        stats = engine.stats()
        assert stats.device_pages_held == 0
        accepted += sum(stats.drafts_accepted.values())
        rejected += sum(stats.drafts_verified.values()) - sum(stats.drafts_accepted.values())
    assert accepted > 20 and rejected > 20


def test_logprobs_are_those_without_drafts() -> None:
    spec, model = MODELS["dsa"]
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=20, logprobs=2, ignore_eos=True) for t in (0.0, 0.9)]
    sizes = {"device_kv_tokens": 400, "max_num_seqs": 2, "max_model_len": 56, "page_rows": 8}
    reported: list[list[Any]] = []
    expected: list[Answer] = []
    for drafts in (0, 2):
        engine = make_engine(model, spec, **sizes, **({"speculate": drafts, **LOOKUP} if drafts else {}))
        if drafts:
            impose_drafts(engine, prompts, expected, spec.vocab)
        else:
            expected = run_all(make_engine(model, spec, **sizes), prompts, params)
        processor = InputProcessor(engine.card, seed=0)
        for index, (prompt, given) in enumerate(zip(prompts, params, strict=True)):
            for choice in processor.accept(str(index), prompt, given):
                engine.add(choice)
        of_requests: dict[str, list[Any]] = {}
        while not engine.idle:
            outputs = engine.step()
            for index, name in enumerate(outputs.request_ids):
                of_requests.setdefault(name, []).append((outputs.token_ids[index], outputs.alternatives[index]))
        reported.append([of_requests[name] for name in sorted(of_requests)])
    for without, drafted in zip(*reported, strict=True):
        assert [token for token, _ in without] == [token for token, _ in drafted]
        for (_, one), (_, other) in zip(without, drafted, strict=True):
            assert one.keys() == other.keys()
            for token in one:
                assert one[token][1] == other[token][1] and abs(one[token][0] - other[token][0]) < 1e-9


@pytest.mark.parametrize(
    ("model", "split", "tiers"),
    [
        ("deepseek_v32", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "always"),
        ("glm_moe_dsa", {"data_parallel_size": 2}, "auto"),
    ],
)
def test_several_workers_verify_the_same_drafts(model: str, split: dict[str, int], tiers: str) -> None:
    spec = SPECS[model]
    rng = random.Random(3)
    prompts = [[rng.randrange(61) for _ in range(rng.choice([1, 7, 25]))] for _ in range(5)]
    params = [SamplingParams(temperature=0.8 * (n % 2), seed=n, max_tokens=20, ignore_eos=True) for n in range(5)]
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "page_rows": 4, "max_model_len": 64}
    expected = run_all(whole_engine(spec, 5, **small, device_kv_tokens=2000), prompts, params)
    settings = small | split | LOOKUP | {"speculate": 3, "device_kv_tokens": 140, "tiers": tiers}
    if tiers != "off":
        settings["host_kv_tokens"] = 600
    with closing(split_engine(spec, 5, **settings)) as engine:
        impose_drafts(engine, prompts, expected, spec.vocab)
        assert run_all(engine, prompts, params) == expected
        stats = engine.stats()
    assert 0 < sum(stats.drafts_accepted.values()) < sum(stats.drafts_verified.values())


def test_a_decode_worker_drafts_from_prompts_that_landed() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    decoder = decoder_of("dsa")
    prompts = Prompts((1, 17, 40)).token_ids(decoder)
    sizes = {"max_model_len": 144, "max_num_batched_tokens": 96, "device_kv_tokens": 800, "host_kv_tokens": 4096}
    engine = make_engine(decoder, decoder.spec, max_num_seqs=4, **sizes)
    expected = [answer.token_ids for answer in run_all(engine, prompts, [params] * 3)]
    with pair("dsa", speculate=2, **LOOKUP, **sizes) as workers:
        assert workers.answers(prompts, params, "auto") == expected
        stats = workers.decode.stats()
    assert stats.landed == 3 and sum(stats.drafts_accepted.values()) > 0


def test_a_text_ends_at_the_same_stop_string_within_drafts(tmp_path: Path) -> None:
    """The prompt contains the answer, so that it is drafted by look-up. The stop string ends within a token."""
    pieces = ["The capital", " of France", " is", " the city", " of Paris", " on", " the Seine."]
    model = write_scripted_model(tmp_path, {"repeat": pieces, "result": ["It is so."], "other": ["I do not know."]})
    messages = [{"role": "user", "content": f"repeat: {''.join(pieces)}"}]
    params = SamplingParams(temperature=0, max_tokens=40, stop=["Paris on the"])
    results, accepted = [], 0
    for drafts in ({}, {"speculate": 3, **LOOKUP}):
        with LLM(model, device="cpu", device_kv_tokens=1024, max_model_len=512, progress=False, **drafts) as llm:
            output = llm.chat(messages, params)[0].outputs[0]
            results.append((output.text, output.token_ids, output.stop_reason))
            accepted = sum(llm.stats().drafts_accepted.values())
    assert results[0] == results[1] and results[0][0] == "The capital of France is the city of "
    assert results[0][2] == "Paris on the" and accepted > 2
