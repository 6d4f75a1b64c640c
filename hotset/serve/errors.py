"""The one table from exceptions to HTTP statuses, and the OpenAI-style body that carries them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from hotset.base.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    EngineStopped,
    HandoffLost,
    NoRoomLeft,
    NoWorkers,
    QueueFull,
    RequestError,
    UnknownModel,
    UnsupportedField,
    WorkerLost,
    WrongApiKey,
    WrongRole,
)
from hotset.serve.protocol import UNION_TAG, ErrorDetail, ErrorResponse

logger = logging.getLogger("hotset.serve")

SHOWN_CHARACTERS = 500
# Errors that are nobody's fault here and may be gone when the client comes back.
UNAVAILABLE = (DeadlineExceeded, EngineStopped, HandoffLost, NoRoomLeft, NoWorkers, WorkerLost)
COME_BACK: Mapping[type[BaseException], int] = {HandoffLost: 1, NoWorkers: 2, WorkerLost: 1}  # seconds


@dataclass(frozen=True, slots=True)
class Verdict:
    """What HTTP says about one kind of error."""

    status: int
    type: str


VERDICTS: Mapping[type[BaseException], Verdict] = {
    RequestError: Verdict(400, "invalid_request_error"),
    WrongApiKey: Verdict(401, "authentication_error"),
    UnknownModel: Verdict(404, "not_found_error"),
    WrongRole: Verdict(409, "invalid_request_error"),
    BodyTooLarge: Verdict(413, "invalid_request_error"),
    QueueFull: Verdict(429, "rate_limit_error"),
    EngineStopped: Verdict(503, "service_unavailable_error"),
    HandoffLost: Verdict(503, "service_unavailable_error"),
    NoRoomLeft: Verdict(503, "service_unavailable_error"),
    NoWorkers: Verdict(503, "service_unavailable_error"),
    WorkerLost: Verdict(503, "service_unavailable_error"),
    DeadlineExceeded: Verdict(504, "timeout_error"),
    BaseException: Verdict(500, "server_error"),
}


def verdict_of(error: BaseException) -> Verdict:
    """The entry of the nearest ancestor; every exception has one."""
    return next(VERDICTS[kind] for kind in type(error).__mro__ if kind in VERDICTS)


def error_body(error: BaseException) -> ErrorResponse:
    """What the client is told. An error that nobody foresaw is logged here and shown without its particulars."""
    verdict = verdict_of(error)
    if isinstance(error, RequestError):
        param = None if error.param is None else _shown(error.param)
        detail = ErrorDetail(message=_shown(str(error)), type=verdict.type, param=param, code=error.code)
    elif isinstance(error, UNAVAILABLE):
        detail = ErrorDetail(message=_shown(str(error)), type=verdict.type, param=None, code=error.code)
    else:
        logger.error("unexpected error", exc_info=error)
        message = "internal error; the server's log has the particulars"
        detail = ErrorDetail(message=message, type=verdict.type, param=None, code="internal_error")
    return ErrorResponse(error=detail)


def error_response(error: BaseException) -> Response:
    """`error` as a whole HTTP response."""
    headers: dict[str, str] = {}
    if isinstance(error, QueueFull):
        headers["Retry-After"] = str(error.retry_after_s)
    elif type(error) in COME_BACK:
        headers["Retry-After"] = str(COME_BACK[type(error)])
    if isinstance(error, WrongApiKey):
        headers["WWW-Authenticate"] = "Bearer"
    return _response(verdict_of(error).status, error_body(error), headers)


def http_error_response(error: HTTPException, method: str, path: str) -> Response:
    """What the framework itself refuses (no such path, wrong method, undecodable body), in our shape."""
    status = HTTPStatus(error.status_code)
    kind, message = "invalid_request_error", f"{status.phrase}: {method} {path}"
    if status is HTTPStatus.NOT_FOUND:
        kind, message = "not_found_error", f"there is no path {path}; /docs lists them"
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{path} does not take {method}"
    elif status is HTTPStatus.BAD_REQUEST:
        message = "the body is not valid JSON in UTF-8"
    code = status.name.lower() if status is not HTTPStatus.BAD_REQUEST else "invalid_json"
    body = ErrorResponse(error=ErrorDetail(message=_shown(message), type=kind, param=None, code=code))
    return _response(error.status_code, body, error.headers or {})


def refusal(error: RequestValidationError) -> RequestError:
    """The first thing that a body's validation found, as one of our errors."""
    found: Mapping[str, Any] = error.errors()[0]
    kind, param = found["type"], _param(found["loc"])
    if kind == "json_invalid":
        return RequestError(f"the body is not valid JSON: {found['ctx']['error']}", code="invalid_json")
    if kind == "extra_forbidden":
        return UnsupportedField(f"{param} is not supported by this server; leave it out", param=param)
    if param is None and kind == "value_error":
        return RequestError(str(found["ctx"]["error"]), code="invalid_value")
    if param is None and kind == "string_unicode":
        return RequestError("the name of a field must not hold lone surrogates", code="invalid_value")
    if param is None:
        return RequestError("the body must be a JSON object, sent as application/json", code="invalid_json")
    if kind == "missing":
        return RequestError(f"{param} is required", param=param, code="missing_field")
    message = found["msg"]
    return RequestError(f"{param}: {message[:1].lower()}{message[1:]}", param=param, code="invalid_value")


def _response(status: int, body: ErrorResponse, headers: Mapping[str, str]) -> Response:
    return Response(body.model_dump_json(), status, dict(headers), "application/json")


def _param(location: Sequence[int | str]) -> str | None:
    """`("body", "messages", 0, "content") -> "messages[0].content"`; None where the body as a whole is at fault."""
    name = ""
    for part in location[1:]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif not part.startswith(UNION_TAG) and part != "[key]":
            name += f".{part}" if name else part
    return name or None


def _shown(text: str) -> str:
    """Text from outside, fit for a body: no lone surrogates, which UTF-8 cannot carry, and not endless."""
    cut = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
    return cut.encode("utf-8", "backslashreplace").decode("utf-8")
