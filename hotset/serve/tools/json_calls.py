"""Reads calls that Qwen3 and Llama 3 write as JSON objects."""

import json

from hotset.serve.tools.json_reader import read_key, read_value, skip_space
from hotset.serve.tools.parsing import CallWriter, Malformed, Reading, Source, json_text, strict_json

TOOL_CALL = "<tool_call>"
PYTHON_TAG = "<|python_tag|>"
ARGUMENTS = ("arguments", "parameters")
BARE_KEYS = frozenset({"name", "type", *ARGUMENTS})  # a call without a marker begins with one of these


def read_qwen3_call(source: Source, writer: CallWriter) -> Reading[None]:
    """Reads one call between the markers of Qwen3."""
    yield from source.expect(TOOL_CALL)
    yield from skip_space(source)
    call = JsonCall(source, writer)
    yield from call.read()
    yield from skip_space(source)
    yield from source.expect("</tool_call>")
    call.end()


def read_llama_calls(source: Source, writer: CallWriter) -> Reading[None]:
    """Reads calls of Llama 3, which are separated by semicolons. They follow <|python_tag|>, or the answer begins with
    them. Without the marker, an object is a call only if it names one of the tools."""
    is_marked = follows_call = False
    while True:
        yield from source.skip()
        while follows_call and (yield from source.peek()) == ";":
            source.at += 1
            yield from source.skip()
        if (yield from source.peek()) == "<":
            yield from source.expect(PYTHON_TAG)
            yield from source.skip()
            is_marked = True
        call = JsonCall(source, writer, is_bare=not is_marked)
        yield from call.read()
        call.end()
        follows_call = True


class JsonCall:
    """Reads one object with a name and arguments.

    If the name comes before the arguments, they are streamed as they arrive. If a key occurs twice, its first
    value counts.
    """

    def __init__(self, source: Source, writer: CallWriter, *, is_bare: bool = False) -> None:
        self._source = source
        self._writer = writer
        self._is_bare = is_bare
        self._values: dict[str, str] = {}  # by their keys, as JSON
        self._written_to: int | None = None  # the position up to which arguments were written

    def read(self) -> Reading[None]:
        """Reads the object. Raises Malformed if it is not JSON, or describes no call."""
        source = self._source
        yield from source.expect("{")
        yield from skip_space(source)
        while (yield from source.peek()) != "}" or self._values:
            start = source.at
            yield from read_key(source)
            key = json.loads(source.text[start : source.text.rindex('"', start, source.at) + 1])
            if self._is_bare and not self._values and key not in BARE_KEYS:
                raise Malformed
            yield from self._read_member(key)
            yield from skip_space(source)
            if (yield from source.expect(",", "}")) == "}":
                break
            yield from skip_space(source)
        self._check_name()

    def _read_member(self, key: str) -> Reading[None]:
        source, start = self._source, self._source.at
        first = yield from source.peek()
        if key in ARGUMENTS and first == "{" and "name" in self._values and self._written_to is None:
            self._writer.begin(self._check_name())
            self._written_to = start
            try:
                for _ in read_value(source):
                    self._write(source.at)
                    yield
            except Malformed:
                self._write(source.at)
                raise
            self._write(source.at - 1)  # the last brace comes with the end of the call
        else:
            yield from read_value(source)
        self._values.setdefault(key, source.text[start : source.at])
        if key == "name":
            self._check_name()

    def _write(self, end: int) -> None:
        assert self._written_to is not None, "the arguments have begun"
        self._writer.arguments(self._source.text[self._written_to : end], end)
        self._written_to = end

    def _check_name(self) -> str:
        """Returns the name. Raises Malformed if it is not a text, or if a call without a marker names no tool."""
        name = json.loads(self._values.get("name", "null"))
        if not isinstance(name, str) or (self._is_bare and name not in self._writer.names):
            raise Malformed
        return name

    def end(self) -> None:
        """Ends the call after its closing marker."""
        if self._written_to is not None:
            self._writer.end("}")
        else:
            self._writer.begin(self._check_name())
            self._writer.end(self._whole_arguments())

    def _whole_arguments(self) -> str:
        text = next((self._values[key] for key in ARGUMENTS if key in self._values), "{}")
        if text.startswith('"'):  # some models write the object as a text, as the API does
            try:
                text = json_text(strict_json(json.loads(text)))
            except (ValueError, RecursionError):
                raise Malformed from None
        if not text.startswith("{"):
            raise Malformed
        return text
