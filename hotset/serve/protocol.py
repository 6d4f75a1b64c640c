"""What clients send and get: the OpenAI API's fields that Hotset implements, and a few of its own.

A field that is not listed is refused, never ignored. Ranges of sampling fields live in `SamplingParams` alone.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from hotset.base.config import LandingChoice, TiersChoice
from hotset.base.sampling import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_STRINGS

# Names the prefill worker that computes a request's prompt, by its control address. A router sends it.
PREFILL_HEADER = "x-hotset-prefill"
REQUEST_ID_HEADER = "x-request-id"
# Union tags appear in the location of a validation error; this sign tells them from field names.
UNION_TAG = "|"
MAX_PROMPTS = 1024


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return "|text"
    return "|list" if isinstance(value, list) else None


def _prompt_form(value: Any) -> str | None:
    """Chosen by the first element, so that a long list of ids is not tried as a list of strings first."""
    if not isinstance(value, list):
        return "|text" if isinstance(value, str) else None
    first = value[0] if value else 0
    if isinstance(first, str):
        return "|texts"
    return "|id_lists" if isinstance(first, list) else "|ids"


def _one_of(choose: Any, forms: str) -> Discriminator:
    return Discriminator(choose, custom_error_type="form", custom_error_message=f"must be {forms}")


def _well_formed(text: str) -> str:
    """JSON can spell half of a surrogate pair; that is no character, and no tokenizer takes it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PydanticCustomError("unicode", "must not hold lone surrogates") from error
    return text


Text = Annotated[str, AfterValidator(_well_formed)]
TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    Annotated[Text, Tag("|text")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("|texts")]
    | Annotated[TokenIds, Tag("|ids")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("|id_lists")],
    _one_of(_prompt_form, "a string, a list of strings, a list of token ids, or a list of such lists"),
]
StopText = Annotated[Text, Field(min_length=1)]
Stop = Annotated[
    Annotated[StopText, Tag("|text")] | Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS), Tag("|list")],
    _one_of(_text_or_list, "a string or a list of strings"),
]
TokenIdText = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
LogitBias = Annotated[dict[TokenIdText, float], Field(json_schema_extra={"additionalProperties": False})]


class Sent(BaseModel):
    """Anything a client sends: exact types, finite numbers, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(Sent):
    type: Literal["text"]
    text: Text


Content = Annotated[
    Annotated[Text, Tag("|text")] | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("|list")],
    _one_of(_text_or_list, "a string or a list of text parts"),
]


class ChatMessage(Sent):
    role: Literal["system", "user", "assistant"]
    content: Content

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class StreamOptions(Sent):
    include_usage: bool | None = Field(None, description="Send a last chunk that holds the usage of the whole request.")


class SamplingFields(Sent):
    """The fields that both generating endpoints share."""

    model: str
    temperature: float | None = Field(None, description="0 takes the likeliest token.")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 considers all tokens.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = Field(None, description="Token id to what its logit gains.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = Field(None, description="Add prompt_token_ids and token_ids to the choices.")
    tiers: TiersChoice | None = Field(
        None, description="Where this request's KV may live; 'auto' on the device while there is room."
    )
    landing: LandingChoice | None = Field(
        None, description="Where KV that a prefill worker computes arrives; 'auto' on the host where that is its home."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_need_stream(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options may be given only with stream: true")
        return self


class ChatRequest(SamplingFields):
    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are the same thing; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs may be given only with logprobs: true")
        return self


class CompletionRequest(SamplingFields):
    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class TokenizeRequest(Sent):
    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Sent):
    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def _only_if_set() -> Any:
    """A field that is left out of the JSON while it is None."""
    return Field(None, exclude_if=lambda value: value is None)


class Choice(BaseModel):
    """What the choices of both endpoints have, streamed or not."""

    index: int
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = _only_if_set()
    prompt_token_ids: list[int] | None = _only_if_set()
    token_ids: list[int] | None = _only_if_set()


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class DeltaMessage(BaseModel):
    role: Literal["assistant"] | None = _only_if_set()
    content: str | None = _only_if_set()


class ChatChunkChoice(Choice):
    delta: DeltaMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class Answer(BaseModel):
    id: str
    created: int
    model: str


class ChatCompletion(Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = _only_if_set()


class Completion(Answer):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Answer):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = _only_if_set()


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["hotset"] = "hotset"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeResponse(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeResponse(BaseModel):
    prompt: str


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class WorkerState(BaseModel):
    """What a worker tells a router about itself, at /handoff."""

    role: str = Field(max_length=32)  # both, prefill or decode
    control: str | None = Field(max_length=256)  # where its peers reach it; None where it has no peers
    model: str = Field(max_length=1024)
    waiting_tokens: int = Field(ge=0)  # of prompts without a first token
    waiting: int = Field(ge=0)  # requests
    running: int = Field(ge=0)
