"""POST /v1/chat/completions."""

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from starlette.requests import Request
from starlette.responses import Response

from hotset.engine.outputs import CompletionOutput, Delta
from hotset.models.chat_prompt import ChatOptions
from hotset.serve.blocks import AnswerBlocks
from hotset.serve.chunks import ChunkResponder, ResponseFormatter
from hotset.serve.conversation import (
    AnswerPiece,
    AnswerReader,
    Conversation,
    ReasoningPiece,
    encode_conversation,
    rename_error_fields,
    thinking_kwargs,
)
from hotset.serve.fair_queue import client_of
from hotset.serve.generation import GenerationJob, api_finish_reason, respond
from hotset.serve.http_server import unless_disconnected
from hotset.serve.logprobs import chat_logprobs
from hotset.serve.protocol import ChatFields, ChatMessage, ChatRequest
from hotset.serve.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    DeltaMessage,
    FormattedPromptLogprobs,
    FunctionCall,
    FunctionCallDelta,
    MessageToolCall,
    ToolCallDelta,
    Usage,
)
from hotset.serve.service import Service
from hotset.serve.tools.calls import CallArguments, CallBegins, CallBreaks, TextPiece
from hotset.serve.tools.fields import tool_use_of


@dataclass(frozen=True, kw_only=True)
class ChatFormatter(ResponseFormatter):
    """Formats output as chat completions. `prompt_token_ids` is None unless the client asked for token ids."""

    alternatives: int | None  # number of alternatives listed per token; None: no log-probabilities
    prompt_token_ids: list[int] | None
    new_reader: Callable[[], AnswerReader]
    show_reasoning: bool = True
    _readers: dict[int, AnswerReader] = field(default_factory=dict)  # of the choices that are being streamed

    def first_chunk(self, index: int) -> ChatCompletionChunk:
        choice = ChatChunkChoice(
            index=index,
            delta=DeltaMessage(role="assistant", content=""),
            logprobs=None,
            finish_reason=None,
            prompt_token_ids=self.prompt_token_ids,
        )
        return self._chunk([choice])

    def chunk(self, delta: Delta) -> ChatCompletionChunk | None:
        if delta.index not in self._readers:
            self._readers[delta.index] = self.new_reader()
        reader = self._readers[delta.index]
        pieces = reader.read(delta)
        text = "".join(_shown_text(piece) for piece in pieces)
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
        message = DeltaMessage(
            content=text or None,
            reasoning_content=(reasoning or None) if self.show_reasoning else None,
            tool_calls=_call_deltas(pieces) or None,
        )
        shows_tokens = self.alternatives is not None or self.prompt_token_ids is not None or delta.prompt_logprobs
        if message == DeltaMessage() and delta.finish_reason is None and not shows_tokens:
            return None
        choice = ChatChunkChoice(
            index=delta.index,
            delta=message,
            logprobs=self._logprobs(delta),
            finish_reason=reader.finish_reason(api_finish_reason(delta)),
            stop_reason=delta.stop_reason,
            token_ids=self._token_ids(delta),
        )
        return self._chunk([choice], prompt_logprobs=self.prompt_logprobs(delta) if delta.index == 0 else None)

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        return self._chunk([], usage)

    def full_response(self, outputs: Iterable[CompletionOutput], usage: Usage) -> ChatCompletion:
        others = iter(outputs)
        first = next(others)
        choices, prompt_logprobs = map(self._choice, chain([first], others)), self.prompt_logprobs(first)
        return ChatCompletion(**self.header, choices=choices, usage=usage, prompt_logprobs=prompt_logprobs)

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        reader = self.new_reader()
        answer = AnswerBlocks()
        answer.add(reader.feed(output.text) + reader.finish())
        text, reasoning = answer.text("text"), answer.text("reasoning")
        calls = [
            MessageToolCall(id=block.call.id, function=FunctionCall(name=block.call.name, arguments=block.text))
            for block in answer.blocks
            if block.call is not None
        ]
        message = AssistantMessage(
            role="assistant",
            content=text or (None if reasoning or calls else ""),
            reasoning_content=(reasoning or None) if self.show_reasoning else None,
            tool_calls=calls or None,
        )
        return ChatChoice(
            index=output.index,
            message=message,
            logprobs=self._logprobs(output),
            finish_reason=reader.finish_reason(api_finish_reason(output)),
            stop_reason=output.stop_reason,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=self._token_ids(output),
        )

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | None = None,
        prompt_logprobs: FormattedPromptLogprobs | None = None,
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self.header, choices=choices, usage=usage, prompt_logprobs=prompt_logprobs)

    def _token_ids(self, piece: Delta | CompletionOutput) -> list[int] | None:
        return None if self.prompt_token_ids is None else list(piece.token_ids)

    def _logprobs(self, piece: Delta | CompletionOutput) -> ChatLogprobs | None:
        if self.alternatives is None:
            return None
        return chat_logprobs(self.tokenizer, piece.token_ids, piece.logprobs or (), self.alternatives)


def _shown_text(piece: AnswerPiece) -> str:
    """Returns the content that a stream shows. For a broken call, the content is its text that was not sent yet."""
    return piece.text if isinstance(piece, TextPiece) else piece.unsent if isinstance(piece, CallBreaks) else ""


def _call_deltas(pieces: Sequence[AnswerPiece]) -> list[ToolCallDelta]:
    """Returns at most one delta for each call: clients merge the deltas of a call over chunks."""
    deltas: dict[int, ToolCallDelta] = {}
    for piece in pieces:
        if isinstance(piece, CallBegins):
            function = FunctionCallDelta(name=piece.name, arguments="")
            deltas[piece.index] = ToolCallDelta(index=piece.index, id=piece.id, type="function", function=function)
        elif isinstance(piece, CallArguments):
            delta = deltas.setdefault(
                piece.index, ToolCallDelta(index=piece.index, function=FunctionCallDelta(arguments=""))
            )
            delta.function.arguments += piece.text
    return list(deltas.values())


async def chat_completion(request: Request, service: Service, body: ChatRequest) -> Response:
    """Answers a conversation. Raises RequestError if it is refused, and the errors of `EngineClient.generate`."""
    service.check_model(body.model)
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    params = service.completion_params(body, max_tokens=max_tokens, logprobs=alternatives)
    service.check_open(params.n)
    options = service.request_options(body, request.headers)
    conversation = conversation_of(body.messages, body, body.parallel_tool_calls)
    encoding = encode_conversation(service, client_of(request), conversation, service.max_untruncated(body))
    prompt = await unless_disconnected(request.receive, encoding)
    token_ids = service.truncated(prompt.token_ids, body, max_tokens or 1)
    formatter = ChatFormatter(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        model=service.model_name,
        fingerprint=service.fingerprint,
        tokenizer=service.client.tokenizer,
        alternatives=alternatives,
        prompt_token_ids=token_ids if body.return_token_ids else None,
        prompt_alternatives=body.prompt_logprobs,
        new_reader=prompt.new_reader,
        show_reasoning=body.include_reasoning is not False,
    )
    job = GenerationJob(
        request_id=formatter.id,
        prompts=[token_ids],
        params=prompt.constrained(params),
        options=options,
        stream=bool(body.stream),
        logprobs_field="top_logprobs" if body.top_logprobs else "logprobs",
    )
    with rename_error_fields({"prompt": "messages"}), prompt.attribute_errors_to_tools():
        return await respond(request, service, job, ChunkResponder(service, job, formatter, body.stream_options))


def conversation_of(
    messages: Sequence[ChatMessage], fields: ChatFields, parallel_tool_calls: bool | None = None
) -> Conversation:
    """Returns the conversation of a request. Raises RequestError if its tools are not usable.

    `chat_template_kwargs` has precedence over `reasoning_effort`, for which templates have several names.
    """
    thinking = {} if fields.reasoning_effort is None else thinking_kwargs(fields.reasoning_effort)
    options = ChatOptions(
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=bool(fields.continue_final_message),
        template_kwargs=thinking | (fields.chat_template_kwargs or {}),
    )
    turns = tuple(message.for_template() for message in messages)
    tool_use = tool_use_of(fields.tools, fields.tool_choice, parallel_tool_calls)
    return Conversation(turns, options, tool_use, add_special_tokens=bool(fields.add_special_tokens))
