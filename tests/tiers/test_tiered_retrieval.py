"""The demo model's answers to long questions with tiers forced and off: the same, question by question."""

from pathlib import Path

import pytest

from hotset import LLM
from hotset.base.config import TiersMode
from hotset.evaluate.retrieval import EvaluationPlan, LocalBackend, evaluate

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-dsa"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("length", "questions"), [(4096, 6), (8192, 3)])
def test_accuracy_with_tiers_forced_equals_that_with_tiers_off(length: int, questions: int) -> None:
    plan = EvaluationPlan(("lookup", "several", "last"), [length], questions, 5)
    answers = []
    modes: tuple[TiersMode, ...] = ("off", "always")
    for tiers in modes:
        with LLM(str(DEMO), progress=False, device="cpu", tiers=tiers, device_kv_tokens=40_000) as llm:
            report = evaluate(LocalBackend(llm), plan)
            misses = sum(llm.stats().slot_misses.values())
        assert (misses > 0) == (tiers == "always"), "with tiers forced, some rows must have come from the host"
        answers.append([(found.question.prompt, found.text, found.correct) for found in report.answers])
    assert answers[0] == answers[1]
