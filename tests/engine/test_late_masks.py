"""A mask that is late changes no token: its seat is left out of the step, and the token is computed again."""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from engine.handoff_pair import Prompts, decoder_of, pair
from engine.test_invariance import MODELS
from engine.test_speculation import LOOKUP, impose_drafts
from engine.test_structures import ROOMY, answers_of_one_process, check, requests
from engine.threaded import split_engine
from harness import make_engine, run_all, whole_engine
from models.split_workers import SPECS
from processes import children_of, command_line
from structures import tokenizer_directory

from hotset.base.sampling import SamplingParams
from hotset.base.structure import Structure
from hotset.engine import constraints
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor
from hotset.grammar.following import FollowedAnswer, Masks
from hotset.schedule.request import Request
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.residence import Residence

FOUND = FollowedAnswer.masks
TIGHT: dict[str, Any] = {"device_kv_tokens": 60, "page_rows": 3, "max_num_seqs": 5, "max_model_len": 56}


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tokenizer_directory(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[Residence]:
    """Makes two masks of five late, whatever the speed of the machine. Returns the residences of requests whose tokens
    were scheduled again."""
    rng, again = random.Random(5), Scheduler._schedule_again
    residences: list[Residence] = []

    def masks(answer: FollowedAnswer, timeout: float) -> Masks | None:
        return None if rng.random() < 0.4 else FOUND(answer, 60.0)

    def schedule_again(scheduler: Scheduler, request: Request, *arguments: Any) -> None:
        residences.append(request.holding.residence)
        again(scheduler, request, *arguments)

    monkeypatch.setattr(FollowedAnswer, "masks", masks)
    monkeypatch.setattr(Scheduler, "_schedule_again", schedule_again)
    return residences


@contextmanager
def punctual() -> Iterator[None]:
    """Makes steps wait for every mask, so that none is late."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FollowedAnswer, "masks", lambda answer, timeout: FOUND(answer, 60.0))
        yield


@pytest.mark.parametrize(("name", "tiers", "plans"), [("dsa", "auto", 1), ("gqa", "off", 3), ("shared", "always", 2)])
def test_late_masks_change_no_token(
    name: str, tiers: str, plans: int, model_directory: str, late: list[Residence]
) -> None:
    spec, model = MODELS[name]
    settings = TIGHT | ({} if tiers == "off" else {"host_kv_tokens": 260, "hot_slots": 9})
    engine = make_engine(model, spec, model=model_directory, tiers=tiers, plans_in_flight=plans, **settings)
    prompts, params = requests()
    together = run_all(engine, prompts, params, arrive_at=[number // 2 for number in range(len(prompts))])
    residences = set(late)
    assert Residence.RESIDENT in residences or Residence.TIERED in residences
    assert tiers != "always" or Residence.TIERED in residences
    with punctual():
        assert together == answers_of_one_process(name, model_directory)
    stats = engine.stats()
    pressure = {"off": stats.recomputes, "auto": stats.parks, "always": stats.bytes_swapped}
    assert pressure[tiers] > 0, f"the pools were large enough, so this checks little: {stats}"
    engine.close()


def test_drafts_are_taken_back_with_the_token_before_them(model_directory: str, late: list[Residence]) -> None:
    with punctual():
        expected = answers_of_one_process("dsa", model_directory)
    spec, model = MODELS["dsa"]
    engine = make_engine(model, spec, model=model_directory, **ROOMY | LOOKUP | {"speculate": 3})
    prompts, params = requests()
    impose_drafts(engine, prompts, expected, spec.vocab)
    assert run_all(engine, prompts, params) == expected and late
    assert 0 < sum(engine.stats().drafts_accepted.values()) < sum(engine.stats().drafts_verified.values())
    engine.close()


@pytest.mark.parametrize(
    "split", [{"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {"data_parallel_size": 2}], ids=str
)
def test_late_masks_of_split_engines(split: dict[str, int], model_directory: str, late: list[Residence]) -> None:
    spec = SPECS["deepseek_v32"]
    prompts, params = requests(4)
    with punctual():
        expected = run_all(whole_engine(spec, 5, model=model_directory, **ROOMY), prompts, params)
    check(expected, params)
    with closing(split_engine(spec, 5, **ROOMY | split | {"model": model_directory})) as engine:
        assert run_all(engine, prompts, params) == expected
    assert late


def test_late_masks_of_a_handoff(model_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first mask of each answer is late, so that the last row of each prompt is computed again."""
    asked = set[int]()

    def masks(answer: FollowedAnswer, timeout: float) -> Masks | None:
        if id(answer) in asked:
            return FOUND(answer, 60.0)
        asked.add(id(answer))
        answers.append(answer)
        return None

    answers: list[FollowedAnswer] = []  # they are kept, so that their ids stay different
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, structure=Structure("regex", "[a-f0-9]{12}"))
    prompts = Prompts((1, 16, 32, 33, 48, 64)).token_ids(decoder_of("dsa"))  # pages have 16 rows
    sizes = {"max_model_len": 144, "max_num_batched_tokens": 96, "device_kv_tokens": 800, "host_kv_tokens": 4096}
    decoder = decoder_of("dsa")
    engine = make_engine(decoder, decoder.spec, model=model_directory, max_num_seqs=4, **sizes)
    with punctual():
        expected = run_all(engine, prompts, [params] * len(prompts))
    engine.close()
    monkeypatch.setattr(FollowedAnswer, "masks", masks)
    with pair("dsa", model=model_directory, **sizes) as workers:
        assert workers.answers(prompts, params, "auto") == [answer.token_ids for answer in expected]
    assert len(answers) == 2 * len(prompts)


def workers() -> set[int]:
    """Returns the processes that follow answers. Servers of other tests may be children of this process too."""
    servers = [pid for pid in children_of(os.getpid()) if b"fork_server" in command_line(pid)]
    return {worker for server in servers for worker in children_of(server)}


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Kills all processes that follow answers before one mask of ten is asked for."""
    rng, killed = random.Random(3), list[int]()
    request = FollowedAnswer.request

    def request_after_kills(answer: FollowedAnswer, *arguments: Any) -> None:
        if rng.random() < 0.1:
            for worker in workers():
                with suppress(ProcessLookupError):  # one that was replaced has ended by itself
                    os.kill(worker, signal.SIGKILL)
                    killed.append(worker)
        request(answer, *arguments)

    monkeypatch.setattr(FollowedAnswer, "request", request_after_kills)
    monkeypatch.setattr(constraints, "STEP_SECONDS", 60.0)
    yield killed


def test_tokens_do_not_depend_on_the_deaths_of_processes(model_directory: str, killing: list[int]) -> None:
    spec, model = MODELS["gqa"]
    engine = make_engine(model, spec, model=model_directory, **ROOMY)
    assert run_all(engine, *requests()) == answers_of_one_process("gqa", model_directory)
    assert killing
    engine.close()


def test_a_process_that_is_stopped_delays_no_other_request(model_directory: str) -> None:
    spec, model = MODELS["gqa"]
    engine = make_engine(model, spec, model=model_directory, **ROOMY)
    structure = Structure("regex", "[0-9]{9}")
    add(engine, "first", SamplingParams(max_tokens=20, structure=structure))
    ended, others = set[str](), workers()
    while "first" not in ended:
        ended |= engine.step().finished.keys()
    (worker,) = workers() - others
    os.kill(worker, signal.SIGSTOP)
    add(engine, "constrained", SamplingParams(max_tokens=20, structure=structure))
    add(engine, "free", SamplingParams(max_tokens=20, ignore_eos=True))
    while "free" not in ended:
        ended |= engine.step().finished.keys()
    assert "constrained" not in ended
    os.kill(worker, signal.SIGCONT)
    while "constrained" not in ended:
        ended |= engine.step().finished.keys()
    engine.close()


def add(engine: Engine, request_id: str, params: SamplingParams) -> None:
    (choice,) = InputProcessor(engine.card, seed=0).accept(request_id, [1, 2, 3], params)
    engine.add(replace(choice, request_id=request_id))
