"""Decode steps as CUDA graphs: the captured batch sizes and, on a GPU, the tokens that replayed graphs produce."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine.waiting_steps import forbid_waiting
from harness import DEMO
from hypothesis import given
from hypothesis import strategies as st

from hotset.base.sampling import SamplingParams
from hotset.engine.decode_graphs import (
    MAX_PROMPT_KEYS,
    StepGraph,
    batch_sizes,
    choose_graph,
    columns_of_tokens,
    graph_sizes,
)
from hotset.engine.llm import LLM
from hotset.engine.runner import Runner, SubmittedStep
from hotset.lab.evaluate.tasks import Question, make_questions
from hotset.models.checkpoint.files import find_model
from hotset.models.tokenizer import Tokenizer
from hotset.schedule.plan import Plan, PromptRange
from hotset.tiers.residence import Residence


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 64, 65, 100, 256, 1000, 4096])
def test_padding_to_a_captured_size_adds_at_most_7_tokens_or_less_than_a_quarter(most: int) -> None:
    sizes = batch_sizes(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == most
    for tokens in range(1, most + 1):
        size = next(size for size in sizes if size >= tokens)
        assert size - tokens < max(8, -(-tokens // 4)), f"{tokens} tokens are padded to {size}"


def decode(tokens: int, *residences: Residence) -> Plan:
    """Returns a plan that decodes `tokens` requests, which have these residences."""
    seats = range(tokens)
    return Plan(0, [], seats, [7] * tokens, [1] * tokens, seats, residences=frozenset(residences))


def prompt(start: int, count: int) -> Plan:
    """Returns a plan that computes a part of a prompt and does not sample, and decodes another request."""
    return Plan(0, [], (0, 1), (start, 9), (count, 1), (1,), residences=frozenset({Residence.RESIDENT}))


ONLY_COMMANDS = Plan(0, [], (), (), (), ())


@given(seats=st.integers(1, 300), data=st.data())
def test_all_replicas_replay_the_smallest_graph_that_is_large_enough_for_each(seats: int, data: st.DataObject) -> None:
    idle = st.sampled_from([None, ONLY_COMMANDS])
    residences = st.sets(st.sampled_from([Residence.RESIDENT, Residence.TIERED]), min_size=1)
    decodes = st.builds(lambda tokens, found: decode(tokens, *found), st.integers(1, seats), residences)
    step = data.draw(st.lists(idle | decodes, min_size=1, max_size=8))
    plans = [plan for plan in step if plan is not None and plan.seats]
    graph = choose_graph(step, seats)
    if not plans:
        assert graph is None
        return
    most = max(len(plan.seats) for plan in plans)
    assert graph is not None and graph.size == min(size for size in graph_sizes(seats) if size >= most)
    assert graph.has_tiered == any(Residence.TIERED in plan.residences for plan in plans)


@pytest.mark.parametrize(
    "plan",
    [
        prompt(0, 64),
        prompt(MAX_PROMPT_KEYS // 7 - 6, 7),
        decode(2, Residence.STREAMED),
        replace(prompt(0, 2), prompt_ranges=(PromptRange(0, 1, 2, 0),)),
    ],
    ids=["long prompt", "too many keys", "streamed", "log-probabilities of a prompt"],
)
@pytest.mark.parametrize("others", [(), (None,), (decode(1, Residence.RESIDENT), None)], ids=len)
def test_no_replica_replays_a_graph_if_one_of_them_cannot(plan: Plan, others: tuple[Plan | None, ...]) -> None:
    assert choose_graph([*others, plan], 8) is None and choose_graph([plan, *others], 8) is None


def test_a_graph_computes_a_short_prompt() -> None:
    assert choose_graph([prompt(0, 7)], 8) == StepGraph(8, False)
    assert choose_graph([prompt(0, 63)], 8) == choose_graph([prompt(0, 60)], 60) == StepGraph(64, False)
    assert choose_graph([prompt(0, 64)], 80) == StepGraph(80, False)
    assert choose_graph([prompt(5, 2), decode(1, Residence.TIERED)], 8) == StepGraph(4, True)
    assert choose_graph([prompt(MAX_PROMPT_KEYS // 7 - 7, 7)], 8) == StepGraph(8, False)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), st.integers(1, 4))))
def test_every_token_of_a_segment_has_its_seat_and_its_position(segments: list[tuple[int, int, int]]) -> None:
    tokens = [(seat, start + index) for seat, start, count in segments for index in range(count)]
    columns = columns_of_tokens(*([segment[column] for segment in segments] for column in range(3)))
    assert list(zip(*columns, strict=True)) == tokens


def make_prompts(tasks: list[str], tokens: int = 1024) -> tuple[Tokenizer, list[Question], list[dict[str, list[int]]]]:
    """Returns a tokenizer, six questions of about `tokens` tokens each, and their prompts."""
    tokenizer = Tokenizer.load(find_model(DEMO), None)
    assert tokenizer is not None
    questions = make_questions(tasks, tokens, 6, 3, lambda text: 1 + len(tokenizer.encode(text)))
    return (
        tokenizer,
        questions,
        [{"prompt_token_ids": tokenizer.encode("<|bos|>" + question.prompt)} for question in questions],
    )


def answers(
    prompts: list[dict[str, list[int]]], together: bool = True, tokens: int = 40, **settings: Any
) -> list[list[int]]:
    """Returns the greedy answers to the prompts, which run in one batch if `together`, else one after another. Unless
    `settings` say otherwise, nothing is drafted: a step that verifies drafts rounds some sums differently."""
    common: dict[str, Any] = {"model": DEMO, "max_num_seqs": len(prompts), "max_num_batched_tokens": 8192, "seed": 0}
    with LLM(**common | {"speculate": 0} | settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        batches = [prompts] if together else [[prompt] for prompt in prompts]
        outputs = [output for batch in batches for output in llm.generate(batch, params)]
        return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.gpu
def test_graphs_eager_steps_and_the_cpu_give_the_same_answers() -> None:
    """With and without graphs, the forty tokens after each question must be the same. As many of them as the correct
    answer has must also equal those of the CPU.

    All prompts are computed in one step, so every decode step has six tokens. Six is a captured size, and eager steps
    of six tokens run the same kernels.
    """
    tokenizer, questions, prompts = make_prompts(["lookup", "several", "chain"])
    on_cpu = answers(prompts, device="cpu")
    small: dict[str, Any] = {"device_kv_tokens": 8192, "host_kv_tokens": 32768}
    for tiers in ("off", "auto", "always"):
        memory: dict[str, Any] = {"device_kv_tokens": 8192} if tiers == "off" else small
        captured = answers(prompts, device="cuda", tiers=tiers, **memory)
        eager = answers(prompts, device="cuda", tiers=tiers, cuda_graphs="off", **memory)
        assert captured == eager, f"tiers {tiers}"
        for question, cpu, gpu in zip(questions, on_cpu, captured, strict=True):
            count = len(tokenizer.encode(question.answer))
            assert gpu[:count] == cpu[:count], f"tiers {tiers}: {question.task}"


@pytest.mark.gpu
@pytest.mark.parametrize("tiers", ["off", "auto"])
def test_short_prompts_in_graphs_get_the_answers_of_the_cpu(tiers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of each prompt is computed first, so that the graph of the other half reads rows of earlier steps."""
    submit, replayed = Runner.submit, 0

    def counted(runner: Runner, plan: Plan, graph: StepGraph | None = None) -> SubmittedStep:
        nonlocal replayed
        replayed += graph is not None and max(plan.counts) > 1
        return submit(runner, plan, graph)

    monkeypatch.setattr(Runner, "submit", counted)
    tokenizer, questions, prompts = make_prompts(["lookup", "several", "chain"], 256)
    on_cpu = answers(prompts, device="cpu")
    settings: dict[str, Any] = {"device": "cuda", "tiers": tiers, "together": False, "max_num_seqs": 160}
    memory = {"device_kv_tokens": 8192} | ({} if tiers == "off" else {"host_kv_tokens": 32768})
    captured = answers(prompts, max_num_batched_tokens=160, **settings, **memory)
    assert replayed >= 2 * len(prompts)
    for question, cpu, gpu in zip(questions, on_cpu, captured, strict=True):
        count = len(tokenizer.encode(question.answer))
        assert gpu[:count] == cpu[:count], f"tiers {tiers}: {question.task}"


def model_with_shared_indexers(folder: Path) -> str:
    """Writes to `folder` a model that has the demo model's weights, but one indexer for its last three layers, and
    returns its path. The model's answers are wrong, but deterministic. Its index groups have 1, 1, 1 and 3 layers, so
    that their keys take turns in pages of 6 layers."""
    for path in Path(DEMO).iterdir():
        (folder / path.name).symlink_to(path)
    fields = json.loads((Path(DEMO) / "config.json").read_text())
    fields |= {"model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"]}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(fields | {"indexer_types": [*["full"] * 4, "shared", "shared"]}))
    return str(folder)


@pytest.mark.gpu
def test_layers_that_share_a_selection_read_the_right_rows_when_rows_are_copied_ahead(tmp_path: Path) -> None:
    """Requests run one after another, so batch sizes and therefore rounding are the same with and without tiers."""
    _, _, prompts = make_prompts(["lookup", "several", "chain"])
    settings: dict[str, Any] = {"model": model_with_shared_indexers(tmp_path), "device": "cuda", "together": False}
    resident = answers(prompts, tiers="off", device_kv_tokens=8192, **settings)
    assert len({token for tokens in resident for token in tokens}) > 40
    for graphs in ("auto", "off"):
        small: dict[str, Any] = {"device_kv_tokens": 8192, "host_kv_tokens": 32768}
        assert answers(prompts, tiers="always", cuda_graphs=graphs, **small, **settings) == resident, graphs


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("tiers", ["off", "always"])
def test_no_decode_step_synchronizes_the_host_with_the_gpu(tiers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers cross at least two page boundaries. With tiers, pages are mirrored there, and rows are copied into
    slots."""
    checked = forbid_waiting(monkeypatch)
    _, _, prompts = make_prompts(["lookup"])
    memory = {"device_kv_tokens": 8192} | ({} if tiers == "off" else {"host_kv_tokens": 32768})
    answers(prompts, tokens=140, tiers=tiers, device="cuda", **memory)
    assert len(checked) > 130
