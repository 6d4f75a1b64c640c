"""Code that `/v1/responses` and `/v1/messages` share: the fields of their requests, and how a request is answered."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from hotset.base.structure import Structure
from hotset.serve.conversation import AnswerReader, Conversation, encode_conversation
from hotset.serve.fair_queue import client_of
from hotset.serve.generation import GenerationJob, Responder, respond
from hotset.serve.http_server import unless_disconnected
from hotset.serve.protocol import GenerationFields, with_sampling_parameters
from hotset.serve.service import Service
from hotset.serve.tools.calls import TOOL_NAME


def _is_json(value: dict[str, Any]) -> dict[str, Any]:
    """Rejects what `json.loads` accepts although it is not JSON: numbers like NaN, and lone surrogates."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("json", "must be a JSON object: {reason}", {"reason": str(error)}) from error
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_is_json)]
ToolName = Annotated[str, Field(pattern=f"^{TOOL_NAME.pattern}$")]


@with_sampling_parameters("all")
class AgentFields(GenerationFields):
    """The fields that both endpoints have under the same name. `chat_template_kwargs` is Hotset's own."""

    chat_template_kwargs: JsonObject | None = Field(
        None, description="Variables of the chat template, like enable_thinking."
    )


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """What one validated request asks the model to generate."""

    id: str  # of the response
    conversation: Conversation
    max_tokens: int | None
    stops_at_context: bool = False  # max_tokens is lowered to the room in the context, instead of an error
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
    params = service.sampling_params(body, max_tokens=turn.max_tokens, stop=turn.stop, structure=turn.structure)
    service.check_open()
    options = service.request_options(body, request.headers)
    encoding = encode_conversation(service, client_of(request), turn.conversation)
    prompt = await unless_disconnected(request.receive, encoding)
    if turn.stops_at_context and turn.max_tokens is not None:
        room = max(1, service.client.model.max_model_len - len(prompt.token_ids))
        params = replace(params, max_tokens=min(turn.max_tokens, room))
    job = GenerationJob(
        request_id=turn.id,
        prompts=[prompt.token_ids],
        params=prompt.constrained(params),
        options=options,
        stream=bool(body.stream),
    )
    with prompt.attribute_errors_to_tools():
        return await respond(request, service, job, new_responder(job, prompt.new_reader()))
