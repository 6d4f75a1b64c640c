"""Schemas that no finite value satisfies are refused, with the path of the recursion."""

import json
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from hotset.base.errors import RequestError
from hotset.base.structure import Structure
from hotset.grammar.finite import check_finite
from hotset.grammar.source import library_grammar


def node(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"], **fields}


def of(definition: Any, **fields: Any) -> dict[str, Any]:
    return {"$defs": {"node": definition}, "$ref": "#/$defs/node", **fields}


ENDLESS: list[tuple[dict[str, Any], str]] = [
    (of(node()), "#/$defs/node/properties/next"),
    (of(node(), type="array"), "#/$defs/node/properties/next"),
    ({"type": "object", "properties": {"a/b": {"$ref": "#"}}, "required": ["a/b"]}, "#/properties/a/b"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#/items"),
    ({"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2}, "#/prefixItems/1"),
    (of({"anyOf": [node(), {"allOf": [{"$ref": "#/$defs/node"}]}]}), "#/$defs/node"),
    ({"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]}, "#/additionalProperties"),
    # A value exists, but an answer can enter a part that never ends.
    ({"$defs": {"node": node()}, "properties": {"maybe": {"$ref": "#/$defs/node"}}}, "#/$defs/node/properties/next"),
    ({"$ref": "#"}, "#"),
]
FINITE: list[Any] = [
    True,
    of(node(required=[])),
    of(node(properties={"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})),
    of(node(type=["object", "null"])),
    of({"type": "array", "items": {"$ref": "#/$defs/node"}}),
    of({"oneOf": [{"const": 1}, {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}]}),
    {"$ref": "#/$defs/missing"},
    {"$ref": "https://example.com/schema"},
    {"$defs": {"unused": {"$ref": "#/$defs/unused"}}, "type": "string"},
    {"type": "object", "required": ["a"]},
]


@pytest.mark.parametrize(("schema", "path"), ENDLESS, ids=lambda value: str(value)[:40])
def test_an_endless_schema_is_refused_with_the_path_of_its_recursion(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(RequestError, match="no finite value") as refused:
        library_grammar(Structure("json_schema", json.dumps(schema)))
    assert f" at {path}" in str(refused.value)
    with pytest.raises(RequestError, match="no finite value"):
        library_grammar(Structure("grammar", f"start: %json {json.dumps(schema)}"))


@pytest.mark.parametrize("schema", FINITE, ids=lambda value: str(value)[:40])
def test_recursion_that_can_end_is_accepted(schema: Any) -> None:
    check_finite(schema)


ANY: dict[str, Any] = {}
names = st.sampled_from("abc")
leaves = st.sampled_from([{"type": "string"}, {}, {"const": 1}]) | names.map(lambda name: {"$ref": f"#/$defs/{name}"})


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(
        st.builds(
            lambda properties, required: {"type": "object", "properties": properties, "required": required},
            st.dictionaries(names, inner, max_size=2),
            st.lists(names, max_size=2),
        ),
        st.builds(lambda items, least: {"type": "array", "items": items, "minItems": least}, inner, st.integers(0, 1)),
        several.map(lambda schemas: {"anyOf": schemas}),
        several.map(lambda schemas: {"allOf": schemas}),
    )


schemas = st.recursive(leaves, _containers, max_leaves=5)


def has_value(schema: Any, defs: dict[str, Any], depth: int, known: dict[tuple[int, int], bool]) -> bool:
    """Returns whether a value satisfies the schema that nests at most `depth` schemas, by trying."""
    key = (id(schema), depth)
    if depth and key not in known:
        known[key] = _tried(schema, defs, depth, known)
    return depth > 0 and known[key]


def _tried(schema: Any, defs: dict[str, Any], depth: int, known: dict[tuple[int, int], bool]) -> bool:
    def inner(each: Any) -> bool:
        return has_value(each, defs, depth - 1, known)

    if "$ref" in schema:
        return inner(defs[schema["$ref"][-1]])
    if "anyOf" in schema:
        return any(map(inner, schema["anyOf"]))
    if "allOf" in schema:
        return all(map(inner, schema["allOf"]))
    if schema.get("type") == "object":
        return all(inner(schema["properties"].get(name, ANY)) for name in schema["required"])
    if schema.get("type") == "array":
        return schema["minItems"] == 0 or inner(schema["items"])
    return True


def parts_of(schema: Any) -> list[Any]:
    inner = [*schema.get("properties", {}).values(), *schema.get("anyOf", ()), *schema.get("allOf", ())]
    inner += [schema["items"]] if "items" in schema else []
    return [schema, *(part for each in inner for part in parts_of(each))]


@examples(40)
@given(st.fixed_dictionaries(dict.fromkeys("abc", schemas)))
def test_every_part_that_an_answer_can_enter_has_a_value_of_some_depth(defs: dict[str, Any]) -> None:
    reached, pending = [], [defs["a"]]
    while pending:
        for part in parts_of(pending.pop()):
            reached.append(part)
            if "$ref" in part and not any(defs[part["$ref"][-1]] is known for known in reached):
                pending.append(defs[part["$ref"][-1]])
    known: dict[tuple[int, int], bool] = {}
    expected = all(has_value(part, defs, 30, known) for part in reached)
    try:
        check_finite({"$defs": defs, "$ref": "#/$defs/a"})
        accepted = True
    except RequestError:
        accepted = False
    assert accepted == expected
