"""Writes the grammars that an answer must follow if it must be a call: Lark syntax as llguidance reads it."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotset.base.structure import Structure
from hotset.serve.tools.calls import ToolSpec, ToolUse, invalid_tool
from hotset.serve.tools.markup_calls import DSML, value_types

MAX_REFERENCES = 16  # that lead from a property to its schema
ANNOTATIONS = frozenset({"title", "description", "default", "examples"})
ANY_TEXT = "/(?s:.*)/"
SPACE = r"/[ \n]{1,2}/"  # before the first call
UNSAFE_IN_MARKUP = re.compile(r'[<>"\n]')


class GrammarWriter:
    """Collects the rules of one grammar. `special_ids` has the tokens that only their ids can stand for in a grammar;
    all others may be written as text."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._ids = special_ids
        self._specials = re.compile("|".join(map(re.escape, special_ids)) or r"(?!)")
        self._rules: dict[str, str] = {}  # definition -> name

    def literal(self, text: str) -> str:
        """Returns the expression for a text, in which special tokens stand for themselves."""
        parts: list[str] = []
        at = 0
        for found in self._specials.finditer(text):
            parts += [_quoted(text[at : found.start()]), f"<[{self._ids[found[0]]}]>"]
            at = found.end()
        return " ".join(part for part in [*parts, _quoted(text[at:])] if part)

    def json(self, schema: Mapping[str, Any]) -> str:
        """Returns the expression for JSON that is valid by a schema."""
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def until(self, closer: str) -> str:
        """Returns the expression for any text that does not contain `closer`, followed by `closer`."""
        special = self._specials.search(closer)
        if special is None:
            return self.rule(ANY_TEXT, attributes=f"[suffix={_quoted(closer)}]")
        # Text never contains a special token, so the text before the token ends like the text before it in `closer`.
        before = re.escape(closer[: special.start()]).replace("/", r"\/")
        return f"{self.terminal(f'/(?s:.*){before}/')} {self.literal(closer[special.start() :])}"

    def rule(self, definition: str, attributes: str = "") -> str:
        return self._named("rule", attributes + ": " + definition)

    def terminal(self, definition: str) -> str:
        return self._named("TERMINAL", ": " + definition)

    def structure(self, start: str) -> Structure:
        lines = [f"{name}{definition}" for definition, name in self._rules.items()]
        return Structure("grammar", "\n".join([f"start: {start}", *lines]))

    def _named(self, prefix: str, definition: str) -> str:
        return self._rules.setdefault(definition, f"{prefix}_{len(self._rules)}")


CallWriter = Callable[[GrammarWriter, Sequence[ToolSpec], bool], str]


def calls_structure(write_calls: CallWriter, use: ToolUse, special_ids: Mapping[str, int]) -> Structure:
    """Returns the structure of an answer that is a call, or several if they may be parallel."""
    writer = GrammarWriter(special_ids)
    calls = write_calls(writer, use.callable, use.parallel)
    return writer.structure(_joined(writer.terminal(SPACE) + "?", calls))


def qwen3_calls(writer: GrammarWriter, tools: Sequence[ToolSpec], parallel: bool) -> str:
    calls = [
        _joined(
            writer.literal(f'<tool_call>\n{{"name": "{tool.name}", "arguments": '),
            writer.json(tool.schema),
            writer.literal("}\n</tool_call>"),
        )
        for tool in tools
    ]
    return _repeated(writer, calls, writer.literal("\n"), parallel)


def llama3_calls(writer: GrammarWriter, tools: Sequence[ToolSpec], parallel: bool) -> str:
    calls = [
        _joined(
            writer.literal(f'{{"name": "{tool.name}", "parameters": '), writer.json(tool.schema), writer.literal("}")
        )
        for tool in tools
    ]
    return _repeated(writer, calls, writer.literal("; "), parallel)


@dataclass(frozen=True, slots=True)
class MarkupGrammar:
    """How calls are written as markup. The texts are patterns for `str.format` with {name} and {key}."""

    before: str  # all calls
    begin: str
    text_argument: str  # before the value of an argument that is a text
    json_argument: str  # before the value of an argument that is JSON
    value_closer: str
    end: str
    after: str
    newline: str = ""  # after each argument
    value_newline: str = ""  # after a value that is not a text; a text may end with a newline itself
    separator: str = ""

    def __call__(self, writer: GrammarWriter, tools: Sequence[ToolSpec], parallel: bool) -> str:
        calls = [
            _joined(
                writer.literal(self.begin.format(name=tool.name)),
                *(self._argument(writer, tool, key) for key in _keys(tool)),
                f"{writer.literal(self.newline)}?"
                if self.newline
                else "",  # a call without arguments has an empty line
                writer.literal(self.end),
            )
            for tool in tools
        ]
        repeated = _repeated(writer, calls, writer.literal(self.separator), parallel)
        return _joined(writer.literal(self.before), repeated, writer.literal(self.after))

    def _argument(self, writer: GrammarWriter, tool: ToolSpec, key: str) -> str:
        """Returns the expression for one argument, which may be absent unless it is required."""
        schema = _property(tool.schema, key)
        text_begin, json_begin = self.text_argument.format(key=key), self.json_argument.format(key=key)
        json_end = self.value_newline + self.value_closer + self.newline
        types = value_types(schema)
        forms: list[str] = []
        if "enum" in schema or "const" in schema:
            for value in schema.get("enum", [schema.get("const")]):
                begun = text_begin + value if isinstance(value, str) else json_begin + json.dumps(value)
                forms.append(writer.literal(begun + json_end))
        else:
            if "string" in types or not (types or schema.keys() - ANNOTATIONS):
                text = _joined(writer.until(self.value_closer), writer.literal(self.newline))
                forms.append(_joined(writer.literal(text_begin), text))
            # If both forms begin alike, the value itself shows its type, and a text can be anything.
            if not forms or (types != {"string"} and text_begin != json_begin):
                names = [name for name in tool.schema if name in ("$defs", "definitions")]
                value = writer.json({**schema, **{name: tool.schema[name] for name in names}})
                forms.append(_joined(writer.literal(json_begin), value, writer.literal(json_end)))
        argument = writer.rule(" | ".join(forms))
        return argument if key in tool.schema.get("required", ()) else f"{argument}?"


DEEPSEEK_CALLS = MarkupGrammar(
    before=f"<{DSML}function_calls>\n",
    begin=f'<{DSML}invoke name="{{name}}">\n',
    text_argument=f'<{DSML}parameter name="{{key}}" string="true">',
    json_argument=f'<{DSML}parameter name="{{key}}" string="false">',
    value_closer=f"</{DSML}parameter>",
    end=f"</{DSML}invoke>\n",
    after=f"</{DSML}function_calls>",
    newline="\n",
)
GLM_CALLS = MarkupGrammar(
    before="",
    begin="<tool_call>{name}",
    text_argument="<arg_key>{key}</arg_key><arg_value>",
    json_argument="<arg_key>{key}</arg_key><arg_value>",
    value_closer="</arg_value>",
    end="</tool_call>",
    after="",
)
QWEN_CODER_CALLS = MarkupGrammar(
    before="",
    begin="<tool_call>\n<function={name}>\n",
    text_argument="<parameter={key}>\n",
    json_argument="<parameter={key}>\n",
    value_closer="</parameter>",
    end="</function>\n</tool_call>",
    after="",
    newline="\n",
    value_newline="\n",
    separator="\n",
)


def _keys(tool: ToolSpec) -> list[str]:
    """Returns the names of the arguments, also of those that are required and not described. Raises RequestError if
    markup cannot contain one."""
    keys = list(dict.fromkeys([*tool.schema["properties"], *tool.schema.get("required", ())]))
    unsafe = next((key for key in keys if UNSAFE_IN_MARKUP.search(key)), None)
    if unsafe is not None:
        raise invalid_tool(
            f"the parameter {unsafe[:128]!r} of the tool {tool.name} must not contain <, >, quotes or newlines"
        )
    return keys


def _property(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the schema of a property, with a reference to a definition of the same schema resolved."""
    found: Any = schema["properties"].get(key, {})
    for _ in range(MAX_REFERENCES):
        if not isinstance(found, Mapping) or not isinstance(path := found.get("$ref"), str):
            break
        _, _, name = path.rpartition("/")
        found = {**schema.get("$defs", {}), **schema.get("definitions", {})}.get(name, {})
    return found if isinstance(found, Mapping) else {}


def _repeated(writer: GrammarWriter, calls: Sequence[str], separator: str, parallel: bool) -> str:
    call = writer.rule(" | ".join(calls))
    return _joined(call, f"({_joined(separator, call)})*") if parallel else call


def _joined(*expressions: str) -> str:
    return " ".join(expression for expression in expressions if expression)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
