"""Generates the response to a validated request, streamed or not, for both completion endpoints."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from hotset.base.errors import EngineStopped, InternalError, RequestError
from hotset.base.request_options import DEFAULT_OPTIONS, RequestOptions
from hotset.base.sampling import SamplingParams
from hotset.engine.client import EngineClient
from hotset.engine.input_processor import ModelCard
from hotset.engine.outputs import CompletionOutput, Delta
from hotset.serve.fair_queue import client_of
from hotset.serve.http_server import unless_disconnected
from hotset.serve.metrics import Metrics
from hotset.serve.page_marks import PAGE_MARKS_HEADER, page_marks_header
from hotset.serve.responses import PromptTokensDetails, Usage
from hotset.serve.service import ServerLoad, Service
from hotset.serve.streams import chained, event_stream

T = TypeVar("T")
Deltas = AsyncGenerator[Delta, None]

# Log-probabilities of one request: each token counts, and so do its alternatives. Their JSON takes up to 130 MiB.
# One prompt of the longest context with one alternative is always allowed.
MAX_LOGPROBS_OF_REQUEST = 2_000_000


@dataclass(frozen=True)
class GenerationJob:
    """One validated and tokenized request."""

    request_id: str
    prompts: Sequence[list[int]]
    params: SamplingParams
    stream: bool
    options: RequestOptions = DEFAULT_OPTIONS
    # The fields of the request that ask for log-probabilities, for error messages
    logprobs_field: str = "logprobs"
    prompt_logprobs_field: str = "prompt_logprobs"

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def check_size(self, model: ModelCard) -> None:
        """Raises RequestError if the response could have too many log-probabilities."""
        params = self.params
        if params.logprobs is None and params.prompt_logprobs is None:
            return
        context = model.max_model_len
        lengths = [min(len(prompt), context) for prompt in self.prompts]
        longest_answers = [min(context - length, params.max_tokens or context) for length in lengths]
        if params.max_tokens == 0:
            longest_answers = []
        of_prompts = _count(params.n * sum(lengths), params.prompt_logprobs)
        of_answers = _count(params.n * sum(longest_answers), params.logprobs)
        limit = max(MAX_LOGPROBS_OF_REQUEST, 2 * context)
        if of_prompts + of_answers > limit:
            field = self.prompt_logprobs_field if of_prompts >= of_answers else self.logprobs_field
            raise RequestError(
                f"{field}: the prompts have {of_prompts} log-probabilities (n times those of each token and its "
                f"alternatives) and the answers up to {of_answers}, and the limit for a request is {limit} together; "
                "request fewer alternatives, or lower max_tokens, n or the number of prompts",
                param=field,
                code="invalid_value",
            )

    def cached_tokens(self, of_choices: Sequence[int]) -> int:
        """Returns how many of `prompt_tokens` were in the prefix cache. Each prompt counts once, with its first choice,
        because its other choices also reuse what the first one computed."""
        return sum(of_choices[:: self.params.n])

    def prompt_tokens_of(self, index: int) -> int:
        """Returns the number of prompt tokens of one choice."""
        return len(self.prompts[index // self.params.n])


def _count(tokens: int, alternatives: int | None) -> int:
    return 0 if alternatives is None else tokens * (1 + alternatives)


class Responder(Protocol):
    """Formats the deltas of one job as the response of one endpoint."""

    async def full(self, deltas: Deltas) -> Response:
        """Reads all deltas and returns the whole response. Raises the errors of `deltas`."""
        ...

    def events(self, deltas: Deltas) -> AsyncGenerator[bytes, None]:
        """Yields the events of a stream. An error of `deltas` becomes the last event."""
        ...


async def respond(request: Request, service: Service, job: GenerationJob, responder: Responder) -> Response:
    """Generates the response. An error after the first delta of a stream becomes the stream's last event. All other
    errors are raised.

    If the client disconnects at any time, the engine's iterator is closed at once, which aborts the request.
    """
    service.check_open(job.choices)
    job.check_size(service.client.model)
    check = service.check_structure(client_of(request), job.params.structure)
    await unless_disconnected(request.receive, check)
    if service.traces is not None:
        service.traces.on_request(job.request_id, request.headers.get("traceparent"))
    waiting = _counted_as_waiting(_all_deltas(service.client, job), job.prompt_tokens, service.load)
    deltas = _measured(waiting, job, service.metrics)
    marks = partial(_page_marks, request, service, job)
    if not job.stream:
        generated = _with_marks(partial(responder.full, deltas), marks)
        response, headers = await unless_disconnected(request.receive, generated)
    else:
        try:
            # The status line is sent only after the first delta, so if the engine rejects the request, the client gets
            # an error status.
            begun = _with_marks(lambda: anext(deltas), marks)
            first, headers = await unless_disconnected(request.receive, begun)
        except BaseException:
            await deltas.aclose()  # the client may have disconnected after the first delta
            raise
        response = event_stream(responder.events(chained(first, deltas)), deltas)
    response.headers.update(headers)
    return response


async def _with_marks(
    generate: Callable[[], Awaitable[T]], compute_marks: Callable[[], Coroutine[Any, Any, dict[str, str]]]
) -> tuple[T, dict[str, str]]:
    """Computes page marks while the engine has the request, which thus counts as waiting. Returns both results."""
    computing = asyncio.create_task(compute_marks())
    try:
        return await generate(), await computing
    finally:
        computing.cancel()


async def _page_marks(request: Request, service: Service, job: GenerationJob) -> dict[str, str]:
    """Returns the header with the hashes of pages if a router asks for it and there is one prompt, else none."""
    hasher = service.client.model.page_hasher
    if PAGE_MARKS_HEADER not in request.headers or hasher is None or len(job.prompts) != 1:
        return {}
    prompt, salt = job.prompts[0], job.options.cache_salt or ""
    return {PAGE_MARKS_HEADER: await service.in_text_thread(lambda: page_marks_header(prompt, salt, hasher))}


def api_finish_reason(piece: Delta | CompletionOutput) -> Literal["stop", "length"] | None:
    """Returns the finish reason in the words of the OpenAI API. For all other reasons, the engine client or `_pump`
    raises an error."""
    if piece.finish_reason not in (None, "stop", "length"):
        raise InternalError(f"an answer ended by {piece.finish_reason!r}, which must be raised as an error")
    return piece.finish_reason


def usage_of(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


async def _measured(deltas: Deltas, job: GenerationJob, metrics: Metrics) -> Deltas:
    """Yields the deltas unchanged, and records their timing and the tokens of each choice."""
    began = time.monotonic()
    last: dict[int, float] = {}
    tokens = [0] * job.choices
    async with aclosing(deltas):
        async for delta in deltas:
            now = time.monotonic()
            if delta.token_ids:
                if not last:
                    metrics.observe_first_token(now - began)
                elif delta.index in last:
                    metrics.observe_inter_token((now - last[delta.index]) / len(delta.token_ids))
                last[delta.index] = now
                tokens[delta.index] += len(delta.token_ids)
            if delta.finish_reason is not None:
                metrics.choice_seconds.observe(now - began)
                metrics.prompt_tokens.observe(job.prompt_tokens_of(delta.index))
                metrics.generation_tokens.observe(tokens[delta.index])
            yield delta


async def _counted_as_waiting(deltas: Deltas, tokens: int, load: ServerLoad) -> Deltas:
    """Yields the deltas unchanged. All prompt tokens count as waiting until the first delta of any prompt."""
    with load.waiting(tokens) as started:
        async with aclosing(deltas):
            async for delta in deltas:
                started()
                yield delta


async def _all_deltas(client: EngineClient, job: GenerationJob) -> Deltas:
    """Yields the deltas of all prompts as they arrive. Closing the generator aborts all prompts.

    `index` of a delta counts the choices of the whole response.
    """
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
    pumps = [
        asyncio.create_task(_pump(client, f"{job.request_id}-{prompt_index}", prompt, job, prompt_index, queue))
        for prompt_index, prompt in enumerate(job.prompts)
    ]
    unfinished = len(pumps)
    try:
        while unfinished:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    client: EngineClient,
    request_id: str,
    prompt: list[int],
    job: GenerationJob,
    prompt_index: int,
    queue: asyncio.Queue[Delta | Exception | None],
) -> None:
    """Moves the deltas of one prompt into `queue`, followed by None at the end or by the error."""
    try:
        async with aclosing(client.generate(request_id, prompt, job.params, job.options)) as deltas:
            async for delta in deltas:
                if delta.finish_reason == "abort":
                    raise EngineStopped("the engine stopped before the response was complete")
                queue.put_nowait(replace(delta, index=prompt_index * job.params.n + delta.index))
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)
