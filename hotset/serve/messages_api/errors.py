"""Errors in Anthropic's shape, on the paths of Anthropic's API."""

import json
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from hotset.serve.errors import error_body, error_kind
from hotset.serve.http_middleware import HttpMiddleware
from hotset.serve.messages_api.answer import MessagesError, MessagesErrorDetail, MessagesErrorDetails
from hotset.serve.protocol import REQUEST_ID_HEADER

MESSAGES_PATH = "/v1/messages"
ANTHROPIC_REQUEST_ID = "request-id"
# The types of errors in Anthropic's API. All other statuses below 500 are invalid requests.
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def is_messages_path(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def error_event(error: BaseException) -> bytes:
    """Returns the event that ends a stream with an error."""
    detail = error_body(error).error.model_dump()
    # Escaped as ASCII, because many clients divide lines at characters that do not end a line of an event stream.
    body = json.dumps(_converted(detail, error_kind(error).status, None).model_dump(), separators=(",", ":"))
    return f"event: error\ndata: {body}\n\n".encode()


class MessagesErrors(HttpMiddleware):
    """Adds Anthropic's header with the request's id to responses of `/v1/messages…`, and converts the bodies of errors.
    Those that a router gets from workers are converted already."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_messages_path(scope["path"]):
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope)[REQUEST_ID_HEADER]  # set by the middleware RequestId
        start: Message | None = None  # of an error, until its body is complete
        body = b""

        async def send_converted(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[ANTHROPIC_REQUEST_ID] = request_id
                if message["status"] >= 400:
                    start = message
                    return
            elif start is not None:
                body += message.get("body", b"")
                if message.get("more_body", False):
                    return
                converted = _converted_body(body, start["status"], request_id)
                MutableHeaders(scope=start)["content-length"] = str(len(converted))
                await send(start)
                message = {"type": "http.response.body", "body": converted, "more_body": False}
            await send(message)

        await self._app(scope, receive, send_converted)


def _converted_body(body: bytes, status: int, request_id: str) -> bytes:
    try:
        parsed = json.loads(body)
        detail = None if parsed.get("type") == "error" else parsed["error"]
        return body if detail is None else _converted(detail, status, request_id).model_dump_json().encode()
    except (ValueError, KeyError, TypeError, AttributeError):  # not written by Hotset
        return body


def _converted(detail: dict[str, Any], status: int, request_id: str | None) -> MessagesError:
    kind = ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    details = MessagesErrorDetails(error_code=detail["code"], param=detail["param"])
    error = MessagesErrorDetail(type=kind, message=detail["message"], details=details)
    return MessagesError(error=error, request_id=request_id)
