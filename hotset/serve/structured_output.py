"""The request fields that give an answer a structure: OpenAI's `response_format` and vLLM's `structured_outputs`."""

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from hotset.base.errors import RequestError
from hotset.base.structure import MAX_STRUCTURE_CHARACTERS, MAX_STRUCTURE_CHOICES, Structure
from hotset.serve.bodies import StrictModel

SourceText = Annotated[str, Field(min_length=1, max_length=MAX_STRUCTURE_CHARACTERS)]


class _Strict(StrictModel):
    model_config = ConfigDict(populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Drops members that are null: they mean the same as members that are left out."""
        if not isinstance(value, dict):
            return value
        return {name: member for name, member in value.items() if member is not None}


class JsonSchemaFormat(_Strict):
    """The schema of an answer. It is enforced, whether `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="A JSON schema. Default: any object.")
    strict: bool | None = Field(None, description="Accepted: the answer always follows the schema.")


class ResponseFormat(_Strict):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema must be given if type is json_schema, and only then")
        return self

    def structure(self) -> Structure | None:
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            return Structure("json_object")
        return Structure("json_schema", json.dumps(self.json_schema.schema_))


class StructuredOutputs(_Strict):
    """The structure of the answer: exactly one of these members."""

    json_: dict[str, Any] | SourceText | None = Field(None, alias="json", description="A JSON schema, or its text.")
    regex: SourceText | None = Field(None, description="A regular expression that matches the whole answer.")
    choice: Annotated[list[SourceText], Field(min_length=1, max_length=MAX_STRUCTURE_CHOICES)] | None = Field(
        None, description="The answer is one of these texts."
    )
    grammar: SourceText | None = Field(None, description="A grammar, in the Lark syntax of llguidance or in GBNF.")
    json_object: bool | None = Field(None, description="true: the answer is a JSON object.")

    @model_validator(mode="after")
    def _has_one_member(self) -> "StructuredOutputs":
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(member is not None for member in given) != 1:
            raise ValueError("must have exactly one of json, regex, choice, grammar and json_object")
        return self

    def structure(self) -> Structure:
        if self.json_ is not None:
            return Structure("json_schema", self.json_ if isinstance(self.json_, str) else json.dumps(self.json_))
        if self.regex is not None:
            return Structure("regex", self.regex)
        if self.choice is not None:
            return Structure("choice", json.dumps(self.choice))
        return Structure("json_object") if self.grammar is None else Structure("grammar", self.grammar)


def structure_of(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> Structure | None:
    """Returns the structure that a request demands. Raises RequestError if the fields contradict each other."""
    if response_format is None or response_format.type == "text":
        return None if outputs is None else outputs.structure()
    if outputs is not None:
        message = "response_format and structured_outputs both give the answer a structure; send one of them"
        raise RequestError(message, param="structured_outputs", code="invalid_value")
    return response_format.structure()
