"""The generation that all chat endpoints share: a conversation becomes a prompt, and the text of its answer events.

An endpoint makes a `Conversation`, encodes it, and calls `generation.respond` with its own responder. The responder
reads the deltas through `events_of`, or through one `AnswerReader` per choice.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal

from hotset.base.errors import ContextLengthExceeded
from hotset.base.sampling import SamplingParams
from hotset.engine.outputs import Delta
from hotset.models.answer_parser import REASONING_END, AnswerParser, ends_in_reasoning
from hotset.models.chat_prompt import ChatOptions, Message
from hotset.serve.generation import Deltas, GenerationJob, usage_of
from hotset.serve.responses import Usage
from hotset.serve.service import Service
from hotset.serve.tools.calls import CallArguments, CallBegins, Piece, TextPiece, ToolCall, ToolUse

AnswerFinish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation and how it becomes a prompt. `messages` have the form that chat templates expect."""

    messages: tuple[Message, ...]
    options: ChatOptions = field(default_factory=ChatOptions)
    tool_use: ToolUse = field(default_factory=ToolUse)
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """New text of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer has ended. `stop_reason` is the stop string or token id that ended it."""

    reason: AnswerFinish
    usage: Usage
    stop_reason: str | int | None = None


AnswerPiece = ReasoningPiece | Piece
AnswerEvent = AnswerPiece | Finished


@dataclass(frozen=True, slots=True)
class ConversationPrompt:
    """The prompt of a conversation. `new_reader` makes a reader for one answer to it."""

    token_ids: list[int]
    new_reader: Callable[[], "AnswerReader"]
    begins_in_reasoning: bool = False  # the answer begins with reasoning, which ends with REASONING_END

    def constrained(self, params: SamplingParams) -> SamplingParams:
        """Returns `params` with the constraint that the tool choice puts on the answer. A structure begins after the
        reasoning."""
        if params.structure is None or not self.begins_in_reasoning:
            return params
        return replace(params, structure=replace(params.structure, after=REASONING_END))


class AnswerReader:
    """Reads the text of one answer, in any pieces. Nothing that may be half of a marker is returned as text."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self.has_calls = False

    def feed(self, text: str) -> list[AnswerPiece]:
        """Returns the pieces that `text` completes."""
        return [
            ReasoningPiece(part.text) if part.channel == "reasoning" else TextPiece(part.text)
            for part in self._parser.push(text)
        ]

    def finish(self) -> list[AnswerPiece]:
        """Ends the text and returns the pieces that were held back."""
        return [
            ReasoningPiece(part.text) if part.channel == "reasoning" else TextPiece(part.text)
            for part in self._parser.finish()
        ]

    def read(self, delta: Delta) -> list[AnswerPiece]:
        """Returns the pieces that a delta completes, and all that are left if it is the last one."""
        pieces = self.feed(delta.text)
        return pieces if delta.finish_reason is None else pieces + self.finish()

    def finish_reason(self, reason: Literal["stop", "length"]) -> AnswerFinish:
        """Returns the reason that clients get: an answer with calls that ended by itself ends with these calls."""
        return "tool_calls" if self.has_calls and reason == "stop" else reason


@dataclass(frozen=True, slots=True)
class Answer:
    """A collected answer. `text` and `reasoning` are empty if there are none."""

    reasoning: str
    text: str
    calls: tuple[ToolCall, ...]

    @classmethod
    def of(cls, pieces: list[AnswerPiece]) -> "Answer":
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
        text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
        calls: list[ToolCall] = []
        for piece in pieces:
            if isinstance(piece, CallBegins):
                calls.append(ToolCall(piece.id, piece.name, ""))
            elif isinstance(piece, CallArguments):
                calls[piece.index] = replace(calls[piece.index], arguments=calls[piece.index].arguments + piece.text)
        return cls(reasoning, text, tuple(calls))


@dataclass(frozen=True, slots=True)
class CollectedAnswer:
    """A whole answer, and how it ended."""

    answer: Answer
    finished: Finished


async def encode_conversation(
    service: Service, conversation: Conversation, max_tokens: int | None = None
) -> ConversationPrompt:
    """Returns the prompt of a conversation. Raises RequestError if the chat template fails, and ContextLengthExceeded
    for a long prompt with more than `max_tokens` tokens; the default is the model's context length."""
    tokenizer, options = service.tokenizer, conversation.options
    messages = conversation.messages
    text = await service.in_template_thread(lambda: tokenizer.render_chat(messages, options))
    try:
        ids = await service.encode(text, max_tokens, add_special=conversation.add_special_tokens)
    except ContextLengthExceeded as error:
        error.param = "messages"
        raise
    in_reasoning = ends_in_reasoning(text, messages[-1]["content"] if options.continue_final_message else "")
    return ConversationPrompt(
        ids,
        lambda: AnswerReader(tokenizer.answer_parser(in_reasoning=in_reasoning)),
        begins_in_reasoning=in_reasoning and tokenizer.parses_reasoning,
    )


async def events_of(deltas: Deltas, job: GenerationJob, reader: AnswerReader) -> AsyncGenerator[AnswerEvent, None]:
    """Yields the events of the only answer of a job. The last one is Finished. Closes `deltas`."""
    tokens = 0
    async with aclosing(deltas):
        async for delta in deltas:
            tokens += len(delta.token_ids)
            for piece in reader.read(delta):
                yield piece
            if delta.finish_reason is not None:
                assert delta.finish_reason in ("stop", "length"), "other reasons are raised as errors"
                usage = usage_of(job.prompt_tokens, delta.cached_tokens, tokens)
                yield Finished(reader.finish_reason(delta.finish_reason), usage, delta.stop_reason)


async def collected(events: AsyncIterator[AnswerEvent]) -> CollectedAnswer:
    """Returns the whole answer. Raises the errors of `events`."""
    pieces: list[AnswerPiece] = []
    finished: Finished | None = None
    async for event in events:
        if isinstance(event, Finished):
            finished = event
        else:
            pieces.append(event)
    assert finished is not None, "events_of ends with Finished"
    return CollectedAnswer(Answer.of(pieces), finished)
