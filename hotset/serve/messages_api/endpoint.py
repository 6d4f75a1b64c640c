"""POST /v1/messages and POST /v1/messages/count_tokens."""

import json
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from hotset.serve.agent_request import AgentTurn, answer
from hotset.serve.blocks import AnswerBlocks, Block, BlockChange
from hotset.serve.conversation import (
    AnswerPiece,
    AnswerReader,
    Finished,
    ReasoningPiece,
    collected,
    encode_conversation,
    events_of,
    rename_error_fields,
)
from hotset.serve.fair_queue import client_of
from hotset.serve.generation import Deltas, GenerationJob
from hotset.serve.messages_api.answer import (
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    InputJsonDelta,
    MessageDelta,
    MessageEnd,
    MessageObject,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    TokenCount,
    ToolUseContent,
)
from hotset.serve.messages_api.errors import error_event
from hotset.serve.messages_api.request import CountTokensRequest, MessagesRequest
from hotset.serve.service import Service
from hotset.serve.streams import event_of, json_response

# Names of fields in errors of code that endpoints share, and the names of these fields at this endpoint.
FIELD_NAMES = {"prompt": "messages"}


async def create_message(request: Request, service: Service, body: MessagesRequest) -> Response:
    """Answers a conversation. Raises RequestError if it is refused, and the errors of `EngineClient.generate`."""

    def new_responder(job: GenerationJob, reader: AnswerReader) -> MessagesResponder:
        return MessagesResponder(job, reader, service.model_name, body.max_tokens, body.shows_thinking)

    with rename_error_fields(FIELD_NAMES):
        turn = AgentTurn(
            id=f"msg_{uuid.uuid4().hex}",
            conversation=body.conversation(),
            max_tokens=body.max_tokens,
            stops_at_context=True,
            stop=tuple(body.stop_sequences or ()),
            structure=body.structure(),
        )
        return await answer(request, service, body, turn, new_responder)


async def count_tokens(request: Request, service: Service, body: CountTokensRequest) -> Response:
    """Counts the tokens of the prompt that a request with these fields would have."""
    service.check_model(body.model)
    prompt = await encode_conversation(service, client_of(request), body.conversation(), service.max_text_tokens)
    return json_response(TokenCount(input_tokens=len(prompt.token_ids)))


@dataclass
class MessagesResponder:
    """Formats the deltas of a job as a message, or as the events of its stream."""

    job: GenerationJob
    reader: AnswerReader
    model: str
    max_tokens: int  # the client's limit; the job's limit may be lower
    shows_thinking: bool
    blocks: AnswerBlocks = field(default_factory=AnswerBlocks)
    cached_tokens: int = 0

    async def full(self, deltas: Deltas) -> Response:
        pieces, finished = await collected(events_of(self._watched(deltas), self.job, self.reader))
        self.blocks.add(piece for piece in pieces if self._is_shown(piece))
        message = self._message(finished)
        message.content = [_content(block) for block in self.blocks.blocks]
        return json_response(message)

    async def events(self, deltas: Deltas) -> AsyncGenerator[bytes, None]:
        has_begun = False
        try:
            async for event in events_of(self._watched(deltas), self.job, self.reader):
                if not has_begun:
                    has_begun = True
                    yield _event(MessageStart(message=self._message(None)))
                    yield _event(Ping())
                if isinstance(event, Finished):
                    for change in self.blocks.end():
                        yield _event(_shown(change))
                    message = self._message(event)
                    assert message.stop_reason is not None, "the answer has ended"
                    end = MessageEnd(stop_reason=message.stop_reason, stop_sequence=message.stop_sequence)
                    yield _event(MessageDelta(delta=end, usage=message.usage))
                    yield _event(MessageStop())
                else:
                    for change in self.blocks.push([event] if self._is_shown(event) else ()):
                        yield _event(_shown(change))
        except Exception as error:
            yield error_event(error)

    async def _watched(self, deltas: Deltas) -> Deltas:
        """Yields the deltas unchanged. Keeps the number of cached tokens, which the first event of a stream reports."""
        async for delta in deltas:
            self.cached_tokens = delta.cached_tokens
            yield delta

    def _is_shown(self, piece: AnswerPiece) -> bool:
        return self.shows_thinking or not isinstance(piece, ReasoningPiece)

    def _message(self, finished: Finished | None) -> MessageObject:
        """Returns the message without its content."""
        message = MessageObject(
            id=self.job.request_id,
            model=self.model,
            content=[],
            usage=MessageUsage(
                input_tokens=self.job.prompt_tokens - self.cached_tokens,
                cache_read_input_tokens=self.cached_tokens,
                output_tokens=finished.usage.completion_tokens if finished is not None else 0,
            ),
        )
        if finished is None:
            return message
        if finished.reason == "length":
            at_limit = finished.usage.completion_tokens >= self.max_tokens
            message.stop_reason = "max_tokens" if at_limit else "model_context_window_exceeded"
        elif isinstance(finished.stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", finished.stop_reason
        else:
            message.stop_reason = "tool_use" if finished.reason == "tool_calls" else "end_turn"
        return message


def _content(block: Block) -> ContentBlock:
    """Returns a block of a whole answer, in which no call is broken."""
    if block.kind == "reasoning":
        return ThinkingContent(thinking=block.text)
    if block.call is not None:
        return ToolUseContent(id=block.call.id, name=block.call.name, input=json.loads(block.text))
    return TextContent(text=block.text)


def _shown(change: BlockChange) -> BaseModel:
    """Returns the event that shows a change."""
    block = change.block
    if change.what == "ends":
        return BlockStop(index=block.index)
    if change.what == "begins":
        begun: ContentBlock
        if block.call is not None:
            begun = ToolUseContent(id=block.call.id, name=block.call.name, input={})
        else:
            begun = TextContent(text="") if block.kind == "text" else ThinkingContent(thinking="")
        return BlockStart(index=block.index, content_block=begun)
    delta: TextDelta | ThinkingDelta | InputJsonDelta
    if block.call is not None:
        delta = InputJsonDelta(partial_json=change.text)
    else:
        delta = TextDelta(text=change.text) if block.kind == "text" else ThinkingDelta(thinking=change.text)
    return BlockDelta(index=block.index, delta=delta)


def _event(body: BaseModel) -> bytes:
    return event_of(body, getattr(body, "type"))  # noqa: B009
