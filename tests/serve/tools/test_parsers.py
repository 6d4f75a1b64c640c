"""Parsers of tool calls: an answer gives the same texts and calls however it is cut, and nothing of it is lost."""

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.serve.tools.calls import CallArguments, CallBegins, Piece, TextPiece, ToolSpec
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
every_format = pytest.mark.parametrize("tool_format", FORMATS, ids=lambda each: each.name)


def items_of(pieces: Iterable[Piece]) -> list[Item]:
    """Returns the texts, each as long as possible, and the calls, in order."""
    items: list[Item] = []
    names: list[str] = []
    for piece in pieces:
        match piece:
            case TextPiece(text):
                assert text, "an empty piece"
                if items and isinstance(items[-1], str):
                    items[-1] += text
                else:
                    items.append(text)
            case CallBegins(index, call_id, name):
                assert index == len(names) and call_id == f"id-{index}"
                names.append(name)
            case CallArguments(index, text):
                assert index == len(names) - 1, "a call begins before its arguments"
                items.append((names[index], json.loads(text)))
    return items


def parsed(tool_format: ToolFormat, chunks: Iterable[str]) -> list[Item]:
    numbers = itertools.count()
    parser = tool_format.parser(TOOLS, lambda: f"id-{next(numbers)}")
    return items_of([piece for chunk in chunks for piece in parser.feed(chunk)] + parser.finish())


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
    whole = parsed(tool_format, [text])
    assert parsed(tool_format, chunks_of(text, cuts)) == whole
    assert parsed(tool_format, list(text)) == whole
    assert_nothing_is_lost(text, whole)
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


MALFORMED = {
    "deepseek_v32": [
        "<｜DSML｜function_calls></｜DSML｜function_calls>",
        '<｜DSML｜function_calls><｜DSML｜invoke name="now"></｜DSML｜function_calls>',
        '<｜DSML｜function_calls><｜DSML｜invoke name="now"></｜DSML｜invoke>',
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
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
def test_a_malformed_call_is_text(name: str, text: str) -> None:
    for around in ("", " ", "See: ") if name != "llama3" else ("",):
        for chunks in ([around + text + around], list(around + text + around)):
            assert parsed(BY_NAME[name], chunks) == [around + text + around]


@every_format
def test_a_call_after_a_malformed_one_is_found(tool_format: ToolFormat) -> None:
    opener = OPENERS.get(tool_format.name, "<tool_call>")
    call = ("weather", {"city": "Genève", "days": 2})
    items = parsed(tool_format, list(f"{opener}x {WRITERS[tool_format.name]([call])} end"))
    assert items == [f"{opener}x", call, " end"]


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


def test_arguments_can_be_encoded_although_the_model_wrote_half_a_surrogate_pair() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": "\\ud800é"}}</tool_call>'
    pieces = BY_NAME["qwen3"].parser(TOOLS).feed(text)
    assert [piece.text.encode() for piece in pieces if isinstance(piece, CallArguments)] == [b'{"a": "\\ud800\\u00e9"}']


@every_format
def test_an_answer_of_many_markers_takes_linear_time(tool_format: ToolFormat) -> None:
    opener, closer = OPENERS.get(tool_format.name, "<tool_call>"), CLOSERS.get(tool_format.name, "</tool_call>")
    for text in (opener * 600, (opener + '"') * 600, opener + '"' + closer * 600, (opener + closer) * 600):
        assert parsed(tool_format, [text]) == [text]
        assert parsed(tool_format, [text[start : start + 9] for start in range(0, len(text), 9)]) == [text]
