"""The road from a checked request to its answer, streamed or whole: the same for both generating endpoints."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hotset.base.config import LandingChoice, TiersChoice
from hotset.base.errors import EngineStopped
from hotset.base.sampling import SamplingParams
from hotset.engine.client import EngineClient
from hotset.engine.outputs import CompletionOutput, Delta
from hotset.serve.disconnect import unless_disconnected
from hotset.serve.errors import error_body
from hotset.serve.metrics import Metrics
from hotset.serve.protocol import Usage
from hotset.serve.service import Load, Service

DONE = b"data: [DONE]\n\n"
# JSON may hold these as they are, and an event's line does not end there; but many a client's lines do.
LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})


class ResponseFormatter(Protocol):
    """How an endpoint words its answer; one object per request. Choices are numbered over the whole response."""

    def opening(self, index: int) -> BaseModel | None:
        """The chunk that introduces a choice, where there is one."""

    def chunk(self, delta: Delta) -> BaseModel | None:
        """The chunk for one delta; None where it holds nothing to show."""

    def closing(self, usage: Usage) -> BaseModel:
        """The chunk that carries the usage."""

    def whole(self, outputs: Sequence[CompletionOutput], usage: Usage) -> BaseModel:
        """The answer in one piece."""


@dataclass(frozen=True)
class Job:
    """One request, checked and tokenised."""

    request_id: str
    prompts: Sequence[list[int]]
    params: SamplingParams
    wording: ResponseFormatter
    stream: bool
    include_usage: bool
    tiers: TiersChoice
    landing: LandingChoice = "auto"
    prefill_at: str | None = None  # control address of the worker that computes the prompts; None: this one does

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def usage(self, completion_tokens: int) -> Usage:
        prompt_tokens = self.prompt_tokens
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )


async def respond(request: Request, service: Service, job: Job) -> Response:
    """Generates the answer. Errors before the first token are raised; later ones end the stream as its last event.

    A client that leaves, before or while it is answered, closes the engine's iterator at once: nothing it held stays.
    """
    service.check_open(job.choices)
    deltas = _timed(_counted(_all_deltas(service.client, job), job.prompt_tokens, service.load), service.metrics)
    if not job.stream:
        return json_response(await unless_disconnected(request.receive, _whole(job, deltas)))
    # The status line is held back until the engine has taken the request on, so that a refusal has its own status.
    first = await unless_disconnected(request.receive, _first(deltas))
    return EventStream(_events(job, first, deltas), deltas)


def ending(piece: Delta | CompletionOutput) -> Literal["stop", "length"] | None:
    """Why a choice ended, as the API words it."""
    assert piece.finish_reason != "abort", "_pump raises EngineStopped before an abort gets here"
    assert piece.finish_reason != "lost", "the client raises HandoffLost before such an end gets here"
    assert piece.finish_reason != "no_room", "the client raises NoRoomLeft before such an end gets here"
    return piece.finish_reason


def json_response(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


class EventStream(Response):
    """Server-sent events. Owns `deltas`, from which they are made, and closes it in the end, however the end comes."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], deltas: AsyncGenerator[Delta, None]) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._deltas = deltas
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Closed here and not only inside: sending may be cancelled before it has made its first step.
        async with aclosing(self._deltas), aclosing(self._events):
            await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _first(deltas: AsyncGenerator[Delta, None]) -> Delta:
    return await anext(deltas)


async def _whole(job: Job, deltas: AsyncGenerator[Delta, None]) -> BaseModel:
    outputs = [CompletionOutput(index) for index in range(job.choices)]
    async with aclosing(deltas):
        async for delta in deltas:
            outputs[delta.index].extend(delta)
    return job.wording.whole(outputs, job.usage(sum(len(output.token_ids) for output in outputs)))


async def _events(job: Job, first: Delta, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[bytes, None]:
    completion_tokens = 0
    try:
        for index in range(job.choices):
            if (opening := job.wording.opening(index)) is not None:
                yield event_of(opening)
        async for delta in _chained(first, deltas):
            completion_tokens += len(delta.token_ids)
            if (chunk := job.wording.chunk(delta)) is not None:
                yield event_of(chunk)
    except Exception as error:
        yield event_of(error_body(error))
        return
    if job.include_usage:
        yield event_of(job.wording.closing(job.usage(completion_tokens)))
    yield DONE


def event_of(body: BaseModel) -> bytes:
    return f"data: {body.model_dump_json().translate(LINE_ENDS)}\n\n".encode()


async def _chained(first: Delta, rest: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    yield first
    async for delta in rest:
        yield delta


async def _timed(deltas: AsyncGenerator[Delta, None], metrics: Metrics) -> AsyncGenerator[Delta, None]:
    """Passes deltas on and notes how long they took."""
    began = time.monotonic()
    last: dict[int, float] = {}
    async with aclosing(deltas):
        async for delta in deltas:
            now = time.monotonic()
            if delta.token_ids:
                if not last:
                    metrics.first_token_seconds.observe(now - began)
                elif delta.index in last:
                    metrics.inter_token_seconds.observe((now - last[delta.index]) / len(delta.token_ids))
                last[delta.index] = now
            yield delta


async def _counted(deltas: AsyncGenerator[Delta, None], tokens: int, load: Load) -> AsyncGenerator[Delta, None]:
    """Passes deltas on; the prompts' tokens count as waiting until the first one comes."""
    with load.waiting(tokens) as started:
        async with aclosing(deltas):
            async for delta in deltas:
                started()
                yield delta


async def _all_deltas(client: EngineClient, job: Job) -> AsyncGenerator[Delta, None]:
    """Deltas of all prompts as they come, `index` counted over the whole response. Closing it aborts every prompt."""
    arrived: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
    pumps = [
        asyncio.create_task(_pump(client, f"{job.request_id}-{place}", prompt, job, place, arrived))
        for place, prompt in enumerate(job.prompts)
    ]
    left = len(pumps)
    try:
        while left:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
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
    job: Job,
    place: int,
    arrived: asyncio.Queue[Delta | Exception | None],
) -> None:
    """Moves one prompt's deltas into `arrived`, and after them its end: None, or the error."""
    try:
        where = (job.tiers, job.prefill_at, job.landing)
        generated = client.generate(request_id, prompt, job.params, *where)
        async with aclosing(generated) as deltas:
            async for delta in deltas:
                if delta.finish_reason == "abort":
                    raise EngineStopped("the engine stopped before the answer was complete")
                arrived.put_nowait(replace(delta, index=place * job.params.n + delta.index))
        arrived.put_nowait(None)
    except Exception as error:
        arrived.put_nowait(error)
