"""Reads JSON bodies. A large body is parsed in a thread, and an object with too many fields is refused."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from hotset.base.errors import RequestError

MAX_FIELDS = 2048  # fields of one object; the error for a body with a million unknown fields would name them all
MAX_LOOP_BYTES = 1 << 16  # a smaller body is parsed on the event loop, in about a millisecond


def json_route(threads: Executor) -> type[APIRoute]:
    """Returns the class of routes whose large JSON bodies are parsed in `threads`, which are borrowed."""

    class JsonRequest(Request):
        async def json(self) -> Any:
            body = await self.body()
            if len(body) <= MAX_LOOP_BYTES:
                return _parsed(body)
            return await asyncio.get_running_loop().run_in_executor(threads, _parsed, body)

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_json(request: Request) -> Response:
                return await handle(JsonRequest(request.scope, request.receive))

            return handle_json

    return JsonRoute


def _parsed(body: bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError if it is not JSON, RecursionError if it is nested too
    deeply, and RequestError if an object has more than MAX_FIELDS fields."""
    return json.loads(body, object_pairs_hook=_checked_object)


def _checked_object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(fields) > MAX_FIELDS:
        message = f"an object in the body has {len(fields)} fields, and the limit is {MAX_FIELDS}; send fewer"
        raise RequestError(message, code="invalid_value")
    return dict(fields)
