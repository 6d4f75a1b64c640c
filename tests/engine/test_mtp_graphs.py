"""Drafting and verification as CUDA graphs: on a CPU with emulated graphs, and on a GPU."""

import random
from typing import Any

import pytest
import torch
from engine.emulated_graphs import emulate_graphs, make_engine_with_graphs
from engine.test_decode_graphs import answers, make_prompts
from engine.test_mtp_drafts import MODELS, SPECS, record_drafts, record_unverified
from engine.waiting_steps import forbid_waiting
from harness import DEMO, make_engine, run_all
from torch import Tensor

from hotset.base.sampling import SamplingParams
from hotset.engine.core import Engine
from hotset.engine.decode_graphs import StepGraph, choose_graph
from hotset.engine.drafts.costs import DraftChoice
from hotset.engine.drafts.mtp import MtpDrafts
from hotset.engine.drafts.mtp_graphs import MtpGraphs
from hotset.engine.drafts.segments import SampledSegments
from hotset.engine.llm import LLM
from hotset.kernels import EMPTY
from hotset.models.mtp import MtpOutput
from hotset.schedule.plan import Plan
from hotset.tiers.residence import Residence

REQUESTS = 3


def test_drafts_of_tiered_requests_have_a_graph() -> None:
    tiered = Plan(
        number=0,
        commands=[],
        seats=(0, 1),
        starts=(9, 4),
        counts=(3, 1),
        sampled=(0, 0, 0, 1),
        residences=frozenset({Residence.TIERED}),
        drafts={0: (5, 6)},
    )
    assert choose_graph([tiered], 8) == StepGraph(4, True, verifies=True)
    long = Plan(0, [], (0,), (1 << 23,), (2,), (0, 0), residences=frozenset({Residence.RESIDENT}), drafts={0: (5,)})
    assert choose_graph([long], 8) == StepGraph(2, False), "the limit of keys is one of prompts"


@pytest.mark.parametrize(
    ("name", "tiers", "max_drafts", "slots", "plans_in_flight"),
    [
        ("deepseek", "always", 3, 24, 2),
        pytest.param("glm", "always", 2, 30, 3, marks=pytest.mark.slow),
        ("deepseek", "off", 5, None, 3),
        ("glm", "auto", 1, 18, 1),
        ("deepseek", "off", 0, None, 1),
        ("glm", "always", 0, 6, 2),
    ],
)
def test_graphs_sample_and_draft_what_steps_without_graphs_do(
    name: str, tiers: str, max_drafts: int, slots: int | None, plans_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts before each token are compared, too. Several plans in flight verify drafts of one request."""
    spec, model, rng = SPECS[name], MODELS[name], random.Random(max_drafts)
    prompts = [[rng.randrange(spec.vocab) for _ in range(length)] for length in (26, 1, 17)]
    params = [SamplingParams(temperature=0.9 * (n % 2), seed=n, max_tokens=26, ignore_eos=True) for n in range(3)]
    sizes: dict[str, Any] = {"max_model_len": 56, "page_rows": 3, "max_num_batched_tokens": 64, "tiers": tiers}
    memory = {"device_kv_tokens": 400} | ({} if tiers == "off" else {"host_kv_tokens": 600, "hot_slots": slots})
    settings = sizes | memory | {"speculate": max_drafts, "plans_in_flight": plans_in_flight}
    eager = make_engine(model, spec, **settings, max_num_seqs=REQUESTS)
    drafter = record_drafts(eager) if max_drafts else None
    expected = run_all(eager, prompts, params)
    monkeypatch.setattr(MtpDrafts, "draft", lambda *_: pytest.fail("drafts without a graph"))
    graphs = emulate_graphs(monkeypatch)
    captured = make_engine_with_graphs(model, spec, requests=REQUESTS, **settings)
    of_graphs = record_drafts(captured) if max_drafts else None
    unverified = record_unverified(monkeypatch)
    assert run_all(captured, prompts, params) == expected
    if drafter is not None and of_graphs is not None:
        assert max(unverified) == (plans_in_flight - 1) * max_drafts, "plans were not made before drafts were verified"
        assert of_graphs.recorded == drafter.recorded
        assert max(map(len, drafter.recorded.values())) == max_drafts
    assert any(graph is not None and graph.verifies for graph in graphs) == (tiers == "always" and max_drafts > 0)
    assert any(graph is not None and graph.has_tiered for graph in graphs) == (tiers == "always")
    assert sum(graph is not None for graph in graphs) > 0.8 * len(graphs)


def test_all_graphs_are_captured_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, model = SPECS["glm"], MODELS["glm"]
    emulate_graphs(monkeypatch)
    settings: dict[str, Any] = {"device_kv_tokens": 400, "host_kv_tokens": 600, "max_model_len": 56, "page_rows": 8}
    engine = make_engine_with_graphs(model, spec, requests=2, **settings, speculate=2, hot_slots=24, tiers="always")
    counts: list[tuple[int, int]] = []
    engine.executor.warm_up(lambda done, total: counts.append((done, total)))
    steps, layers = (count for done, count in counts if done == count)
    assert steps == 3 * 8, "sizes 1, 2, 4, 8, 9, 16, 32 and 64; resident, tiered, tiered with drafts"
    assert layers == steps + 3 * 2 * 2, "rows of each graph; 1 or 2 drafts of 1 to 3 requests, resident and tiered"
    monkeypatch.setattr("hotset.engine.decode_graphs.DecodeGraphs.capture", lambda *_: pytest.fail("captured late"))
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 2
    assert [len(answer.token_ids) for answer in run_all(engine, [[1, 2, 3], [4] * 20], params)] == [12, 12]


def draft_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets engines draft three tokens, whether that pays or not."""
    monkeypatch.setattr(DraftChoice, "choose", lambda choice, requests: 3)


@pytest.mark.gpu
def test_an_engine_on_a_gpu_knows_which_drafts_pay() -> None:
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 1024, "device_kv_tokens": 8192, "tiers": "off"}
    with LLM(DEMO, device="cuda", speculate=2, **sizes) as llm:
        assert isinstance(llm._engine, Engine)
        speculation = llm._engine.schedulers[0]._speculation
        assert speculation is not None and speculation.choice.costs is not None
        costs = speculation.choice.costs
        assert list(costs.requests) == [1, 2, 4] and all(len(times) == 3 for times in costs.drafting)


@pytest.mark.gpu
@pytest.mark.parametrize("tiers", ["off", "always"])
def test_graphs_verify_and_draft_what_eager_steps_do(tiers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are those of the CPU. After each step, tokens are drafted with and without a graph. Padding can change
    how sums are rounded, so few drafts may differ."""
    by_graphs, drafts, same = MtpGraphs.draft, 0, 0

    def compared(
        graphs: MtpGraphs,
        segments: SampledSegments,
        ids: Tensor,
        output: MtpOutput,
        num_drafts: int,
        *,
        has_tiered: bool,
    ) -> Tensor:
        nonlocal drafts, same
        state = graphs._mtp.seat_drafts
        before = state.next_starts.clone(), state.tokens.clone()
        eager = graphs._mtp.draft(segments.on_device, ids, output)
        state.next_starts.copy_(before[0])
        state.tokens.copy_(before[1])
        tokens = by_graphs(graphs, segments, ids, output, num_drafts, has_tiered=has_tiered)
        assert torch.equal(tokens == EMPTY, eager == EMPTY) and torch.equal(tokens[:, 0], eager[:, 0])
        drafts += int((tokens[:, 1:] != EMPTY).sum())
        same += int(((tokens == eager) & (tokens != EMPTY))[:, 1:].sum())
        return tokens

    monkeypatch.setattr(MtpGraphs, "draft", compared)
    draft_always(monkeypatch)
    tokenizer, questions, prompts = make_prompts(["lookup", "several", "chain"])
    on_cpu = answers(prompts, device="cpu")
    memory = {"device_kv_tokens": 8192}
    memory |= {} if tiers == "off" else {"host_kv_tokens": 32768}
    captured = answers(prompts, device="cuda", tiers=tiers, speculate=3, **memory)
    for question, cpu, gpu in zip(questions, on_cpu, captured, strict=True):
        count = len(tokenizer.encode(question.answer))
        assert gpu[:count] == cpu[:count], question.task
    assert drafts > 100 and same >= 0.95 * drafts, f"{same} of {drafts} drafts are equal"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("tiers", ["off", "always"])
def test_no_step_with_drafts_synchronizes_the_host_with_the_gpu(tiers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = forbid_waiting(monkeypatch)
    draft_always(monkeypatch)
    _, _, prompts = make_prompts(["lookup"])
    memory = {"device_kv_tokens": 8192} | ({} if tiers == "off" else {"host_kv_tokens": 32768})
    answers(prompts, tokens=140, tiers=tiers, device="cuda", speculate=3, **memory)
    assert sum(bool(plan.drafts) for plan in checked) > 30
