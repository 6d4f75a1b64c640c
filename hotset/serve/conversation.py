"""Code that all chat endpoints share: it turns a conversation into a prompt, and the text of an answer into events.

An endpoint makes a `Conversation`, encodes it, and calls `generation.respond` with its own responder. The responder
reads the deltas through `events_of`, or through one `AnswerReader` per choice.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

from hotset.base.errors import ContextLengthExceeded, RequestError
from hotset.base.sampling import SamplingParams
from hotset.base.structure import Structure
from hotset.engine.outputs import Delta
from hotset.models.answer_parser import REASONING_END, AnswerParser, TextPart, ends_in_reasoning
from hotset.models.chat_prompt import ChatOptions, Message
from hotset.models.tokenizer import Tokenizer
from hotset.serve.generation import Deltas, GenerationJob, api_finish_reason, usage_of
from hotset.serve.responses import Usage
from hotset.serve.service import Service
from hotset.serve.tools.calls import CallBegins, CallBreaks, CallEnds, Piece, TextPiece, ToolUse
from hotset.serve.tools.formats import ToolFormat, format_for, structure_in_process, takes_tools
from hotset.serve.tools.parsing import CallParser
from hotset.serve.tools.plain_template import plain_messages

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
    """New text of the reasoning before an answer."""

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
    structure: Structure | None = None  # of an answer that must be a call

    def constrained(self, params: SamplingParams) -> SamplingParams:
        """Returns `params` with the structure that the tool choice demands. A structure begins after the reasoning.

        Raises RequestError if the request demands another structure.
        """
        if self.structure is not None and params.structure is not None:
            message = "tool_choice demands a call, and the request also gives the answer a structure; send one of them"
            raise RequestError(message, param="tool_choice", code="invalid_value")
        structure = self.structure or params.structure
        if structure is not None and self.begins_in_reasoning:
            structure = replace(structure, after=REASONING_END)
        return params if structure is None else replace(params, structure=structure)

    @contextmanager
    def attribute_errors_to_tools(self) -> Iterator[None]:
        """Makes an error of the structure an error of the field `tools`, if the tools demand the structure."""
        try:
            yield
        except RequestError as error:
            if self.structure is not None and error.code == "invalid_structure":
                error.param = "tools"
            raise


class AnswerReader:
    """Reads the text of one answer, in any pieces. Text that may be the beginning of a marker is held back."""

    def __init__(self, parser: AnswerParser, calls: CallParser | None = None, *, parallel: bool = True) -> None:
        self._parser = parser
        self._calls = calls
        self._parallel = parallel
        self._dropped: int | None = None  # the index of a call that is left out
        self.has_calls = False  # the answer has complete calls

    def feed(self, text: str) -> list[AnswerPiece]:
        """Returns the pieces that `text` completes."""
        return self._pieces(self._parser.push(text))

    def finish(self) -> list[AnswerPiece]:
        """Ends the text and returns the pieces that were held back."""
        pieces = self._pieces(self._parser.finish())
        return pieces if self._calls is None else pieces + self._kept(self._calls.finish())

    def _pieces(self, parts: Iterable[TextPart]) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        for part in parts:
            if part.channel == "reasoning":
                pieces.append(ReasoningPiece(part.text))
            elif self._calls is None:
                pieces.append(TextPiece(part.text))
            else:
                pieces += self._kept(self._calls.feed(part.text))
        return pieces

    def _kept(self, pieces: Iterable[Piece]) -> list[AnswerPiece]:
        """Drops all calls after the first complete one if the client wants only one."""
        kept: list[AnswerPiece] = []
        for piece in pieces:
            if isinstance(piece, CallBegins) and self.has_calls and not self._parallel:
                self._dropped = piece.index
            if isinstance(piece, TextPiece) or piece.index != self._dropped:
                kept.append(piece)
            elif isinstance(piece, CallBreaks):
                kept.append(TextPiece(piece.source))
            self.has_calls = self.has_calls or isinstance(piece, CallEnds)
        return kept

    def read(self, delta: Delta) -> list[AnswerPiece]:
        """Returns the pieces that a delta completes, and all that are left if it is the last one."""
        pieces = self.feed(delta.text)
        return pieces if delta.finish_reason is None else pieces + self.finish()

    @overload
    def finish_reason(self, reason: Literal["stop", "length"]) -> AnswerFinish: ...

    @overload
    def finish_reason(self, reason: Literal["stop", "length"] | None) -> AnswerFinish | None: ...

    def finish_reason(self, reason: Literal["stop", "length"] | None) -> AnswerFinish | None:
        """Returns the reason that clients get. If the answer has calls and ended by itself, it is "tool_calls"."""
        return "tool_calls" if self.has_calls and reason == "stop" else reason


def thinking_kwargs(effort: str) -> dict[str, Any]:
    """Returns the variables, under all their names, with which chat templates turn thinking on or off."""
    thinks = effort != "none"
    return {"reasoning_effort": effort, "thinking": thinks, "enable_thinking": thinks}


@contextmanager
def rename_error_fields(fields: Mapping[str, str]) -> Iterator[None]:
    """Translates the field that a RequestError names: the chat template and the engine client use names of other
    endpoints."""
    try:
        yield
    except RequestError as error:
        error.param = fields.get(error.param or "", error.param)
        raise


async def encode_conversation(
    service: Service, client: str, conversation: Conversation, max_tokens: int | None = None
) -> ConversationPrompt:
    """Returns the prompt of a conversation that `client` sent. Raises RequestError if the chat template fails, and
    ContextLengthExceeded for a long prompt with more than `max_tokens` tokens; the default is the model's context
    length."""
    tokenizer, options, use = service.tokenizer, conversation.options, conversation.tool_use
    messages: Sequence[Message] = conversation.messages
    tool_format = _tool_format(service, tokenizer, use)
    if use.tools and not takes_tools(tokenizer.chat_template or ""):
        messages = plain_messages(messages, use.offered)
    options = replace(options, tools=tuple(tool.for_template() for tool in use.offered))
    text = await service.templates.run(client, lambda: tokenizer.render_chat(messages, options))
    try:
        ids = await service.encode(text, max_tokens, add_special=conversation.add_special_tokens)
    except ContextLengthExceeded as error:
        error.param = "messages"
        raise
    in_reasoning = ends_in_reasoning(text, messages[-1]["content"] if options.continue_final_message else "")

    def new_reader() -> AnswerReader:
        parser = tokenizer.answer_parser(in_reasoning=in_reasoning)
        calls = None if tool_format is None else tool_format.parser(use.tools)
        return AnswerReader(parser, calls, parallel=use.parallel)

    return ConversationPrompt(
        token_ids=ids,
        new_reader=new_reader,
        begins_in_reasoning=in_reasoning and tokenizer.parses_reasoning,
        structure=await _structure(service, client, tool_format, use) if tool_format and use.must_call else None,
    )


async def _structure(service: Service, client: str, tool_format: ToolFormat, use: ToolUse) -> Structure:
    tokenizer = service.tokenizer
    try:
        return await service.structures.run(
            client, lambda: structure_in_process(tokenizer.jobs, tool_format, use, tokenizer.grammar_ids)
        )
    except RequestError as error:
        error.param = "tools"  # the structure is too large, or a parameter has an unusable name
        raise


def _tool_format(service: Service, tokenizer: Tokenizer, use: ToolUse) -> ToolFormat | None:
    """Returns the format of calls in the answer, or None if it has none. Raises RequestError if tools are refused."""
    if not use.offered:
        return None
    tool_format = format_for(tokenizer.chat_template, service.config.tool_format)
    if tool_format is None:
        message = "this server refuses tools (--tool-format none); leave them out, or set tool_choice to none"
        raise RequestError(message, param="tools", code="unsupported_field")
    return tool_format


async def events_of(deltas: Deltas, job: GenerationJob, reader: AnswerReader) -> AsyncGenerator[AnswerEvent, None]:
    """Yields the events of the only answer of a job. The last one is Finished. Closes `deltas`."""
    tokens = 0
    async with aclosing(deltas):
        async for delta in deltas:
            tokens += len(delta.token_ids)
            for piece in reader.read(delta):
                yield piece
            if (reason := api_finish_reason(delta)) is not None:
                usage = usage_of(job.prompt_tokens, delta.cached_tokens, tokens)
                yield Finished(reader.finish_reason(reason), usage, delta.stop_reason)


async def collected(events: AsyncIterator[AnswerEvent]) -> tuple[list[AnswerPiece], Finished]:
    """Returns the pieces of a whole answer, and how it ended."""
    pieces: list[AnswerPiece] = []
    finished: Finished | None = None
    async for event in events:
        if isinstance(event, Finished):
            finished = event
        else:
            pieces.append(event)
    assert finished is not None, "events_of ends with Finished"
    return pieces, finished
