"""The events of a stream of /v1/responses or /v1/messages add up to the whole response, for every answer."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.base.errors import EngineStopped
from hotset.base.sampling import SamplingParams
from hotset.engine.outputs import Delta
from hotset.serve.conversation import AnswerPiece, AnswerReader, ReasoningPiece
from hotset.serve.generation import GenerationJob
from hotset.serve.messages_api.endpoint import MessagesResponder
from hotset.serve.responses_api.answer import ResponseObject
from hotset.serve.responses_api.endpoint import ResponsesResponder
from hotset.serve.responses_api.tools import DeclaredTool
from hotset.serve.tools.calls import CallArguments, CallBegins, CallBreaks, CallEnds, TextPiece, ToolSpec

JOB = GenerationJob("resp_0", [[1] * 9], SamplingParams(), stream=True)
CUSTOM = DeclaredTool(ToolSpec("eyes__patch"), "patch", "eyes", is_custom=True)
UNANSWERED = ResponseObject(
    id="resp_0",
    created_at=0,
    status="in_progress",
    model="m",
    output=[],
    instructions=None,
    max_output_tokens=None,
    temperature=1.0,
    top_p=1.0,
    tools=[],
    tool_choice="auto",
    parallel_tool_calls=True,
    text={},
    reasoning={},
    metadata={},
)


class PieceReader:
    """Returns pieces that the test has chosen, one list for each delta."""

    def __init__(self, pieces: list[list[AnswerPiece]]) -> None:
        self._pieces = iter(pieces)
        self._has_calls = any(isinstance(piece, CallEnds) for each in pieces for piece in each)

    def read(self, delta: Delta) -> list[AnswerPiece]:
        return next(self._pieces)

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if self._has_calls and reason == "stop" else reason


texts = st.text(st.sampled_from('a {"\n\u2028é'), max_size=4)
calls = st.tuples(st.sampled_from(["look", "eyes__patch"]), st.dictionaries(st.sampled_from(["input", "b"]), texts))


@st.composite
def answers(draw: st.DrawFn) -> list[list[AnswerPiece]]:
    """Returns the pieces of an answer, as one list for each of its deltas."""
    pieces: list[AnswerPiece] = [ReasoningPiece(text) for text in draw(st.lists(texts, max_size=3))]
    index = 0
    for part in draw(st.lists(st.one_of(texts, calls), max_size=6)):
        if isinstance(part, str):
            pieces.append(TextPiece(part))
            continue
        name, arguments = part
        pieces.append(CallBegins(index, f"call_{index}", name))
        rest = json.dumps(arguments)
        while rest:
            size = draw(st.integers(1, len(rest)))
            pieces.append(CallArguments(index, rest[:size]))
            rest = rest[size:]
        pieces.append(CallEnds(index))
        index += 1
    deltas: list[list[AnswerPiece]] = [[]]
    for piece in pieces:
        if draw(st.booleans()):
            deltas.append([])
        deltas[-1].append(piece)
    return deltas


def reader_of(pieces: list[list[AnswerPiece]]) -> AnswerReader:
    return cast(AnswerReader, PieceReader(pieces))


async def deltas_of(
    count: int, reason: Any = "stop", stop: str | None = None, error: Exception | None = None
) -> AsyncGenerator[Delta, None]:
    for number in range(count):
        last = number == count - 1
        if last and error is not None:
            raise error
        yield Delta(0, "", (1,), finish_reason=reason if last else None, stop_reason=stop if last else None)


async def streamed(responder: Any, deltas: AsyncGenerator[Delta, None]) -> list[dict[str, Any]]:
    events = []
    async for event in responder.events(deltas):
        name, data = event.decode().removesuffix("\n\n").split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def whole(responder: Any, deltas: AsyncGenerator[Delta, None]) -> Any:
    return json.loads((await responder.full(deltas)).body)


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Puts a message together from its events, as Anthropic describes them."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message, open_index = events[0]["message"], None
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert open_index is None and event["index"] == len(message["content"])
            open_index = event["index"]
            message["content"].append({**event["content_block"], "json": ""})
            continue
        assert event["index"] == open_index
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            open_index = None
            arguments = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(arguments)
            continue
        delta = event["delta"]
        field = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[delta["type"]]
        block[field] += delta[delta["type"].removesuffix("_delta") if field != "json" else "partial_json"]
    assert open_index is None
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


@settings(deadline=None)
@given(answers(), st.booleans(), st.sampled_from(["stop", "length"]))
def test_the_events_of_a_message_add_up_to_the_whole_message(
    pieces: list[list[AnswerPiece]], shows_thinking: bool, reason: str
) -> None:
    async def both() -> tuple[Any, Any]:
        def responder() -> MessagesResponder:
            return MessagesResponder(JOB, reader_of(pieces), "m", len(pieces), shows_thinking)

        events = await streamed(responder(), deltas_of(len(pieces), reason))
        return message_of(events), await whole(responder(), deltas_of(len(pieces), reason))

    from_events, message = asyncio.run(both())
    assert from_events == message
    kinds = [block["type"] for block in message["content"]]
    assert shows_thinking or "thinking" not in kinds
    ended = "tool_use" if "tool_use" in kinds else "end_turn"
    assert message["stop_reason"] == (ended if reason == "stop" else "max_tokens")
    assert message["usage"]["output_tokens"] == len(pieces) and message["usage"]["input_tokens"] == 9


def output_of(events: list[dict[str, Any]]) -> list[Any]:
    """Puts the output of a response together from the deltas of its events, as OpenAI describes them."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[Any] = []
    text = ""
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            text = ""
            continue
        assert event["output_index"] == len(items) - 1
        item = items[-1]
        assert event.get("item_id", item["id"]) == item["id"]
        if kind.endswith(".delta"):
            text += event["delta"]
        elif kind == "content_part.added":
            assert event["part"]["text"] == ""
        elif kind == "content_part.done":
            assert event["part"]["text"] == text
            item["content"].append(event["part"])
        elif kind == "output_item.done":
            item["status"] = event["item"]["status"]
            assert item == event["item"]
        else:
            field = {"function_call_arguments.done": "arguments", "custom_tool_call_input.done": "input"}.get(
                kind, "text"
            )
            assert event[field] == text
            if field != "text":
                item[field] = text
    return items


@settings(deadline=None)
@given(answers(), st.sampled_from(["stop", "length"]))
def test_the_events_of_a_response_add_up_to_the_whole_response(pieces: list[list[AnswerPiece]], reason: str) -> None:
    async def both() -> tuple[Any, Any]:
        def responder() -> ResponsesResponder:
            return ResponsesResponder(JOB, reader_of(pieces), {"eyes__patch": CUSTOM}, UNANSWERED)

        events = await streamed(responder(), deltas_of(len(pieces), reason))
        return events, await whole(responder(), deltas_of(len(pieces), reason))

    events, response = asyncio.run(both())
    assert output_of(events) == response["output"] and events[-1]["response"] == response
    status = "completed" if reason == "stop" else "incomplete"
    assert (events[-1]["type"], response["status"]) == (f"response.{status}", status)
    assert response["usage"]["output_tokens"] == len(pieces)
    for item in response["output"]:
        if item["type"] == "custom_tool_call":
            assert (item["name"], item["namespace"]) == ("patch", "eyes")


@pytest.mark.parametrize(
    ("reason", "stop", "asked", "expected"),
    [
        ("stop", "END", 9, ("stop_sequence", "END")),
        ("length", None, 2, ("max_tokens", None)),
        ("length", None, 9, ("model_context_window_exceeded", None)),
    ],
)
def test_a_message_says_why_it_ended(reason: str, stop: str | None, asked: int, expected: tuple[str, str]) -> None:
    pieces: list[list[AnswerPiece]] = [[TextPiece("a")], []]
    responder = MessagesResponder(JOB, reader_of(pieces), "m", asked, shows_thinking=False)
    message = asyncio.run(whole(responder, deltas_of(2, reason, stop)))
    assert (message["stop_reason"], message["stop_sequence"]) == expected


# A call with an invalid value, a complete call, and a call that is cut off.
BROKEN: list[list[AnswerPiece]] = [
    [CallBegins(0, "call_0", "look"), CallArguments(0, '{"a": n')],
    [CallBreaks(0, '<tool_call>{"name": "look", "arguments": {"a": n', ""), TextPiece("an}}")],
    [CallBegins(1, "call_1", "look"), CallArguments(1, '{"a": 1'), CallArguments(1, "}"), CallEnds(1)],
    [CallBegins(2, "call_2", "look"), CallArguments(2, '{"a": 2')],
    [CallBreaks(2, '<tool_call>{"name": "look", "arguments": {"a": 2}}</', "}}</")],
]
SOURCES = [f'<tool_call>{{"name": "look", "arguments": {{"a": {rest}' for rest in ("nan}}", "2}}</")]


def test_a_call_that_breaks_is_shown_as_text_in_a_message() -> None:
    responder = MessagesResponder(JOB, reader_of(BROKEN), "m", 5, shows_thinking=False)
    message = asyncio.run(whole(responder, deltas_of(5, "length")))
    call = {"type": "tool_use", "id": "call_1", "name": "look", "input": {"a": 1}}
    texts = [{"type": "text", "text": source, "citations": None} for source in SOURCES]
    assert message["content"] == [texts[0], call, texts[1]], "no client runs a call with half of its arguments"
    assert message["stop_reason"] == "max_tokens"


def test_the_events_of_a_message_show_a_call_up_to_the_place_where_it_breaks() -> None:
    responder = MessagesResponder(JOB, reader_of(BROKEN), "m", 5, shows_thinking=False)
    events = asyncio.run(streamed(responder, deltas_of(5, "stop")))
    blocks: list[list[str]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append([event["content_block"]["type"], ""])
        if event["type"] == "content_block_delta":
            blocks[event["index"]][1] += event["delta"].get("partial_json") or event["delta"].get("text")
    assert blocks == [
        ["tool_use", '{"a": n'],
        ["text", "an}}"],
        ["tool_use", '{"a": 1}'],
        ["tool_use", '{"a": 2'],
        ["text", "}}</"],
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use", "one call is complete"


def test_a_call_that_breaks_is_incomplete_in_the_events_of_a_response_and_text_in_a_whole_one() -> None:
    def responder() -> ResponsesResponder:
        return ResponsesResponder(JOB, reader_of(BROKEN), {}, UNANSWERED)

    events = asyncio.run(streamed(responder(), deltas_of(5, "stop")))
    items = output_of(events)
    assert items == events[-1]["response"]["output"]
    assert [(item["type"], item["status"], item.get("arguments")) for item in items] == [
        ("function_call", "incomplete", '{"a": n'),
        ("message", "completed", None),
        ("function_call", "completed", '{"a": 1}'),
        ("function_call", "incomplete", '{"a": 2'),
        ("message", "completed", None),
    ]
    response = asyncio.run(whole(responder(), deltas_of(5, "length")))
    shown = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in response["output"]]
    assert shown == [SOURCES[0], '{"a": 1}', SOURCES[1]]
    assert [item["status"] for item in response["output"]] == ["completed", "completed", "incomplete"]


def test_an_error_in_the_middle_is_the_last_event() -> None:
    pieces: list[list[AnswerPiece]] = [[TextPiece("a")], []]
    error = EngineStopped("the engine died")
    message = MessagesResponder(JOB, reader_of(pieces), "m", 9, shows_thinking=False)
    *_, last = asyncio.run(streamed(message, deltas_of(2, error=error)))
    assert last == {
        "type": "error",
        "error": {"type": "api_error", "message": "the engine died", "details": {"error_code": "engine_stopped"}},
    }
    response = ResponsesResponder(JOB, reader_of(pieces), {}, UNANSWERED)
    *_, last = asyncio.run(streamed(response, deltas_of(2, error=error)))
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "engine_stopped", "message": "the engine died"}
    assert last["response"]["output"][0]["content"][0]["text"] == "a"
