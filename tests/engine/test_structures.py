"""Answers with a structure: the same tokens on every engine, whatever else runs, and only tokens that fit."""

import contextlib
import json
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from engine.handoff_pair import pair
from engine.test_invariance import MODELS
from harness import DEMO, Answer, make_engine, run_all
from structures import (
    END,
    SMALL_STRUCTURES,
    SchemaGenerator,
    of_schema,
    satisfies,
    small_tokenizer,
    tokenizer_directory,
)

from hotset import LLM
from hotset.base.errors import RequestError
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.base.structure import Structure
from hotset.engine import constraints as constraints_module
from hotset.engine.constraints import Constraints, SeatMasks
from hotset.grammar.following import StructureProcesses
from hotset.schedule.plan import AssignSeat, Plan

VOCAB = 61
CPU = torch.device("cpu")
ROOMY = {"device_kv_tokens": 2000, "page_rows": 8, "max_num_seqs": 8, "max_model_len": 96, "tiers": "off"}


@pytest.fixture(autouse=True)
def no_mask_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for all masks, so that what is scheduled does not depend on the speed of the machine."""
    for name in ("STEP_SECONDS", "LATE_SECONDS", "ALONE_SECONDS"):
        monkeypatch.setattr(constraints_module, name, 60.0)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tokenizer_directory(tmp_path_factory.mktemp("tokenizer"))


def requests(count: int = 10) -> tuple[list[list[int]], list[SamplingParams]]:
    """Returns prompts with parameters. Two of three answers have a structure."""
    rng = random.Random(4)
    prompts = [[rng.randrange(VOCAB) for _ in range((1, 7, 16, 25)[number % 4])] for number in range(count)]
    params = [
        SamplingParams(
            temperature=0.0 if number % 5 == 0 else 1.0,
            seed=number,
            max_tokens=30 if number % 3 else 12,
            logprobs=1 if number % 4 == 0 else None,
            repetition_penalty=1.2 if number % 4 == 1 else 1.0,
            structure=None if number % 3 == 0 else SMALL_STRUCTURES[number % len(SMALL_STRUCTURES)],
        )
        for number in range(count)
    ]
    return prompts, params


def text_of(token_ids: Sequence[int]) -> str:
    return small_tokenizer().decode(list(token_ids))


def check(answers: Sequence[Answer], params: Sequence[SamplingParams]) -> None:
    """Asserts that every answer that ended by itself satisfies its structure, and that most of them did."""
    constrained = [(answer, given.structure) for answer, given in zip(answers, params, strict=True) if given.structure]
    ended = [(answer, structure) for answer, structure in constrained if answer.finish_reason == "stop"]
    assert len(ended) > len(constrained) // 2
    for answer, structure in ended:
        assert answer.token_ids[-1] == END and satisfies(structure, text_of(answer.token_ids[:-1]))


@lru_cache
def answers_of_one_process(name: str, model_directory: str) -> list[Answer]:
    spec, model = MODELS[name]
    answers = run_all(make_engine(model, spec, model=model_directory, **ROOMY), *requests())
    check(answers, requests()[1])
    return answers


def test_an_answer_that_cannot_be_continued_ends_with_an_error_and_the_others_continue(model_directory: str) -> None:
    """The front end refuses the first structure. The second becomes too complex only in the course of its answer."""
    spec, model = MODELS["gqa"]
    bombs = [Structure("regex", "(?=a)b"), Structure("regex", "((a{1,1000}){1,1000}){1,1000}")]
    prompts, params = requests(4)
    expected = answers_of_one_process("gqa", model_directory)[:4]
    engine = make_engine(model, spec, model=model_directory, **ROOMY, plans_in_flight=3)
    params += [SamplingParams(temperature=0.0, max_tokens=60, structure=bomb, logit_bias={END: -100}) for bomb in bombs]
    *others, refused, complex_one = run_all(engine, [*prompts, [1], [2]], params)
    assert others == expected
    assert (refused.finish_reason, refused.token_ids) == ("structure", [])
    assert complex_one.finish_reason == "structure" and set(text_of(complex_one.token_ids)) == {"a"}
    assert engine.idle and engine.stats().device_pages_held == 0


def test_a_prefill_worker_that_cannot_compile_a_structure_fails_the_handoff(model_directory: str) -> None:
    sizes = {"max_model_len": 144, "device_kv_tokens": 800, "host_kv_tokens": 4096}
    params = SamplingParams(max_tokens=4, structure=Structure("regex", "(?=a)b"))
    with pair("dsa", model=model_directory, **sizes) as workers:
        assert workers.answers([[1, 2, 3]], params, "auto") == [[]]
        assert workers.decode.stats().requests_finished["lost"] == 1


class LateToken:
    """A step that counts how often its token is asked for."""

    def __init__(self, token: int) -> None:
        self.token, self.asked = token, 0

    def token_id(self, index: int) -> int:
        assert index == 1
        self.asked += 1
        return self.token


def plan_of(number: int, seats: Sequence[int], position: int) -> Plan:
    """Returns a plan that computes and samples one token of each seat."""
    ones = [1] * len(seats)
    return Plan(number, (), seats, [position - 1] * len(seats), ones, range(len(seats)))


def masks_of(constraints: Constraints, plan: Plan) -> SeatMasks:
    runs = constraints.runs(plan)
    constraints.request(runs)
    return constraints.masks(runs, alone=False)


def allowed_by(masks: SeatMasks) -> list[int]:
    assert masks.masks is not None
    words = masks.masks.bits[0].tolist()
    return [token for token in range(VOCAB) if words[token // 32] >> token % 32 & 1]


def test_a_mask_waits_for_the_previous_token_of_its_own_seat_only() -> None:
    tokenizer = small_tokenizer()
    constraints = Constraints(StructureProcesses(tokenizer.to_str, VOCAB), CPU)
    prompt = PromptSpec((1,), SamplingParams(seed=0, structure=Structure("choice", '["ab", "12"]')), frozenset({END}))
    free = PromptSpec((1,), SamplingParams(seed=0))
    with contextlib.closing(constraints):
        constraints.assign(AssignSeat(0, free, (), "free"))
        constraints.assign(AssignSeat(1, prompt, (), "constrained"))
        first = plan_of(0, [0, 1], 1)
        assert masks_of(constraints, first).masks is not None
        step = LateToken(tokenizer.token_to_id("a"))
        constraints.record(constraints.runs(first), (), step.token_id)
        assert masks_of(constraints, plan_of(1, [0], 2)).masks is None and step.asked == 0
        masks = masks_of(constraints, plan_of(1, [0, 1], 2))
        assert masks.masks is not None and step.asked == 1 and masks.masks.requests.tolist() == [1]
        assert allowed_by(masks) == [tokenizer.token_to_id("b")]
        constraints.assign(AssignSeat(1, free, (), "free too"))
        assert not constraints.runs(plan_of(2, [0, 1], 3)), "no seat has a structure"


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(DEMO, progress=False, max_model_len=4096, max_num_seqs=32) as llm:
        yield llm


def structures(count: int) -> list[Structure]:
    """Returns random bounded schemas, regular expressions and choices."""
    rng = random.Random(count)
    generator = SchemaGenerator(rng)
    patterns = ["[A-Z][a-z]{2,9}", r"\d{3}-\d{4}", "(yes|no|maybe)( yes| no){0,3}", "[^a]{5,20}"]
    made = []
    for number in range(count):
        if number % 5 == 3:
            made.append(Structure("regex", rng.choice(patterns)))
        elif number % 5 == 4:
            made.append(Structure("choice", json.dumps(rng.sample(["yes", "no", "it depends", "été", "yes!"], 3))))
        else:
            made.append(of_schema(generator.schema()))
    return made


@pytest.mark.parametrize("count", [5, pytest.param(500, marks=pytest.mark.slow)])
def test_generations_at_temperature_1_end_by_themselves_and_satisfy_their_structures(llm: LLM, count: int) -> None:
    made = structures(count)
    params = [
        SamplingParams(temperature=1.0, seed=number, max_tokens=3000, structure=structure)
        for number, structure in enumerate(made)
    ]
    outputs = llm.generate(["The answer in JSON: "] * count, params)
    for output, structure in zip(outputs, made, strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop", structure
        assert satisfies(structure, answer.text), (structure, answer.text)


def test_a_greedy_answer_that_satisfies_a_structure_anyway_is_the_same(llm: LLM) -> None:
    prompt = "The capital of France is"
    free = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    for structure in [
        Structure("choice", json.dumps(["Berlin", free.text + " and so on"])),
        Structure("regex", r"(.|\n)*"),
        Structure("grammar", f"start: /[^~]*/ {json.dumps(free.text[-3:])} | /[0-9]+/"),
    ]:
        params = SamplingParams(temperature=0, max_tokens=12, structure=structure)
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == free.token_ids, structure


def test_a_greedy_answer_ends_at_the_same_stop_token_if_its_structure_may_end_there(llm: LLM) -> None:
    prompt = "The capital of France is"
    stop = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].token_ids[-1]
    free = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop]))[0].outputs[0]
    assert (free.finish_reason, free.token_ids[-1]) == ("stop", stop)
    params = SamplingParams(
        temperature=0,
        max_tokens=12,
        stop_token_ids=[stop],
        structure=Structure("choice", json.dumps([free.text, free.text + " and so on"])),
    )
    ended = llm.generate(prompt, params)[0].outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (free.token_ids, "stop", stop)


def test_llm_refuses_a_structure_before_anything_is_computed(llm: LLM) -> None:
    good, bad = (SamplingParams(structure=Structure("regex", pattern)) for pattern in ("a", "("))
    with pytest.raises(RequestError, match="cannot be compiled"):
        llm.generate(["a", "b"], [good, bad])
    assert llm.stats().running == 0


def test_choices_of_one_request_have_the_same_structure_and_raw_log_probabilities(llm: LLM) -> None:
    structure = Structure("choice", '["yes", "no", "maybe"]')
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=10, structure=structure, logprobs=2)
    (output,) = llm.generate("Answer: ", params)
    free = llm.generate("Answer: ", SamplingParams(temperature=0, max_tokens=1, logprobs=2))[0].outputs[0]
    assert free.logprobs is not None
    top = {token: logprob.logprob for token, logprob in free.logprobs[0].items()}
    for choice in output.outputs:
        assert choice.text in ("yes", "no", "maybe") and choice.logprobs is not None
        first = choice.logprobs[0]
        assert all(first[token].logprob == pytest.approx(value, abs=1e-4) for token, value in top.items())
