"""Drafts of the MTP layer in an engine: tokens are those without drafts, and drafts those of the published layer.

An MTP layer with random weights guesses badly. The LM head therefore prefers four tokens, so that many guesses are
right by chance.
"""

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from engine.handoff_pair import Prompts, decoder_of, pair
from engine.test_invariance import REQUESTS, dsa_spec, with_room_for_drafts, workload
from engine.threaded import split_engine
from harness import DEMO, Answer, RandomWeights, make_engine, run_all, whole_engine
from models.mtp_oracle import MtpOracle
from models.split_workers import SPECS as SPLIT_SPECS
from models.test_mtp import DraftingMemory, oracle_drafts
from torch import Tensor

from hotset import LLM
from hotset.base.config import EngineConfig, TiersMode
from hotset.base.errors import ConfigError
from hotset.base.sampling import SamplingParams
from hotset.engine.core import Engine
from hotset.engine.decode_graphs import StepGraph
from hotset.engine.drafts.drafters import MtpDrafter
from hotset.engine.runner import Runner, SubmittedStep
from hotset.lab.evaluate.retrieval import LocalBackend
from hotset.lab.evaluate.tasks import make_questions
from hotset.models.decoder import Decoder
from hotset.models.spec import ModelSpec, MtpSpec
from hotset.models.split import Split
from hotset.schedule.plan import Plan

LIKELY = 4  # tokens that the LM head prefers


class FewLikelyTokens(RandomWeights):
    def load(self, name: str, shape: tuple[int, ...], **options: Any) -> Tensor:
        values = super().load(name, shape, **options)
        if name == "lm_head.weight":
            values[LIKELY:] *= 0.1
        return values


SPECS = {
    "deepseek": replace(dsa_spec(2, (0, 1)), mtp=MtpSpec(carries_normed=False, shares_selection=False)),
    "glm": replace(dsa_spec(3, (0, 2)), mtp=MtpSpec(carries_normed=True, shares_selection=True)),
}
WEIGHTS = FewLikelyTokens(torch.float64, seed=9)
MODELS = {name: Decoder(spec, WEIGHTS) for name, spec in SPECS.items()}


def plain(spec: ModelSpec) -> ModelSpec:
    return replace(spec, mtp=None)


@cache
def expected_answers(name: str) -> list[Answer]:
    """Returns the answers of an engine that has room for all REQUESTS, without drafts and without the layer."""
    spec = plain(SPECS[name])
    sizes = {"device_kv_tokens": 2000, "page_rows": 96, "max_num_seqs": len(REQUESTS), "max_model_len": 56}
    return run_all(make_engine(Decoder(spec, WEIGHTS), spec, **sizes, tiers="off"), *zip(*REQUESTS, strict=True))


class RecordedDrafts(MtpDrafter):
    """Records what is drafted for which context."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: dict[tuple[int, ...], Sequence[int]] = {}

    def receive(self, request_id: str, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        super().receive(request_id, tokens, drafts)
        self.recorded[tuple(tokens)] = drafts


def record_drafts(engine: Engine) -> RecordedDrafts:
    drafter = RecordedDrafts()
    for scheduler in engine.schedulers:
        assert scheduler._speculation is not None
        scheduler._speculation._drafter = drafter
    return drafter


def record_unverified(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list. Each later step appends the most drafts that one request has in earlier plans in flight."""
    submit, unverified = Runner.submit, []

    def recorded(runner: Runner, plan: Plan, graph: StepGraph | None = None) -> SubmittedStep:
        unverified.append(max(plan.unverified, default=0))
        return submit(runner, plan, graph)

    monkeypatch.setattr(Runner, "submit", recorded)
    return unverified


def published_drafts(name: str, context: Sequence[int], count: int) -> list[int]:
    """Returns what the published layer drafts after `context`, whose last token has no row yet."""
    spec, drafting = SPECS[name], DraftingMemory(MODELS[name], context=64)
    assert spec.mtp is not None
    oracle = MtpOracle(spec, cache(WEIGHTS.load))
    drafts: list[int] = []
    with torch.inference_mode():
        hidden = drafting.step([context], [0], [len(context) - 1])
        while len(drafts) < count:
            logits = oracle_drafts(oracle, context, hidden, drafts, spec.mtp.shares_selection)
            drafts.append(int(logits[-1].argmax()))
    return drafts


@pytest.mark.parametrize("workloads", [4, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_those_without_drafts(name: str, workloads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines have one, two or three plans in flight, all of which can verify drafts of the same request."""
    modes: list[TiersMode] = ["auto", "off", "always"]
    rng, checked, unverified = random.Random(4), 0, record_unverified(monkeypatch)
    accepted = rejected = 0
    for number in range(workloads):
        load, max_drafts = workload(rng, modes[number % 3], sparse=True), (3, 1, 2, 5)[number % 4]
        # The last MTP row of a cached page depends on the next token, which may differ in a request that uses the page.
        settings = with_room_for_drafts(load.settings, max_drafts) | {"prefix_cache": number % 2 == 0}
        settings |= {"speculate": max_drafts, "max_model_len": 56}
        engine = make_engine(MODELS[name], SPECS[name], **settings)
        drafter = record_drafts(engine)
        prompts, params = zip(*(REQUESTS[request] for request in load.batch), strict=True)
        answers = run_all(engine, prompts, params, load.arrive_at)
        assert answers == [expected_answers(name)[request] for request in load.batch], load
        stats = engine.stats()
        assert stats.device_pages_held == 0
        accepted += sum(stats.drafts_accepted.values())
        rejected += sum(stats.drafts_verified.values()) - sum(stats.drafts_accepted.values())
        if not settings["prefix_cache"]:
            contexts = [context for context, drafts in drafter.recorded.items() if drafts]
            for context in rng.sample(contexts, min(4, len(contexts))):
                drafts = drafter.recorded[context]
                assert list(drafts) == published_drafts(name, context, len(drafts)), load
                checked += 1
    assert accepted > 8 and rejected > 20 and checked >= 6, (accepted, rejected, checked)
    assert sum(drafts > 0 for drafts in unverified) > 0.2 * len(unverified), "few plans were made ahead of verification"


@pytest.mark.parametrize(
    ("split", "accept"),
    [
        ("tensor_parallel_size", "distribution"),
        ("pipeline_parallel_size", "exact"),
        ("data_parallel_size", "distribution"),
    ],
)
def test_ranks_and_stages_draft_what_one_process_drafts(split: str, accept: str) -> None:
    prompts = [[5, 7, 11, 2, 3, 4, 9, 30, 31], [8, 1, 2, 50, 51, 52, 53, 54, 55, 56, 57, 58], [6]]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True) for t in (0.0, 0.9, 0.0)]
    sizes = {"device_kv_tokens": 400, "host_kv_tokens": 500, "max_num_seqs": 3, "max_model_len": 56, "page_rows": 4}
    spec, seed = replace(SPLIT_SPECS["deepseek_v32"], mtp=MtpSpec(carries_normed=False, shares_selection=False)), 6
    one = whole_engine(spec, seed, **sizes, speculate=3, accept=accept)
    drafter = record_drafts(one)
    expected = run_all(one, prompts, params)
    with closing(split_engine(spec, seed, **sizes, **{split: 2}, speculate=3, accept=accept)) as engine:
        of_split = record_drafts(engine)
        assert run_all(engine, prompts, params) == expected
    assert of_split.recorded == drafter.recorded
    assert sum(map(len, drafter.recorded.values())) > 40


def test_a_rank_that_would_draft_other_tokens_verifies_the_drafts_of_rank_0() -> None:
    """All sampled tokens and drafts are among four, so that many drafts are right."""

    def draft_others(decoder: Decoder, split: Split) -> None:
        logits, rank = decoder.mtp_logits, split.tp_rank

        def of_rank(normed: Tensor) -> Tensor:
            likely = logits(normed)[:, :LIKELY].roll(rank, 1)
            return torch.nn.functional.pad(likely, (0, decoder.spec.vocab - LIKELY), value=-1e9)

        decoder.mtp_logits = of_rank  # type: ignore[method-assign]

    bias = dict.fromkeys(range(LIKELY), 100.0)
    params = [SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logit_bias=bias)] * 2
    prompts = [[5, 7, 11, 2, 3, 4, 9, 30, 31], [6]]
    sizes = {"device_kv_tokens": 200, "max_num_seqs": 2, "max_model_len": 56, "page_rows": 4, "tiers": "off"}
    spec, seed = replace(SPLIT_SPECS["deepseek_v32"], mtp=MtpSpec(carries_normed=False, shares_selection=False)), 6
    one = whole_engine(plain(spec), seed, **sizes)
    expected = run_all(one, prompts, params)
    split = {"tensor_parallel_size": 2, "speculate": 3}
    with closing(split_engine(spec, seed, on_load=draft_others, **sizes, **split)) as engine:
        assert run_all(engine, prompts, params) == expected
        assert sum(engine.stats().drafts_accepted.values()) > 4


def drafted_answers(name: str, params: Sequence[SamplingParams], **settings: Any) -> tuple[list[list[int]], int]:
    """Returns the answers to one prompt with these parameters, and how many drafts were accepted."""
    sizes = {"device_kv_tokens": 3200, "max_num_seqs": 100, "max_model_len": 24, "page_rows": 4, "tiers": "off"}
    engine = make_engine(MODELS[name], SPECS[name], **sizes, **settings)
    answers = run_all(engine, [[5, 7, 11, 2, 3]] * len(params), params)
    return [answer.token_ids for answer in answers], sum(engine.stats().drafts_accepted.values())


def test_acceptance_by_distribution_changes_tokens_but_not_how_often_each_is_sampled() -> None:
    """Answers of many seeds. In each place, tokens are sampled as often as without drafts: the squared differences, in
    units of their variance, have the mean 1. With few likely tokens, a bias of the acceptance shows in few answers."""
    params = [
        SamplingParams(
            temperature=1.0 + number % 2 / 2,
            top_p=1.0 - number % 3 / 10,
            seed=number,
            max_tokens=4,
            ignore_eos=True,
            logit_bias={0: -2.0, 1: 2.0, 2: 2.0},
        )
        for number in range(200)
    ]
    plain, _ = drafted_answers("glm", params)
    exact, num_exact = drafted_answers("glm", params, speculate=3)
    assert exact == plain
    found, num_accepted = drafted_answers("glm", params, speculate=3, accept="distribution", plans_in_flight=2)
    assert found != plain and num_accepted > 1.2 * num_exact, (num_accepted, num_exact)
    for place in (1, 2, 3):
        counts = [Counter(answer[place] for answer in answers) for answers in (plain, found)]
        often = [token for token in counts[0] | counts[1] if counts[0][token] + counts[1][token] >= 10]
        squares = [(counts[0][token] - counts[1][token]) ** 2 / (counts[0] + counts[1])[token] for token in often]
        assert len(often) >= 2 and sum(squares) < len(often) + 4 * (2 * len(often)) ** 0.5, (place, counts)


def test_acceptance_by_distribution_changes_no_greedy_token() -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={n: 2.0}) for n in range(5)]
    plain, _ = drafted_answers("deepseek", params)
    found, accepted = drafted_answers("deepseek", params, speculate=3, accept="distribution")
    assert found == plain and accepted > 0


def test_a_tiered_request_with_few_slots_drafts_what_a_resident_one_drafts() -> None:
    """The slots suffice for the tokens that a step verifies. Drafting after it evicts rows that the step has read."""
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=16, ignore_eos=True)
    prompts = [[(7 * number * number + seat) % 61 for number in range(28)] for seat in range(3)]
    sizes = {"max_num_seqs": 3, "max_model_len": 56, "page_rows": 1, "device_kv_tokens": 400, "host_kv_tokens": 600}
    recorded, answers = [], []
    for tiers in ({"tiers": "always", "hot_slots": 4 * 6}, {"tiers": "off", "host_kv_tokens": None}):
        engine = make_engine(MODELS["deepseek"], SPECS["deepseek"], **sizes | tiers, speculate=3)
        drafter = record_drafts(engine)
        answers.append(run_all(engine, prompts, [params] * 3))
        recorded.append({context: drafts for context, drafts in drafter.recorded.items() if len(drafts) == 3})
    compared = recorded[0].keys() & recorded[1].keys()
    assert answers[0] == answers[1] and len(compared) > 10
    assert all(recorded[0][context] == recorded[1][context] for context in compared)


def test_the_rows_of_the_layer_travel_with_a_handoff() -> None:
    """After a landing, the decode worker drafts what an engine drafts that computed the prompts itself."""
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    decoder = decoder_of("mtp")
    prompts = Prompts((1, 17, 40)).token_ids(decoder)
    sizes = {"max_model_len": 144, "max_num_batched_tokens": 96, "device_kv_tokens": 800, "host_kv_tokens": 4096}
    engine = make_engine(decoder, decoder.spec, max_num_seqs=4, speculate=2, **sizes)
    of_one = record_drafts(engine)
    expected = [answer.token_ids for answer in run_all(engine, prompts, [params] * 3)]
    with pair("mtp", speculate=2, **sizes) as workers:
        drafter = record_drafts(workers.decode)
        assert workers.answers(prompts, params, "auto") == expected
        assert workers.decode.stats().landed == 3
    compared = [context for context, drafts in drafter.recorded.items() if drafts]
    for context in compared:
        assert drafter.recorded[context] == of_one.recorded[context]
    assert len(compared) > 20


def test_the_demo_model_drafts_its_answers() -> None:
    with LLM(DEMO, device="cpu", max_num_seqs=2, max_model_len=320, speculate=3) as llm:
        questions = make_questions(["several"], 256, 1, 5, LocalBackend(llm).count_tokens)
        prompts = [f"<|bos|>{question.prompt}" for question in questions]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24))
        stats = llm.stats()
    assert [output.outputs[0].text for output in outputs] == [question.answer for question in questions]
    assert sum(stats.drafts_accepted.values()) >= 0.7 * sum(stats.drafts_verified.values()) > 0


def test_flags_that_need_the_layer_are_refused_without_it() -> None:
    from hotset.engine.model_checks import check_model

    with pytest.raises(ConfigError, match=r"no layer for multi-token prediction.*--speculate-by lookup"):
        check_model(EngineConfig(model="embedded", speculate=3))
