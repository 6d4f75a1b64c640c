"""The structure that an answer must have: JSON, a regular expression, one of several texts, or a grammar."""

import json
from dataclasses import dataclass
from typing import Literal, get_args

from hotset.base.errors import RequestError

MAX_STRUCTURE_CHARACTERS = 1 << 18
MAX_STRUCTURE_CHOICES = 4096
MAX_MARKER_CHARACTERS = 64

StructureKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


def invalid_structure(message: str) -> RequestError:
    return RequestError(message, code="invalid_structure")


def needs_tokenizer() -> RequestError:
    return invalid_structure("structured output needs a tokenizer, and this model has none")


def structure_failed(reason: str) -> RequestError:
    """Returns the error of an answer that cannot be continued as its structure demands."""
    return RequestError(f"the answer cannot be completed: {reason}", code="structure_failed")


@dataclass(frozen=True, slots=True)
class Structure:
    """What an answer must look like. Creating one checks its form; `hotset.grammar` checks whether it can be compiled.

    `value` depends on the kind:

    - "json_object": empty; the answer is any JSON object
    - "json_schema": the JSON text of a schema
    - "regex": a regular expression that the whole answer matches
    - "choice": the JSON text of a list of texts; the answer is one of them
    - "grammar": a grammar in Lark syntax as llguidance reads it (`%json {…}` stands for JSON by a schema), or in GBNF

    If `after` is not empty, the structure begins after the first occurrence of this text, and what comes before is
    free: a model that thinks answers after "</think>".

    Raises RequestError for any other value.
    """

    kind: StructureKind
    value: str = ""
    after: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(StructureKind):
            kinds = ", ".join(get_args(StructureKind))
            raise invalid_structure(f"the kind of a structure must be one of {kinds}, got {self.kind!r}")
        if not isinstance(self.value, str):
            raise invalid_structure(f"a structure of kind {self.kind} must be a text, got {type(self.value).__name__}")
        if len(self.value) > MAX_STRUCTURE_CHARACTERS:
            raise invalid_structure(
                f"a structure has at most {MAX_STRUCTURE_CHARACTERS} characters, but this one has {len(self.value)}"
            )
        if not isinstance(self.after, str) or len(self.after) > MAX_MARKER_CHARACTERS:
            raise invalid_structure(f"`after` must be a text of at most {MAX_MARKER_CHARACTERS} characters")
        try:
            (self.value + self.after).encode()
        except UnicodeEncodeError:
            raise invalid_structure(f"a structure of kind {self.kind} must not contain lone surrogates") from None
        if (self.kind == "json_object") != (not self.value):
            expected = "no value" if self.kind == "json_object" else "a value that is not empty"
            raise invalid_structure(f"a structure of kind {self.kind} needs {expected}")
        if self.kind == "json_schema":
            if not isinstance(self._parsed(), dict | bool):
                raise invalid_structure("a JSON schema must be an object")
        elif self.kind == "choice":
            _ = self.choices

    @property
    def name(self) -> str:
        """The kind in words, for messages."""
        return self.kind.replace("_", " ")

    @property
    def choices(self) -> list[str]:
        """The texts of a structure of kind "choice"."""
        choices = self._parsed()
        if not isinstance(choices, list) or not all(isinstance(text, str) and text for text in choices):
            raise invalid_structure("choice must be a list of texts that are not empty")
        if not 1 <= len(choices) <= MAX_STRUCTURE_CHOICES:
            raise invalid_structure(f"choice must have 1 to {MAX_STRUCTURE_CHOICES} texts, got {len(choices)}")
        return choices

    def _parsed(self) -> object:
        try:
            parsed: object = json.loads(self.value)
        except (ValueError, RecursionError) as error:
            raise invalid_structure(f"a structure of kind {self.kind} must be valid JSON: {error}") from None
        return parsed
