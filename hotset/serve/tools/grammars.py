"""Writes the grammars that an answer must follow if it must be a call: Lark syntax as llguidance reads it."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from hotset.base.structure import MAX_STRUCTURE_CHARACTERS, Structure
from hotset.serve.tools.calls import ToolSpec, ToolUse, invalid_tool
from hotset.serve.tools.markup_calls import DSML, value_types

ANNOTATIONS = frozenset({"title", "description", "default", "examples"})
ANY_TEXT = "/(?s:.*)/"
SPACE = r"/[ \n]{1,2}/"  # before the first call
LITERALS = {"null": ("null",), "boolean": ("true", "false")}
TEXT_LIMITS = frozenset({"pattern", "minLength", "maxLength"})
DEFINITIONS = ("$defs", "definitions")
DEFINITION = re.compile(r"#/(\$defs|definitions)/[^/]+")
# An escape, a character class (perhaps without its end), or one of ()|. It never backtracks, so it takes linear time.
PATTERN_TOKEN = re.compile(r"\\.|\[\^?+\]?+(?:\\.|[^\]\\])*+(?:\]|\Z)|[()|]", re.DOTALL)
UNSAFE_IN_MARKUP = re.compile(r'[<>"\n]')


class GrammarWriter:
    """Collects the rules of one grammar. `special_ids` has the tokens that a grammar can name only by their ids."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._ids = special_ids
        self._specials = re.compile("|".join(map(re.escape, special_ids)) or r"(?!)")
        self._rules: dict[str, str] = {}  # what follows the name of a rule (attributes, colon, body) -> the name
        self._characters = 0  # in all keys of `_rules`

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
        # No text contains the special token of `closer`. So it suffices that the text ends with the part of `closer`
        # before this token.
        before = re.escape(closer[: special.start()]).replace("/", r"\/")
        return f"{self.terminal(f'/(?s:.*){before}/')} {self.literal(closer[special.start() :])}"

    def limited(self, shortest: int, longest: int | None, pattern: str, closer: str) -> str:
        """Returns the expression for a text of limited length that a regular expression matches, followed by `closer`.

        A lexer that counts characters cannot also search for `closer`, so the text contains no "<". If `closer` begins
        with a special token, which no text contains, the text may have any characters.
        """
        special = self._specials.search(closer)
        ends_with_token = special is not None and special.start() == 0
        length = f"{{{shortest},{'' if longest is None else longest}}}"
        conditions = [f"(?s:.){length}" if ends_with_token else f"[^<]{length}", *([pattern] if pattern else [])]
        escaped = [each.replace("/", r"\/").replace("\n", r"\n") for each in conditions]
        text = self.terminal(" & ".join(f"/{each}/" for each in escaped))
        before, after = (closer, "") if special is None else (closer[: special.start()], closer[special.start() :])
        return _joined(self.terminal(_joined(text, _quoted(before))), self.literal(after))

    def rule(self, body: str, attributes: str = "") -> str:
        return self._named("rule", attributes + ": " + body)

    def terminal(self, body: str) -> str:
        return self._named("TERMINAL", ": " + body)

    def structure(self, start: str) -> Structure:
        lines = [f"{name}{after_name}" for after_name, name in self._rules.items()]
        return Structure("grammar", "\n".join([f"start: {start}", *lines]))

    def _named(self, prefix: str, after_name: str) -> str:
        """Returns the name of the rule that ends with `after_name`, and adds the rule if it is new. Raises RequestError
        as soon as the grammar is too long."""
        if after_name not in self._rules:
            self._characters += len(after_name)
            if self._characters > MAX_STRUCTURE_CHARACTERS:
                raise invalid_tool(
                    f"the grammar of calls of these tools has more than {MAX_STRUCTURE_CHARACTERS} characters; send "
                    "fewer tools, or schemas with fewer parameters and definitions"
                )
            self._rules[after_name] = f"{prefix}_{len(self._rules)}"
        return self._rules[after_name]


GrammarOfCalls = Callable[[GrammarWriter, Sequence[ToolSpec], bool], str]


def calls_structure(write_calls: GrammarOfCalls, use: ToolUse, special_ids: Mapping[str, int]) -> Structure:
    """Returns the structure of an answer that is a call, or several if they may be parallel."""
    writer = GrammarWriter(special_ids)
    calls = write_calls(writer, use.callable, use.parallel)
    return writer.structure(_joined(writer.terminal(SPACE) + "?", calls))


@dataclass(frozen=True, slots=True)
class JsonGrammar:
    """How calls are written as JSON. `begin` has a text before the name of the tool, and one after it."""

    begin: tuple[str, str]
    end: str  # after the arguments
    separator: str

    def __call__(self, writer: GrammarWriter, tools: Sequence[ToolSpec], parallel: bool) -> str:
        calls = [
            _joined(writer.literal(tool.name.join(self.begin)), writer.json(tool.schema), writer.literal(self.end))
            for tool in tools
        ]
        return _repeated(writer, calls, writer.literal(self.separator), parallel)


@dataclass(frozen=True, slots=True)
class MarkupGrammar:
    """How calls are written as markup. The texts are patterns for `str.format` with {name} and {key}."""

    before: str  # before the first call
    begin: str
    text_argument: str  # before the value of an argument that is a text
    json_argument: str  # before the value of an argument that is JSON
    value_closer: str
    end: str
    after: str  # after the last call
    newline: str = ""  # after each argument
    value_newline: str = ""  # after a value that is not a text; a text may end with a newline itself
    separator: str = ""

    def __call__(self, writer: GrammarWriter, tools: Sequence[ToolSpec], parallel: bool) -> str:
        calls = [
            _joined(
                writer.literal(self.begin.format(name=tool.name)),
                *(self._argument(writer, tool, key) for key in tool.argument_names()),
                # A call without arguments has an empty line.
                f"{writer.literal(self.newline)}?" if self.newline else "",
                writer.literal(self.end),
            )
            for tool in map(_Arguments, tools)
        ]
        repeated = _repeated(writer, calls, writer.literal(self.separator), parallel)
        return _joined(writer.literal(self.before), repeated, writer.literal(self.after))

    def _argument(self, writer: GrammarWriter, tool: "_Arguments", key: str) -> str:
        """Returns the expression for one argument, which may be absent unless it is required."""
        text_begin, json_begin = self.text_argument.format(key=key), self.json_argument.format(key=key)
        described = tool.schema["properties"].get(key, {})
        schema = described if isinstance(described, Mapping) else {}
        forms = self._values(writer, tool, schema, set()) or [self._json(writer, tool, schema)]
        if text_begin == json_begin:
            # Nothing marks a text as such. A text without limits then matches every value, so only its form is kept. A
            # limited text cannot be told from JSON, so it is refused.
            free = [form for form in forms if form.is_free_text]
            if not free and any(form.is_limited for form in forms) and any(form.is_json for form in forms):
                raise invalid_tool(
                    f"the parameter {key!r} of the tool {tool.name} can be a text with limits (pattern, minLength or "
                    "maxLength), but also JSON that is neither null nor a boolean; this model writes both alike, so "
                    "the limits cannot be enforced"
                )
            forms = free[:1] or forms
        argument = writer.rule(
            " | ".join(
                _joined(writer.literal(text_begin if form.is_text else json_begin), form.expression) for form in forms
            )
        )
        return argument if key in tool.required else f"{argument}?"

    def _values(self, writer: GrammarWriter, tool: "_Arguments", schema: Any, visited: set[str]) -> "list[ValueForm]":
        """Returns the forms that a value can have, each with the end of the argument. Skips definitions in
        `visited`, whose forms were already added."""
        schema = tool.resolved(schema, visited)
        if schema is None:
            return []
        end = self.value_newline + self.value_closer + self.newline
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            shown = [value if isinstance(value, str) else json.dumps(value) for value in values]
            return [
                ValueForm(writer.literal(text + end), is_text=isinstance(value, str))
                for text, value in zip(shown, values, strict=True)
            ]
        alternatives = schema.get("anyOf") or schema.get("oneOf")
        if alternatives and not schema.keys() - ANNOTATIONS - {"anyOf", "oneOf"}:
            return [form for each in alternatives for form in self._values(writer, tool, each, visited)]
        types = value_types(schema)
        forms: list[ValueForm] = []
        if "string" in types or not (types or schema.keys() - ANNOTATIONS):
            forms.append(self._text(writer, tool, schema))
        if types and types - {"string"} <= LITERALS.keys():
            literals = [literal for kind in sorted(types - {"string"}) for literal in LITERALS[kind]]
            forms += [ValueForm(writer.literal(literal + end)) for literal in literals]
        else:
            others = {**schema, "type": sorted(types - {"string"})} if "string" in types else schema
            forms.append(self._json(writer, tool, others))
        return forms

    def _json(self, writer: GrammarWriter, tool: "_Arguments", schema: Mapping[str, Any]) -> "ValueForm":
        definitions: dict[str, Any] = {}
        if '"$ref"' in json.dumps(schema):
            definitions = {name: tool.schema[name] for name in DEFINITIONS if name in tool.schema}
        end = self.value_newline + self.value_closer + self.newline
        return ValueForm(_joined(writer.json({**schema, **definitions}), writer.literal(end)), is_json=True)

    def _text(self, writer: GrammarWriter, tool: "_Arguments", schema: Mapping[str, Any]) -> "ValueForm":
        if not schema.keys() & TEXT_LIMITS:
            free = _joined(writer.until(self.value_closer), writer.literal(self.newline))
            return ValueForm(free, is_text=True, is_free_text=True)
        shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
        pattern = schema.get("pattern", "")
        if not isinstance(pattern, str) or type(shortest) is not int or type(longest) not in (int, NoneType):
            raise invalid_tool(f"in the tool {tool.name}, a pattern must be a text, and lengths must be whole numbers")
        closer = self.value_newline + self.value_closer
        limited = writer.limited(shortest, longest, whole_pattern(pattern) if pattern else "", closer)
        return ValueForm(_joined(limited, writer.literal(self.newline)), is_text=True, is_limited=True)


@dataclass(frozen=True, slots=True)
class ValueForm:
    """One form of a value."""

    expression: str
    is_text: bool = False  # some formats mark texts as such
    is_free_text: bool = False  # a text without limits
    is_limited: bool = False  # a text with a pattern or a limited length
    is_json: bool = False  # JSON that follows a schema


QWEN3_CALLS = JsonGrammar(('<tool_call>\n{"name": "', '", "arguments": '), "}\n</tool_call>", separator="\n")
LLAMA3_CALLS = JsonGrammar(('{"name": "', '", "parameters": '), "}", separator="; ")
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


class _Arguments:
    """The arguments of one tool, as its schema describes them."""

    def __init__(self, tool: ToolSpec) -> None:
        self.name, self.schema = tool.name, tool.schema
        self.required = frozenset(self.schema.get("required", ()))
        self._definitions = {name: each for kind in DEFINITIONS for name, each in self.schema.get(kind, {}).items()}

    def argument_names(self) -> list[str]:
        """Returns the names of all arguments, including required ones that the schema does not describe. Raises
        RequestError if markup cannot contain a name."""
        self._check_references()
        keys = list(dict.fromkeys([*self.schema["properties"], *self.schema.get("required", ())]))
        unsafe = next((key for key in keys if UNSAFE_IN_MARKUP.search(key)), None)
        if unsafe is not None:
            raise invalid_tool(
                f"the parameter {unsafe[:128]!r} of the tool {self.name} must not contain <, >, quotes or newlines"
            )
        return keys

    def resolved(self, schema: Any, visited: set[str]) -> Mapping[str, Any] | None:
        """Returns a schema, or the definition that it refers to. Returns None for a definition in `visited`, and for
        the schema `false`, which no value fulfils."""
        while isinstance(schema, Mapping) and isinstance(path := schema.get("$ref"), str):
            if path in visited:
                return None
            visited.add(path)
            _, _, name = path.rpartition("/")
            schema = self._definitions.get(name, {})
        return schema if isinstance(schema, Mapping) else None if schema is False else {}

    def _check_references(self) -> None:
        """Raises RequestError for a reference to anything but a definition. The schemas of the arguments are compiled
        one by one, each with the definitions, so no other reference could be resolved."""
        pending: list[Any] = [self.schema]
        while pending:
            value = pending.pop()
            if isinstance(value, Mapping):
                path = value.get("$ref")
                if isinstance(path, str) and not DEFINITION.fullmatch(path):
                    raise invalid_tool(
                        f"the parameters of the tool {self.name} refer to {path[:128]!r}; with this model, references "
                        "can only lead to #/$defs/…"
                    )
                pending += value.values()
            elif isinstance(value, list):
                pending += value


def whole_pattern(pattern: str) -> str:
    """Returns a regular expression that matches a whole text if the pattern of a JSON schema occurs in it."""
    return "|".join(f"(?:{_whole_alternative(alternative)})" for alternative in _alternatives(pattern))


def _whole_alternative(pattern: str) -> str:
    before, after = "(?s:.*)", "(?s:.*)"
    if pattern.startswith("^"):
        pattern, before = pattern[1:], ""
    if re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern):
        pattern, after = pattern[:-1], ""
    return f"{before}(?:{pattern}){after}"


def _alternatives(pattern: str) -> list[str]:
    """Splits a pattern at the bars that are in no group."""
    parts, depth, start = [], 0, 0
    for token in PATTERN_TOKEN.finditer(pattern):
        depth += (token[0] == "(") - (token[0] == ")")
        if token[0] == "|" and depth == 0:
            parts.append(pattern[start : token.start()])
            start = token.end()
    return [*parts, pattern[start:]]


def _repeated(writer: GrammarWriter, calls: Sequence[str], separator: str, parallel: bool) -> str:
    call = writer.rule(" | ".join(calls))
    return _joined(call, f"({_joined(separator, call)})*") if parallel else call


def _joined(*expressions: str) -> str:
    return " ".join(expression for expression in expressions if expression)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
