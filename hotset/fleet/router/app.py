"""The router's HTTP application: routes that it relays to workers, and routes that it answers itself."""

from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from hotset import __version__
from hotset.base.errors import HotsetError, NoRoomLeft, NotAllowed, NoWorkers, RequestError, WrongApiKey
from hotset.fleet.router.config import RouterConfig
from hotset.fleet.router.fleet import ROLES, Fleet, RoutedWorker
from hotset.fleet.router.live import LiveFleet
from hotset.fleet.router.metrics import RouterMetrics
from hotset.fleet.router.relay import Relay
from hotset.serve.bodies import StrictModel
from hotset.serve.errors import error_response, http_error_response
from hotset.serve.middleware import DOCS_PATHS, middleware_of
from hotset.serve.page import page_response


class WorkerAddress(StrictModel):
    """The body of POST and DELETE /workers."""

    url: str


def create_app(fleet: Fleet, relay: Relay, config: RouterConfig, metrics: RouterMetrics) -> Starlette:
    """Builds the application. The caller keeps ownership of fleet and relay."""
    local = _LocalRoutes(fleet, metrics, config)
    live = LiveFleet(fleet)
    routes = [
        Route("/v1/chat/completions", relay.generate, methods=["POST"]),
        Route("/v1/completions", relay.generate, methods=["POST"]),
        Route("/v1/responses", relay.generate, methods=["POST"]),
        Route("/v1/messages", relay.generate, methods=["POST"]),
        Route("/v1/messages/count_tokens", relay.forward, methods=["POST"]),
        Route("/v1/models", relay.forward, methods=["GET"]),
        Route("/v1/models/{model_id:path}", relay.forward, methods=["GET"]),
        Route("/tokenize", relay.forward, methods=["POST"]),
        Route("/detokenize", relay.forward, methods=["POST"]),
        Route("/tokenizer_info", relay.forward, methods=["GET"]),
        *(Route(path, relay.forward, methods=["GET"]) for path in ("/openapi.json", *DOCS_PATHS)),
        *(_page_routes(live) if config.page else [Route("/", local.root, methods=["GET"])]),
        Route("/health", local.health, methods=["GET"]),
        Route("/ping", local.health, methods=["GET"]),
        Route("/version", local.version, methods=["GET"]),
        Route("/metrics", local.metrics, methods=["GET"]),
        Route("/workers", local.list_workers, methods=["GET"]),
        Route("/workers", local.add_worker, methods=["POST"]),
        Route("/workers", local.remove_worker, methods=["DELETE"]),
    ]
    handlers: Any = {HotsetError: _on_hotset_error, HTTPException: _on_http_error}
    app = Starlette(routes=routes, middleware=middleware_of(config, metrics), exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.state.close_streams = live.feed.close
    return app


def _page_routes(live: LiveFleet) -> list[Route]:
    async def page(request: Request) -> Response:
        return page_response()

    async def stream(request: Request) -> Response:
        return live.response()

    return [Route("/", page, methods=["GET"]), Route("/live", stream, methods=["GET"])]


class _LocalRoutes:
    """The routes that the router answers without a worker."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics, config: RouterConfig) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._has_key = config.api_key is not None
        self._workers_file = config.workers_file

    async def health(self, request: Request) -> Response:
        """Reports how many workers of each role are alive. Raises NoWorkers if a role has none, and NoRoomLeft if all
        decode workers are degraded."""
        counts = {role: len(self._fleet.up(role)) for role in ROLES}
        if not all(counts.values()):
            alive = " and ".join(f"{count} {role}" for role, count in counts.items())
            raise NoWorkers(f"{alive} workers are alive; at least one of each role is needed")
        degraded = [f"{worker.url}: {worker.degraded}" for worker in self._fleet.up("decode") if worker.degraded]
        if len(degraded) == counts["decode"]:
            raise NoRoomLeft(f"all {len(degraded)} decode workers are degraded; {degraded[0]}")
        return JSONResponse({"status": "ok", **counts})

    async def root(self, request: Request) -> Response:
        return RedirectResponse("/docs")

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def list_workers(self, request: Request) -> Response:
        return JSONResponse({"workers": [_worker_json(worker) for worker in self._fleet.workers]})

    async def add_worker(self, request: Request) -> Response:
        """Adds a worker that passes a health check."""
        url = await self._url_of(request)
        return JSONResponse(_worker_json(await self._fleet.join(url)), 201)

    async def remove_worker(self, request: Request) -> Response:
        """Removes a worker. Its requests in flight continue."""
        url = (await self._url_of(request)).rstrip("/")
        if not self._fleet.remove(url):
            raise RequestError(f"there is no worker {url}; GET /workers lists them", param="url", code="no_worker")
        return Response(status_code=204)

    async def _url_of(self, request: Request) -> str:
        # A worker receives the prompts of all clients, so only holders of the API key may change the workers.
        if not self._has_key:
            raise WrongApiKey("a router without an API key cannot change its workers; start it with --api-key-file")
        if self._workers_file is not None:
            raise NotAllowed(f"the workers of this router are those of {self._workers_file}; change that file")
        try:
            return WorkerAddress.model_validate_json(await request.body()).url
        except ValidationError:
            message = 'the body must be a JSON object like {"url": "http://host:port"}'
            raise RequestError(message, param="url", code="invalid_json") from None


def _worker_json(worker: RoutedWorker) -> dict[str, Any]:
    return {
        "url": worker.url,
        "role": worker.role,
        "up": worker.up,
        "last_error": worker.last_error or None,
        "requests_in_flight": worker.requests,
        "tokens_in_flight": worker.tokens,
        "uncached_tokens_in_flight": worker.uncached_tokens,
        "kv_events_synced": None if worker.kv_events is None else worker.kv_events.synced,
        "state": None if worker.state is None else worker.state.model_dump(),
    }


async def _on_hotset_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for this exception type only"
    return http_error_response(error, request.method, request.url.path)
