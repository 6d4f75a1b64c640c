"""The demo model gives the same answers to long questions with `tiers` "always" and "off"."""

from pathlib import Path

import pytest

from hotset import LLM
from hotset.base.config import TiersMode
from hotset.lab.evaluate.retrieval import EvaluationPlan, LocalBackend, evaluate

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-dsa"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("length", "questions"), [(4096, 6), (8192, 3)])
def test_every_answer_is_the_same_with_tiers_always_and_off(length: int, questions: int) -> None:
    plan = EvaluationPlan(("lookup", "several", "last"), [length], questions, 5)
    answers = []
    modes: tuple[TiersMode, ...] = ("off", "always")
    for tiers in modes:
        with LLM(str(DEMO), progress=False, device="cpu", tiers=tiers, device_kv_tokens=40_000) as llm:
            report = evaluate(LocalBackend(llm), plan)
            misses = sum(llm.stats().slot_misses.values())
        assert (misses > 0) == (tiers == "always"), "rows must come from the host if, and only if, tiers is always"
        answers.append([(answer.question.prompt, answer.text, answer.correct) for answer in report.answers])
    assert answers[0] == answers[1]
