"""Parsers of tool calls find the same texts and calls however an answer is cut, and lose nothing of it."""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.serve.tools.calls import (
    CallArguments,
    CallBegins,
    CallBreaks,
    CallEnds,
    Piece,
    TextPiece,
    ToolSpec,
    without_broken_calls,
)
from hotset.serve.tools.formats import FORMATS, ToolFormat

Arguments = dict[str, Any]
Item = str | tuple[str, Arguments]  # a text, or a call

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "array"}, "any": {}}
TOOLS = [ToolSpec("weather", parameters={"type": "object", "properties": PROPERTIES}), ToolSpec("now")]
BY_NAME = {tool_format.name: tool_format for tool_format in FORMATS}


def dsml(calls: Iterable[tuple[str, Arguments]]) -> str:
    text = "<｜DSML｜function_calls>\n"
    for name, arguments in calls:
        text += f'<｜DSML｜invoke name="{name}">\n'
        lines = [
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{shown(value)}'
            "</｜DSML｜parameter>"
            for key, value in arguments.items()
        ]
        text += "\n".join(lines) + "\n</｜DSML｜invoke>\n"
    return text + "</｜DSML｜function_calls>"


def shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def glm(calls: Iterable[tuple[str, Arguments]]) -> str:
    def pairs(arguments: Arguments) -> str:
        return "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{shown(value)}</arg_value>\n" for key, value in arguments.items()
        )

    return "".join(f"<tool_call>{name}\n{pairs(arguments)}</tool_call>" for name, arguments in calls)


def coder(calls: Iterable[tuple[str, Arguments]]) -> str:
    def lines(arguments: Arguments) -> str:
        return "".join(f"<parameter={key}>\n{shown(value)}\n</parameter>\n" for key, value in arguments.items())

    return "\n".join(
        f"<tool_call>\n<function={name}>\n{lines(arguments)}</function>\n</tool_call>" for name, arguments in calls
    )


def qwen3(calls: Iterable[tuple[str, Arguments]]) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
        for name, arguments in calls
    )


def llama3(calls: Iterable[tuple[str, Arguments]]) -> str:
    objects = [json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False) for name, arguments in calls]
    return "<|python_tag|>" + "; ".join(objects)


WRITERS: dict[str, Callable[[Iterable[tuple[str, Arguments]]], str]] = {
    "deepseek_v32": dsml,
    "glm": glm,
    "qwen3_coder": coder,
    "qwen3": qwen3,
    "llama3": llama3,
}
OPENERS = {"deepseek_v32": "<｜DSML｜function_calls>", "llama3": "<|python_tag|>"}
CLOSERS = {"deepseek_v32": "</｜DSML｜function_calls>", "llama3": "}"}
ENDS = {"deepseek_v32": "</｜DSML｜invoke>", "qwen3_coder": "</function>"}  # of a call, if a block has several
every_format = pytest.mark.parametrize("tool_format", FORMATS, ids=lambda each: each.name)


@dataclass
class SeenCall:
    """A call as a client sees it after it has added up the pieces of a stream."""

    name: str
    arguments: str = ""
    end: CallEnds | CallBreaks | None = None


def seen(pieces: Iterable[Piece]) -> list[str | SeenCall]:
    """Adds up the texts, each as long as possible, and the calls, in order."""
    items: list[str | SeenCall] = []
    ids: set[str] = set()
    for piece in pieces:
        last = items[-1] if items else None
        if isinstance(piece, TextPiece):
            assert piece.text, "an empty piece"
            if isinstance(last, str):
                items[-1] = last + piece.text
            else:
                items.append(piece.text)
            continue
        if isinstance(piece, CallBegins):
            assert piece.index == len(ids) and piece.id not in ids
            assert not isinstance(last, SeenCall) or last.end is not None, "one call at a time"
            items.append(SeenCall(piece.name))
            ids.add(piece.id)
            continue
        assert isinstance(last, SeenCall) and last.end is None and piece.index == len(ids) - 1
        if isinstance(piece, CallArguments):
            assert piece.text, "an empty piece"
            last.arguments += piece.text
        else:
            last.end = piece
    return items


def streamed(tool_format: ToolFormat, chunks: Iterable[str], tools: Sequence[ToolSpec] = TOOLS) -> list[Piece]:
    parser = tool_format.parser(tools)
    return [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.finish()


def parsed(tool_format: ToolFormat, chunks: Iterable[str], tools: Sequence[ToolSpec] = TOOLS) -> list[Item]:
    """Returns the whole answer, in which broken calls are text."""
    items: list[Item] = []
    for item in seen(without_broken_calls(streamed(tool_format, chunks, tools))):
        assert isinstance(item, str) or isinstance(item.end, CallEnds)
        items.append(item if isinstance(item, str) else (item.name, json.loads(item.arguments)))
    return items


def chunks_of(text: str, cuts: Iterable[int]) -> list[str]:
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


letters = st.text(st.sampled_from('ab <>{}/"\\\n:;｜|_'), max_size=12)
plain = st.text(st.characters(exclude_categories=["Cs", "Zs", "Zl", "Zp", "Cc"], exclude_characters="<{"), max_size=12)
# Values that every format can write: no marker within a text.
values = st.fixed_dictionaries(
    {},
    optional={
        "city": plain,
        "days": st.integers(-(10**6), 10**6),
        "units": st.lists(st.one_of(st.none(), st.booleans(), plain), max_size=2),
    },
)
calls = st.lists(st.one_of(st.tuples(st.just("weather"), values), st.just(("now", {}))), min_size=1, max_size=3)
cuts = st.lists(st.integers(0, 10**6), max_size=8)


@every_format
@settings(max_examples=25, deadline=None)
@given(before=plain, calls=calls, after=plain, cuts=cuts)
def test_calls_between_texts_are_found(
    tool_format: ToolFormat, before: str, calls: list[tuple[str, Arguments]], after: str, cuts: list[int]
) -> None:
    text = before + WRITERS[tool_format.name](calls) + after
    expected: list[Item] = [before, *calls, after]
    assert parsed(tool_format, chunks_of(text, cuts)) == [item for item in expected if item]


@st.composite
def answers(draw: st.DrawFn, name: str) -> str:
    """Texts in which calls, parts of calls, markers and other characters follow each other."""
    opener, closer = OPENERS.get(name, "<tool_call>"), CLOSERS.get(name, "</tool_call>")
    call = calls.map(WRITERS[name])
    part = st.tuples(call, st.integers(0, 200), st.integers(0, 200)).map(lambda p: p[0][min(p[1:]) : max(p[1:])])
    return "".join(draw(st.lists(st.one_of(call, part, letters, st.sampled_from([opener, closer])), max_size=5)))


def assert_nothing_is_lost(text: str, items: list[Item]) -> None:
    if all(isinstance(item, str) for item in items):
        assert "".join(map(str, items)) == text, "an answer without calls is unchanged"
    position = 0
    for item in items:
        if isinstance(item, str):
            found = text.find(item, position)
            assert found >= 0, "texts are in the answer, in their order"
            position = found + len(item)


@every_format
@settings(max_examples=40, deadline=None)
@given(data=st.data(), cuts=cuts)
def test_a_streamed_answer_equals_the_whole_one_and_shows_no_half_marker(
    tool_format: ToolFormat, data: st.DataObject, cuts: list[int]
) -> None:
    text = data.draw(answers(tool_format.name))
    at_once = seen(streamed(tool_format, [text]))
    assert seen(streamed(tool_format, chunks_of(text, cuts))) == at_once
    assert seen(streamed(tool_format, list(text))) == at_once
    assert_nothing_is_lost(text, parsed(tool_format, [text]))
    for call in at_once:
        if isinstance(call, SeenCall):
            assert_json_if_complete(call, tool_format.name)
    opener = OPENERS.get(tool_format.name, "<tool_call>")
    parser = tool_format.parser(TOOLS)
    shown = 0
    for length in range(1, len(text) + 1):
        pieces = parser.feed(text[length - 1])
        if any(isinstance(piece, CallBegins) for piece in pieces):
            break  # from here on, less is shown than was read
        shown += sum(len(piece.text) for piece in pieces if isinstance(piece, TextPiece))
        half = next(half for half in range(len(opener) - 1, -1, -1) if text[:length].endswith(opener[:half]))
        assert shown <= length - half, f"{opener[:half]} may be half a marker and is shown"


def assert_json_if_complete(call: SeenCall, name: str) -> None:
    assert call.name in ("weather", "now") or isinstance(call.end, CallEnds), "unknown tools are not streamed"
    if isinstance(call.end, CallEnds):
        assert isinstance(json.loads(call.arguments), dict)
        return
    assert call.end is not None and call.arguments.startswith("{")
    assert call.end.source.endswith(call.end.unsent)
    if name in ("qwen3", "llama3"):  # they write arguments as JSON
        # A broken call ends where the next one begins, even if that is within a string that was sent.
        arguments, opener = call.arguments + call.end.unsent, OPENERS.get(name, "<tool_call>")
        before_next = arguments[: arguments.rindex(opener)] if opener in arguments else arguments
        assert call.end.source.endswith((arguments, before_next)), "the client has seen every character"
    with pytest.raises(ValueError):
        json.loads(call.arguments)


@every_format
@settings(max_examples=6, deadline=None)
@given(arguments=values)
def test_a_call_that_is_cut_off_anywhere_is_text_and_never_json(tool_format: ToolFormat, arguments: Arguments) -> None:
    text = WRITERS[tool_format.name]([("weather", arguments)])
    [whole] = seen(streamed(tool_format, [text]))
    assert isinstance(whole, SeenCall)
    for length in range(1, len(text)):
        if tool_format.name in ENDS and ENDS[tool_format.name] in text[:length]:
            assert parsed(tool_format, [text[:length]]) == [("weather", arguments)], "only the block is cut off"
            continue
        assert parsed(tool_format, [text[:length]]) == [text[:length]]
        for call in seen(streamed(tool_format, [text[:length]])):
            if isinstance(call, SeenCall):
                assert_json_if_complete(call, tool_format.name)
                assert whole.arguments.startswith(call.arguments)


@every_format
def test_a_text_is_streamed_while_it_is_written(tool_format: ToolFormat) -> None:
    city = "".join(f'{number} é "<a>\\ ' for number in range(100))
    text = WRITERS[tool_format.name]([("weather", {"city": city})])
    parser = tool_format.parser(TOOLS)
    arguments, most_behind = "", 0
    for length, character in enumerate(text, 1):
        arguments += "".join(piece.text for piece in parser.feed(character) if isinstance(piece, CallArguments))
        if length <= (value_end := text.rindex("99 é") + 4):
            read, sent = text[:length].count("é"), arguments.count("é")
            most_behind = max(most_behind, read - sent)
            assert length < value_end or sent >= 99
    assert most_behind <= 1


def test_a_call_of_an_unknown_tool_is_returned_when_it_is_complete() -> None:
    for tool_format in FORMATS:
        text = WRITERS[tool_format.name]([("later", {"a": "b"})])
        parser = tool_format.parser(TOOLS)
        before = [piece for character in text[:-25] for piece in parser.feed(character)]
        assert not before
        assert [type(piece) for piece in parser.feed(text[-25:])] == [CallBegins, CallArguments, CallEnds]


def test_broken_calls_between_others_are_text_in_a_whole_answer() -> None:
    broken = '<tool_call>{"name": "now", "arguments": {"a": nan}}</tool_call>'
    calls = WRITERS["qwen3"]([("now", {})])
    text = f"a {broken} {calls} {broken}{calls} b"
    items = seen(streamed(BY_NAME["qwen3"], list(text)))
    assert [item if isinstance(item, str) else item.arguments for item in items] == [
        "a",
        '{"a": n',
        "an}}</tool_call>",
        "{}",
        '{"a": n',
        "an}}</tool_call>",
        "{}",
        " b",
    ]
    assert parsed(BY_NAME["qwen3"], list(text)) == [f"a {broken}", ("now", {}), f" {broken}", ("now", {}), " b"]


MALFORMED = {
    "deepseek_v32": [
        "<｜DSML｜function_calls></｜DSML｜function_calls>",
        '<｜DSML｜function_calls><｜DSML｜invoke name="now"></｜DSML｜function_calls>',
        '<｜DSML｜function_calls><｜DSML｜invoke name="now">',
        '<｜DSML｜function_calls><｜DSML｜invoke name="a b"></｜DSML｜invoke></｜DSML｜function_calls>',
        '<｜DSML｜function_calls><｜DSML｜invoke name="now"><｜DSML｜parameter name="a" string="false">{'
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
    ],
    "glm": [
        "<tool_call></tool_call>",
        "<tool_call>now",
        "<tool_call>now<arg_key>a</arg_key></tool_call>",
        "<tool_call>now and then</tool_call>",
        "<tool_call>now<arg_key>a</arg_key><arg_value>b</tool_call>",
    ],
    "qwen3_coder": [
        "<tool_call></tool_call>",
        "<tool_call><function=now></tool_call>",
        "<tool_call><function=></function></tool_call>",
        "<tool_call><function=now><parameter=a>b</function></tool_call>",
        "<function=now></function>",
    ],
    "qwen3": [
        "<tool_call></tool_call>",
        "<tool_call>now</tool_call>",
        '<tool_call>{"name": "now", "arguments": []}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "[1"}</tool_call>',
        '<tool_call>{"name": 1}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": "</tool_call>',
        '<tool_call>{"name": "now"',
        "</tool_call>",
    ],
    "llama3": [
        '{"name": "unknown", "parameters": {}}',
        '{"answer": 1}',
        '{"name": "now"',
        '<|python_tag|>brave_search.call(query="a")',
        '<|python_tag|>{"name": 1}',
        '<|python_tag|>{"name": "now", "parameters": {"a": NaN}}',
        "<|python_tag|>",
        'See {"name": "now", "parameters": {}}',
        ';{"name": "now", "parameters": {}}',
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
def test_a_malformed_call_is_text(name: str, text: str) -> None:
    for around in ("", " ", "See: ") if name != "llama3" else ("",):
        at_once, in_letters = [around + text + around], list(around + text + around)
        assert parsed(BY_NAME[name], at_once) == parsed(BY_NAME[name], in_letters) == at_once
        assert seen(streamed(BY_NAME[name], at_once)) == seen(streamed(BY_NAME[name], in_letters))


@every_format
def test_a_call_after_a_malformed_one_is_found(tool_format: ToolFormat) -> None:
    opener = OPENERS.get(tool_format.name, "<tool_call>")
    call = ("weather", {"city": "Genève", "days": 2})
    items = parsed(tool_format, list(f"{opener}x {WRITERS[tool_format.name]([call])} end"))
    assert items == [f"{opener}x", call, " end"]


@every_format
def test_a_call_within_the_values_of_a_malformed_one_is_found(tool_format: ToolFormat) -> None:
    """The value of the first call never ends, so it contains the second call."""
    first = WRITERS[tool_format.name]([("weather", {"city": "Gen"})])
    second = WRITERS[tool_format.name]([("now", {})])
    text = first[: first.index("Gen") + 3] + second
    items = parsed(tool_format, list(text))
    assert items == [first[: first.index("Gen") + 3], ("now", {})]


@pytest.mark.parametrize("name", ["deepseek_v32", "glm", "qwen3_coder", "qwen3"])
def test_a_value_may_contain_the_marker_that_ends_calls(name: str) -> None:
    call = ("weather", {"city": f"a{CLOSERS.get(name, '</tool_call>')}b"})
    text = WRITERS[name]([call])
    assert parsed(BY_NAME[name], [text]) == parsed(BY_NAME[name], list(text)) == [call]


@pytest.mark.parametrize("name", ["glm", "qwen3_coder"])
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "5", "5"),
        ("city", '"quoted"', '"quoted"'),
        ("days", "5", 5),
        ("days", "five", "five"),
        ("units", '["C"]', ["C"]),
        ("any", "null", None),
        ("any", "five", "five"),
        ("unknown", "true", True),
    ],
)
def test_the_schema_decides_whether_a_value_is_a_text(name: str, key: str, text: str, value: Any) -> None:
    assert parsed(BY_NAME[name], [WRITERS[name]([("weather", {key: text})])]) == [("weather", {key: value})]


def test_llama_calls_without_a_marker_are_found_at_the_beginning_only() -> None:
    text = ' {"name": "weather", "parameters": {"city": "a}\\"{"}}; {"type": "function", "name": "now"} Done.'
    expected: list[Item] = [("weather", {"city": 'a}"{'}), ("now", {}), " Done."]
    assert parsed(BY_NAME["llama3"], [text]) == parsed(BY_NAME["llama3"], list(text)) == expected


def test_semicolons_between_calls_of_llama_are_dropped_and_others_are_text() -> None:
    text = '; <|python_tag|>{"name": "now", "parameters": {}};; {"name": "now", "parameters": {}};'
    expected: list[Item] = [";", ("now", {}), ("now", {}), ";"]
    assert parsed(BY_NAME["llama3"], [text]) == parsed(BY_NAME["llama3"], list(text)) == expected


def test_arguments_can_be_encoded_although_the_model_wrote_half_a_surrogate_pair() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": "\\ud800é"}}</tool_call>'
    as_text = '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"\\\\ud800é\\"}"}</tool_call>'
    element = '<tool_call>now<arg_key>any</arg_key><arg_value>["\\ud800é"]</arg_value></tool_call>'
    for name, answer in (("qwen3", text), ("qwen3", as_text), ("glm", element)):
        arguments = "".join(
            piece.text for piece in streamed(BY_NAME[name], [answer]) if isinstance(piece, CallArguments)
        )
        assert arguments.encode() and "\ud800é" in json.dumps(json.loads(arguments), ensure_ascii=False)


@every_format
def test_an_answer_of_many_markers_takes_linear_time(tool_format: ToolFormat) -> None:
    opener, closer = OPENERS.get(tool_format.name, "<tool_call>"), CLOSERS.get(tool_format.name, "</tool_call>")
    for text in (opener * 600, (opener + '"') * 600, opener + '"' + closer * 600, (opener + closer) * 600):
        assert parsed(tool_format, [text]) == [text]
        assert parsed(tool_format, [text[start : start + 9] for start in range(0, len(text), 9)]) == [text]
