"""Responses in the form of the OpenAI completion endpoints: one object, or a stream of chunks that ends with [DONE]."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from hotset.engine.outputs import CompletionOutput, Delta
from hotset.models.tokenizer import Tokenizer
from hotset.serve.errors import error_body
from hotset.serve.generation import Deltas, GenerationJob, usage_of
from hotset.serve.logprobs import prompt_logprobs
from hotset.serve.protocol import StreamOptions
from hotset.serve.responses import ChunkBase, FormattedPromptLogprobs, Usage
from hotset.serve.service import Service
from hotset.serve.streams import (
    PIECE_BYTES,
    PiecewiseResponse,
    chained,
    event_of,
    event_pieces,
    json_pieces,
    json_response,
)

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, kw_only=True)
class ResponseFormatter(ABC):
    """Formats the output of one request for one endpoint. Choices are numbered over the whole response."""

    id: str
    model: str
    fingerprint: str
    tokenizer: Tokenizer | None
    prompt_alternatives: int | None  # alternatives listed per token of a prompt; None: no log-probabilities of prompts
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def header(self) -> dict[str, Any]:
        """The fields that all responses and chunks have."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def prompt_logprobs(self, piece: Delta | CompletionOutput) -> FormattedPromptLogprobs | None:
        if piece.prompt_logprobs is None or self.prompt_alternatives is None:
            return None
        return prompt_logprobs(self.tokenizer, piece.prompt_logprobs, self.prompt_alternatives)

    def first_chunk(self, index: int) -> ChunkBase | None:
        """Returns the chunk that opens a choice, or None if the endpoint has no such chunk."""
        return None

    @abstractmethod
    def chunk(self, delta: Delta) -> ChunkBase | None:
        """Returns the chunk for one delta, or None if the delta has nothing to show."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> ChunkBase:
        """Returns the chunk that carries the usage. It is the last one, if the client asked for it."""

    @abstractmethod
    def full_response(self, outputs: Iterable[CompletionOutput], usage: Usage) -> BaseModel:
        """Returns the whole response, for a request that is not streamed. `outputs` is read while it is written."""


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
                # The choices of one prompt share its log-probabilities, which arrive with every choice.
                if delta.prompt_logprobs is not None:
                    first_choice = outputs[delta.index - delta.index % job.params.n]
                    first_choice.prompt_logprobs = first_choice.prompt_logprobs or delta.prompt_logprobs
                    delta = replace(delta, prompt_logprobs=first_choice.prompt_logprobs)
                outputs[delta.index].extend(delta)
        usage = usage_of(
            job.prompt_tokens,
            job.cached_tokens([output.cached_tokens for output in outputs]),
            sum(len(output.token_ids) for output in outputs),
        )
        if job.params.logprobs is None and job.params.prompt_logprobs is None:
            return json_response(self.formatter.full_response(outputs, usage))

        def formatted() -> Iterator[bytes]:
            yield from json_pieces(self.formatter.full_response(_popped(outputs), usage))

        pieces = self._in_text_thread(formatted())
        first = await anext(pieces)
        if len(first) < PIECE_BYTES:  # the only piece
            return Response(first, media_type="application/json")
        return PiecewiseResponse(chained(first, pieces), deltas)

    async def events(self, deltas: Deltas) -> AsyncGenerator[bytes, None]:
        job = self.job
        completion_tokens, cached_tokens = [0] * job.choices, [0] * job.choices
        # As in vLLM, usage in every chunk needs both options, and counts only the choice of the chunk.
        options = self.stream_options
        include_usage = options is not None and bool(options.include_usage)
        in_every_chunk = include_usage and options is not None and bool(options.continuous_usage_stats)

        def with_usage(index: int, chunk: ChunkBase) -> ChunkBase:
            if in_every_chunk:
                chunk.usage = usage_of(job.prompt_tokens_of(index), cached_tokens[index], completion_tokens[index])
            return chunk

        def event_pieces_of(delta: Delta) -> Iterator[bytes]:
            if (chunk := self.formatter.chunk(delta)) is not None:
                yield from event_pieces(with_usage(delta.index, chunk))

        try:
            begun = False
            async for delta in deltas:
                cached_tokens[delta.index] = delta.cached_tokens
                if not begun:
                    begun = True
                    for index in range(job.choices):
                        if (chunk := self.formatter.first_chunk(index)) is not None:
                            yield event_of(with_usage(index, chunk))
                completion_tokens[delta.index] += len(delta.token_ids)
                if delta.prompt_logprobs is not None:
                    async for piece in self._in_text_thread(event_pieces_of(delta)):
                        yield piece
                elif (chunk := self.formatter.chunk(delta)) is not None:
                    yield event_of(with_usage(delta.index, chunk))
                if delta.logprobs is not None:
                    await asyncio.sleep(0)  # lets other requests run, even if many deltas are waiting
        except Exception as error:
            yield event_of(error_body(error))
            return
        if include_usage:
            usage = usage_of(job.prompt_tokens, job.cached_tokens(cached_tokens), sum(completion_tokens))
            yield event_of(self.formatter.usage_chunk(usage))
        yield DONE

    async def _in_text_thread(self, pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Yields the pieces. A thread formats each piece when the previous one has been sent."""
        while piece := await self.service.in_text_thread(partial(next, pieces, b"")):
            yield piece


def _popped(outputs: list[CompletionOutput]) -> Iterator[CompletionOutput]:
    """Yields the outputs and removes them from the list, so that their memory is freed."""
    while outputs:
        yield outputs.pop(0)
