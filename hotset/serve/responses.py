"""Response bodies of the OpenAI API and of Hotset's own endpoints."""

from collections.abc import Iterable
from itertools import chain
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, SkipValidation
from typing_extensions import TypedDict

T = TypeVar("T")

# A long list, given as an iterator, so that its items do not all exist at once.
LongList = SkipValidation[Iterable[T]]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int  # prompt tokens whose rows were in the prefix cache, so that they were not computed


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: LongList[ChatTokenLogprob]


class CompletionLogprobs(BaseModel):
    tokens: LongList[str]
    token_logprobs: LongList[float | None]  # None for the first token of a prompt
    top_logprobs: LongList[dict[str, float] | None]
    text_offset: LongList[int]

    def followed_by(self, other: "CompletionLogprobs") -> "CompletionLogprobs":
        return CompletionLogprobs(
            tokens=chain(self.tokens, other.tokens),
            token_logprobs=chain(self.token_logprobs, other.token_logprobs),
            top_logprobs=chain(self.top_logprobs, other.top_logprobs),
            text_offset=chain(self.text_offset, other.text_offset),
        )


class PromptTokenLogprob(TypedDict):
    """One log-probability of `prompt_logprobs`, as in vLLM."""

    logprob: float
    rank: int
    decoded_token: str | None


# For each token of the prompt: token id -> log-probability. None for the first token.
FormattedPromptLogprobs = LongList[dict[str, PromptTokenLogprob] | None]


def omitted_if_none() -> Any:
    """Declares a field that is omitted from the JSON if it is None."""
    return Field(None, exclude_if=lambda value: value is None)


class ResponseChoice(BaseModel):
    """The fields of a choice in both endpoints, streamed or not."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None = omitted_if_none()
    prompt_token_ids: list[int] | None = omitted_if_none()
    token_ids: list[int] | None = omitted_if_none()


class FunctionCall(BaseModel):
    name: str
    arguments: str  # the JSON text of an object


class MessageToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None  # None if the answer ended within its reasoning, or has only calls
    reasoning_content: str | None = omitted_if_none()
    tool_calls: list[MessageToolCall] | None = omitted_if_none()


class ChatChoice(ResponseChoice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class FunctionCallDelta(BaseModel):
    name: str | None = omitted_if_none()
    arguments: str


class ToolCallDelta(BaseModel):
    """New text of a call. Its first delta has the id, the type and the name."""

    index: int
    id: str | None = omitted_if_none()
    type: Literal["function"] | None = omitted_if_none()
    function: FunctionCallDelta


class DeltaMessage(BaseModel):
    role: Literal["assistant"] | None = omitted_if_none()
    content: str | None = omitted_if_none()
    reasoning_content: str | None = omitted_if_none()
    tool_calls: list[ToolCallDelta] | None = omitted_if_none()


class ChatChunkChoice(ResponseChoice):
    delta: DeltaMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(ResponseChoice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: FormattedPromptLogprobs | None = omitted_if_none()


class CompletionBase(BaseModel):
    """The fields of a response or chunk in both endpoints."""

    id: str
    created: int
    model: str
    system_fingerprint: str  # of the version, the model and the settings; see Service.fingerprint


class ChunkBase(CompletionBase):
    """The fields of a chunk in both endpoints."""

    usage: Usage | None = omitted_if_none()


class ChatCompletion(CompletionBase):
    object: Literal["chat.completion"] = "chat.completion"
    choices: LongList[ChatChoice]
    usage: Usage
    prompt_logprobs: FormattedPromptLogprobs | None = omitted_if_none()


class ChatCompletionChunk(ChunkBase):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_logprobs: FormattedPromptLogprobs | None = omitted_if_none()


class Completion(CompletionBase):
    object: Literal["text_completion"] = "text_completion"
    choices: LongList[CompletionChoice]
    usage: Usage


class CompletionChunk(ChunkBase):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ModelObject(BaseModel):
    """One entry of /v1/models, OpenAI's `model` object."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["hotset"] = "hotset"
    root: str  # the model's own name, which --served-model-name does not change
    parent: None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelObject]


class TokenizeResponse(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeResponse(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    """The tokenizer, with the names of tokenizer_config.json."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    add_bos_token: bool
    chat_template: str | None
    bos_token: str | None = omitted_if_none()
    eos_token: str | None = omitted_if_none()
    unk_token: str | None = omitted_if_none()
    sep_token: str | None = omitted_if_none()
    pad_token: str | None = omitted_if_none()
    cls_token: str | None = omitted_if_none()
    mask_token: str | None = omitted_if_none()


class Version(BaseModel):
    version: str


class Health(BaseModel):
    """The progress of the engine."""

    status: Literal["ok"] = "ok"
    steps: int  # since start
    seconds_since_step: float | None  # null before the first step
    # How long the engine has shown no sign of life, or has not advanced in a step. The limit is --step-timeout.
    seconds_without_progress: float
    open_requests: int  # requests that the engine has not finished, in any phase


class KvEventsPorts(BaseModel):
    """The ports of one publisher of KV events."""

    live: int = Field(gt=0, lt=1 << 16)
    replay: int | None = Field(default=None, gt=0, lt=1 << 16)


class WorkerState(BaseModel):
    """The role, address and load that a worker reports at /handoff, for routers."""

    role: str = Field(max_length=32)  # both, prefill or decode
    control: str | None = Field(max_length=256)  # control address for handoffs; None for role both
    model: str = Field(max_length=1024)
    # The larger of two numbers: prompt tokens of requests that have no token yet, and tokens left to prefill.
    waiting_tokens: int = Field(ge=0)
    # The larger of two numbers: requests in the engine's queue, and choices that have no token yet.
    waiting: int = Field(ge=0)
    running: int = Field(ge=0)  # requests that are being prefilled or decoded
    degraded: str | None = Field(default=None, max_length=1024)  # why it cannot admit a request of the maximum length
    stored_tokens: int = Field(default=0, ge=0)  # tokens whose KV is in the host store, of requests and in the cache
    host_tokens: int = Field(default=0, ge=0)  # tokens for which the host store has room; 0 if unknown, or without one
    kv_usage: float = Field(default=0.0, ge=0)  # share of the KV memory that requests use
    tier_pressure: float = Field(default=0.0, ge=0)  # share of the admitted requests that are tiered or parked
    kv_events: list[KvEventsPorts] = Field(default=[], max_length=64)  # one entry for each data parallel rank
    # For the live page of a router.
    resident: int = Field(default=0, ge=0)  # running requests by tier
    tiered: int = Field(default=0, ge=0)
    parked: int = Field(default=0, ge=0)
    device_pages_held: int = Field(default=0, ge=0)
    device_pages_total: int = Field(default=0, ge=0)
    tokens_generated: int = Field(default=0, ge=0)  # since the start
    tokens_prefilled: int = Field(default=0, ge=0)
