"""Grammars of answers that must be calls: they allow the calls that parsers read, and nothing that breaks a schema."""

import json
from typing import Any

import pytest
import tokenizers
from byte_level import byte_level
from test_parsers import BY_NAME, WRITERS, parsed

from hotset.base.errors import RequestError
from hotset.grammar.compiler import GrammarCompiler
from hotset.grammar.matcher import StructureFailed
from hotset.serve.tools.calls import NamedTool, ToolChoice, ToolSpec, ToolUse
from hotset.serve.tools.formats import FORMATS

MARKERS = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "｜DSML｜"]
PLACE = {"$defs": {"Unit": {"enum": ["C", "F"]}}, "type": "object", "required": ["city", "days"]}
PLACE["properties"] = {
    "city": {"type": "string"},
    "days": {"type": "integer", "minimum": 1, "maximum": 9},
    "unit": {"$ref": "#/$defs/Unit"},
    "tags": {"type": "array", "items": {"$ref": "#/$defs/Unit"}},
}
WEATHER, NOW = ToolSpec("weather", parameters=PLACE), ToolSpec("now")
VALID = {"city": "Genève, <b>", "days": 2, "unit": "C", "tags": ["F"]}


def backend(special: bool) -> tokenizers.Tokenizer:
    made = byte_level()
    made.add_special_tokens(["<end>"])
    (made.add_special_tokens if special else made.add_tokens)(MARKERS)
    return made


TOKENIZERS = {"plain": backend(special=False), "special": backend(special=True)}
COMPILERS = {
    kind: GrammarCompiler(made.to_str(), made.get_vocab_size(with_added_tokens=True))
    for kind, made in TOKENIZERS.items()
}


def ids_of(kind: str) -> dict[str, int]:
    """Returns the ids of tokens that grammars name by id, like `Tokenizer.grammar_ids`."""
    added = TOKENIZERS[kind].get_added_tokens_decoder()
    return {
        token.content: token_id
        for token_id, token in added.items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }


def allows(
    name: str,
    kind: str,
    text: str,
    choice: ToolChoice = "required",
    *,
    parallel: bool = True,
    use: ToolUse | None = None,
) -> bool:
    """Returns whether the grammar allows exactly this answer, token by token."""
    structure = BY_NAME[name].structure(use or ToolUse((WEATHER, NOW), choice, parallel), ids_of(kind))
    end = TOKENIZERS[kind].token_to_id("<end>")
    matcher = COMPILERS[kind].compile(structure).matcher(frozenset({end}))
    try:
        for token in TOKENIZERS[kind].encode(text, add_special_tokens=False).ids:
            matcher.accept(token)
    except StructureFailed:
        return False
    return matcher.may_end


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    text = WRITERS[name](calls).removeprefix("<|python_tag|>")
    return (
        text.replace("</arg_key>\n", "</arg_key>")
        .replace("</arg_value>\n", "</arg_value>")
        .replace("<tool_call>weather\n", "<tool_call>weather")
        .replace("<tool_call>now\n", "<tool_call>now")
        if name == "glm"
        else text
    )


every_format = pytest.mark.parametrize("name", [each.name for each in FORMATS])
every_kind = pytest.mark.parametrize("kind", TOKENIZERS)


@every_format
@every_kind
def test_the_calls_of_a_format_are_allowed_and_nothing_else(name: str, kind: str) -> None:
    both = written(name, ("weather", VALID), ("now", {}))
    assert allows(name, kind, both) and allows(name, kind, "\n\n" + both)
    assert parsed(BY_NAME[name], [both]) == [("weather", VALID), ("now", {})]
    assert not allows(name, kind, both, parallel=False), "one call"
    assert not allows(name, kind, "It rains.") and not allows(name, kind, both + "It rains.")
    assert not allows(name, kind, written(name, ("later", {})))
    assert not allows(name, kind, "")


@every_format
@every_kind
def test_arguments_follow_their_schema(name: str, kind: str) -> None:
    assert allows(name, kind, written(name, ("weather", {"city": "", "days": 1})))
    for wrong in [
        {"city": "Paris"},
        {"days": 1},
        VALID | {"days": 10},
        VALID | {"days": "two"},
        VALID | {"unit": "K"},
        VALID | {"tags": ["K"]},
        VALID | {"country": "France"} if name not in ("qwen3", "llama3") else VALID | {"tags": 1},
    ]:
        assert not allows(name, kind, written(name, ("weather", wrong))), wrong


@every_format
def test_a_named_tool_is_the_only_one_that_can_be_called(name: str) -> None:
    assert allows(name, "special", written(name, ("now", {})), NamedTool("now"))
    assert not allows(name, "special", written(name, ("weather", VALID)), NamedTool("now"))


@pytest.mark.parametrize("name", ["deepseek_v32", "glm", "qwen3_coder"])
def test_a_parameter_that_markup_cannot_contain_is_refused(name: str) -> None:
    tool = ToolSpec("a", parameters={"type": "object", "properties": {'b">': {}}})
    with pytest.raises(RequestError, match="must not contain"):
        BY_NAME[name].structure(ToolUse((tool,), "required"), {})


LIMITED = {
    "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
    "word": {"type": "string", "minLength": 2, "maxLength": 4},
    "either": {"type": "string", "pattern": "^a/|b$"},
    "maybe": {"anyOf": [{"type": "string", "pattern": "[0-9]"}, {"type": "null"}]},
    "defined": {"$ref": "#/$defs/Short"},
}
LIMITED_TOOL = ToolSpec(
    "weather",
    parameters={"type": "object", "properties": LIMITED, "$defs": {"Short": {"type": "string", "maxLength": 1}}},
)
ALLOWED: dict[str, list[Any]] = {
    "code": ["CH-1"],
    "word": ["éé", "a\nbc"],
    "either": ["a/\n", "x\nb"],
    "maybe": ["x1y\n", None],
    "defined": ["", "é"],
}
FORBIDDEN: dict[str, list[Any]] = {
    "code": ["CH-", "xCH-1", "CH-1\n"],
    "word": ["a", "abcde"],
    "either": ["xa/", "bx"],
    "maybe": ["x", 3],
    "defined": ["ab"],
}


@every_format
@every_kind
@pytest.mark.parametrize("key", LIMITED)
def test_texts_keep_their_patterns_and_lengths(name: str, kind: str, key: str) -> None:
    use = ToolUse((LIMITED_TOOL,), "required", parallel=False)
    for value in ALLOWED[key]:
        text = written(name, ("weather", {key: value}))
        assert allows(name, kind, text, use=use), value
        assert parsed(BY_NAME[name], [text], [LIMITED_TOOL]) == [("weather", {key: value})]
    for value in FORBIDDEN[key]:
        if value != 3 or name not in ("glm", "qwen3_coder"):  # they write the text "3" like the number
            assert not allows(name, kind, written(name, ("weather", {key: value})), use=use), value


@pytest.mark.parametrize("name", ["deepseek_v32", "glm", "qwen3_coder"])
@every_kind
def test_the_marker_that_ends_a_limited_text_ends_it(name: str, kind: str) -> None:
    closer = {"deepseek_v32": "</｜DSML｜parameter>", "glm": "</arg_value>", "qwen3_coder": "</parameter>"}[name]
    long = ToolSpec("weather", parameters={"properties": {"city": {"type": "string", "maxLength": 2000}}})
    use = ToolUse((long,), "required", parallel=False)
    assert allows(name, kind, written(name, ("weather", {"city": "é\n" * 1000})), use=use)
    assert not allows(name, kind, written(name, ("weather", {"city": "é\n" * 1000 + "x"})), use=use)
    assert not allows(name, kind, written(name, ("weather", {"city": f"a{closer}b"})), use=use)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm", "qwen3_coder"])
def test_references_that_markup_cannot_follow_are_refused(name: str) -> None:
    def structure(properties: dict[str, Any], **fields: Any) -> Any:
        tool = ToolSpec("a", parameters={"type": "object", "properties": properties, **fields})
        return BY_NAME[name].structure(ToolUse((tool,), "required"), ids_of("special"))

    with pytest.raises(RequestError, match=r"refer to '#/properties/b'"):
        structure({"a": {"type": "array", "items": {"$ref": "#/properties/b"}}, "b": {}})
    with pytest.raises(RequestError, match="a pattern must be a text"):
        structure({"a": {"type": "string", "pattern": 1}})
    if name != "deepseek_v32":
        with pytest.raises(RequestError, match="the parameter 'a' of the tool a can be a text with limits"):
            structure({"a": {"type": ["string", "integer"], "maxLength": 3}})
    # Definitions that refer to each other many times are followed once each.
    chain: dict[str, Any] = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    endless = structure({"a": {"$ref": "#/$defs/d0"}}, **{"$defs": {**chain, "d40": {"$ref": "#/$defs/d0"}}})
    with pytest.raises(RequestError, match="no finite value"):
        COMPILERS["special"].compile(endless)
    finite = structure({"a": {"$ref": "#/$defs/d0"}}, **{"$defs": {**chain, "d40": {"type": "string"}}})
    COMPILERS["special"].compile(finite)


@every_format
def test_a_schema_with_odd_properties_can_be_compiled(name: str) -> None:
    odd = {"any": {}, "either": {"type": ["string", "null"]}, "one": {"const": 1}, "mixed": {"enum": ["a", None]}}
    odd |= {"nested": {"type": "object", "properties": {"x": {"type": "number"}}}, "all": {"allOf": [{"type": "null"}]}}
    tool = ToolSpec("odd-1.0", parameters={"properties": odd, "required": ["undescribed"]})
    structure = BY_NAME[name].structure(ToolUse((tool,), "required"), ids_of("special"))
    COMPILERS["special"].compile(structure)


def test_grammars_are_small_enough_for_many_tools() -> None:
    tools = tuple(ToolSpec(f"tool-{number}", "a" * 1000, PLACE) for number in range(100))
    for tool_format in FORMATS:
        assert len(tool_format.structure(ToolUse(tools, "required"), {}).value) < 100_000
    assert json.loads(json.dumps(PLACE)) == PLACE, "schemas are not changed"
