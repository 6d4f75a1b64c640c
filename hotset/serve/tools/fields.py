"""The fields of OpenAI's chat completions that concern tools."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from hotset.serve.bodies import LenientModel, one_of, shown
from hotset.serve.tools.calls import MAX_TOOLS, TOOL_NAME, NamedTool, ToolChoice, ToolSpec, ToolUse

# What openapi.json says about the schema of arguments.
PARAMETERS_SCHEMA: JsonDict = {
    "properties": {
        "type": {"const": "object"},
        "properties": {"type": "object", "additionalProperties": {"type": "object"}},
        "required": {"type": "array", "items": {"type": "string"}},
    }
}


def _is_function(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "function":
        message = "is '{given}', but only tools of type 'function' are supported"
        raise PydanticCustomError("tool_type", message, {"given": shown(kind)})
    return kind


ToolType = Annotated[Literal["function"], BeforeValidator(_is_function)]


class Function(LenientModel):
    name: str = Field(json_schema_extra={"pattern": f"^{TOOL_NAME.pattern}$"})
    description: str | None = None
    parameters: Annotated[dict[str, Any], Field(json_schema_extra=PARAMETERS_SCHEMA)] | None = Field(
        None, description="JSON schema of the arguments."
    )
    strict: bool | None = Field(
        None, description="Arguments always follow the schema if tool_choice requires a call; otherwise a hint."
    )


class FunctionTool(LenientModel):
    """A function that the model may call."""

    type: ToolType
    function: Function

    @property
    def spec(self) -> ToolSpec:
        function = self.function
        return ToolSpec(function.name, function.description, function.parameters, bool(function.strict))


class FunctionName(LenientModel):
    name: str


class FunctionChoice(LenientModel):
    """The answer must be a call of this function."""

    type: ToolType
    function: FunctionName


def _choice_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "|mode"
    return "|function" if isinstance(value, dict) else None


Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoiceField = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("|mode")] | Annotated[FunctionChoice, Tag("|function")],
    one_of(_choice_form, "'none', 'auto', 'required', or an object that names a function"),
]


def tool_use_of(
    tools: Sequence[FunctionTool] | None,
    choice: Literal["none", "auto", "required"] | FunctionChoice | None,
    parallel: bool | None,
) -> ToolUse:
    """Returns the tools of a request. Raises RequestError if a tool or the choice is not usable."""
    specs = tuple(tool.spec for tool in tools or ())
    chosen: ToolChoice = NamedTool(choice.function.name) if isinstance(choice, FunctionChoice) else choice or "auto"
    return ToolUse(specs, chosen, parallel is not False)
