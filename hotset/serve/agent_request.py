"""What `/v1/responses` and `/v1/messages` share: fields of requests, and the way from a request to its response."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from hotset.base.config import LandingChoice, TiersChoice
from hotset.base.errors import RequestError
from hotset.base.structure import Structure
from hotset.serve.conversation import AnswerReader, Conversation, encode_conversation
from hotset.serve.generation import GenerationJob, Responder, respond
from hotset.serve.http_server import unless_disconnected
from hotset.serve.protocol import CacheSalt, RequestBody, SamplingFields
from hotset.serve.service import Service
from hotset.serve.tools.calls import NamedTool, ToolChoice, ToolSpec, ToolUse

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed")
MAX_TOOLS = 1024


def _is_json(value: dict[str, Any]) -> dict[str, Any]:
    """Rejects what `json.loads` accepts although it is not JSON: numbers like NaN, and lone surrogates."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("json", "must be a JSON object: {reason}", {"reason": str(error)}) from error
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_is_json)]
ToolName = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,128}$")]


def tool_use_of(tools: Sequence[ToolSpec], choice: ToolChoice, *, parallel: bool) -> ToolUse:
    """Returns the tools of a request. Raises RequestError if two have the same name, or if none can be chosen."""
    names = [tool.name for tool in tools]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise RequestError(f"tools has two tools with the name {twice!r}", param="tools", code="invalid_value")
    if isinstance(choice, NamedTool) and choice.name not in names:
        message = f"tool_choice names {choice.name!r}, which is not one of the {len(names)} tools"
        raise RequestError(message, param="tool_choice", code="invalid_value")
    if choice == "required" and not names:
        message = "tool_choice requires a call, but the request has no tools"
        raise RequestError(message, param="tool_choice", code="invalid_value")
    return ToolUse(tuple(tools), choice, parallel)


def thinking_kwargs(effort: str) -> dict[str, Any]:
    """Returns the variables, under all their names, with which chat templates turn thinking on or off."""
    thinks = effort != "none"
    return {"reasoning_effort": effort, "thinking": thinks, "enable_thinking": thinks}


class AgentFields(RequestBody):
    """The fields that both endpoints have under the same name. Those after `stream` are Hotset's own."""

    model: str | None = Field(None, description="Default: the served model.")
    temperature: float | None = Field(None, description="0 selects the most likely token.")
    top_p: float | None = None
    stream: bool | None = None
    top_k: int | None = Field(None, description="0 or -1 considers all tokens.")
    min_p: float | None = None
    seed: int | None = None
    chat_template_kwargs: JsonObject | None = Field(
        None, description="Variables of the chat template, like enable_thinking."
    )
    tiers: TiersChoice | None = Field(
        None, description="Where this request's KV is stored. 'auto': on the device while there is room."
    )
    landing: LandingChoice | None = Field(
        None, description="Where KV from a prefill worker arrives. 'auto': on the device if all of it fits there."
    )
    cache_salt: CacheSalt | None = Field(
        None, description="Only requests with the same salt reuse each other's prefixes."
    )


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One validated request: what is generated, and how the endpoint names the field of its conversation."""

    id: str  # of the response
    conversation: Conversation
    prompt_field: str
    max_tokens: int | None
    stops_at_context: bool = False  # a larger max_tokens than the context has room for is not an error
    stop: tuple[str, ...] = ()
    structure: Structure | None = None


async def answer(
    request: Request,
    service: Service,
    body: AgentFields,
    turn: AgentTurn,
    new_responder: Callable[[GenerationJob, AnswerReader], Responder],
) -> Response:
    """Answers a conversation. Raises RequestError if it is refused, and the errors of `EngineClient.generate`."""
    service.check_model(body.model)
    sampling = SamplingFields(
        **{name: getattr(body, name) for name in SAMPLING_FIELDS if getattr(body, name) is not None}
    )
    params = service.sampling_params(sampling, max_tokens=turn.max_tokens, logprobs=None)
    params = replace(params, stop=turn.stop or params.stop, structure=turn.structure)
    service.check_open()
    prefill_at = service.prefill_at(request.headers)
    try:
        prompt = await unless_disconnected(request.receive, encode_conversation(service, turn.conversation))
        if turn.stops_at_context and turn.max_tokens is not None:
            room = max(1, service.client.model.max_model_len - len(prompt.token_ids))
            params = replace(params, max_tokens=min(turn.max_tokens, room))
        job = GenerationJob(
            request_id=turn.id,
            prompts=[prompt.token_ids],
            params=prompt.constrained(params),
            stream=bool(body.stream),
            tiers=body.tiers or "auto",
            landing=body.landing or "auto",
            cache_salt=body.cache_salt,
            prefill_at=prefill_at,
        )
        return await respond(request, service, job, new_responder(job, prompt.new_reader()))
    except RequestError as error:
        # The chat template and the engine client name the fields of other endpoints.
        if error.param in ("prompt", "messages"):
            error.param = turn.prompt_field
        raise
