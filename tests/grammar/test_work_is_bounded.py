"""Reading a structure takes linear time, and whatever it says is an error of the request, never of the server.

The limits of CPU time are hundreds of times what is needed. Earlier code exceeded them.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from hotset.base.errors import RequestError
from hotset.base.structure import Structure
from hotset.grammar.finite import check_finite
from hotset.grammar.source import library_grammar
from hotset.serve.tools.calls import ToolSpec, ToolUse
from hotset.serve.tools.formats import FORMATS
from hotset.serve.tools.grammars import whole_pattern

CPU_SECONDS = 3.0


def schema(value: Any) -> Structure:
    return Structure("json_schema", json.dumps(value))


def use_of(parameters: dict[str, Any]) -> ToolUse:
    return ToolUse((ToolSpec("f", None, parameters),), "required")


def chain(size: int) -> dict[str, Any]:
    """Returns parameters that all refer to the end of one long chain of references."""
    defs: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(size)} | {f"d{size}": {}}
    return {"type": "object", "properties": {f"p{n}": {"$ref": "#/$defs/d0"} for n in range(size)}, "$defs": defs}


def definitions(size: int) -> dict[str, Any]:
    """Returns parameters, each of which needs all definitions."""
    properties = {f"p{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n}"}} for n in range(size)}
    defs = {f"d{n}": {"type": "object", "description": "x" * 40} for n in range(size)}
    return {"type": "object", "properties": properties, "$defs": defs}


def write(parameters: dict[str, Any]) -> None:
    (glm,) = (each for each in FORMATS if each.name == "glm")
    glm.structure(use_of(parameters), {})


WORK: dict[str, Callable[[], Any]] = {
    "blank lines": lambda: library_grammar(Structure("grammar", "\n" * 16_000 + 'start: "a"')),
    "a schema of many parts": lambda: check_finite({"allOf": [{}] * 20_000}),
    "parts of parts": lambda: check_finite({"anyOf": [{"allOf": [{"$ref": "#/anyOf/1"}] * 4000}, {}]}),
    "an open class": lambda: whole_pattern("[" * 16_000),
    "a chain of references": lambda: write(chain(1200)),
}


@pytest.mark.parametrize("name", WORK)
def test_the_time_does_not_explode(name: str) -> None:
    began = time.process_time()
    try:
        WORK[name]()
    except RequestError as error:
        assert error.code in ("invalid_structure", "invalid_value")
    assert time.process_time() - began < CPU_SECONDS


def test_a_grammar_that_would_be_much_longer_than_its_tools_is_refused() -> None:
    with pytest.raises(RequestError, match="more than 262144 characters"):
        write(definitions(1000))


@pytest.mark.parametrize("index", ["00", "²", "01", "٣", "9" * 5000, "-1", "x"])
def test_a_reference_to_an_element_is_written_in_one_way_or_leads_nowhere(index: str) -> None:
    value = {"allOf": [{"allOf": [{"$ref": f"#/allOf/{index}"}]}]}
    try:
        check_finite(value)
    except RequestError as error:
        assert "without leading zeros" in str(error)
        return
    assert not index.isdigit() or len(index) > 9


@pytest.mark.parametrize(
    "value",
    [
        {"multipleOf": 10**400},
        {"type": "integer", "multipleOf": -(10**400)},
        {"type": "integer", "minimum": 10**300},
        {"type": "integer", "maximum": -(10**300)},
        {"allOf": [{"$ref": "#/allOf/²"}]},
    ],
)
def test_numbers_and_references_of_any_length_are_errors_of_the_request(value: Any) -> None:
    with pytest.raises(RequestError) as refused:
        library_grammar(schema(value))
    assert refused.value.code == "invalid_structure" and len(str(refused.value)) < 600
