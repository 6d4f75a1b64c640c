"""Messages and the events of their streams in the shape of Anthropic's `/v1/messages`."""

from typing import Any, Literal

from pydantic import BaseModel

from hotset.serve.responses import omitted_if_none

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessagesErrorDetails(BaseModel):
    """The code and the field of an error, as in the errors of other endpoints."""

    error_code: str | None
    param: str | None = omitted_if_none()


class MessagesErrorDetail(BaseModel):
    type: str
    message: str
    details: MessagesErrorDetails


class MessagesError(BaseModel):
    """The body of an error, and the event of a stream that ends early."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | None = omitted_if_none()


class TextContent(BaseModel):
    type: Literal["text"] = "text"
    text: str
    citations: None = None


class ThinkingContent(BaseModel):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""  # thoughts are not signed, nor checked when a client sends them back


class ToolUseContent(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(BaseModel):
    """The tokens of the prompt are the sum of `input_tokens` and `cache_read_input_tokens`."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens: int


class MessageObject(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(BaseModel):
    input_tokens: int


class MessageStart(BaseModel):
    type: Literal["message_start"] = "message_start"
    message: MessageObject


class Ping(BaseModel):
    type: Literal["ping"] = "ping"


class BlockStart(BaseModel):
    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: ContentBlock


class TextDelta(BaseModel):
    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingDelta(BaseModel):
    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class InputJsonDelta(BaseModel):
    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


class BlockDelta(BaseModel):
    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class BlockStop(BaseModel):
    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class MessageEnd(BaseModel):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(BaseModel):
    type: Literal["message_delta"] = "message_delta"
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(BaseModel):
    type: Literal["message_stop"] = "message_stop"


class MessageStreamEvent(BaseModel):
    """Documents the events of a stream. Each event is sent by itself, not within this object."""

    event: MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessagesError
