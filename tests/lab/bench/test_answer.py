"""The parser of event streams returns the same answer however the stream is divided into network reads."""

import itertools
import json
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.lab.bench.answer import EventParser, Failure, StreamedAnswer, failure_of


def event(**chunk: Any) -> bytes:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()


def text(value: str, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": value, "finish_reason": finish_reason}])


def delta(**values: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": values, "finish_reason": None}])


EXAMPLES = examples(40)
USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10})
DONE = b"data: [DONE]\n\n"
STREAM = b": comment\r\n\r\n" + text("é") + text("\n") + text("", "length") + b"event: x\nid: 1\n" + USAGE + DONE


def read(*pieces: bytes) -> StreamedAnswer:
    """Feeds the pieces at the times 0, 1, 2, …"""
    answer = StreamedAnswer()
    for now, piece in enumerate(pieces):
        answer.feed(piece, float(now))
    answer.end()
    return answer


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    return [data[start:end] for start, end in itertools.pairwise([0, *sorted(cuts), len(data)])]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_events_are_the_same_for_every_division_of_the_stream_into_two_and_three_reads(line_end: bytes) -> None:
    stream = (b"data: a\n\ndata:b\ndata:  c\n\n: no\n\nretry: 1\n\ndata: \xc3\xa9\n\n").replace(b"\n", line_end)
    expected = [b"a", b"b\n c", "é".encode()]
    for cuts in itertools.chain(
        itertools.combinations(range(len(stream) + 1), 1), itertools.combinations(range(len(stream) + 1), 2)
    ):
        parser = EventParser()
        assert [found for piece in split(stream, list(cuts)) for found in parser.feed(piece)] == expected


@EXAMPLES
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_an_answer_is_the_same_for_every_division_of_its_stream(cuts: list[int]) -> None:
    answer = read(*split(STREAM, cuts))
    assert answer.failure is None
    assert (answer.input_tokens, answer.output_tokens, len(answer.chunk_times)) == (7, 3, 2)
    # A chunk has the time of the read in which its event ends.
    ends = [STREAM.index(piece) + len(piece) for piece in (text("é"), text("\n"))]
    assert answer.chunk_times == [sum(cut < end for cut in cuts) for end in ends]


def test_deltas_with_content_reasoning_or_tool_calls_count_as_chunks_and_others_do_not() -> None:
    pieces = [delta(role="assistant"), delta(reasoning_content="a"), delta(content="b"), delta(tool_calls=[{}])]
    answer = read(*pieces, text("", "stop"), DONE)
    assert answer.chunk_times == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("details", "cached"), [({"cached_tokens": 5}, 5), ({"cached_tokens": None}, None), ({}, None), (None, None)]
)
def test_cached_tokens_are_read_where_the_server_reports_them(details: object, cached: int | None) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": details}
    answer = read(text("a", "length"), event(choices=[], usage=usage), DONE)
    assert (answer.failure, answer.input_tokens, answer.cached_tokens) == (None, 7, cached)
    assert read(text("a", "length"), USAGE, DONE).cached_tokens is None


def test_without_usage_the_chunks_are_counted() -> None:
    answer = read(text("a"), text("b"), text("c", "length"), DONE)
    assert (answer.input_tokens, answer.output_tokens) == (None, 3)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([text("a")], "the stream ended early, after 1 chunks with text"),
        ([text("a"), event(error={"message": "the engine stopped", "code": 500})], "the engine stopped"),
        ([event(error="busy")], "busy"),
        ([b"data: {nonsense\n\n"], "the server sent an event that is not a completion chunk: {nonsense"),
        ([b"data: [1]\n\n"], "the server sent an event that is not a completion chunk: [1]"),
    ],
)
def test_a_stream_that_is_cut_or_contains_an_error_has_failed(pieces: list[bytes], message: str) -> None:
    assert read(*pieces).failure == Failure(200, message)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"error": {"message": "too long"}}', "too long"),
        (422, b'{"detail": "field required"}', "field required"),
        (404, b'{"object": "error", "message": "no model"}', "no model"),
        (502, b"<html>\n bad   gateway</html>", "<html> bad gateway</html>"),
        (500, b"", "(empty)"),
        (200, b'{"choices": []}', 'the server did not stream its answer: {"choices": []}'),
    ],
)
def test_the_message_of_a_response_that_is_not_a_stream_is_found(status: int, body: bytes, message: str) -> None:
    assert failure_of(status, body) == Failure(status, message)
