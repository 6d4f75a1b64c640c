"""The demo model answers through the engine and a server, and reports count what was answered correctly."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import DEMO
from serve.running_server import serving

from hotset import LLM
from hotset.base.errors import ConfigError
from hotset.cli import main
from hotset.lab.evaluate.retrieval import EvaluationPlan, LocalBackend, ServerBackend, evaluate
from hotset.lab.evaluate.tasks import make_questions

LOOKUPS = ("lookup", "several", "last")


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
    plan = EvaluationPlan(["lookup", "copy"], [512, 1024], 40, 1)
    batches: list[int] = []
    report = evaluate(FixedBackend(plan, ["lookup"]), plan, batches.append)
    assert sum(batches) == 80 and len(batches) > 2
    assert (report.score("lookup").accuracy, report.score("copy").accuracy) == (1.0, 0.0)
    written = json.loads(json.dumps(report.to_json()))
    assert written["total"] == {"accuracy": 0.5, "right": 40, "asked": 80}
    assert len(written["by_task_and_length"]) == 4
    for cell in written["by_task_and_length"]:
        assert sum(part["asked"] for part in cell["by_depth"].values()) == cell["asked"] == 20
        assert list(cell["by_depth"]) == ["0-0.25", "0.25-0.5", "0.5-0.75", "0.75-1"]


def test_length_beyond_the_context_is_refused_before_the_first_question() -> None:
    plan = EvaluationPlan(["lookup"], [512, 2048], 1, 0)
    batches: list[int] = []
    with pytest.raises(ConfigError, match="2048 tokens exceed the context of fixed, 1024"):
        evaluate(FixedBackend(plan, []), plan, batches.append)
    assert batches == []


@pytest.mark.slow
def test_engine_and_server_give_the_same_answers(tmp_path: Path) -> None:
    plan = EvaluationPlan(LOOKUPS, [512, 4096], 6, 0)
    with LLM(DEMO, progress=False, device="cpu", max_model_len=4608) as llm:
        local = evaluate(LocalBackend(llm), plan)
    with serving(tmp_path, DEMO, "--device", "cpu", "--max-model-len", "4608") as server:
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
        (["--model", DEMO, "--device", "cpu", "--max-model-len", "512"], "1024 tokens exceed the context"),
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
