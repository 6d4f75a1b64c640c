"""Translates a structure into a grammar of llguidance, and refuses structures that would take long to compile.

The library limits the work of its lexer and parser itself. Two parts of its compiler have no limit: the automaton of
`multipleOf`, and objects with very many properties. Their cost is estimated here, in one unit (see `MAX_COST`).
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Any, Literal

from hotset.base.structure import Structure, invalid_structure
from hotset.grammar.finite import check_finite

# White space between the tokens of JSON. It is bounded, or an answer could consist of white space without end.
JSON_OPTIONS: Any = {
    "whitespace_pattern": r"[ \t\r\n]{0,40}",
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
MAX_GAP = 16  # characters of white space between `Structure.after` and the structure
ANY_OBJECT = {"type": "object"}
GBNF_RULE = re.compile(r"^[ \t]*+[\w-]++\s*+::=", re.MULTILINE)  # never backtracks, so that it takes linear time
EMBEDDED_SCHEMA = re.compile(r"%json\s*+(?=\{)")
MAX_COST = 2_000_000  # about 0.5 s (one core of a server, 2026)
MAX_DEPTH = 100  # of nested JSON
COST_OF_MULTIPLE = 15  # times m * log m, for an automaton that counts modulo m
COST_OF_VALUE = 20  # of each value in a schema: objects, lists, texts and numbers


def library_grammar(structure: Structure, special_tokens: Collection[str] = ()) -> str:
    """Returns the grammar in a form that `LLMatcher` reads. Raises RequestError if it would take long to compile.

    Special tokens have names like <this>. In grammars they do not match their text.
    """
    try:
        grammar = _grammar_of(structure)
    except ValueError as error:  # of the library: for example a number in a schema has too many digits
        raise invalid_structure(f"the {structure.name} cannot be read: {str(error)[:400]}") from None
    if not structure.after:
        return grammar
    answer = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    if structure.after in special_tokens:
        lead = f"start: FREE {structure.after} GAP @answer\nFREE: /(.|\\n)*/"
    else:
        lead = f"start: free GAP @answer\nfree[suffix={json.dumps(structure.after)}]: /(.|\\n)*/"
    lead += f"\nGAP: /[ \\t\\r\\n]{{0,{MAX_GAP}}}/"
    return json.dumps({"grammars": [{"lark_grammar": lead}, {**answer, "name": "answer"}]})


def _grammar_of(structure: Structure) -> str:
    from llguidance import LLMatcher, grammar_from

    match structure.kind:
        case "json_object":
            return str(LLMatcher.grammar_from_json_schema(ANY_OBJECT, overrides=JSON_OPTIONS))
        case "json_schema":
            schema = json.loads(structure.value)
            _check_cost(schema)
            check_finite(schema)
            if isinstance(schema, bool):
                schema = {} if schema else {"not": {}}
            return str(LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS))
        case "regex":
            return str(LLMatcher.grammar_from_regex(_without_anchors(structure.value)))
        case "choice":
            # One terminal: as alternatives of a rule, each text would be an item of the parser.
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in structure.choices)
            return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}"))
        case "grammar":
            syntax: Literal["gbnf", "lark"] = "gbnf" if GBNF_RULE.search(structure.value) else "lark"
            return str(grammar_from(syntax, _with_options(structure.value)))


def _without_anchors(pattern: str) -> str:
    """Drops the anchors of a whole pattern, which other servers expect: the pattern always matches the whole answer."""
    pattern = pattern.removeprefix("^")
    ends_with_anchor = pattern.endswith("$") and not pattern.endswith("\\$")
    return pattern[:-1] if ends_with_anchor else pattern


def _with_options(grammar: str) -> str:
    """Returns a grammar whose embedded JSON schemas have our options."""
    parts, end, total = [], 0, 0.0
    for marker in EMBEDDED_SCHEMA.finditer(grammar):
        if marker.start() < end:
            continue  # within a schema
        try:
            schema, schema_end = json.JSONDecoder().raw_decode(grammar, marker.end())
        except (ValueError, RecursionError) as error:
            raise invalid_structure(f"the schema after %json in the grammar is not valid JSON: {error}") from None
        total += _check_cost(schema)
        check_finite(schema)
        parts += [grammar[end : marker.end()], json.dumps(schema | {"x-guidance": JSON_OPTIONS})]
        end = schema_end
    if total > MAX_COST:
        raise _too_costly(total)
    return "".join([*parts, grammar[end:]])


def _check_cost(schema: Any) -> float:
    """Returns the cost of a schema. Raises RequestError if it is above MAX_COST."""
    cost = 0.0
    pending: list[tuple[Any, int]] = [(schema, 1)]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise invalid_structure(f"the JSON schema is nested more than {MAX_DEPTH} levels deep; make it flatter")
        cost += COST_OF_VALUE
        if isinstance(value, Mapping):
            cost += len(value) ** 2 + _cost_of_multiple(value.get("multipleOf"))
        if isinstance(value, Mapping | list):
            pending += [(inner, depth + 1) for inner in (value.values() if isinstance(value, Mapping) else value)]
    if cost > MAX_COST:
        raise _too_costly(cost)
    return cost


def _cost_of_multiple(multiple: object) -> float:
    if isinstance(multiple, bool) or not isinstance(multiple, int | float):
        return 0.0
    if isinstance(multiple, int) and abs(multiple) >= MAX_COST:
        return math.inf
    if not math.isfinite(multiple):
        return 0.0
    digits = Decimal(repr(multiple)).as_tuple().digits
    modulus = int("".join(map(str, digits)))
    return COST_OF_MULTIPLE * modulus * math.log2(modulus + 1) if modulus < MAX_COST else math.inf


def _too_costly(cost: float) -> Exception:
    return invalid_structure(
        f"the JSON schema is too complex: its cost is {cost:.3g}, and the limit is {MAX_COST}; use fewer parts, fewer "
        "properties in one object and smaller values of multipleOf"
    )
