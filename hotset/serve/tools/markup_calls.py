"""Calls that a model writes as markup, one element for each argument: those of DeepSeek-V3.2, GLM-5 and Qwen3-Coder."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hotset.serve.tools.calls import ToolSpec
from hotset.serve.tools.parsing import Malformed, ParsedCall, Unfinished, strict_json

DSML = "｜DSML｜"


@dataclass(frozen=True, slots=True)
class Markup:
    """How calls are written. `argument` has the groups `key`, `value` and, if the markup says so, `string`."""

    begin: re.Pattern[str]  # has the group `name`
    argument: re.Pattern[str]
    end: re.Pattern[str]
    value_opener: str  # of the last value; the text between the two may contain any marker
    value_closer: str

    def read(self, body: str, tools: Mapping[str, ToolSpec]) -> list[ParsedCall]:
        """Reads all calls between the outer markers. Types of values that the markup leaves open are those of the
        tool's schema."""
        calls: list[ParsedCall] = []
        at = 0
        while at < len(body) or not calls:
            begin = self._matched(self.begin, body, at)
            at = begin.end()
            arguments: dict[str, Any] = {}
            while (argument := self.argument.match(body, at)) is not None:
                arguments[argument["key"]] = _value(argument, tools.get(begin["name"]))
                at = argument.end()
            at = self._matched(self.end, body, at).end()
            calls.append(ParsedCall(begin["name"], arguments))
        return calls

    def _matched(self, pattern: re.Pattern[str], body: str, at: int) -> re.Match[str]:
        matched = pattern.match(body, at)
        if matched is None:
            in_value = body.rfind(self.value_opener) > body.rfind(self.value_closer)
            raise Unfinished if in_value else Malformed
        return matched


def _value(argument: re.Match[str], tool: ToolSpec | None) -> Any:
    """Returns the value of an argument. Raises Malformed if it must be JSON and is not."""
    text = argument["value"]
    marked_as = argument.groupdict().get("string")
    if marked_as == "true":
        return text
    try:
        value = strict_json(text)
    except (ValueError, RecursionError):
        if marked_as == "false":
            raise Malformed from None
        return text
    if marked_as == "false" or tool is None:
        return value
    allowed = value_types(tool.schema.get("properties", {}).get(argument["key"]))
    return text if "string" in allowed and not allowed & _types_of(value) - {"string"} else value


def value_types(schema: object) -> frozenset[str]:
    """Returns the types that a schema allows, as far as they can be seen. Empty: any."""
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


DEEPSEEK = Markup(
    begin=re.compile(rf'\s*<{DSML}invoke name="(?P<name>[^"<>]*)">\s*'),
    argument=re.compile(
        rf'<{DSML}parameter name="(?P<key>[^"]*)" string="(?P<string>true|false)">(?P<value>.*?)</{DSML}parameter>\s*',
        re.DOTALL,
    ),
    end=re.compile(rf"</{DSML}invoke>\s*"),
    value_opener=f"<{DSML}parameter ",
    value_closer=f"</{DSML}parameter>",
)
GLM = Markup(
    begin=re.compile(r"\s*(?P<name>[^\s<>]+)\s*"),
    argument=re.compile(
        r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*",
        re.DOTALL,
    ),
    end=re.compile(r"\Z"),
    value_opener="<arg_value>",
    value_closer="</arg_value>",
)
QWEN_CODER = Markup(
    begin=re.compile(r"\s*<function=(?P<name>[^<>\s]*)>\s*"),
    argument=re.compile(r"<parameter=(?P<key>[^<>]*)>\n?(?P<value>.*?)\n?</parameter>\s*", re.DOTALL),
    end=re.compile(r"</function>\s*"),
    value_opener="<parameter=",
    value_closer="</parameter>",
)
