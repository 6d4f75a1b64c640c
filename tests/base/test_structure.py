import json
from dataclasses import replace
from typing import Any

import pytest

from hotset.base.errors import RequestError
from hotset.base.sampling import SamplingParams
from hotset.base.structure import MAX_STRUCTURE_CHARACTERS, MAX_STRUCTURE_CHOICES, Structure

VALID = [
    Structure("json_object"),
    Structure("json_schema", '{"type": "object"}'),
    Structure("regex", "[0-9]+"),
    Structure("choice", '["yes", "no"]'),
    Structure("grammar", 'start: "a"+'),
]


@pytest.mark.parametrize("structure", VALID)
def test_a_structure_is_a_hashable_value(structure: Structure) -> None:
    assert {structure: 1}[replace(structure)] == 1
    assert SamplingParams(structure=structure).structure == structure


def test_choices_are_parsed() -> None:
    assert Structure("choice", '["yes", "né"]').choices == ["yes", "né"]


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("xml", "a", "must be one of json_object"),
        ("regex", b"a", "must be a text"),
        ("regex", "", "not empty"),
        ("regex", "\ud800", "surrogates"),
        ("regex", "a" * (MAX_STRUCTURE_CHARACTERS + 1), f"has {MAX_STRUCTURE_CHARACTERS + 1}"),
        ("json_object", "{}", "no value"),
        ("json_schema", "{", "valid JSON"),
        ("json_schema", "[" * 100_000, "valid JSON"),
        ("json_schema", "[1]", "must be an object"),
        ("choice", '{"a": 1}', "list of texts"),
        ("choice", '["a", 1]', "list of texts"),
        ("choice", '["a", ""]', "list of texts"),
        ("choice", "[]", "1 to"),
        ("choice", json.dumps(["a"] * (MAX_STRUCTURE_CHOICES + 1)), f"got {MAX_STRUCTURE_CHOICES + 1}"),
    ],
)
def test_an_invalid_structure_is_refused(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Structure(kind, value)


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_options_that_forbid_the_end_of_a_structure_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="cannot be combined with a structure"):
        SamplingParams(structure=VALID[0], **options)


def test_params_take_only_a_structure() -> None:
    text: Any = "[0-9]+"
    with pytest.raises(RequestError, match="must be a Structure"):
        SamplingParams(structure=text)
