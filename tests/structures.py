"""Structures with independent oracles, random bounded schemas, and a tokenizer of 61 tokens for tiny models."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import tokenizers
from byte_level import BYTES, byte_level
from harness import tiny_directory

from hotset.base.structure import Structure

END = 3
PIECES = [
    *"0123456789abcdef",
    *'{}[]":,-.',
    "Ġ",
    "Ċ",
    *("true", "false", "null", "ab", "abc", "12", "34", "cab", "fed", "00", "ace"),
    *('{"', '":', '",', '"}', '"]', '["', "},", "],", ',"', ':"', ':Ġ"', ":Ġ", ',Ġ"'),
    *('ab"', 'a":', "12}", '"a', '"b', '"c'),
    *("ĊĠ", "ĠĠ", "}}"),
]  # fmt: skip


def small_tokenizer() -> tokenizers.Tokenizer:
    """Returns a byte-level tokenizer of 61 tokens. Token END ends an answer. Most letters have no token."""
    return _tokenizer(PIECES)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Returns a byte-level tokenizer with a token for each byte and the longer tokens of the small one."""
    return _tokenizer([*BYTES, *(piece for piece in PIECES if len(piece) > 1)])


def _tokenizer(others: Sequence[str]) -> tokenizers.Tokenizer:
    tokenizer = byte_level([*others[:END], "<end>", *others[END:]])
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def tokenizer_directory(folder: Path) -> str:
    """Writes a model directory with the small tokenizer and without weights. Returns its path."""
    small_tokenizer().save(str(folder / "tokenizer.json"))
    return tiny_directory(folder, vocab_size=61)


def satisfies(structure: Structure, text: str) -> bool:
    """Checks a text without our grammars: by `re`, `json` and `jsonschema`."""
    match structure.kind:
        case "choice":
            return text in json.loads(structure.value)
        case "regex":
            return re.fullmatch(structure.value, text) is not None
        case _:
            try:
                value = json.loads(text)
                schema = json.loads(structure.value) if structure.value else {"type": "object"}
                jsonschema.Draft202012Validator(schema).validate(value)
            except (ValueError, jsonschema.ValidationError):
                return False
            return True


def of_schema(schema: Any) -> Structure:
    return Structure("json_schema", json.dumps(schema))


SMALL_STRUCTURES = [
    Structure("choice", '["ab12", "abc", "12", "ab1234"]'),
    Structure("regex", "[a-f]{2,6}(12|34)*"),
    of_schema(
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["abc", True]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    ),
    of_schema({"type": "array", "items": {"enum": ["ab", 12, None]}, "minItems": 1, "maxItems": 3}),
]


@dataclass(frozen=True)
class SchemaGenerator:
    """Makes random schemas, all of whose answers are short."""

    rng: random.Random

    def schema(self, depth: int = 3) -> dict[str, Any]:
        rng = self.rng
        makers = [self._text, self._integer, self._enum, self._pattern, self._simple]
        if depth:
            makers += [self._object, self._object, self._array, self._any_of]
        maker = rng.choice(makers)
        return maker(depth - 1)

    def _text(self, depth: int) -> dict[str, Any]:
        least = self.rng.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self.rng.randint(0, 9)}

    def _integer(self, depth: int) -> dict[str, Any]:
        low = self.rng.randint(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + self.rng.randint(0, 5000)}

    def _enum(self, depth: int) -> dict[str, Any]:
        values = ["red", 'a "quoted" text', "ünïcode", 17, -2.5, None, True, ""]
        return {"enum": self.rng.sample(values, self.rng.randint(1, 4))}

    def _pattern(self, depth: int) -> dict[str, Any]:
        return {
            "type": "string",
            "pattern": self.rng.choice(["^[a-z]{1,6}$", "^[0-9]{4}-[0-9]{2}$", "^(ab|cd){1,3}!?$"]),
        }

    def _simple(self, depth: int) -> dict[str, Any]:
        return self.rng.choice([{"type": "boolean"}, {"type": "null"}, {"const": {"fixed": [1, "two"]}}])

    def _object(self, depth: int) -> dict[str, Any]:
        names = self.rng.sample(["name", "age", "tags", "city", "ok", "nested item"], self.rng.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: self.schema(depth) for name in names},
            "required": self.rng.sample(names, self.rng.randint(0, len(names))),
            "additionalProperties": False,
        }

    def _array(self, depth: int) -> dict[str, Any]:
        least = self.rng.randint(0, 1)
        return {"type": "array", "items": self.schema(depth), "minItems": least, "maxItems": least + 2}

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.schema(depth), self.schema(depth)]}
