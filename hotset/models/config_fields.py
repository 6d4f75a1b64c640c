"""Reads the JSON files of a checkpoint, with errors that name file, field and value."""

import json
import math
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from hotset.base.errors import CheckpointError
from hotset.base.units import MIB, show_bytes

MAX_JSON_BYTES = 8 * MIB  # the largest configurations, which list added tokens, have about 1 MiB
MAX_DIGITS = 300  # of a whole number in a file; a float64 holds numbers of up to 308 digits
MAX_COUNT = (1 << 31) - 1  # token ids and positions are stored in 32 bits
MAX_PARTS = 1 << 16  # attention heads, or experts
MAX_NUMBER = 1e30  # a float32 holds numbers of up to 3e38
MAX_SHOWN = 120  # characters of a value in an error message

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SHORT = reprlib.Repr()  # shows only the beginning of long and deeply nested values
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 20
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = MAX_SHOWN


class ConfigFields:
    """Typed access to the fields of one JSON object. A null counts as absent, as in the `transformers` library.

    Methods that return a typed value raise `CheckpointError`, with a message of one line, if the value has the wrong
    type. They also raise it if the field is absent and has no default, unless they return None for an absent field.
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self._values = values
        self._source = source
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Returns whether the field exists and is null."""
        return name in self._values and self._values[name] is None

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def section(self, name: str) -> "ConfigFields":
        """Returns the object under `name`, or an empty one if there is none."""
        value = self.get(name) or {}
        if not isinstance(value, Mapping):
            self.refuse(name, "an object")
        return ConfigFields(value, self._source, f"{self._prefix}{name}.")

    def refuse(self, name: str, supported: str) -> NoReturn:
        shown = _SHORT.repr(self.get(name))
        shown = shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 3] + "..."
        raise CheckpointError(f"{self._source}: {self._prefix}{name} is {shown}; supported: {supported}")

    def missing(self, name: str) -> NoReturn:
        raise CheckpointError(f"{self._source}: the field {self._prefix}{name} is missing")

    def count(self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_COUNT) -> int:
        value = self.get(name)
        if value is None:
            if default is None:
                self.missing(name)
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float | None = None, *, above: float | None = 0.0) -> float:
        value = self.get(name)
        if value is None:
            if default is None:
                self.missing(name)
            return default
        # `not abs(value) <= MAX_NUMBER` also refuses NaN.
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
            self.refuse(name, f"a number from {-MAX_NUMBER:g} to {MAX_NUMBER:g}")
        if above is not None and value <= max(above, 1 / MAX_NUMBER):
            self.refuse(name, f"a number above {max(above, 1 / MAX_NUMBER):g}")
        return float(value)

    def even_count(self, name: str, default: int | None = None) -> int:
        """Returns a number of values that rope rotates. The number must be even, because rope rotates pairs."""
        value = self.count(name, default)
        if value % 2:
            self.refuse(name, "an even number (rotary embedding rotates pairs of values)")
        return value

    def optional_number(self, name: str) -> float | None:
        """Returns a number of at least 0, or None if the field is absent."""
        if name not in self:
            return None
        value = self.number(name, above=None)
        if value < 0:
            self.refuse(name, "a number from 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def choice(self, name: str, default: str, supported: tuple[str, ...]) -> str:
        value = default if self.get(name) is None else self.get(name)
        if value not in supported:
            self.refuse(name, ", ".join(supported))
        return str(value)

    def layer_choices(self, name: str, length: int, supported: tuple[str, ...]) -> list[str] | None:
        """Returns one entry for each of `length` layers, or None if the field is absent. Ignores further entries."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(entry not in supported for entry in value[:length]):
            self.refuse(name, f"a list of {' or '.join(supported)}")
        if len(value) < length:
            raise CheckpointError(f"{self._source}: {self._prefix}{name} has {len(value)} entries for {length} layers")
        return list(value[:length])

    def ids(self, name: str) -> tuple[int, ...] | None:
        """Returns one token id or a list of them as a tuple, or None if the field is absent."""
        value = self.get(name)
        if value is None:
            return None
        listed = list(value) if isinstance(value, list | tuple) else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in listed):
            self.refuse(name, "a token id or a list of them")
        return tuple(dict.fromkeys(listed))


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Reads a text file. Raises `CheckpointError` if it is unreadable, longer than `max_bytes` or not UTF-8."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) <= max_bytes:
            return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    raise CheckpointError(f"{path} has more than {show_bytes(max_bytes)}, which no model needs")


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Reads the object in `path`.

    Raises `CheckpointError` if the file is unreadable, too long, damaged or not an object. A whole number of more than
    `MAX_DIGITS` digits becomes infinite, like 1e400 does, so that the field that holds it is refused by its name.
    """
    text = read_text(path, max_bytes)
    try:
        value = json.loads(text, parse_int=_whole_number)
        if _SURROGATE.search(text):  # half of a surrogate pair is valid in JSON, but no library accepts it as text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} contains no JSON object")
    return value


def _whole_number(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_DIGITS else math.inf


def read_optional_json(path: Path) -> dict[str, Any]:
    """Reads the object in `path`, or returns an empty one if there is no such file."""
    return read_json(path) if path.is_file() else {}
