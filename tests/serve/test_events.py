"""Events of a stream as a client splits them into lines."""

import json

import httpx
import pytest

from hotset.base.errors import RequestError
from hotset.serve.errors import error_body
from hotset.serve.generation import event_of


@pytest.mark.parametrize("end", ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"])
def test_no_character_of_a_text_ends_the_line_of_its_event(end: str) -> None:
    """httpx ends lines where str.splitlines does, which is more often than events do."""
    stream = httpx.Response(200, content=event_of(error_body(RequestError(f"one{end}two"))))
    (line,) = [line for line in stream.iter_lines() if line]
    assert json.loads(line.removeprefix("data: "))["error"]["message"] == f"one{end}two"
