"""Responses and the events of their streams in the shape of OpenAI's `/v1/responses`."""

from typing import Any, Literal

from pydantic import BaseModel

from hotset.serve.responses import omitted_if_none

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class MessageItem(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(BaseModel):
    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCallItem(BaseModel):
    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = omitted_if_none()
    arguments: str


class CustomCallItem(BaseModel):
    """A call of a tool whose input is a text, not JSON."""

    id: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = omitted_if_none()
    input: str


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = 0  # not counted: output_tokens includes them


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class ResponseError(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """A response. The fields of the request are repeated as they were sent, or with their defaults."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: dict[str, str]
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    store: Literal[False] = False  # whatever the request says: nothing is stored
    previous_response_id: None = None


class StreamEvent(BaseModel):
    """The fields that all events have. Events of a stream are numbered from 0."""

    type: str
    sequence_number: int = 0


class ResponseEvent(StreamEvent):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class ItemEvent(StreamEvent):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PartEvent(StreamEvent):
    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class TextEvent(StreamEvent):
    """New text of a part (`delta`), or its whole text (`text`)."""

    type: Literal[
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
    ]
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str | None = omitted_if_none()
    text: str | None = omitted_if_none()
    logprobs: list[Any] | None = omitted_if_none()


class CallEvent(StreamEvent):
    """New text of the arguments of a call (`delta`), or all of it (`arguments`, and `input` of a custom tool)."""

    type: Literal[
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
    ]
    item_id: str
    output_index: int
    delta: str | None = omitted_if_none()
    name: str | None = omitted_if_none()
    arguments: str | None = omitted_if_none()
    input: str | None = omitted_if_none()


class ResponseStreamEvent(BaseModel):
    """Documents the events of a stream. Each event is sent by itself, not within this object."""

    event: ResponseEvent | ItemEvent | PartEvent | TextEvent | CallEvent
