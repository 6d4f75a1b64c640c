"""Responses in the form of the OpenAI completion endpoints: one object, or a stream of chunks that ends with [DONE]."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pydantic import BaseModel
from starlette.responses import Response

from hotset.engine.outputs import CompletionOutput, Delta
from hotset.serve.errors import error_body
from hotset.serve.generation import Deltas, GenerationJob, event_of, json_response, usage_of
from hotset.serve.protocol import StreamOptions
from hotset.serve.responses import ChunkBase, Usage
from hotset.serve.service import Service

DONE = b"data: [DONE]\n\n"


class ResponseFormatter(Protocol):
    """Formats the output of one request for one endpoint. Choices are numbered over the whole response."""

    def first_chunk(self, index: int) -> ChunkBase | None:
        """Returns the chunk that opens a choice, or None if the endpoint has no such chunk."""

    def chunk(self, delta: Delta) -> ChunkBase | None:
        """Returns the chunk for one delta, or None if the delta has nothing to show."""

    def usage_chunk(self, usage: Usage) -> ChunkBase:
        """Returns the chunk that carries the usage. It is the last one, if the client asked for it."""

    def full_response(self, outputs: Sequence[CompletionOutput], usage: Usage) -> BaseModel:
        """Returns the whole response, for a request that is not streamed."""


@dataclass(frozen=True)
class ChunkResponder:
    """The responder of both completion endpoints."""

    service: Service
    job: GenerationJob
    formatter: ResponseFormatter
    stream_options: StreamOptions | None = None

    async def full(self, deltas: Deltas) -> Response:
        job = self.job
        outputs = [CompletionOutput(index) for index in range(job.choices)]
        async with aclosing(deltas):
            async for delta in deltas:
                outputs[delta.index].extend(delta)
        usage = usage_of(
            job.prompt_tokens,
            job.cached_tokens([output.cached_tokens for output in outputs]),
            sum(len(output.token_ids) for output in outputs),
        )

        def formatted() -> Response:
            return json_response(self.formatter.full_response(outputs, usage))

        return formatted() if job.params.prompt_logprobs is None else await self.service.in_text_thread(formatted)

    async def events(self, deltas: Deltas) -> AsyncGenerator[bytes, None]:
        job = self.job
        completion_tokens, cached_tokens = [0] * job.choices, [0] * job.choices
        # As in vLLM, usage in every chunk needs both options, and is that of the chunk's choice.
        options = self.stream_options
        include_usage = options is not None and bool(options.include_usage)
        in_every_chunk = include_usage and options is not None and bool(options.continuous_usage_stats)

        def event_of_choice(index: int, chunk: ChunkBase) -> bytes:
            if in_every_chunk:
                chunk.usage = usage_of(job.prompt_tokens_of(index), cached_tokens[index], completion_tokens[index])
            return event_of(chunk)

        def event_of_delta(delta: Delta) -> bytes | None:
            chunk = self.formatter.chunk(delta)
            return None if chunk is None else event_of_choice(delta.index, chunk)

        try:
            begun = False
            async for delta in deltas:
                cached_tokens[delta.index] = delta.cached_tokens
                if not begun:
                    begun = True
                    for index in range(job.choices):
                        if (chunk := self.formatter.first_chunk(index)) is not None:
                            yield event_of_choice(index, chunk)
                completion_tokens[delta.index] += len(delta.token_ids)
                if delta.prompt_logprobs is None:
                    event = event_of_delta(delta)
                else:
                    event = await self.service.in_text_thread(partial(event_of_delta, delta))
                if event is not None:
                    yield event
        except Exception as error:
            yield event_of(error_body(error))
            return
        if include_usage:
            usage = usage_of(job.prompt_tokens, job.cached_tokens(cached_tokens), sum(completion_tokens))
            yield event_of(self.formatter.usage_chunk(usage))
        yield DONE
