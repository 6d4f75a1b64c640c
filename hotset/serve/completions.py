"""POST /v1/completions."""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from hotset.base.errors import RequestError
from hotset.base.sampling import SamplingParams
from hotset.engine.outputs import CompletionOutput, Delta
from hotset.serve.chunks import ChunkResponder, ResponseFormatter
from hotset.serve.generation import GenerationJob, api_finish_reason, respond
from hotset.serve.http_server import unless_disconnected
from hotset.serve.logprobs import CompletionLogprobWriter
from hotset.serve.protocol import MAX_PROMPTS, CompletionRequest
from hotset.serve.responses import Completion, CompletionChoice, CompletionChunk, CompletionLogprobs, Usage
from hotset.serve.service import Service

DEFAULT_MAX_TOKENS = 16
MAX_BATCH_TOKENS = 1 << 20  # of all prompts of a request, unless the model's context is longer


@dataclass(frozen=True, kw_only=True)
class CompletionFormatter(ResponseFormatter):
    """Formats output as text completions. Choices are numbered prompt by prompt, beginning with the first."""

    prompts: Sequence[list[int]]
    params: SamplingParams
    show_token_ids: bool
    echoed: Sequence[str] | None  # the texts of the prompts, if they are shown before the answers
    _writers: dict[int, CompletionLogprobWriter] = field(default_factory=dict)
    _started: set[int] = field(default_factory=set)  # choices whose prompts were already shown

    def chunk(self, delta: Delta) -> CompletionChunk | None:
        shows_prompt = (self.echoed is not None or delta.prompt_logprobs) and delta.index not in self._started
        shows_tokens = self.params.logprobs is not None or self.show_token_ids or shows_prompt
        if not delta.text and delta.finish_reason is None and not shows_tokens:
            return None
        return self._chunk([self._choice(delta)])

    def usage_chunk(self, usage: Usage) -> CompletionChunk:
        return self._chunk([], usage)

    def full_response(self, outputs: Iterable[CompletionOutput], usage: Usage) -> Completion:
        return Completion(**self.header, choices=map(self._choice, outputs), usage=usage)

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None = None) -> CompletionChunk:
        return CompletionChunk(**self.header, choices=choices, usage=usage)

    def _choice(self, piece: Delta | CompletionOutput) -> CompletionChoice:
        first = piece.index not in self._started
        self._started.add(piece.index)
        prompt = piece.index // self.params.n
        echoed = self.echoed[prompt] if first and self.echoed is not None else None
        return CompletionChoice(
            index=piece.index,
            text=(echoed or "") + piece.text,
            logprobs=self._logprobs(piece, echoed),
            finish_reason=api_finish_reason(piece),
            stop_reason=piece.stop_reason,
            prompt_token_ids=self.prompts[prompt] if first and self.show_token_ids else None,
            token_ids=list(piece.token_ids) if self.show_token_ids else None,
            prompt_logprobs=self.prompt_logprobs(piece),
        )

    def _logprobs(self, piece: Delta | CompletionOutput, echoed: str | None) -> CompletionLogprobs | None:
        """Returns the log-probabilities of a piece, after those of its prompt if `echoed` is the prompt's text."""
        if self.params.logprobs is None:
            return None
        writer = self._writers.get(piece.index)
        if writer is None:
            writer = CompletionLogprobWriter(self.tokenizer, self.params.skip_special_tokens, self.params.logprobs)
            self._writers[piece.index] = writer
        if echoed is None:
            return writer.write(piece.token_ids, piece.logprobs or ())
        assert piece.prompt_logprobs is not None, "echo with logprobs needs the log-probabilities of the prompt"
        of_prompt = writer.write_prompt(self.prompts[piece.index // self.params.n], piece.prompt_logprobs, echoed)
        return of_prompt.followed_by(writer.write(piece.token_ids, piece.logprobs or ()))


async def completion(request: Request, service: Service, body: CompletionRequest) -> Response:
    """Continues prompts. Raises RequestError if they are refused, and the errors of `EngineClient.generate`."""
    service.check_model(body.model)
    service.check_open()
    options = service.request_options(body, request.headers)
    prompts = await unless_disconnected(request.receive, _prompts(service, body))
    # If the client sets no limit, the default is lowered to the room that the longest prompt leaves in the context, but
    # not below 1 or `min_tokens`. The engine client rejects a request that does not fit.
    room = service.client.model.max_model_len - max(map(len, prompts))
    default = max(1, body.min_tokens or 0, min(DEFAULT_MAX_TOKENS, room))
    max_tokens = default if body.max_tokens is None else body.max_tokens
    params = service.completion_params(body, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None:
        params = replace(params, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    if len(prompts) * params.n > MAX_PROMPTS:
        message = f"{len(prompts)} prompts with n = {params.n} make more than {MAX_PROMPTS} choices; send fewer"
        raise RequestError(message, param="n", code="invalid_value")
    echoed = await service.texts(prompts, skip_special=params.skip_special_tokens) if body.echo else None
    formatter = CompletionFormatter(
        id=f"cmpl-{uuid.uuid4().hex}",
        model=service.model_name,
        fingerprint=service.fingerprint,
        tokenizer=service.client.tokenizer,
        prompts=prompts,
        params=params,
        show_token_ids=bool(body.return_token_ids),
        echoed=echoed,
        prompt_alternatives=body.prompt_logprobs,
    )
    job = GenerationJob(
        request_id=formatter.id,
        prompts=prompts,
        params=params,
        options=options,
        stream=bool(body.stream),
        prompt_logprobs_field="logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
    )
    return await respond(request, service, job, ChunkResponder(service, job, formatter, body.stream_options))


async def _prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    """Returns the prompts as token ids, truncated as requested. The API accepts a text, texts, token ids, or lists of
    token ids.

    Raises RequestError if all prompts together have too many tokens.
    """
    items = cast(list[str | list[int]], _as_batch(body.prompt))
    limit = max(MAX_BATCH_TOKENS, service.client.model.max_model_len)
    prompts: list[list[int]] = []
    total = 0
    for item in items:
        token_ids = item if isinstance(item, list) else await _encoded(service, body, item)
        answer_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        prompts.append(service.truncated(token_ids, body, answer_tokens))
        total += len(prompts[-1])
        if len(items) > 1 and total > limit:
            raise RequestError(
                f"the first {len(prompts)} of {len(items)} prompts have {total} tokens, and the limit for all prompts "
                f"together is {limit}; send fewer at a time",
                param="prompt",
                code="invalid_value",
            )
    return prompts


async def _encoded(service: Service, body: CompletionRequest, text: str) -> list[int]:
    add_special = body.add_special_tokens is not False
    return await service.encode(text, service.max_untruncated(body), add_special=add_special)


def _as_batch(prompt: str | list[str] | list[int] | list[list[int]]) -> object:
    """Returns a list of prompts. A single prompt is a text or a list of token ids."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
