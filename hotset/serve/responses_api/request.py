"""Requests to `/v1/responses` in OpenAI's shape, and their conversation in the form that chat templates expect."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from hotset.base.structure import Structure
from hotset.serve.agent_request import AgentFields, JsonObject
from hotset.serve.bodies import MAX_SHOWN_CHARACTERS, LenientModel, StrictModel, Text, one_of, text_or_list
from hotset.serve.protocol import MAX_MESSAGES, MAX_PARTS, Content
from hotset.serve.responses_api.tools import ResponseTools, ToolChoiceField, flat_name

# What a client may ask to include in the answer. It is ignored: answers of this server contain none of it.
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class MessageInput(LenientModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningTextPart(LenientModel):
    type: Literal["reasoning_text", "text"]
    text: Text


class ReasoningInput(LenientModel):
    """What the model thought in an earlier turn. Summaries and encrypted forms are ignored."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningTextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


class FunctionCallInput(LenientModel):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    arguments: Text


class CustomCallInput(LenientModel):
    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    input: Text

    @property
    def arguments(self) -> str:
        return json.dumps({"input": self.input}, ensure_ascii=False)


class CallOutputInput(LenientModel):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: Content


ITEM_FORMS = {
    "message": "|message",
    "reasoning": "|reasoning",
    "function_call": "|function_call",
    "custom_tool_call": "|custom_call",
    "function_call_output": "|call_output",
    "custom_tool_call_output": "|call_output",
}


def _item_form(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    return ITEM_FORMS.get(kind) if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageInput, Tag("|message")]
    | Annotated[ReasoningInput, Tag("|reasoning")]
    | Annotated[FunctionCallInput, Tag("|function_call")]
    | Annotated[CustomCallInput, Tag("|custom_call")]
    | Annotated[CallOutputInput, Tag("|call_output")],
    one_of(_item_form, f"an item of one of these types: {', '.join(ITEM_FORMS)}"),
]
Input = Annotated[
    Annotated[Text, Tag("|text")]
    | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("|list")],
    one_of(text_or_list, "a text or a list of items"),
]


class TextFormat(LenientModel):
    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    json_schema: JsonObject | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_schema(self) -> "TextFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("schema", "must have a schema if its type is json_schema")
        return self

    def structure(self) -> Structure | None:
        """Returns the structure that answers must have, or None if they may be any text."""
        if self.type == "json_schema":
            return Structure("json_schema", json.dumps(self.json_schema, ensure_ascii=False))
        return Structure("json_object") if self.type == "json_object" else None


class TextField(StrictModel):
    format: TextFormat | None = None
    verbosity: Text | None = Field(None, description="Ignored: a hint for the length of the answer.")


class ReasoningField(LenientModel):
    effort: Annotated[Text, Field(max_length=MAX_SHOWN_CHARACTERS)] | None = Field(
        None, description="'none' turns thinking off, any other value turns it on, in models that can do both."
    )


class ResponseStreamOptions(StrictModel):
    include_obfuscation: bool | None = Field(None, description="Ignored: events are never padded.")


class ResponsesRequest(AgentFields):
    """The body of POST /v1/responses. Nothing is stored: `store` is ignored, and earlier items come with `input`."""

    input: Input
    instructions: Text | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(None, ge=1, description="Default: the rest of the context.")
    tools: ResponseTools | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer.")
    text: TextField | None = None
    reasoning: ReasoningField | None = None
    include: list[Includable] | None = Field(None, description="Ignored: the server has none of it.")
    metadata: dict[Text, Text] | None = Field(None, description="Returned as it is.")
    stream_options: ResponseStreamOptions | None = None


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Returns the messages of a request as chat templates expect them."""
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    turn: dict[str, Any] | None = None  # the assistant's message to which the next items may belong
    for item in body.input:
        if isinstance(item, CallOutputInput):
            turn = None
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        elif isinstance(item, MessageInput) and item.role != "assistant":
            turn = None
            messages.append({"role": item.role, "content": text_of(item.content)})
        else:
            if turn is None or _begins_turn(item, turn):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add(item, turn)
    return messages


def _begins_turn(item: Any, turn: dict[str, Any]) -> bool:
    """Returns whether an item of the assistant begins a new message: reasoning comes first, then text, then calls."""
    if isinstance(item, ReasoningInput):
        return bool(turn["content"]) or "tool_calls" in turn or "reasoning_content" in turn
    return isinstance(item, MessageInput) and (bool(turn["content"]) or "tool_calls" in turn)


def _add(item: Any, turn: dict[str, Any]) -> None:
    """Adds an item to the assistant's message to which it belongs."""
    if isinstance(item, MessageInput):
        turn["content"] = text_of(item.content)
    elif isinstance(item, ReasoningInput):
        if thoughts := "".join(part.text for part in item.content or ()):
            turn["reasoning_content"] = thoughts
    else:
        function = {"name": flat_name(item.name, item.namespace), "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def text_of(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
