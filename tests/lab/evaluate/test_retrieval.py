"""The demo model answers through the engine and a server, and each way of reading wrong rows lowers its accuracy."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from prepared import DEMO, Damage, Prepared, load, prepare
from serve.running_server import serving
from torch import Tensor

from hotset import LLM
from hotset.base.errors import ConfigError
from hotset.cli import main
from hotset.lab.evaluate.retrieval import EvaluationPlan, LocalBackend, ServerBackend, evaluate
from hotset.lab.evaluate.tasks import make_questions
from hotset.memory.view import View

LOOKUPS = ("lookup", "several", "last")


@pytest.fixture(scope="module", params=[pytest.param(length, marks=pytest.mark.slow) for length in (512, 4096)])
def prepared(request: pytest.FixtureRequest) -> Prepared:
    model, tokenizer = load()
    count = 6 if request.param == 512 else 24
    questions = make_questions(LOOKUPS, request.param, count, 0, lambda text: 1 + len(tokenizer.encode(text)))
    return prepare(model, tokenizer, questions)


def random_rows(share: float) -> Damage:
    """Replaces this share of the selected rows by rows at random positions."""
    generator = torch.Generator().manual_seed(0)

    def damage(positions: Tensor, view: View) -> Tensor:
        random = torch.rand(positions.shape, generator=generator) * (view.segments.positions[:, None] + 1)
        replaced = torch.rand(positions.shape, generator=generator) < share
        return torch.where(replaced & (positions >= 0), random.long(), positions)

    return damage


def test_demo_model_answers_when_every_row_is_right(prepared: Prepared) -> None:
    assert prepared.undamaged >= 0.9


def test_random_selection_is_noticed(prepared: Prepared) -> None:
    assert prepared.accuracy(random_rows(1.0)) < 0.2


def test_quarter_of_rows_read_from_wrong_positions_is_noticed(prepared: Prepared) -> None:
    assert prepared.accuracy(random_rows(0.25)) <= prepared.undamaged - 0.4


def test_one_page_of_rows_shifted_by_a_position_is_noticed(prepared: Prepared) -> None:
    with prepared.shifted("rows"):
        damaged = prepared.accuracy()
    assert damaged <= prepared.undamaged - 0.3


def test_one_page_of_index_keys_shifted_by_a_position_is_noticed(prepared: Prepared) -> None:
    with prepared.shifted("keys"):
        damaged = prepared.accuracy()
    assert damaged <= prepared.undamaged - 0.5


class FixedBackend:
    """Answers the tasks in `known` correctly and all other tasks incorrectly."""

    name = "fixed"
    context = 1024

    def __init__(self, plan: EvaluationPlan, known: Sequence[str]) -> None:
        self._answers = {
            question.prompt: question.answer if question.task in known else "no idea"
            for length in plan.lengths
            for question in make_questions(plan.tasks, length, plan.questions, plan.seed, self.count_tokens)
        }

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def answer(self, prompts: Sequence[str], max_tokens: int) -> list[str]:
        return [self._answers[prompt] + " " for prompt in prompts]


def test_report_counts_by_task_length_and_depth() -> None:
    plan = EvaluationPlan(["lookup", "copy"], [512, 1024], 70, 1)
    batches: list[int] = []
    report = evaluate(FixedBackend(plan, ["lookup"]), plan, batches.append)
    assert sum(batches) == 140 and len(batches) > 2
    assert (report.score("lookup").accuracy, report.score("copy").accuracy) == (1.0, 0.0)
    written = json.loads(json.dumps(report.to_json()))
    assert written["total"] == {"accuracy": 0.5, "right": 70, "asked": 140}
    assert len(written["by_task_and_length"]) == 4
    for cell in written["by_task_and_length"]:
        assert sum(part["asked"] for part in cell["by_depth"].values()) == cell["asked"] == 35
        assert list(cell["by_depth"]) == ["0-0.25", "0.25-0.5", "0.5-0.75", "0.75-1"]


def test_length_beyond_the_context_is_refused_before_the_first_question() -> None:
    plan = EvaluationPlan(["lookup"], [512, 2048], 1, 0)
    batches: list[int] = []
    with pytest.raises(ConfigError, match="2048 tokens exceed the context of fixed, 1024"):
        evaluate(FixedBackend(plan, []), plan, batches.append)
    assert batches == []


@pytest.mark.slow
def test_engine_and_server_give_the_same_answers(tmp_path: Path) -> None:
    plan = EvaluationPlan(LOOKUPS, [256], 6, 0)
    with LLM(str(DEMO), progress=False, device="cpu", max_model_len=1024) as llm:
        local = evaluate(LocalBackend(llm), plan)
    with serving(tmp_path, str(DEMO), "--device", "cpu", "--max-model-len", "1024") as server:
        backend = ServerBackend(server.url)
        remote = evaluate(backend, plan)
        backend.close()
    assert local.score().accuracy is not None and local.score().accuracy >= 0.8
    assert [answer.text for answer in local.answers] == [answer.text for answer in remote.answers]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such/model"], "no/such/model"),
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9 cannot be reached"),
        (["--url", "nonsense"], "nonsense cannot be reached"),
        (["--model", str(DEMO), "--device", "cpu", "--max-model-len", "512"], "1024 tokens exceed the context"),
        (["--lengths", "1k"], "--lengths '1k'"),
        (["--lengths", "12"], "--lengths '12'"),
        (["--tasks", "riddle"], "--tasks 'riddle'"),
        (["--questions", "0"], "--questions"),
        (["--json", "no/such/folder/x.json"], "no/such/folder"),
        (["--url", "http://127.0.0.1:9", "--dtype", "float64"], "--dtype has no effect"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["hotset", "eval", "retrieval", *arguments])
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and message in err
