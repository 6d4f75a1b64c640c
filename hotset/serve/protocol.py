"""Request bodies: the fields of the OpenAI API that Hotset implements, and a few of Hotset's own.

`fields.py` decides about all other fields. `SamplingParams` checks the ranges of sampling fields.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hotset.base.request_options import (
    MAX_CACHE_SALT_CHARACTERS,
    LandingChoice,
    RequestOptions,
    TiersChoice,
    check_cache_salt,
)
from hotset.base.sampling import (
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    PARAMETERS,
)
from hotset.serve.bodies import MAX_SHOWN_CHARACTERS, LenientModel, StrictModel, Text, one_of, shown, text_or_list
from hotset.serve.fields import IGNORED, UNSUPPORTED, UNSUPPORTED_IN_MESSAGES, implemented_fields, unsupported_message
from hotset.serve.structured_output import ResponseFormat, StructuredOutputs
from hotset.serve.tools.fields import ToolChoiceField, Tools

B = TypeVar("B", bound="RequestBody")

REQUEST_ID_HEADER = "x-request-id"
IGNORED_TOOLS_HEADER = "x-hotset-ignored-tools"  # of a response
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # text parts, or tool calls, of one message
OPTION_NAMES = tuple(field.name for field in fields(RequestOptions))
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def _prompt_form(value: Any) -> str | None:
    """Selects the form by the first element, so that a long list of ids is not first tried as a list of strings."""
    if not isinstance(value, list):
        return "|text" if isinstance(value, str) else None
    first = value[0] if value else 0
    if isinstance(first, str):
        return "|texts"
    return "|id_lists" if isinstance(first, list) else "|ids"


TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    Annotated[Text, Tag("|text")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("|texts")]
    | Annotated[TokenIds, Tag("|ids")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("|id_lists")],
    one_of(_prompt_form, "a string, a list of strings, a list of token ids, or a list of such lists"),
]
StopText = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    Annotated[StopText, Tag("|text")] | Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS), Tag("|list")],
    one_of(text_or_list, "a string or a list of strings"),
]
TokenIdText = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARACTERS), BeforeValidator(check_cache_salt)]
LogitBias = Annotated[
    dict[TokenIdText, float], Field(max_length=MAX_LOGIT_BIASES, json_schema_extra={"additionalProperties": False})
]


def _other_fields(model: type[BaseModel]) -> dict[str, Any]:
    """Returns the JSON schema of the fields that a body does not declare, by the pattern of their names. They are not
    listed as properties, because the list would hide the declared fields."""
    names: dict[str, list[str]] = {}  # by the accepted values
    schemas: dict[str, Any] = {}
    for name, entry in UNSUPPORTED.items():
        if name not in model.model_fields:
            names.setdefault(entry.shown, []).append(name)
            schemas[entry.shown] = {"enum": [*entry.values, None]}
    ignored = [name for name in IGNORED if name not in model.model_fields]
    patterns = {_pattern(names[shown]): schema for shown, schema in schemas.items()}
    return patterns | {_pattern(ignored): {"description": "Accepted and ignored."}}


def _pattern(names: Iterable[str]) -> str:
    return f"^({'|'.join(map(re.escape, names))})$"


class RequestBody(StrictModel):
    """The base of request bodies. The table of `fields.py` decides about fields that are not declared."""

    @model_validator(mode="before")
    @classmethod
    def _only_implemented(cls, body: Any) -> Any:
        return implemented_fields(body, cls.model_fields) if isinstance(body, dict) else body

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> Any:
        schema = handler.resolve_ref_schema(handler(core_schema))
        schema["patternProperties"] = _other_fields(cls)
        schema["additionalProperties"] = {"type": "null"}
        return schema


def _readable(part_type: Any) -> Any:
    """Rejects the content parts that a text model cannot read, by the name of their type."""
    if isinstance(part_type, str) and part_type not in TEXT_PARTS:
        message = "is '{given}', but the model reads text only; send parts of type 'text'"
        raise PydanticCustomError("part_type", message, {"given": shown(part_type)})
    return part_type


class TextPart(LenientModel):
    type: Annotated[Literal["text", "input_text", "output_text"], BeforeValidator(_readable)]
    text: Text


class RefusalPart(LenientModel):
    """A part of an assistant's message in which it refused to answer."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


def _part_form(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    return "|refusal" if value.get("type") == "refusal" else "|text"


Part = Annotated[
    Annotated[TextPart, Tag("|text")] | Annotated[RefusalPart, Tag("|refusal")],
    one_of(_part_form, "an object with type and text"),
]
Content = Annotated[
    Annotated[Text, Tag("|text")] | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True), Tag("|list")],
    one_of(text_or_list, "a string or a list of text parts"),
]


class CalledFunction(LenientModel):
    name: Text
    arguments: Text = Field("", description="The arguments as JSON.")


class ToolCall(LenientModel):
    """A call that the assistant made in an earlier message."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(LenientModel):
    """One message of a conversation. Only an assistant's message may have no content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(None, validate_default=True)
    name: Text | None = None
    refusal: Text | None = Field(None, description="Stands for the content of an assistant that refused to answer.")
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tool_call_id: Text | None = Field(None, description="The id of the call that a message of role tool answers.")

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> Any:
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, entry in UNSUPPORTED_IN_MESSAGES.items():
            schema["properties"][name] = {"enum": [*entry.values, None]}
        return schema

    @model_validator(mode="before")
    @classmethod
    def _no_unsupported_key(cls, message: Any) -> Any:
        for name, entry in UNSUPPORTED_IN_MESSAGES.items() if isinstance(message, dict) else ():
            if not entry.accepts(message.get(name)):
                raise PydanticCustomError("unsupported", "{reason}", {"reason": unsupported_message(name, entry)})
        return message

    @field_validator("content")
    @classmethod
    def _is_given(cls, content: Any, others: ValidationInfo) -> Any:
        if content is None and others.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("missing", "is required, except in an assistant's message")
        return content

    @property
    def text(self) -> str | None:
        """The content as one string. None if an assistant's message has only tool calls."""
        if self.content is None:
            return self.refusal or (None if self.tool_calls else "")
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """Returns the message as a chat template gets it. Members that the client did not send are left out."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(exclude_none=True) for call in self.tool_calls]
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def _not_zero(tokens: int) -> int:
    if tokens == 0:
        raise PydanticCustomError("tokens", "must be -1 or at least 1")
    return tokens


TruncatePromptTokens = Annotated[int, Field(ge=-1, json_schema_extra={"not": {"const": 0}}), AfterValidator(_not_zero)]


class StreamOptions(StrictModel):
    include_usage: bool | None = Field(None, description="Send a last chunk with the usage of the whole request.")
    continuous_usage_stats: bool | None = Field(
        None,
        description="With include_usage: send in every chunk the usage of its choice so far.",
    )
    include_obfuscation: bool | None = Field(None, description="Ignored: chunks are never padded.")


class GenerationFields(RequestBody):
    """The fields of all endpoints that generate. Options have the same names as in `RequestOptions`."""

    model: str | None = Field(None, description="Default: the served model.")
    stream: bool | None = None
    tiers: TiersChoice | None = Field(
        None, description="Where this request's KV is stored. 'auto': on the device while there is room."
    )
    landing: LandingChoice | None = Field(
        None, description="Where KV from a prefill worker arrives. 'auto': on the device if all of it fits there."
    )
    cache_salt: CacheSalt | None = Field(
        None, description="Only requests with the same salt reuse each other's prefixes."
    )

    def request_options(self, prefill_at: str | None) -> RequestOptions:
        given = {name: getattr(self, name) for name in OPTION_NAMES if name in GenerationFields.model_fields}
        return RequestOptions(
            **{name: value for name, value in given.items() if value is not None}, prefill_at=prefill_at
        )


def with_sampling_parameters(*endpoints: str) -> Callable[[type[B]], type[B]]:
    """Adds a field for each sampling parameter that is declared for one of these kinds of endpoints. `SamplingParams`
    checks the ranges."""
    declared: dict[str, Any] = {
        name: ((int if parameter.whole else float) | None, Field(None, description=parameter.help))
        for name, parameter in PARAMETERS.items()
        if parameter.fields in endpoints
    }

    def add_fields(body: type[B]) -> type[B]:
        return create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **declared)

    return add_fields


@with_sampling_parameters("all", "completions")
class SamplingFields(GenerationFields):
    """The fields that both completion endpoints share."""

    logit_bias: LogitBias | None = Field(None, description="Maps token ids to the value added to their logits.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=0, description="0 only with echo or prompt_logprobs: nothing is generated.")
    min_tokens: int | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Report the prompt's tokens and this many alternatives for each."
    )
    truncate_prompt_tokens: TruncatePromptTokens | None = Field(
        None,
        description="Keep only this many tokens at the end of the prompt; -1: as many as the context has room for.",
    )
    return_token_ids: bool | None = Field(None, description="Add prompt_token_ids and token_ids to the choices.")
    response_format: ResponseFormat | None = Field(None, description="Make the answer JSON, with or without a schema.")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="Give the answer a structure. The answer ends where its structure ends."
    )
    stream_options: StreamOptions | None = Field(None, description="Ignored without stream: true.")

    @property
    def shows_prompt(self) -> bool:
        """True if the response shows the prompt, so that it has content even if nothing is generated."""
        return self.prompt_logprobs is not None


class ChatFields(RequestBody):
    """The fields that decide how a conversation becomes a prompt."""

    add_generation_prompt: bool | None = Field(
        None, description="Open the model's next message. Default: true, unless the last message is continued."
    )
    continue_final_message: bool | None = Field(
        None, description="End the prompt with the text of the last message, for the model to continue it."
    )
    add_special_tokens: bool | None = Field(
        None, description="Add tokens like BOS. Default: true for a prompt, false for messages: templates write them."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, like enable_thinking."
    )
    tools: Tools | None = Field(None, description="Functions that the model may call.")
    tool_choice: ToolChoiceField | None = Field(
        None, description="'none' hides the tools, 'required' or a named tool makes the answer a call. Default: 'auto'."
    )
    reasoning_effort: Annotated[Text, Field(max_length=MAX_SHOWN_CHARACTERS)] | None = Field(
        None, description="'none' turns thinking off, any other value turns it on, in models that can do both."
    )


class ChatRequest(SamplingFields, ChatFields):
    messages: Messages
    parallel_tool_calls: bool | None = Field(None, description="false: the answer has at most one call.")
    include_reasoning: bool | None = Field(None, description="false leaves reasoning_content out of the answer.")
    max_completion_tokens: int | None = Field(
        None, ge=1, description="Same as max_tokens, which it replaces in the OpenAI API."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @field_validator("max_completion_tokens")
    @classmethod
    def _equals_max_tokens(cls, limit: int | None, others: ValidationInfo) -> int | None:
        if None not in (limit, other := others.data.get("max_tokens")) and limit != other:
            message = "is {limit}, but max_tokens is {other}, which means the same; send one of them"
            raise PydanticCustomError("max_tokens", message, {"limit": limit, "other": other})
        return limit

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs may be given only with logprobs: true")
        return self


class CompletionRequest(SamplingFields):
    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = Field(None, description="Return the prompt before the answer, also in logprobs.")
    add_special_tokens: bool | None = Field(None, description="false: add no BOS or other special tokens to a text.")
    best_of: int | None = Field(None, description="Must equal n: every choice that is generated is returned.")

    @field_validator("best_of")
    @classmethod
    def _equals_n(cls, best_of: int | None, others: ValidationInfo) -> int | None:
        if best_of is not None and best_of != (choices := others.data.get("n") or 1):
            message = "is {best_of}, but must equal n ({choices}); use n, and choose among the choices yourself"
            raise PydanticCustomError("best_of", message, {"best_of": best_of, "choices": choices})
        return best_of

    @property
    def shows_prompt(self) -> bool:
        return bool(self.echo) or super().shows_prompt


class TokenizeRequest(ChatFields):
    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        return self


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
