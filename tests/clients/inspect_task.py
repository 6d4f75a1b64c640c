"""Tasks for inspect-ai: questions, each with a word that the answer must contain, and sums that need a tool."""

import json
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool

QUESTIONS = Path(__file__).parent / "lm_eval_tasks" / "questions.jsonl"
SAMPLES = 10


@task
def questions() -> Task:
    items = [json.loads(line) for line in QUESTIONS.read_text().splitlines()[:SAMPLES]]
    samples = [Sample(input=item["question"], target=item["answer"]) for item in items]
    return Task(dataset=samples, solver=generate(), scorer=includes())


@tool
def add() -> Tool:
    async def execute(x: int, y: int) -> int:
        """Adds two numbers.

        Args:
            x: The first number.
            y: The second number.
        """
        return x + y

    return execute


@task
def tools() -> Task:
    """The model calls the tool, and says that it is done when it sees the result."""
    samples = [
        Sample(input=f"Please add-with-inspect, {word}.", target="Done.") for word in ("now", "again", "at last")
    ]
    return Task(dataset=samples, solver=[use_tools(add()), generate()], scorer=includes())
