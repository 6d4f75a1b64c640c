"""A task for inspect-ai: ten questions, each with a word that the answer must contain."""

import json
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

QUESTIONS = Path(__file__).parent / "lm_eval_tasks" / "questions.jsonl"
SAMPLES = 10


@task
def questions() -> Task:
    items = [json.loads(line) for line in QUESTIONS.read_text().splitlines()[:SAMPLES]]
    samples = [Sample(input=item["question"], target=item["answer"]) for item in items]
    return Task(dataset=samples, solver=generate(), scorer=includes())
