"""One streamed answer: when its pieces of text arrived, and how many tokens the server counted."""

import json
from dataclasses import dataclass
from typing import Any

MAX_ERROR_CHARACTERS = 300
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")  # in the `delta` of a chat chunk


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed. `status` is None if there was no HTTP response."""

    status: int | None
    message: str


class StreamedAnswer:
    """Reads the event stream of one request. The caller passes the current time to `feed`."""

    def __init__(self) -> None:
        self.chunk_times: list[float] = []  # one for each chunk that has text
        self.input_tokens: int | None = None
        self.cached_tokens: int | None = None  # input tokens that were in the server's prefix cache
        self.failure: Failure | None = None
        self._completion_tokens: int | None = None
        self._finished = False  # a finish reason or the end marker has arrived
        self._events = EventParser()

    @property
    def output_tokens(self) -> int:
        """The server's count, or the number of chunks if the server sent no usage."""
        return len(self.chunk_times) if self._completion_tokens is None else self._completion_tokens

    def feed(self, data: bytes, now: float) -> None:
        """Reads bytes that arrived at time `now`."""
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self._finished = True
                continue
            try:
                self._read_chunk(json.loads(event), now)
            except (ValueError, LookupError, TypeError, AttributeError):
                self._fail(f"the server sent an event that is not a completion chunk: {_shortened(event)}")

    def end(self) -> None:
        """Ends the stream. The request failed if neither a finish reason nor the end marker arrived."""
        if not self._finished:
            self._fail(f"the stream ended early, after {len(self.chunk_times)} chunks with text")

    def _read_chunk(self, chunk: dict[str, Any], now: float) -> None:
        if error := chunk.get("error"):
            self._fail(error_message(error))
        if usage := chunk.get("usage"):
            self.input_tokens, self._completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if choice.get("text") or any(delta.get(field) for field in TEXT_FIELDS):
                self.chunk_times.append(now)
            if choice.get("finish_reason") is not None:
                self._finished = True

    def _fail(self, message: str) -> None:
        self.failure = self.failure or Failure(200, message)


class EventParser:
    """Splits a stream into the data of its server-sent events. The bytes may arrive in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""  # the beginning of a line whose end has not arrived
        self._data: list[bytes] = []  # the data lines of an event whose end has not arrived

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of the events that end in these bytes. Comments and other fields are dropped."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events


def error_message(error: Any) -> str:
    """Returns the message of an `error` object, in OpenAI's format or another one."""
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)[:MAX_ERROR_CHARACTERS]


def failure_of(status: int, body: bytes) -> Failure:
    """Describes an HTTP response that is not a stream."""
    if status == 200:
        return Failure(status, f"the server did not stream its answer: {_shortened(body)}")
    try:
        values = json.loads(body)
        return Failure(status, error_message(values.get("error") or values.get("detail") or values))
    except (ValueError, AttributeError):
        return Failure(status, _shortened(body))


def _shortened(body: bytes) -> str:
    return " ".join(body.decode("utf-8", "replace").split())[:MAX_ERROR_CHARACTERS] or "(empty)"
