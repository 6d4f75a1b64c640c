"""Reads calls that DeepSeek-V3.2, GLM-5 and Qwen3-Coder write as markup, with one element for each argument."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from hotset.serve.tools.calls import ToolSpec
from hotset.serve.tools.parsing import (
    CallReader,
    CallWriter,
    Malformed,
    Reading,
    Source,
    json_text,
    overlap,
    strict_json,
)

DSML = "｜DSML｜"
MAX_NAME = 1024  # characters of a name or of a key
GLM_NAME = re.compile(r"[^\s<>]*")
ToolsByName = Mapping[str, ToolSpec]
ValueFormat = Literal["text", "json", "by schema"]


class MarkupCall:
    """Writes the arguments of one call as a JSON object. Arguments that can only be texts are written while they grow;
    all others when they are complete."""

    def __init__(self, source: Source, writer: CallWriter, name: str, tools: ToolsByName) -> None:
        self._source = source
        self._writer = writer
        self._tool = tools.get(name)
        self._lead = ""  # before the next argument
        writer.begin(name)
        writer.arguments("{", source.at)

    def read_value(
        self, key: str, closer: str, form: ValueFormat = "by schema", *, is_on_lines: bool = False
    ) -> Reading[None]:
        """Reads the value of an argument and the marker `closer` after it. If `is_on_lines`, one newline before and one
        after the value are not parts of it. Raises Malformed if the value must be JSON and is not."""
        source = self._source
        if is_on_lines and (yield from source.peek()) == "\n":
            source.at += 1
        lead = f"{self._lead}{json.dumps(key, ensure_ascii=False)}: "
        if form == "text" or (form == "by schema" and self._allowed(key) == {"string"}):
            self._writer.arguments(lead + '"', source.at)
            yield from self._read_text(closer, is_on_lines)
        else:
            text = yield from source.until(closer)
            value = self._value(key, text.removesuffix("\n") if is_on_lines else text, form)
            self._writer.arguments(lead + json_text(value), source.at)
        self._lead = ", "

    def _read_text(self, closer: str, is_on_lines: bool) -> Reading[None]:
        source = self._source
        markers = ["\n" + closer, closer] if is_on_lines else [closer]
        while (end := source.text.find(closer, source.at)) < 0:
            held = max(overlap(source.text, marker) for marker in markers)
            self._write_text(max(source.at, len(source.text) - held))
            yield from source.more()
        ends_line = is_on_lines and end > source.at and source.text[end - 1] == "\n"
        self._write_text(end - ends_line)
        source.at = end + len(closer)
        self._writer.arguments('"', source.at)

    def _write_text(self, end: int) -> None:
        text = self._source.text[self._source.at : end]
        self._source.at = end
        if text:
            self._writer.arguments(json.dumps(text, ensure_ascii=False)[1:-1], end)

    def _allowed(self, key: str) -> frozenset[str]:
        return value_types(None if self._tool is None else self._tool.schema["properties"].get(key))

    def _value(self, key: str, text: str, form: ValueFormat) -> Any:
        try:
            value = strict_json(text)
        except (ValueError, RecursionError):
            if form == "json":
                raise Malformed from None
            return text
        allowed = self._allowed(key)
        is_text = form == "by schema" and "string" in allowed and not allowed & _types_of(value) - {"string"}
        return text if is_text else value


def deepseek_reader(tools: ToolsByName) -> CallReader:
    begin, parameter, value_closer = f'<{DSML}invoke name="', f'<{DSML}parameter name="', f"</{DSML}parameter>"

    def read(source: Source, writer: CallWriter) -> Reading[None]:
        yield from source.expect(f"<{DSML}function_calls>")
        yield from source.skip()
        yield from source.expect(begin)
        has_call = True
        while has_call:
            call = MarkupCall(source, writer, (yield from source.until('">', MAX_NAME)), tools)
            yield from source.skip()
            while (yield from source.expect(parameter, f"</{DSML}invoke>")) == parameter:
                key = yield from source.until('" string="', MAX_NAME)
                is_text = (yield from source.expect('true">', 'false">')) == 'true">'
                yield from call.read_value(key, value_closer, "text" if is_text else "json")
                yield from source.skip()
            writer.end("}")
            has_call = yield from _read_next(source, begin, f"</{DSML}function_calls>")

    return read


def glm_reader(tools: ToolsByName) -> CallReader:
    def read(source: Source, writer: CallWriter) -> Reading[None]:
        yield from source.expect("<tool_call>")
        name = yield from _glm_name(source)
        call = MarkupCall(source, writer, name, tools)
        while (yield from source.expect("<arg_key>", "</tool_call>")) == "<arg_key>":
            key = yield from source.until("</arg_key>", MAX_NAME)
            yield from source.skip()
            yield from source.expect("<arg_value>")
            yield from call.read_value(key, "</arg_value>")
            yield from source.skip()
        writer.end("}")

    return read


def _glm_name(source: Source) -> Reading[str]:
    """Reads the name of a call, and the white space before the next marker."""
    yield from source.skip()
    start = source.at
    yield from source.skip(GLM_NAME)
    name = source.text[start : source.at]
    yield from source.skip()
    if not name or (yield from source.peek()) != "<":
        raise Malformed
    return name


def qwen_coder_reader(tools: ToolsByName) -> CallReader:
    begin, parameter = "<function=", "<parameter="

    def read(source: Source, writer: CallWriter) -> Reading[None]:
        yield from source.expect("<tool_call>")
        yield from source.skip()
        yield from source.expect(begin)
        has_call = True
        while has_call:
            call = MarkupCall(source, writer, (yield from source.until(">", MAX_NAME)), tools)
            yield from source.skip()
            while (yield from source.expect(parameter, "</function>")) == parameter:
                key = yield from source.until(">", MAX_NAME)
                if "<" in key:
                    raise Malformed
                yield from call.read_value(key, "</parameter>", is_on_lines=True)
                yield from source.skip()
            writer.end("}")
            has_call = yield from _read_next(source, begin, "</tool_call>")

    return read


def _read_next(source: Source, begin: str, closer: str) -> Reading[bool]:
    """Reads what follows a call in a block, and returns whether it begins another call. The marker that ends the block
    may be cut off."""
    yield from source.skip()
    try:
        return (yield from source.expect(begin, closer)) == begin
    except Malformed:
        if not closer.startswith(source.text[source.at :]):
            raise
        source.at = len(source.text)
        return False


def value_types(schema: object) -> frozenset[str]:
    """Returns the types that a schema allows, or an empty set if it may allow any type."""
    if not isinstance(schema, Mapping):
        return frozenset()
    if "type" in schema:
        return frozenset([schema["type"]] if isinstance(schema["type"], str) else schema["type"])
    if "enum" in schema or "const" in schema:
        return frozenset().union(*map(_types_of, schema.get("enum", [schema.get("const")])))
    inner: Iterable[object] = schema.get("anyOf") or schema.get("oneOf") or ()
    types = [value_types(each) for each in inner]
    return frozenset().union(*types) if all(types) else frozenset()


def _types_of(value: Any) -> frozenset[str]:
    """Returns the names of JSON's types that a value has: a whole number is a number, too."""
    if value is None:
        return frozenset({"null"})
    names = {bool: "boolean", str: "string", float: "number", dict: "object", list: "array"}
    return frozenset({"integer", "number"} if type(value) is int else {names[type(value)]})
