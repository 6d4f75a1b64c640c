"""One exception tree. `serve/errors.py` holds the one table that maps it to HTTP statuses.

HotsetError
├── StartupError             the engine does not start; the CLI prints one line and exits 1
│   ├── ConfigError          a setting is wrong or cannot be met
│   ├── CheckpointError      a model file is missing, damaged, mismatched or not supported
│   └── MissingDependency    an optional package is needed; the message names the command that adds it
├── RequestError             one request is refused; every other request goes on
│   ├── ContextLengthExceeded
│   ├── UnsupportedField
│   ├── UnknownModel
│   ├── WrongApiKey
│   ├── BodyTooLarge
│   ├── WrongRole            a prefill worker answers no completions
│   └── QueueFull
├── TransferError            a peer's memory cannot be reached; other peers can
├── BadMessage               bytes from the control port that no peer of ours has sent; they are dropped
├── HandoffLost              the prompt was to be computed elsewhere and did not arrive; asking again may help
├── NoWorkers                a router has nobody alive to send a request to
├── WorkerLost               a router's worker failed a request that nobody else could take over
├── DeadlineExceeded         no answer had begun when a request's time was up
├── EngineStopped            the engine is draining, stopped or dead; nothing further will be answered
└── IllegalTransition        our own bug: a request moved between phases that no table joins
"""


class HotsetError(Exception):
    """Root of everything that Hotset raises on purpose."""


class StartupError(HotsetError):
    """The engine cannot start. The message is one line that says what to change."""


class ConfigError(StartupError):
    """A setting is out of range, contradicts another, or asks for what this machine lacks."""


class CheckpointError(StartupError):
    """A model directory or file cannot be used. The message names the file and, where there is one, the tensor."""


class MissingDependency(StartupError):
    """An optional package is needed. The message names the command that installs it."""


class RequestError(HotsetError):
    """A request is refused. `param` names the field at fault; `code` is a stable word for programs."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class ContextLengthExceeded(RequestError):
    """Prompt and answer together cannot fit the model's context."""

    code = "context_length_exceeded"


class UnsupportedField(RequestError):
    """The field exists in the API that we follow, but is not implemented here."""

    code = "unsupported_field"


class UnknownModel(RequestError):
    """The request names a model that this server does not serve."""

    code = "model_not_found"


class WrongApiKey(RequestError):
    """The server asks for an API key and this one is missing or wrong."""

    code = "invalid_api_key"


class BodyTooLarge(RequestError):
    """The request body exceeds the server's limit."""

    code = "request_too_large"


class WrongRole(RequestError):
    """The request belongs to a worker of another role. The message says which."""

    code = "wrong_role"


class QueueFull(RequestError):
    """Too many requests wait already. `retry_after_s` says when to come back."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BadMessage(HotsetError):
    """What came over the control port is no message: damaged, forged, or not meant for us. Dropped and counted."""


class TransferError(HotsetError):
    """A peer cannot be connected, or described itself in a way that makes no sense here. Other peers are unaffected."""


class HandoffLost(HotsetError):
    """A prefill worker was to compute the prompt, and what it computed did not arrive. Nothing was answered yet."""

    code = "prefill_lost"


class NoRoomLeft(HotsetError):
    """Pages of lost handoffs are in quarantine, and too few others are left for the request ever to come in."""

    code = "no_room_left"


class NoWorkers(HotsetError):
    """A router knows no live worker of a kind that the request needs."""

    code = "no_workers"


class WorkerLost(HotsetError):
    """A worker died or went silent over a request, and the router has given up on another attempt."""

    code = "worker_lost"


class DeadlineExceeded(HotsetError):
    """The time in which an answer has to begin has passed, retries included."""

    code = "deadline_exceeded"


class EngineStopped(HotsetError):
    """The engine no longer takes or answers requests."""

    code = "engine_stopped"


class IllegalTransition(HotsetError):
    """A phase change that the transition table does not hold: a bug of ours, never of a user."""

    def __init__(self, before: object, after: object) -> None:
        super().__init__(f"no transition from {before} to {after}")
