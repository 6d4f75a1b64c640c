"""POST /v1/completions."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from hotset.base.errors import RequestError
from hotset.base.sampling import SamplingParams
from hotset.engine.outputs import CompletionOutput, Delta
from hotset.models.tokenizer import Tokenizer
from hotset.serve.generation import Job, ending, respond
from hotset.serve.logprobs import CompletionLogprobWriter
from hotset.serve.protocol import (
    MAX_PROMPTS,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionRequest,
    Usage,
)
from hotset.serve.service import Service

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class CompletionFormatter:
    """Answers as text completions; the choices of one prompt follow those of the prompt before it."""

    id: str
    model: str
    tokenizer: Tokenizer | None
    prompts: Sequence[list[int]]
    params: SamplingParams
    show_token_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))
    _writers: dict[int, CompletionLogprobWriter] = field(default_factory=dict)
    _introduced: set[int] = field(default_factory=set)

    def opening(self, index: int) -> CompletionChunk | None:
        return None

    def chunk(self, delta: Delta) -> CompletionChunk | None:
        wants_tokens = self.params.logprobs is not None or self.show_token_ids
        if not delta.text and delta.finish_reason is None and not wants_tokens:
            return None
        return self._chunk([self._choice(delta)])

    def closing(self, usage: Usage) -> CompletionChunk:
        return self._chunk([], usage)

    def whole(self, outputs: Sequence[CompletionOutput], usage: Usage) -> Completion:
        choices = [self._choice(output) for output in outputs]
        return Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None = None) -> CompletionChunk:
        return CompletionChunk(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    def _choice(self, piece: Delta | CompletionOutput) -> CompletionChoice:
        prompt_ids = None
        if self.show_token_ids and piece.index not in self._introduced:
            self._introduced.add(piece.index)
            prompt_ids = self.prompts[piece.index // self.params.n]
        return CompletionChoice(
            index=piece.index,
            text=piece.text,
            logprobs=self._logprobs(piece),
            finish_reason=ending(piece),
            stop_reason=piece.stop_reason,
            prompt_token_ids=prompt_ids,
            token_ids=list(piece.token_ids) if self.show_token_ids else None,
        )

    def _logprobs(self, piece: Delta | CompletionOutput) -> CompletionLogprobs | None:
        if self.params.logprobs is None:
            return None
        writer = self._writers.get(piece.index)
        if writer is None:
            writer = CompletionLogprobWriter(self.tokenizer, self.params.skip_special_tokens)
            self._writers[piece.index] = writer
        return writer.write(piece.token_ids, piece.logprobs or ())


async def completion(request: Request, service: Service, body: CompletionRequest) -> Response:
    """Continues prompts. RequestError where the request cannot be met, EngineStopped where nothing can."""
    service.check_model(body.model)
    service.check_open()
    prompts = await _prompts(service, body)
    # A client that names no limit gets what still fits; where that is too little, the engine's intake says so.
    room = service.client.model.max_model_len - max(map(len, prompts))
    default = max(1, body.min_tokens or 0, min(DEFAULT_MAX_TOKENS, room))
    max_tokens = default if body.max_tokens is None else body.max_tokens
    params = service.sampling_params(body, max_tokens=max_tokens, logprobs=body.logprobs)
    if len(prompts) * params.n > MAX_PROMPTS:
        message = f"{len(prompts)} prompts with n = {params.n} make more than {MAX_PROMPTS} choices"
        raise RequestError(message, param="n", code="invalid_value")
    wording = CompletionFormatter(
        id=f"cmpl-{uuid.uuid4().hex}",
        model=service.model_name,
        tokenizer=service.client.tokenizer,
        prompts=prompts,
        params=params,
        show_token_ids=bool(body.return_token_ids),
    )
    usage_wanted = body.stream_options is not None and bool(body.stream_options.include_usage)
    job = Job(
        *(wording.id, prompts, params, wording, bool(body.stream), usage_wanted),
        tiers=body.tiers or "auto",
        landing=body.landing or "auto",
        prefill_at=service.prefill_at(request.headers),
    )
    return await respond(request, service, job)


async def _prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    """The prompts as token ids, whichever of the four forms they came in."""
    given = body.prompt
    if isinstance(given, str):
        return [await service.encode(given)]
    prompts: list[list[int]] = []
    alone: list[int] = []
    for item in given:
        if isinstance(item, int):
            alone.append(item)
        else:
            prompts.append(await service.encode(item) if isinstance(item, str) else item)
    return prompts or [alone]
