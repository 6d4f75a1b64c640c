"""Log-probabilities are limited in number, and large answers are formatted piece by piece, while they are sent."""

import asyncio
import json
import threading
from array import array
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.responses import Response
from starlette.types import Message

from hotset.base.errors import RequestError
from hotset.base.sampling import SamplingParams
from hotset.base.serve_config import ServeConfig
from hotset.engine.client import EngineClient
from hotset.engine.input_processor import ModelCard
from hotset.engine.outputs import AnswerLogprobs, Delta, Logprob, PromptLogprobs, TokenLogprobs
from hotset.schedule.plan import LogprobColumns
from hotset.serve.chat import ChatFormatter
from hotset.serve.chunks import ChunkResponder
from hotset.serve.completions import CompletionFormatter
from hotset.serve.generation import MAX_LOGPROBS_OF_REQUEST, GenerationJob, usage_of
from hotset.serve.responses import Completion, CompletionChoice, CompletionLogprobs, PromptTokenLogprob
from hotset.serve.service import Service
from hotset.serve.streams import PIECE_BYTES, event_of, event_pieces, json_pieces


def job_of(lengths: list[int], **params: Any) -> GenerationJob:
    return GenerationJob("r", [[1] * length for length in lengths], SamplingParams(**params), False)


def check(context: int, job: GenerationJob) -> None:
    job.check_size(cast(ModelCard, SimpleNamespace(max_model_len=context)))


@pytest.mark.parametrize("context", [16, 8192, 1_000_001, 3_000_000])
def test_a_prompt_of_the_whole_context_with_one_alternative_is_allowed(context: int) -> None:
    check(context, job_of([context], prompt_logprobs=1, max_tokens=0))
    check(context, job_of([context - 1], prompt_logprobs=1, logprobs=1, max_tokens=1))
    check(context, job_of([context - 9], prompt_logprobs=1, logprobs=1, max_tokens=None))


@pytest.mark.parametrize(
    ("prompts", "params", "refused", "field"),
    [
        (12, {"prompt_logprobs": 18, "max_tokens": 0}, {"prompt_logprobs": 20}, "prompt_logprobs"),
        (1, {"prompt_logprobs": 20, "max_tokens": 0, "n": 11}, {"n": 12}, "prompt_logprobs"),
        (0, {"logprobs": 9, "max_tokens": 1562, "n": 128}, {"max_tokens": 1563}, "logprobs"),
        (1, {"logprobs": 20, "max_tokens": None, "n": 128}, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (9, {"logprobs": 20, "max_tokens": 10**9}, {"n": 60}, "logprobs"),
        (8, {"prompt_logprobs": 20, "logprobs": 0, "max_tokens": 192}, {"logprobs": 20, "n": 2}, "prompt_logprobs"),
    ],
)
def test_one_request_has_at_most_two_million_log_probabilities(
    prompts: int, params: dict[str, Any], refused: dict[str, Any], field: str
) -> None:
    lengths = [8000] * prompts or [8]
    check(8192, job_of(lengths, **params))
    with pytest.raises(RequestError, match=f"^{field}: .*the limit for a request is 2000000 ") as caught:
        check(8192, job_of(lengths, **params | refused))
    assert caught.value.param == field and MAX_LOGPROBS_OF_REQUEST == 2_000_000


def test_log_probabilities_of_an_answer_are_returned_as_they_were_added() -> None:
    first, second = {5: (-0.5, 1), 7: (-3.0, 9)}, {1: (-2.0, 2)}
    logprobs = AnswerLogprobs([first])
    logprobs.extend(AnswerLogprobs([second, first]))
    as_entries = [{token: Logprob(*value) for token, value in entry.items()} for entry in (first, second, first)]
    assert list(logprobs) == as_entries and logprobs[1:] == as_entries[1:] and logprobs[-1] == as_entries[-1]


ENTRY = {"1": PromptTokenLogprob(logprob=-1e-7, rank=2, decoded_token="é\u2028")}


def completion(entries: int, read: list[int]) -> Completion:
    """Returns a response whose log-probabilities append to `read` when they are created."""

    def formatted() -> Iterator[dict[str, PromptTokenLogprob] | None]:
        for number in range(entries):
            read.append(number)
            yield ENTRY if number else None

    columns = CompletionLogprobs(
        tokens=iter(["\x85"]), token_logprobs=iter([1e16]), top_logprobs=iter([{"a": -1e-5}]), text_offset=iter([])
    )
    choice = CompletionChoice(
        index=0, finish_reason="stop", text="t", logprobs=columns, prompt_logprobs=formatted(), stop_reason="x"
    )
    header: dict[str, Any] = {"id": "c", "created": 1, "model": "m", "system_fingerprint": ""}
    return Completion(**header, choices=iter([choice]), usage=usage_of(1, 0, 1))


@pytest.mark.parametrize("entries", [0, 1, 5000])
def test_pieces_are_the_bytes_of_the_whole_body(entries: int) -> None:
    assert b"".join(json_pieces(completion(entries, []))) == completion(entries, []).model_dump_json().encode()
    assert b"".join(event_pieces(completion(entries, []))) == event_of(completion(entries, []))


def test_only_what_is_sent_is_formatted() -> None:
    read: list[int] = []
    pieces = json_pieces(completion(100_000, read))
    for number in range(1, 4):
        assert PIECE_BYTES <= len(next(pieces)) < PIECE_BYTES + 1000
        assert len(read) < number * PIECE_BYTES / 50


class RecordedColumns(PromptLogprobs):
    """Log-probabilities that record the threads in which they are read."""

    threads: set[str]

    def _entry(self, position: int) -> TokenLogprobs | None:
        self.threads.add(threading.current_thread().name)
        return super()._entry(position)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_large_answer_is_sent_in_pieces_that_a_thread_formats_and_choices_share_a_prompt(endpoint: str) -> None:
    tokens, n = 3000, 2
    params = SamplingParams(n=n, prompt_logprobs=1, logprobs=1)
    job = GenerationJob("r", [[3] * tokens], params, False)
    columns = [
        LogprobColumns(
            array("d", [-1.0 - choice]) * (tokens - 1),
            array("i", [2]) * (tokens - 1),
            array("i", [5]) * (tokens - 1),
            array("d", [-0.5]) * (tokens - 1),
        )
        for choice in range(n)
    ]
    scored = [RecordedColumns(job.prompts[0], [each]) for each in columns]
    names: set[str] = set()
    for each in scored:
        each.threads = names
    common: Any = {"id": "c", "model": "m", "fingerprint": "", "tokenizer": None, "prompt_alternatives": 1}
    formatter: Any = (
        CompletionFormatter(**common, prompts=job.prompts, params=params, show_token_ids=False, echoed=None)
        if endpoint == "completions"
        else ChatFormatter(**common, alternatives=1, prompt_token_ids=None, new_reader=cast(Any, Reader))
    )
    service = Service(cast(EngineClient, SimpleNamespace()), ServeConfig())

    async def deltas() -> AsyncGenerator[Delta, None]:
        for index in range(n):
            logprobs = AnswerLogprobs([{5: (-0.5, 1)}])
            yield Delta(index, "a", (5,), logprobs, "length", prompt_logprobs=scored[index])

    async def send_all() -> list[Message]:
        response: Response = await ChunkResponder(service, job, formatter).full(deltas())
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        await response({"type": "http"}, receive, send)
        return sent

    sent = asyncio.run(send_all())
    bodies = [message["body"] for message in sent[1:]]
    assert len(bodies) > 3 and max(map(len, bodies)) < PIECE_BYTES + 1000
    whole = json.loads(b"".join(bodies))
    lists = [whole["prompt_logprobs"]] if endpoint == "chat" else [each["prompt_logprobs"] for each in whole["choices"]]
    assert all(len(entries) == tokens and entries == lists[0] for entries in lists), (
        "the choices share the log-probabilities of their prompt"
    )
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert names and all(name.startswith("hotset-text") for name in names)


class Reader:
    """Reads answers that are only text."""

    def feed(self, text: str) -> list[Any]:
        return []

    def finish(self) -> list[Any]:
        return []

    def finish_reason(self, reason: str) -> str:
        return reason
