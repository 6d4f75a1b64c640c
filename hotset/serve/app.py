"""The FastAPI application: routes, their OpenAPI documentation, and the middleware around them."""

import asyncio
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Path
from fastapi.exceptions import RequestValidationError
from fastapi.security import APIKeyHeader, HTTPBearer
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from hotset import __version__
from hotset.base.errors import EngineStopped, HotsetError, RequestError
from hotset.base.serve_config import ServeConfig
from hotset.engine.client import EngineClient
from hotset.serve.chat import chat_completion, conversation_of
from hotset.serve.completions import completion
from hotset.serve.conversation import encode_conversation
from hotset.serve.docs_page import docs_routes
from hotset.serve.errors import error_response, http_error_response, validation_error
from hotset.serve.fair_queue import client_of
from hotset.serve.json_body import json_route
from hotset.serve.live import Live
from hotset.serve.messages_api.answer import MessageObject, MessagesError, MessageStreamEvent, TokenCount
from hotset.serve.messages_api.endpoint import count_tokens, create_message
from hotset.serve.messages_api.request import CountTokensRequest, MessagesRequest
from hotset.serve.middleware import middleware_of
from hotset.serve.page import page_response
from hotset.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from hotset.serve.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    DetokenizeResponse,
    ErrorResponse,
    Health,
    ModelList,
    ModelObject,
    TokenizeResponse,
    TokenizerInfo,
    Version,
    WorkerState,
)
from hotset.serve.responses_api.answer import ResponseObject, ResponseStreamEvent
from hotset.serve.responses_api.endpoint import create_response
from hotset.serve.responses_api.request import ResponsesRequest
from hotset.serve.service import Service
from hotset.serve.streams import json_response
from hotset.serve.traces import Traces

Responses = dict[int | str, dict[str, Any]]

# The events of streams, which no route returns as its body.
STREAMED = (ChatCompletionChunk, CompletionChunk, ResponseStreamEvent, MessageStreamEvent)
IDLE_ENGINE_SECONDS = 2.0  # time for an engine without requests to report statistics
SCHEMAS = "#/components/schemas/"
DESCRIPTIONS = {
    400: "The request is malformed, out of range, too long, or uses an unsupported feature.",
    401: "The API key is missing or wrong.",
    403: "A web page whose origin is not allowed sent the request, or it names a prefill worker that the router did "
    "not choose.",
    404: "The model does not exist.",
    408: "The request did not arrive within the server's time limit.",
    409: "This worker has the wrong role for the request; the message names the right one.",
    413: "The body is larger than the server's limit.",
    429: "Too many requests are waiting or in progress; retry after the time in Retry-After.",
    500: "Internal error; the server's log has the details.",
    503: "The engine has stopped, the prefill worker was lost, or quarantine leaves too few pages for the request.",
}


def create_app(
    client: EngineClient,
    config: ServeConfig,
    *,
    aliases: frozenset[str] = frozenset(),
    handoff_secret: str | None = None,
    fingerprint: str = "",
) -> FastAPI:
    """Builds the application over a running engine. The caller keeps ownership of `client` and closes it.

    `aliases` are further names that requests may use for the model. `handoff_secret` is the engine's.
    `fingerprint` is the `system_fingerprint` of answers.
    """
    model_name = config.served_model_name or client.model.name
    traces = None if config.otlp is None else Traces(config.otlp, model_name, client.role)
    service = Service(client, config, aliases, handoff_secret, fingerprint, traces=traces)
    app = _Api(
        title="Hotset",
        version=__version__,
        summary="An OpenAI-compatible server for sparse-attention language models.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=middleware_of(config, service.metrics),
        exception_handlers=dict.fromkeys((HotsetError, RequestValidationError, HTTPException), _on_error),
    )
    if traces is not None:
        client.state_observers.append(lambda report: traces.record(report.requests))
    # This only documents the key. The middleware ApiKey enforces it before a body is read.
    schemes = (HTTPBearer(auto_error=False), APIKeyHeader(name="x-api-key", auto_error=False))
    key = [Depends(scheme) for scheme in schemes] if config.api_key else []
    app.include_router(_completion_routes(service), dependencies=key)
    app.include_router(_model_routes(service), dependencies=key)
    app.include_router(_status_routes(service))
    app.include_router(_page_routes(service))
    app.include_router(docs_routes())
    app.state.traces = traces
    return app


class _Api(FastAPI):
    """FastAPI with a corrected OpenAPI document: invalid bodies get 400, not 422, and stream chunks have schemas."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            for operations in document["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
            schemas = document["components"]["schemas"]
            schemas.pop("HTTPValidationError", None)
            schemas.pop("ValidationError", None)
            _, chunk_schemas = models_json_schema(
                [(event, "serialization") for event in STREAMED],
                ref_template=SCHEMAS + "{model}",
            )
            document["components"]["schemas"] = chunk_schemas["$defs"] | schemas
        return super().openapi()


def _completion_routes(service: Service) -> APIRouter:
    async def check_role() -> None:
        service.check_role()

    routes = APIRouter(
        tags=["generate"], dependencies=[Depends(check_role)], route_class=json_route(service.text_threads)
    )
    errors = _errors(400, 401, 403, 404, 408, 409, 413, 429, 500, 503)

    @routes.post("/v1/chat/completions", responses=_full_or_stream(ChatCompletion, ChatCompletionChunk) | errors)
    async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
        """Creates the next message of a conversation."""
        return await chat_completion(request, service, body)

    @routes.post("/v1/responses", responses=_full_or_stream(ResponseObject, ResponseStreamEvent) | errors)
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        """Creates the next items of a conversation, in the shape of OpenAI's Responses API. Nothing is stored."""
        return await create_response(request, service, body)

    messages_errors = {status: {**entry, "model": MessagesError} for status, entry in errors.items()}

    @routes.post("/v1/messages", responses=_full_or_stream(MessageObject, MessageStreamEvent) | messages_errors)
    async def messages(request: Request, body: MessagesRequest) -> Response:
        """Creates the next message of a conversation, in the shape of Anthropic's Messages API."""
        return await create_message(request, service, body)

    @routes.post("/v1/messages/count_tokens", responses=_full(TokenCount) | messages_errors)
    async def message_tokens(request: Request, body: CountTokensRequest) -> Response:
        """Counts the tokens of the prompt that the same request to /v1/messages would have."""
        return await count_tokens(request, service, body)

    @routes.post("/v1/completions", responses=_full_or_stream(Completion, CompletionChunk) | errors)
    async def create_completion(request: Request, body: CompletionRequest) -> Response:
        """Continues one or several prompts, given as text or as token ids."""
        return await completion(request, service, body)

    return routes


def _model_routes(service: Service) -> APIRouter:
    routes = APIRouter(tags=["model"], route_class=json_route(service.text_threads))

    def served() -> ModelObject:
        model = service.client.model
        return ModelObject(
            id=service.model_name, created=service.started, root=model.name, max_model_len=model.max_model_len
        )

    @routes.get("/v1/models", responses=_full(ModelList) | _errors(401, 500))
    async def list_models() -> Response:
        """Lists the one model that is served."""
        return json_response(ModelList(data=[served()]))

    @routes.get("/v1/models/{model_id:path}", responses=_full(ModelObject) | _errors(401, 404, 500))
    async def show_model(model_id: Annotated[str, Path(min_length=1)]) -> Response:
        """Describes a model by its name."""
        service.check_model(model_id)
        return json_response(served())

    errors = _errors(400, 401, 403, 404, 408, 413, 500)

    @routes.post("/tokenize", responses=_full(TokenizeResponse) | errors)
    async def tokenize(request: Request, body: TokenizeRequest) -> Response:
        """Returns the token ids of a prompt, or of a conversation with the chat template applied."""
        service.check_model(body.model)
        limit = service.max_text_tokens
        if body.messages:
            conversation = conversation_of(body.messages, body)
            tokens = (await encode_conversation(service, client_of(request), conversation, limit)).token_ids
        else:
            tokens = await service.encode(body.prompt or "", limit, add_special=body.add_special_tokens is not False)
        max_model_len = service.client.model.max_model_len
        return json_response(TokenizeResponse(tokens=tokens, count=len(tokens), max_model_len=max_model_len))

    @routes.get("/tokenizer_info", responses=_full(TokenizerInfo) | _errors(400, 401, 500))
    async def tokenizer_info() -> Response:
        """Describes the tokenizer: class, size of the vocabulary, special tokens and chat template."""
        return json_response(service.tokenizer_info())

    @routes.post("/detokenize", responses=_full(DetokenizeResponse) | errors)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Returns the text of token ids, including special tokens."""
        service.check_model(body.model)
        return json_response(DetokenizeResponse(prompt=await service.decode(body.tokens)))

    return routes


def _status_routes(service: Service) -> APIRouter:
    routes = APIRouter(tags=["state"])

    @routes.get("/health", responses=_full(Health) | _errors(500, 503))
    async def health() -> Response:
        """Returns 200 and the progress of steps while the engine works, 503 with the reason if it has died or hangs, or
        if quarantine leaves too few pages for a request of the maximum length. Never waits for the engine."""
        return json_response(service.health())

    @routes.get("/ping", responses=_full(Health) | _errors(500, 503))
    async def ping() -> Response:
        """Returns the same as /health, for clients that expect this path."""
        return json_response(service.health())

    @routes.get("/version", responses=_full(Version) | _errors(500))
    async def version() -> Response:
        """Returns the version of Hotset."""
        return json_response(Version(version=__version__))

    @routes.get("/handoff", responses=_full(WorkerState) | _errors(500, 503))
    async def handoff() -> Response:
        """Reports this worker's role, control address and load to a router."""
        return json_response(service.state())

    text: Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @routes.get("/metrics", response_class=Response, responses=text | _errors(500))
    async def metrics() -> Response:
        """Returns Prometheus metrics of the server, and the newest ones that the engine has reported. Never waits for
        a step."""
        client = service.client
        if client.newest_stats is None or client.progress.open_requests == 0:
            with suppress(EngineStopped, TimeoutError):  # `alive` is False after EngineStopped
                await asyncio.wait_for(client.stats(), IDLE_ENGINE_SECONDS)
        seconds_without_progress = client.seconds_without_progress if client.alive else None
        text = service.metrics.render(client.newest_stats, seconds_without_progress, service.model_name)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return routes


def _page_routes(service: Service) -> APIRouter:
    """Returns the routes of the live page and its data. Only the data needs the key: the page asks its user for it."""
    routes = APIRouter(include_in_schema=False)
    if not service.config.page:

        @routes.get("/")
        async def root() -> Response:
            return RedirectResponse("/docs")

        return routes
    client = service.client
    live = Live(service.describe, lambda: client.failure, service.metrics)
    client.state_observers.append(live.record)
    client.on_closing = live.feed.close

    @routes.get("/")
    async def page() -> Response:
        return page_response()

    @routes.get("/live")
    async def stream() -> Response:
        return live.feed.response()

    return routes


def _errors(*statuses: int) -> Responses:
    return {status: {"model": ErrorResponse, "description": DESCRIPTIONS[status]} for status in statuses}


def _full(body: type[BaseModel]) -> Responses:
    return {200: {"model": body}}


def _full_or_stream(body: type[BaseModel], chunk: type[BaseModel]) -> Responses:
    """Documents the two forms of a response: one JSON object, or with `stream: true` a stream of chunks."""
    description = f"A {chunk.__name__}, an ErrorResponse that ends the stream early, or [DONE] at the end."
    if "event" in chunk.model_fields:  # other APIs name their events, and end and fail with events of their own
        description = f"One of the events of {chunk.__name__}."
    data = {"type": "string", "description": description}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {200: {"model": body, "content": {"text/event-stream": {"schema": event}}}}


async def _on_error(request: Request, error: Exception) -> Response:
    """Formats an error that a route or FastAPI has raised."""
    if isinstance(error, RequestValidationError):
        return error_response(validation_error(error))
    if isinstance(error, HTTPException):
        if isinstance(error.__cause__, RequestError):  # FastAPI replaces the errors of `json_route`
            return error_response(error.__cause__)
        return http_error_response(error, request.method, request.url.path)
    return error_response(error)
