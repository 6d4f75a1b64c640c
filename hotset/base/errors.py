"""The tree of exceptions that Hotset raises. `serve/errors.py` maps them to HTTP statuses.

HotsetError
├── StartupError             the engine cannot start; the CLI prints one line and exits with 1
│   ├── ConfigError          a setting is invalid, or does not suit the model or this machine
│   │   └── KvDoesNotFit     the KV memory does not hold one request of the configured length
│   ├── CheckpointError      a model file is missing, damaged, mismatched or not supported
│   └── MissingDependency    an optional package is required; the message names the command that installs it
├── RequestError             one request is refused; all others continue
│   ├── ContextLengthExceeded
│   ├── UnsupportedField
│   ├── UnknownModel
│   ├── WrongApiKey
│   ├── NotAllowed           the request names an address, or comes from a web page, that the operator did not allow
│   ├── BodyTooLarge
│   ├── AmbiguousLength      a request declares the length of its body in two ways
│   ├── RequestTimeout       the client did not send its request within the time limit
│   ├── WrongRole            the request must be sent to a worker of another role
│   └── QueueFull
├── TransferError            a peer cannot be connected or written to; other peers are unaffected
├── BadMessage               bytes on the control port are not a valid message; they are dropped
├── HandoffLost              KV from a prefill worker did not arrive; a retry may help
├── NoRoomLeft               pages in quarantine leave too little memory for a request
├── NoWorkers                the router has no live worker for a request
├── WorkerLost               the workers that the router tried died or did not respond
├── HeadLost                 the head of the Ray cluster does not answer, so that the processes of `hotset cluster` end
├── DeadlineExceeded         the response did not begin within its time limit
├── EngineStopped            the engine is draining, stopped or dead; no further output will come
└── IllegalTransition        a bug in Hotset: a change of phase or residence that its table does not allow

InternalError                a bug in Hotset: continuing would corrupt memory, send wrong bytes or leak
"""


class HotsetError(Exception):
    """The base class of all exceptions that Hotset raises on purpose."""

    code: str  # a stable identifier for programs; all errors that clients get have one


class StartupError(HotsetError):
    """The engine cannot start. The message is one line and, if the cause is known, includes what to change."""


class ConfigError(StartupError):
    """A setting is out of range, contradicts another one, or does not suit the model or this machine."""


class KvDoesNotFit(ConfigError):
    """The KV memory cannot hold one request of the configured length or, if none is configured, one of two tokens."""


class CheckpointError(StartupError):
    """A model directory or file cannot be used. The message names the file and, if a tensor is at fault, the tensor."""


class MissingDependency(StartupError):
    """An optional package is required. The message names the command that installs it."""


class RequestError(HotsetError):
    """A request is refused. `param` names the field at fault."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class ContextLengthExceeded(RequestError):
    """Prompt and answer together exceed the maximum context length."""

    code = "context_length_exceeded"


class UnsupportedField(RequestError):
    """The request has a field that Hotset does not implement and must not ignore, or a misspelt one."""

    code = "unsupported_field"


class UnknownModel(RequestError):
    """The request names a model that this server does not serve."""

    code = "model_not_found"


class WrongApiKey(RequestError):
    """The server requires an API key, and the request has none or a wrong one."""

    code = "invalid_api_key"


class NotAllowed(RequestError):
    """The operator does not allow the request: it names an address to which this server may not connect, or a web page
    of another origin sent it."""

    code = "not_allowed"


class BodyTooLarge(RequestError):
    """The request body exceeds the server's limit."""

    code = "request_too_large"


class AmbiguousLength(RequestError):
    """The request has both a Content-Length and a Transfer-Encoding, so a proxy may see another body than we do."""

    code = "ambiguous_length"


class RequestTimeout(RequestError):
    """The client did not send its headers or its body within the time limit."""

    code = "request_timeout"


class WrongRole(RequestError):
    """The request must be sent to a worker of another role. The message names that role."""

    code = "wrong_role"


class QueueFull(RequestError):
    """Too many requests are waiting or in progress. The message ends with the time after which to try again."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(f"{message}; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class BadMessage(HotsetError):
    """Bytes on the control port are not a valid message. They are damaged, forged or misdirected; the receiver drops
    and counts them."""


class TransferError(HotsetError):
    """A peer cannot be connected or written to, or its description is invalid. Other peers are unaffected."""


class HandoffLost(HotsetError):
    """The KV of a prompt did not arrive from its prefill worker. The choice that waited for the KV has no token
    yet; other choices of the request may have some."""

    code = "prefill_lost"


class NoRoomLeft(HotsetError):
    """The request does not fit although no other request holds pages: pages are in quarantine after lost handoffs."""

    code = "no_room_left"


class NoWorkers(HotsetError):
    """The router has no live worker of a role that the request needs."""

    code = "no_workers"


class WorkerLost(HotsetError):
    """All attempts of the router failed, or the worker was lost after the response had begun."""

    code = "worker_lost"


class HeadLost(HotsetError):
    """The head of the Ray cluster does not answer. Nobody would restart or remove the processes on its nodes."""

    code = "head_lost"


class DeadlineExceeded(HotsetError):
    """The response did not begin within its time limit, which includes retries."""

    code = "deadline_exceeded"


class EngineStopped(HotsetError):
    """The engine no longer accepts or answers requests."""

    code = "engine_stopped"


class IllegalTransition(HotsetError):
    """A change of phase or residence is not in its transition table. This is a bug in Hotset, not a user error."""

    def __init__(self, before: object, after: object) -> None:
        super().__init__(f"no transition from {before} to {after}")


class InternalError(AssertionError):
    """A check failed, which only a bug in Hotset can cause. Continuing would corrupt memory, send wrong bytes or leak.

    Unlike `assert`, it is not removed by `python -O`. It is not a HotsetError, so that no handler of expected
    errors hides its traceback.
    """
