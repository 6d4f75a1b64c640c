"""Tools and calls, independent of the formats of APIs and models, and the pieces of an answer that is being parsed."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from hotset.base.errors import RequestError

MAX_TOOLS = 1024
MAX_TOOL_CHARACTERS = 1 << 20  # of all tools of a request as JSON
MAX_SCHEMA_DEPTH = 64
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")  # no format needs to escape such a name
PieceT = TypeVar("PieceT")
SCHEMA_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})


def invalid_tool(message: str, param: str = "tools") -> RequestError:
    return RequestError(message, param=param, code="invalid_value")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call. `parameters` is the JSON schema of its arguments; None: it takes none.

    Raises RequestError if the name is not usable, or if `parameters` is not the schema of an object.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if TOOL_NAME.fullmatch(self.name) is None:
            shown = self.name if len(self.name) <= 128 else f"{self.name[:128]}…"
            raise invalid_tool(f"the name of a tool must have 1 to 128 letters, digits, _, . or -, got {shown!r}")
        if self.parameters is None:
            return
        if self.parameters.get("type", "object") != "object":
            kind = json.dumps(self.parameters["type"])[:64]
            raise invalid_tool(f"the parameters of the tool {self.name} must be of type object, got {kind}")
        if (problem := schema_problem(self.parameters)) is not None:
            raise invalid_tool(f"the parameters of the tool {self.name} are not a JSON schema: {problem}")

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return {"type": "object", "properties": {}, **(self.parameters or {})}

    def for_template(self) -> dict[str, Any]:
        """Returns the tool as chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.schema
        return {"type": "function", "function": function}


def schema_problem(schema: object, depth: int = 0) -> str | None:
    """Returns why a value is not a JSON schema, or None. Only keywords that this server reads are checked."""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, Mapping):
        return f"a schema must be an object, got {type(schema).__name__}"
    if depth > MAX_SCHEMA_DEPTH:
        return f"it is nested more than {MAX_SCHEMA_DEPTH} levels deep"
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in SCHEMA_TYPES:
            return f"there is no type {json.dumps(kind)[:64]}"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return "required must be a list of names"
    if not isinstance(schema.get("enum", []), list):
        return "enum must be a list"
    items = schema.get("items", [])
    inner: list[object] = [*items] if isinstance(items, list) else [items]
    inner.append(schema.get("additionalProperties", True))
    for name in ("properties", "$defs", "definitions"):
        named = schema.get(name, {})
        if not isinstance(named, Mapping):
            return f"{name} must be an object"
        inner.extend(named.values())
    for name in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(name, [])
        if not isinstance(alternatives, list):
            return f"{name} must be a list"
        inner.extend(alternatives)
    return next((problem for each in inner if (problem := schema_problem(each, depth + 1)) is not None), None)


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A tool choice: the answer must be one call of this tool."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, and how the model may use them.

    Raises RequestError if there are too many tools, if two have the same name, or if the choice names none of them.
    """

    tools: tuple[ToolSpec, ...] = ()
    choice: ToolChoice = "auto"
    parallel: bool = True  # an answer may have several calls

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        if len(names) > MAX_TOOLS:
            raise invalid_tool(f"tools has {len(names)} tools, and the limit is {MAX_TOOLS}; send fewer")
        if len(set(names)) < len(names):
            twice = next(name for index, name in enumerate(names) if name in names[:index])
            raise invalid_tool(f"tools has two tools with the name {twice!r}")
        if isinstance(self.choice, NamedTool) and self.choice.name not in names:
            shown = self.choice.name[:128]
            raise invalid_tool(
                f"tool_choice names {shown!r}, which is not one of the {len(names)} tools", "tool_choice"
            )
        if self.choice == "required" and not names:
            raise invalid_tool("tool_choice requires a call, but the request has no tools", "tool_choice")
        if names and (characters := self._characters()) > MAX_TOOL_CHARACTERS:
            raise invalid_tool(
                f"tools has {characters} characters of JSON, and the limit is {MAX_TOOL_CHARACTERS}; send fewer tools, "
                "or shorter descriptions"
            )

    def _characters(self) -> int:
        try:
            return len(json.dumps([tool.for_template() for tool in self.tools], ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise invalid_tool(f"tools must consist of JSON values: {error}") from error

    @property
    def offered(self) -> tuple[ToolSpec, ...]:
        """The tools that the model sees. With the choice "none" it sees none, so that it calls none."""
        return () if self.choice == "none" else self.tools

    @property
    def callable(self) -> tuple[ToolSpec, ...]:
        """The tools that the answer may call if it must be a call: with the choice "required", or a named tool."""
        if isinstance(self.choice, NamedTool):
            return tuple(tool for tool in self.tools if tool.name == self.choice.name)
        return self.tools

    @property
    def must_call(self) -> bool:
        return self.choice == "required" or isinstance(self.choice, NamedTool)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """New text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call begins. `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """New text of the arguments of a call. The texts of a complete call add up to a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """A call is complete and valid."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBreaks:
    """A call that has begun is malformed, or the answer ends within it. Its arguments so far are not JSON.

    `source` is the call as the model wrote it, up to the first character that does not fit. `unsent` is the end of
    `source` that is not in the arguments.
    """

    index: int
    source: str
    unsent: str


Piece = TextPiece | CallBegins | CallArguments | CallEnds | CallBreaks


def without_broken_calls(pieces: Iterable[PieceT | Piece]) -> list[PieceT | Piece]:
    """Returns the pieces of a whole answer, with each broken call replaced by its source as text."""
    kept: list[PieceT | Piece] = []
    index, start = 0, 0  # of the call that was begun last
    for piece in pieces:
        if isinstance(piece, CallBreaks):
            kept[start:] = [TextPiece(piece.source)]
            continue
        if isinstance(piece, CallBegins):
            start = len(kept)
        if isinstance(piece, CallBegins | CallArguments | CallEnds):
            piece = replace(piece, index=index)
        index += isinstance(piece, CallEnds)
        kept.append(piece)
    return kept
