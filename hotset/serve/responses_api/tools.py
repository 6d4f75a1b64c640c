"""The tools of `/v1/responses`: functions, custom tools, and namespaces of both.

The model sees all of them as functions. A custom tool takes a text: it becomes a function with the one argument
`input`. The model calls a tool of a namespace by both names joined to one; the calls in an answer have
the two names again.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, Tag

from hotset.base.errors import RequestError
from hotset.serve.agent_request import JsonObject, ToolName
from hotset.serve.bodies import LenientModel, Text, one_of
from hotset.serve.tools.calls import MAX_TOOLS, NamedTool, ToolSpec, ToolUse

# Tools that OpenAI's own servers run, or that only its own models call. Clients like Codex declare them in every
# request, to every server. The model does not see them, and a header of the response names them.
NotOffered = Literal[
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "image_generation",
    "local_shell",
]
CUSTOM_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class FunctionTool(LenientModel):
    type: Literal["function"]
    name: ToolName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class CustomTool(LenientModel):
    type: Literal["custom"]
    name: ToolName
    description: Text | None = None
    format: JsonObject | None = Field(None, description="Shown to the model; the input is not constrained to it.")


class HostedTool(LenientModel):
    """A tool that does not exist here. It is accepted, but the model does not see it."""

    type: NotOffered


def _type_of(value: Any) -> Any:
    """Returns the type of an object that a client sent, before or after its validation."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _tool_form(tool: Any) -> str | None:
    kind = _type_of(tool)
    if not isinstance(kind, str):
        return None
    if kind in ("function", "custom", "namespace"):
        return f"|{kind}"
    return "|hosted" if kind in get_args(NotOffered) else None


TOOL_FORM = one_of(_tool_form, "a tool of type function, custom or namespace; the server runs no tools itself")
NamespaceMember = Annotated[
    Annotated[FunctionTool, Tag("|function")] | Annotated[CustomTool, Tag("|custom")],
    TOOL_FORM,
]


class NamespaceTool(LenientModel):
    type: Literal["namespace"]
    name: ToolName
    description: Text | None = None
    tools: Annotated[list[NamespaceMember], Field(max_length=MAX_TOOLS, fail_fast=True)]


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("|function")]
    | Annotated[CustomTool, Tag("|custom")]
    | Annotated[NamespaceTool, Tag("|namespace")]
    | Annotated[HostedTool, Tag("|hosted")],
    TOOL_FORM,
]
ResponseTools = Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ChosenTool(LenientModel):
    type: Literal["function", "custom"]
    name: Text
    namespace: Text | None = None


def _allowed_form(choice: Any) -> str | None:
    kind = _type_of(choice)
    return "|tool" if kind in ("function", "custom") else "|hosted" if kind in get_args(NotOffered) else None


AllowedTool = Annotated[
    Annotated[ChosenTool, Tag("|tool")] | Annotated[HostedTool, Tag("|hosted")],
    one_of(_allowed_form, "a tool of type function or custom; the server runs no tools itself"),
]


class AllowedTools(LenientModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


def _choice_form(choice: Any) -> str | None:
    if isinstance(choice, str):
        return "|mode"
    return "|allowed" if _type_of(choice) == "allowed_tools" else _allowed_form(choice)


ToolChoiceField = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("|mode")]
    | Annotated[ChosenTool, Tag("|tool")]
    | Annotated[HostedTool, Tag("|hosted")]
    | Annotated[AllowedTools, Tag("|allowed")],
    one_of(_choice_form, "none, auto, required, or an object of type function, custom or allowed_tools"),
]


def flat_name(name: str, namespace: str | None) -> str:
    """Returns the name by which the model calls a tool."""
    return name if namespace is None else f"{namespace}__{name}"


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """A tool under the names that the client gave it."""

    spec: ToolSpec
    name: str
    namespace: str | None = None
    is_custom: bool = False


def declared_tools(tools: Sequence[ResponseTool]) -> dict[str, DeclaredTool]:
    """Returns the tools that the model sees, by the name by which it calls them. Raises RequestError if two have the
    same name."""
    declared: dict[str, DeclaredTool] = {}
    for tool in tools:
        if isinstance(tool, HostedTool):
            continue
        members = tool.tools if isinstance(tool, NamespaceTool) else [tool]
        namespace = tool.name if isinstance(tool, NamespaceTool) else None
        for member in members:
            name = flat_name(member.name, namespace)
            if name in declared:
                raise RequestError(f"tools has two tools with the name {name!r}", param="tools", code="invalid_value")
            declared[name] = _declared(member, name, namespace)
    return declared


def ignored_tools(tools: Sequence[ResponseTool]) -> list[str]:
    """Returns the types of the tools that do not exist here."""
    return sorted({tool.type for tool in tools if isinstance(tool, HostedTool)})


def _declared(tool: FunctionTool | CustomTool, name: str, namespace: str | None) -> DeclaredTool:
    if isinstance(tool, FunctionTool):
        spec = ToolSpec(name, tool.description, tool.parameters, bool(tool.strict))
        return DeclaredTool(spec, tool.name, namespace)
    description = tool.description or ""
    if tool.format is not None and tool.format.get("type") == "grammar":
        description += f"\nThe input follows this grammar:\n{tool.format.get('definition', '')}"
    return DeclaredTool(ToolSpec(name, description or None, CUSTOM_PARAMETERS), tool.name, namespace, is_custom=True)


def tool_use(declared: dict[str, DeclaredTool], choice: Any, *, parallel: bool) -> ToolUse:
    """Returns the tools of a request and the choice among them. Raises RequestError if it names no tool."""
    specs = tuple(tool.spec for tool in declared.values())
    if isinstance(choice, HostedTool):
        message = f"tool_choice demands the tool {choice.type}, which this server does not have; choose another"
        raise RequestError(message, param="tool_choice", code="invalid_value")
    if isinstance(choice, ChosenTool):
        return ToolUse(specs, NamedTool(flat_name(choice.name, choice.namespace)), parallel)
    if isinstance(choice, AllowedTools):
        chosen = [tool for tool in choice.tools if isinstance(tool, ChosenTool)]
        allowed = [flat_name(tool.name, tool.namespace) for tool in chosen]
        if (unknown := next((name for name in allowed if name not in declared), None)) is not None:
            message = f"tool_choice allows {unknown!r}, which is not one of the {len(declared)} tools"
            raise RequestError(message, param="tool_choice", code="invalid_value")
        return ToolUse(tuple(declared[name].spec for name in dict.fromkeys(allowed)), choice.mode, parallel)
    return ToolUse(specs, choice, parallel)


def custom_input(arguments: str) -> str:
    """Returns the text of a call of a custom tool. If the arguments are not as declared, they are the text."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = parsed.get("input") if isinstance(parsed, dict) else None
    return text if isinstance(text, str) else arguments
