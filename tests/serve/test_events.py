"""Text in a stream of events has no character at which a client splits lines."""

import json

import httpx
import pytest

from hotset.base.errors import RequestError
from hotset.serve.errors import error_body
from hotset.serve.streams import event_of


@pytest.mark.parametrize("end", ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"])
def test_no_character_of_a_text_ends_the_line_of_its_event(end: str) -> None:
    """httpx splits lines like str.splitlines, at more characters than the event stream format does."""
    stream = httpx.Response(200, content=event_of(error_body(RequestError(f"one{end}two"))))
    (line,) = [line for line in stream.iter_lines() if line]
    assert json.loads(line.removeprefix("data: "))["error"]["message"] == f"one{end}two"
