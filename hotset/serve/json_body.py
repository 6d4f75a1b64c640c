"""Reads JSON bodies. Large ones are parsed in a thread. Too many fields and too deep nesting are refused."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from hotset.base.errors import RequestError

MAX_FIELDS = 2048  # fields of one object; the error for a body with a million unknown fields would name them all
# Structures and schemas of tools may be nested 100 levels deep. Some versions of Python parse thousands of levels, but
# then no other function can follow them.
MAX_NESTING = 200
MAX_LOOP_BYTES = 1 << 16  # a smaller body is parsed on the event loop, in about a millisecond


def json_route(threads: Executor) -> type[APIRoute]:
    """Returns a class of routes that parse large JSON bodies in `threads`, which the caller owns."""

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
    """Returns the value of a JSON text. Raises ValueError if it is not JSON, and RequestError if it is nested more than
    MAX_NESTING levels deep, or if an object has more than MAX_FIELDS fields."""
    try:
        value = json.loads(body, object_pairs_hook=_checked_object)
    except RecursionError:
        raise _too_deep() from None
    if body.count(b"[") + body.count(b"{") > MAX_NESTING:  # only then can it be nested too deeply
        level = [value]
        for _ in range(MAX_NESTING + 1):
            level = [child for parent in level for child in _children(parent)]
        if level:
            raise _too_deep()
    return value


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep() -> RequestError:
    return RequestError(f"the body is nested more than {MAX_NESTING} levels deep; make it flatter", code="invalid_json")


def _checked_object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(fields) > MAX_FIELDS:
        message = f"an object in the body has {len(fields)} fields, and the limit is {MAX_FIELDS}; send fewer"
        raise RequestError(message, code="invalid_value")
    return dict(fields)
