"""Requests to `/v1/messages` in Anthropic's shape, and their conversation in the form that chat templates expect."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from hotset.base.errors import RequestError
from hotset.base.sampling import MAX_STOP_STRINGS
from hotset.base.structure import Structure
from hotset.models.chat_prompt import ChatOptions
from hotset.serve.agent_request import AgentFields, JsonObject, ToolName
from hotset.serve.bodies import MAX_SHOWN_CHARACTERS, LenientModel, Text, one_of, text_or_list
from hotset.serve.conversation import Conversation, thinking_kwargs
from hotset.serve.protocol import MAX_MESSAGES, MAX_PARTS, StopText
from hotset.serve.tools.calls import MAX_TOOLS, NamedTool, ToolChoice, ToolSpec, ToolUse

# Claude Code puts this line, which differs in every request, before its system prompt. With it, no two prompts would
# begin alike, and the prefix cache would be useless.
BILLING_LINE = "x-anthropic-billing-header:"
BLOCK_SEPARATOR = "\n\n"  # between the texts of two blocks


class TextInput(LenientModel):
    type: Literal["text"]
    text: Text


class ThinkingInput(LenientModel):
    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingInput(LenientModel):
    """Thoughts that another server encrypted. The model does not see them."""

    type: Literal["redacted_thinking"]


class ToolUseInput(LenientModel):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: JsonObject


BlockLimit = Field(max_length=MAX_PARTS, fail_fast=True)
TextBlocks = Annotated[
    Annotated[Text, Tag("|text")] | Annotated[list[TextInput], BlockLimit, Tag("|list")],
    one_of(text_or_list, "a text or a list of text blocks"),
]


class ToolResultInput(LenientModel):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: TextBlocks = ""


BLOCK_FORMS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _block_form(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else None
    return f"|{kind}" if kind in BLOCK_FORMS else None


Block = Annotated[
    Annotated[TextInput, Tag("|text")]
    | Annotated[ThinkingInput, Tag("|thinking")]
    | Annotated[RedactedThinkingInput, Tag("|redacted_thinking")]
    | Annotated[ToolUseInput, Tag("|tool_use")]
    | Annotated[ToolResultInput, Tag("|tool_result")],
    one_of(_block_form, f"a block of one of these types: {', '.join(BLOCK_FORMS)}; the model reads text only"),
]
MessageContent = Annotated[
    Annotated[Text, Tag("|text")] | Annotated[list[Block], BlockLimit, Tag("|list")],
    one_of(text_or_list, "a text or a list of blocks"),
]


class InputMessage(LenientModel):
    role: Literal["user", "assistant", "system"]
    content: MessageContent

    @model_validator(mode="after")
    def _suits_role(self) -> "InputMessage":
        wrong = ToolResultInput if self.role == "assistant" else ToolUseInput | ThinkingInput | RedactedThinkingInput
        if (found := next((block for block in self.blocks if isinstance(block, wrong)), None)) is not None:
            message = "has a block of type {type}, which a message of role {role} cannot have"
            raise PydanticCustomError("role", message, {"type": found.type, "role": self.role})
        return self

    @property
    def blocks(self) -> Sequence[Any]:
        return [TextInput(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class ToolInput(LenientModel):
    type: Literal["custom"] = "custom"
    name: ToolName
    description: Text | None = None
    input_schema: JsonObject
    strict: bool | None = None


class ToolChoiceInput(LenientModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = Field(None, description="The tool to call; only with type tool.")
    disable_parallel_tool_use: bool | None = Field(None, description="true: at most one call in an answer.")

    @model_validator(mode="after")
    def _is_named(self) -> "ToolChoiceInput":
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("name", "must have a name if, and only if, its type is tool")
        return self

    @property
    def choice(self) -> ToolChoice:
        if self.name is not None:
            return NamedTool(self.name)
        return "required" if self.type == "any" else "none" if self.type == "none" else "auto"


class ThinkingField(LenientModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, description="Ignored: max_tokens limits thoughts and answer together.")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="'omitted' leaves thoughts out of the answer. They are never summarized."
    )


class JsonFormat(LenientModel):
    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")


class OutputConfig(LenientModel):
    effort: Annotated[Text, Field(max_length=MAX_SHOWN_CHARACTERS)] | None = Field(
        None, description="Given to the chat template as reasoning_effort, if the model thinks."
    )
    format: JsonFormat | None = None


class ContextEdit(LenientModel):
    """An edit of the conversation. It is ignored: the chat template decides which earlier thoughts the model sees."""

    type: Annotated[str, Field(pattern="^clear_thinking_[0-9]+$")]


class ContextManagement(LenientModel):
    edits: Annotated[list[ContextEdit], BlockLimit] | None = None


def _no_thread(thread: Any) -> None:
    """Refuses threads with an error code after which Anthropic's client continues without threads."""
    raise RequestError(
        "thread is not supported, because nothing is stored; send the whole conversation in messages",
        param="thread",
        code="thread_unsupported_request",
    )


class CountTokensRequest(AgentFields):
    """The body of POST /v1/messages/count_tokens: all fields of a request that can change its prompt."""

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: TextBlocks | None = None
    tools: Annotated[list[ToolInput], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoiceInput | None = None
    thinking: ThinkingField | None = Field(None, description="Default: disabled, in models that can do both.")
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None

    def conversation(self) -> Conversation:
        """Returns the conversation. Raises RequestError if the tools or the choice among them are invalid."""
        messages = tuple(self._messages())
        last = messages[-1]
        continues = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
        options = ChatOptions(continue_final_message=continues, template_kwargs=self._template_kwargs())
        return Conversation(messages, options, self._tool_use())

    def structure(self) -> Structure | None:
        """Returns the structure that the answer must have, or None if it may be any text."""
        if self.output_config is None or self.output_config.format is None:
            return None
        return Structure("json_schema", json.dumps(self.output_config.format.json_schema, ensure_ascii=False))

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled" and self.thinking.display != "omitted"

    def _template_kwargs(self) -> dict[str, Any]:
        """Returns the variables of the chat template. As in Anthropic's API, the model thinks only if it is asked to;
        `adaptive` leaves it to the template."""
        effort = None if self.output_config is None else self.output_config.effort
        kwargs: dict[str, Any] = {}
        if self.thinking is None or self.thinking.type == "disabled":
            kwargs = thinking_kwargs("none")
        elif self.thinking.type == "enabled":
            kwargs = thinking_kwargs(effort or "high")
        elif effort is not None:
            kwargs = {"reasoning_effort": effort}
        return kwargs | (self.chat_template_kwargs or {})

    def _tool_use(self) -> ToolUse:
        tools, choice = self.tools or (), self.tool_choice
        specs = (ToolSpec(tool.name, tool.description, tool.input_schema, bool(tool.strict)) for tool in tools)
        parallel = choice is None or not choice.disable_parallel_tool_use
        return ToolUse(tuple(specs), "auto" if choice is None else choice.choice, parallel)

    def _messages(self) -> Iterator[dict[str, Any]]:
        if system := _joined(self.system or "", without=BILLING_LINE):
            yield {"role": "system", "content": system}
        for message in self.messages:
            if message.role == "assistant":
                yield _assistant_message(message)
            else:
                yield from _other_messages(message)


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    max_tokens: int = Field(ge=1, description="The answer also ends where the context ends.")
    thread: Annotated[None, BeforeValidator(_no_thread)] = None
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS)] | None = None


def _joined(content: str | Sequence[TextInput], without: str | None = None) -> str:
    texts = [content] if isinstance(content, str) else [block.text for block in content]
    return BLOCK_SEPARATOR.join(text for text in texts if without is None or not text.startswith(without))


def _assistant_message(message: InputMessage) -> dict[str, Any]:
    """Returns a message of the assistant: thoughts, then text, then calls, in whichever order the blocks are."""
    blocks = message.blocks
    turn: dict[str, Any] = {"role": "assistant"}
    turn["content"] = _joined([block for block in blocks if isinstance(block, TextInput)])
    if thoughts := BLOCK_SEPARATOR.join(block.thinking for block in blocks if isinstance(block, ThinkingInput)):
        turn["reasoning_content"] = thoughts
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
        }
        for block in blocks
        if isinstance(block, ToolUseInput)
    ]
    if calls:
        turn["tool_calls"] = calls
    return turn


def _other_messages(message: InputMessage) -> Iterator[dict[str, Any]]:
    """Yields a message of the user, divided at the results of tools, which are messages of their own."""
    texts: list[TextInput] = []
    for block in message.blocks:
        if isinstance(block, TextInput):
            texts.append(block)
        elif isinstance(block, ToolResultInput):
            if texts:
                yield {"role": message.role, "content": _joined(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _joined(block.content)}
    if texts or not message.blocks:
        yield {"role": message.role, "content": _joined(texts)}
