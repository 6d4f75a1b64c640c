"""Request bodies: the fields of the OpenAI API that Hotset implements, and a few of Hotset's own.

An unknown field is rejected, never ignored. `SamplingParams` checks the ranges of sampling fields.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from hotset.base.config import LandingChoice, TiersChoice
from hotset.base.sampling import (
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

REQUEST_ID_HEADER = "x-request-id"
# Union tags appear in the location of a validation error; this prefix distinguishes them from field names.
UNION_TAG = "|"
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # text parts of one message


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return "|text"
    return "|list" if isinstance(value, list) else None


def _prompt_form(value: Any) -> str | None:
    """Selects the form by the first element, so that a long list of ids is not first tried as a list of strings."""
    if not isinstance(value, list):
        return "|text" if isinstance(value, str) else None
    first = value[0] if value else 0
    if isinstance(first, str):
        return "|texts"
    return "|id_lists" if isinstance(first, list) else "|ids"


def _one_of(choose: Any, forms: str) -> Discriminator:
    return Discriminator(choose, custom_error_type="form", custom_error_message=f"must be {forms}")


def _well_formed(text: str) -> str:
    """Rejects lone surrogates: JSON can express them, but they are not characters and no tokenizer accepts them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PydanticCustomError("unicode", "must not contain lone surrogates") from error
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
StopText = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    Annotated[StopText, Tag("|text")] | Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS), Tag("|list")],
    _one_of(_text_or_list, "a string or a list of strings"),
]
TokenIdText = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
LogitBias = Annotated[
    dict[TokenIdText, float], Field(max_length=MAX_LOGIT_BIASES, json_schema_extra={"additionalProperties": False})
]


class StrictModel(BaseModel):
    """The base of request bodies. It converts no type except int to float, and rejects unknown fields, inf and NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(StrictModel):
    type: Literal["text"]
    text: Text


Content = Annotated[
    Annotated[Text, Tag("|text")]
    | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("|list")],
    _one_of(_text_or_list, "a string or a list of text parts"),
]


class ChatMessage(StrictModel):
    role: Literal["system", "user", "assistant"]
    content: Content

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class StreamOptions(StrictModel):
    include_usage: bool | None = Field(None, description="Send a last chunk with the usage of the whole request.")


class SamplingFields(StrictModel):
    """The fields that both completion endpoints share."""

    model: str
    temperature: float | None = Field(None, description="0 selects the most likely token.")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 considers all tokens.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = Field(None, description="Maps token ids to the value added to their logits.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = Field(None, description="Add prompt_token_ids and token_ids to the choices.")
    tiers: TiersChoice | None = Field(
        None, description="Where this request's KV is stored. 'auto': on the device while there is room."
    )
    landing: LandingChoice | None = Field(
        None, description="Where KV from a prefill worker arrives. 'auto': on the device if all of it fits there."
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
    max_completion_tokens: int | None = Field(
        None, ge=1, description="Same as max_tokens, which it replaces in the OpenAI API."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens mean the same; send only one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs may be given only with logprobs: true")
        return self


class CompletionRequest(SamplingFields):
    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class TokenizeRequest(StrictModel):
    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        return self


class DetokenizeRequest(StrictModel):
    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
