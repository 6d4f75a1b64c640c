"""Puts retrieval questions to a model and counts the answers that are right, word for word."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hotset.base.errors import ConfigError
from hotset.evaluate.tasks import Question, make_questions

BATCH = 32  # questions handed over at once: enough to fill a batch, few enough for progress to be seen
BUCKETS = 4  # of depth


class Backend(Protocol):
    """A model that answers greedily, up to its end token."""

    name: str
    context: int  # longest prompt and answer, in tokens

    def count_tokens(self, text: str) -> int:
        """Tokens of `text` as a prompt, the model's own special tokens included."""

    def answer(self, prompts: Sequence[str], max_tokens: int) -> list[str]:
        """One answer per prompt, in order. HotsetError if the model cannot be asked."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be asked."""

    tasks: Sequence[str]
    lengths: Sequence[int]
    questions: int  # per length, dealt evenly to the tasks
    seed: int


@dataclass(frozen=True, slots=True)
class Score:
    """How many of the questions asked were answered right."""

    right: int
    asked: int

    @property
    def accuracy(self) -> float | None:
        return self.right / self.asked if self.asked else None


@dataclass(frozen=True, slots=True)
class Answered:
    question: Question
    text: str

    @property
    def right(self) -> bool:
        return self.text.strip() == self.question.answer.strip()

    @property
    def bucket(self) -> int:
        return min(int(self.question.depth * BUCKETS), BUCKETS - 1)


@dataclass(frozen=True, slots=True)
class Report:
    """Every answer of one evaluation."""

    model: str
    plan: Plan
    seconds: float
    answers: Sequence[Answered]

    def score(self, task: str | None = None, length: int | None = None, bucket: int | None = None) -> Score:
        """Of the questions of this task, length and depth; None: of all."""
        chosen = [
            found.right
            for found in self.answers
            if task in (None, found.question.task)
            and length in (None, found.question.length)
            and bucket in (None, found.bucket)
        ]
        return Score(sum(chosen), len(chosen))

    def cells(self) -> Iterator[tuple[str, int]]:
        """Each task at each length that was asked."""
        for task in self.plan.tasks:
            for length in self.plan.lengths:
                if self.score(task, length).asked:
                    yield task, length

    def to_json(self) -> dict[str, Any]:
        """Plain values. Depth 0 is the oldest quarter of the context, each bucket named by its bounds."""
        return {
            "model": self.model,
            "seed": self.plan.seed,
            "questions_per_length": self.plan.questions,
            "seconds": round(self.seconds, 3),
            "total": _plain(self.score()),
            "by_length": [{"length": n, **_plain(self.score(length=n))} for n in self.plan.lengths],
            "by_task_and_length": [
                {
                    "task": task,
                    "length": length,
                    **_plain(self.score(task, length)),
                    "by_depth": {name: _plain(self.score(task, length, n)) for n, name in enumerate(bucket_names())},
                }
                for task, length in self.cells()
            ],
        }


def bucket_names() -> list[str]:
    return [f"{n / BUCKETS:g}-{(n + 1) / BUCKETS:g}" for n in range(BUCKETS)]


def evaluate(backend: Backend, plan: Plan, answered: Callable[[int], None] = lambda count: None) -> Report:
    """Asks everything in `plan`; calls `answered` with the number of answers that just came.

    ConfigError, before anything is asked, if a length exceeds the model's context.
    """
    for length in plan.lengths:
        if length > backend.context:
            raise ConfigError(f"--lengths: {length} tokens exceed the context of {backend.name}, {backend.context}")
    begun = time.monotonic()
    answers: list[Answered] = []
    for length in plan.lengths:
        questions = make_questions(plan.tasks, length, plan.questions, plan.seed, backend.count_tokens)
        max_tokens = max((backend.count_tokens(question.answer) + 1 for question in questions), default=1)
        for first in range(0, len(questions), BATCH):
            batch = questions[first : first + BATCH]
            texts = backend.answer([question.prompt for question in batch], max_tokens)
            answers += [Answered(question, text) for question, text in zip(batch, texts, strict=True)]
            answered(len(batch))
    return Report(backend.name, plan, time.monotonic() - begun, answers)


def _plain(score: Score) -> dict[str, Any]:
    return {"accuracy": score.accuracy, "right": score.right, "asked": score.asked}
