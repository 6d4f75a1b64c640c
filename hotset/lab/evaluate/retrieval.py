"""Asks a model retrieval questions and counts the answers that are correct word for word.

The model runs in this process (`LocalBackend`) or behind an OpenAI-compatible server (`ServerBackend`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hotset.base.errors import ConfigError, MissingDependency, RequestError, StartupError
from hotset.base.sampling import SamplingParams
from hotset.lab.evaluate.tasks import Question, make_questions

if TYPE_CHECKING:
    from hotset.engine.llm import LLM

BATCH = 32  # questions per call of `answer`: enough to fill a batch of the engine, few enough to show progress
DEPTH_BUCKETS = 4
BOS = "<|bos|>"  # the demo model's beginning-of-text token, which its tokenizer does not add
MAX_CONCURRENT_REQUESTS = 8
ANSWER_SECONDS = 600.0


class Backend(Protocol):
    """A model that answers greedily, up to its end token."""

    name: str
    context: int  # the maximum length of prompt and answer together, in tokens

    def count_tokens(self, text: str) -> int:
        """Returns the number of tokens of `text` as a prompt, including the model's own special tokens."""

    def answer(self, prompts: Sequence[str], max_tokens: int) -> list[str]:
        """Returns one answer per prompt, in order. Raises HotsetError if a prompt cannot be answered."""


class LocalBackend:
    """An `LLM` in this process. The caller closes the `LLM`."""

    def __init__(self, llm: "LLM") -> None:
        tokenizer = llm.tokenizer
        if tokenizer is None:
            raise ConfigError(f"{llm.card.name} has no tokenizer; select one with --tokenizer")
        self._llm = llm
        self._tokenizer = tokenizer
        self.name = llm.card.name
        self.context = llm.card.max_model_len
        self._prefix = BOS if len(tokenizer.encode(BOS)) == 1 else ""

    def count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(self._prefix + text))

    def answer(self, prompts: Sequence[str], max_tokens: int) -> list[str]:
        greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        outputs = self._llm.generate([self._prefix + prompt for prompt in prompts], greedy)
        return [output.outputs[0].text for output in outputs]


class ServerBackend:
    """A server with `/v1/models` (including `max_model_len`), `/v1/completions` and `/tokenize`.

    Raises StartupError if the server cannot be reached or its replies have another format, and RequestError for any
    status but 200. The caller calls `close`.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            import httpx
        except ImportError as error:
            raise MissingDependency("--url needs httpx; run: pip install httpx") from error
        self._connection_errors = (httpx.HTTPError, httpx.InvalidURL)
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(ANSWER_SECONDS, connect=10.0))
        model = self._request("GET", "/v1/models", None, lambda reply: reply["data"][0])
        self.name = str(model["id"])
        self.context = int(model.get("max_model_len") or 0)
        if self.context < 1:
            raise StartupError(f"{self._url} does not report the context length of {self.name} (max_model_len)")
        self._prefix = ""
        self._prefix = BOS if self.count_tokens(BOS) == 1 else ""

    def count_tokens(self, text: str) -> int:
        return int(self._request("POST", "/tokenize", {"prompt": self._prefix + text}, lambda reply: reply["count"]))

    def answer(self, prompts: Sequence[str], max_tokens: int) -> list[str]:
        with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
            return list(pool.map(lambda prompt: self._complete(prompt, max_tokens), prompts))

    def close(self) -> None:
        self._client.close()

    def _complete(self, prompt: str, max_tokens: int) -> str:
        body = {"model": self.name, "prompt": self._prefix + prompt, "max_tokens": max_tokens, "temperature": 0}
        return str(self._request("POST", "/v1/completions", body, lambda reply: reply["choices"][0]["text"]))

    def _request(self, method: str, path: str, body: dict[str, Any] | None, extract: Callable[[Any], Any]) -> Any:
        try:
            reply = self._client.request(method, self._url + path, json=body)
        except self._connection_errors as error:
            raise StartupError(f"{self._url} cannot be reached: {str(error) or type(error).__name__}") from error
        if reply.status_code != 200:
            raise RequestError(f"{self._url}{path} answered {reply.status_code}: {reply.text[:200]}")
        try:
            return extract(reply.json())
        except (ValueError, LookupError, TypeError) as error:
            raise StartupError(f"{self._url}{path} did not send the reply of an OpenAI-compatible server") from error


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """The questions of an evaluation."""

    tasks: Sequence[str]
    lengths: Sequence[int]  # in tokens
    questions: int  # per length, divided as evenly as possible among the tasks
    seed: int


@dataclass(frozen=True, slots=True)
class Score:
    """The number of correct answers and the number of questions."""

    correct: int
    asked: int

    @property
    def accuracy(self) -> float | None:
        return self.correct / self.asked if self.asked else None


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer to one question."""

    question: Question
    text: str

    @property
    def correct(self) -> bool:
        return self.text.strip() == self.question.answer.strip()

    @property
    def depth_bucket(self) -> int:
        return min(int(self.question.depth * DEPTH_BUCKETS), DEPTH_BUCKETS - 1)


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """All answers of one evaluation."""

    model: str
    plan: EvaluationPlan
    seconds: float
    answers: Sequence[Answer]

    def score(self, task: str | None = None, length: int | None = None, depth_bucket: int | None = None) -> Score:
        """Returns the score of the questions of this task, length and depth; None selects all."""
        selected = [
            answer.correct
            for answer in self.answers
            if task in (None, answer.question.task)
            and length in (None, answer.question.length)
            and depth_bucket in (None, answer.depth_bucket)
        ]
        return Score(sum(selected), len(selected))

    def cells(self) -> Iterator[tuple[str, int]]:
        """Yields each pair of a task and a length that has questions."""
        for task in self.plan.tasks:
            for length in self.plan.lengths:
                if self.score(task, length).asked:
                    yield task, length

    def to_json(self) -> dict[str, Any]:
        """Returns values for JSON. The keys of `by_depth` are ranges of depth: '0-0.25' is the oldest quarter."""
        return {
            "model": self.model,
            "seed": self.plan.seed,
            "questions_per_length": self.plan.questions,
            "seconds": round(self.seconds, 3),
            "total": _values(self.score()),
            "by_length": [{"length": n, **_values(self.score(length=n))} for n in self.plan.lengths],
            "by_task_and_length": [
                {
                    "task": task,
                    "length": length,
                    **_values(self.score(task, length)),
                    "by_depth": {name: _values(self.score(task, length, n)) for n, name in enumerate(bucket_names())},
                }
                for task, length in self.cells()
            ],
        }


def bucket_names() -> list[str]:
    return [f"{n / DEPTH_BUCKETS:g}-{(n + 1) / DEPTH_BUCKETS:g}" for n in range(DEPTH_BUCKETS)]


def evaluate(
    backend: Backend, plan: EvaluationPlan, on_answers: Callable[[int], None] = lambda count: None
) -> EvaluationReport:
    """Sends all questions of `plan` in batches, and calls `on_answers` with the number of answers of each batch.

    Raises ConfigError, before the first question is sent, if a length exceeds the model's context.
    """
    for length in plan.lengths:
        if length > backend.context:
            raise ConfigError(f"--lengths: {length} tokens exceed the context of {backend.name}, {backend.context}")
    started = time.monotonic()
    answers: list[Answer] = []
    for length in plan.lengths:
        questions = make_questions(plan.tasks, length, plan.questions, plan.seed, backend.count_tokens)
        max_tokens = max((backend.count_tokens(question.answer) + 1 for question in questions), default=1)
        for first in range(0, len(questions), BATCH):
            batch = questions[first : first + BATCH]
            texts = backend.answer([question.prompt for question in batch], max_tokens)
            answers += [Answer(question, text) for question, text in zip(batch, texts, strict=True)]
            on_answers(len(batch))
    return EvaluationReport(backend.name, plan, time.monotonic() - started, answers)


def _values(score: Score) -> dict[str, Any]:
    return {"accuracy": score.accuracy, "right": score.correct, "asked": score.asked}
