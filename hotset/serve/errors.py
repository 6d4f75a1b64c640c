"""The one table that maps exceptions to HTTP statuses, and the OpenAI-style error body."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from hotset.base.errors import (
    AmbiguousLength,
    BodyTooLarge,
    DeadlineExceeded,
    EngineStopped,
    HandoffLost,
    HotsetError,
    NoRoomLeft,
    NotAllowed,
    NoWorkers,
    QueueFull,
    RequestError,
    RequestTimeout,
    UnknownModel,
    UnsupportedField,
    WorkerLost,
    WrongApiKey,
    WrongRole,
)
from hotset.serve.bodies import UNION_TAG
from hotset.serve.responses import ErrorDetail, ErrorResponse

logger = logging.getLogger("hotset.serve")

MAX_MESSAGE_CHARACTERS = 500
# Paths of earlier versions, and what replaces them.
REMOVED_PATHS = {"/plan": "hotset plan", "/plan/calculate": "hotset plan --json"}


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """The HTTP status and the OpenAI error type of one kind of error."""

    status: int
    type: str
    retry_after_s: int | None = None  # a client should retry after this time; QueueFull has a time of its own


_UNAVAILABLE = "service_unavailable_error"  # the request did not cause the error
ERROR_KINDS: Mapping[type[BaseException], ErrorKind] = {
    RequestError: ErrorKind(400, "invalid_request_error"),
    WrongApiKey: ErrorKind(401, "authentication_error"),
    NotAllowed: ErrorKind(403, "permission_error"),
    UnknownModel: ErrorKind(404, "not_found_error"),
    WrongRole: ErrorKind(409, "invalid_request_error"),
    RequestTimeout: ErrorKind(408, "invalid_request_error"),
    BodyTooLarge: ErrorKind(413, "invalid_request_error"),
    QueueFull: ErrorKind(429, "rate_limit_error"),
    EngineStopped: ErrorKind(503, _UNAVAILABLE),  # a stopped engine stays stopped
    HandoffLost: ErrorKind(503, _UNAVAILABLE, retry_after_s=1),
    NoRoomLeft: ErrorKind(503, _UNAVAILABLE, retry_after_s=5),
    NoWorkers: ErrorKind(503, _UNAVAILABLE, retry_after_s=2),
    WorkerLost: ErrorKind(503, _UNAVAILABLE, retry_after_s=1),
    DeadlineExceeded: ErrorKind(504, "timeout_error"),
    BaseException: ErrorKind(500, "server_error"),
}


def error_kind(error: BaseException) -> ErrorKind:
    """Returns the entry of the error's class or of its nearest base class in the table; every exception has one."""
    return next(ERROR_KINDS[kind] for kind in type(error).__mro__ if kind in ERROR_KINDS)


def error_body(error: BaseException) -> ErrorResponse:
    """Returns the response body. An unexpected error is logged here, and its details are hidden from the client."""
    kind = error_kind(error)
    if not isinstance(error, HotsetError) or kind.status == 500:
        logger.error("unexpected error", exc_info=error)
        message = "internal error; the server's log has the details"
        return ErrorResponse(error=ErrorDetail(message=message, type=kind.type, param=None, code="internal_error"))
    param = error.param if isinstance(error, RequestError) else None
    shown_param = None if param is None else _printable(param)
    detail = ErrorDetail(message=_printable(str(error)), type=kind.type, param=shown_param, code=error.code)
    return ErrorResponse(error=detail)


def error_response(error: BaseException) -> Response:
    """Returns the HTTP response for an error."""
    kind, headers = error_kind(error), dict[str, str]()
    retry_after_s = error.retry_after_s if isinstance(error, QueueFull) else kind.retry_after_s
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    if isinstance(error, WrongApiKey):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, AmbiguousLength | RequestTimeout):
        headers["Connection"] = "close"  # it is unknown where the next request would begin
    return _response(kind.status, error_body(error), headers)


def http_error_response(error: HTTPException, method: str, path: str) -> Response:
    """Formats an error of the framework (unknown path, wrong method, undecodable body) like our own errors."""
    status = HTTPStatus(error.status_code)
    error_type, message = "invalid_request_error", f"{status.phrase}: {method} {path}"
    if status is HTTPStatus.NOT_FOUND:
        instead = f"run {REMOVED_PATHS[path]}" if path in REMOVED_PATHS else "/docs lists the paths"
        error_type, message = "not_found_error", f"the path {path} does not exist; {instead}"
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{path} does not accept {method}"
    elif status is HTTPStatus.BAD_REQUEST:
        message = "the body is not valid JSON in UTF-8"
    code = status.name.lower() if status is not HTTPStatus.BAD_REQUEST else "invalid_json"
    body = ErrorResponse(error=ErrorDetail(message=_printable(message), type=error_type, param=None, code=code))
    return _response(error.status_code, body, error.headers or {})


def validation_error(error: RequestValidationError) -> RequestError:
    """Converts the first error that the validation of a body found into a RequestError."""
    finding: Mapping[str, Any] = error.errors()[0]
    kind, param = finding["type"], _param(finding["loc"])
    if kind == "json_invalid":
        return RequestError(f"the body is not valid JSON: {finding['ctx']['error']}", code="invalid_json")
    if kind == "extra_forbidden":
        return UnsupportedField(f"{param} is not supported by this server; leave it out", param=param)
    if param is None and kind == "value_error":
        return RequestError(str(finding["ctx"]["error"]), code="invalid_value")
    if param is None and kind == "string_unicode":
        return RequestError("the name of a field must not contain lone surrogates", code="invalid_value")
    if param is None:
        return RequestError("the body must be a JSON object", code="invalid_json")
    if kind == "missing":
        return RequestError(f"{param} is required", param=param, code="missing_field")
    message = finding["msg"]
    return RequestError(f"{param}: {message[:1].lower()}{message[1:]}", param=param, code="invalid_value")


def _response(status: int, body: ErrorResponse, headers: Mapping[str, str]) -> Response:
    return Response(body.model_dump_json(), status, dict(headers), "application/json")


def _param(location: Sequence[int | str]) -> str | None:
    """Converts `("body", "messages", 0, "content")` to "messages[0].content", and `("body",)` to None."""
    name = ""
    for part in location[1:]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif not part.startswith(UNION_TAG) and part != "[key]":
            name += f".{part}" if name else part
    return name or None


def _printable(text: str) -> str:
    """Truncates text and escapes lone surrogates, which UTF-8 cannot encode. The text may come from a client."""
    truncated = text if len(text) <= MAX_MESSAGE_CHARACTERS else text[:MAX_MESSAGE_CHARACTERS] + "..."
    return truncated.encode("utf-8", "backslashreplace").decode("utf-8")
