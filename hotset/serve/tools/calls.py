"""Tools and calls in a form that no API and no model prescribes, and the pieces of an answer that is being parsed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call. `parameters` is the JSON schema of its arguments; None: it takes none."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """Returns the tool as chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters or {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A tool choice: the answer must be one call of this tool."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, and how the model may use them."""

    tools: tuple[ToolSpec, ...] = ()
    choice: ToolChoice = "auto"
    parallel: bool = True  # several calls in one answer


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call. `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


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
    """New text of the arguments of a call. All texts of a call together are a JSON object."""

    index: int
    text: str


Piece = TextPiece | CallBegins | CallArguments
